"""DP-SGD in few numbers: the coordinates in which gradients of public text are largest.

The noise that hides a unit has a norm that grows with the square root of how many numbers are trained. So a weight
matrix W [out, in] is trained as W + L X R', with fixed columns of L and R and some trained coordinates of X. The
columns are the eigenvectors of the sums of G G' and of G' G over gradients G of public text (as in Shampoo, Gupta et
al. 2018). Those coordinates are trained whose mean square over public gradients is largest. A vector is trained as it
is.

The mean squares f also say how far to go. With n tokens in a public unit, n f is the Fisher information of a coordinate
and g / (n f) the step of Newton's method for a gradient g. A coordinate that noise hides should hardly move: the step
is g / (n (f + v / SIGNAL_SHARE)), Wiener's filter, with the variance v of the noise in the mean of all steps.

Nothing of this depends on private text but for its number of units, which is not hidden. What costs privacy are the
noisy sums of clipped coordinates alone. The promise holds whatever the directions are, so it needs no trust in whoever
chose the public text.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from fpld.errors import InputError
from fpld.privacy.accounting import SIGNAL_SHARE
from fpld.students.configs import MIN_PUBLIC_SEQUENCES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import numpy as np

    from fpld.privacy import Mechanism
    from fpld.students.base import PublicText

T = TypeVar("T")

NEWTON_SHARE = 0.1
"""The learning rate where none is set: a share of the step of Newton's method."""
MAX_SIDE = 4096
"""A matrix with a longer side, such as the embedding of a large vocabulary, is not trained."""
_FLOOR = 1e-3  # of the mean square: squares below it are taken for it


@dataclass(frozen=True, eq=False, slots=True)
class Directions:
    """Which numbers of a tensor are trained: the coordinates `places` of left' G right, flattened.

    None stands for all places, or for a side that is left as it is.
    """

    left: Tensor | None = None  # [out, a]
    right: Tensor | None = None  # [in, b]
    places: Tensor | None = None  # [d]

    def coordinates(self, gradient: Tensor) -> Tensor:
        """Return the coordinates [d] of a gradient."""
        turned = gradient.float()
        if self.left is not None:
            turned = self.left.T @ turned
        if self.right is not None:
            turned = turned @ self.right
        flat = turned.flatten()
        return flat if self.places is None else flat[self.places]

    def tensor(self, x: Tensor, like: Tensor) -> Tensor:
        """Return the tensor with coordinates x [d], of the shape of another."""
        rows = len(like) if self.left is None else self.left.shape[1]
        columns = like.numel() // len(like) if self.right is None else self.right.shape[1]
        core = x if self.places is None else x.new_zeros(rows * columns).index_copy(0, self.places, x)
        if like.ndim < 2:
            return core
        core = core.view(rows, columns)
        core = core if self.left is None else self.left @ core
        return core if self.right is None else core @ self.right.T

    def only(self, places: Tensor) -> Directions:
        """Return the same directions with some of the coordinates, and no more columns than those need."""
        if self.left is None or self.right is None:
            return Directions(self.left, self.right, places)
        row = places // self.right.shape[1]
        column = places % self.right.shape[1]
        left = self.left[:, : int(row.max()) + 1].contiguous()
        right = self.right[:, : int(column.max()) + 1].contiguous()
        return Directions(left, right, row * right.shape[1] + column)


@dataclass(frozen=True, eq=False, slots=True)
class Subspace:
    """The trained numbers of a model.

    Attributes
    ----------
    directions
        Those of each trained tensor, by name.
    squares
        By tensor, the mean square [d] of each coordinate over gradients of public units.
    tokens
        How many tokens a public unit predicts.
    """

    directions: dict[str, Directions]
    squares: dict[str, Tensor]
    tokens: int

    @property
    def norm(self) -> float:
        """Return the root mean square of the norm of a public unit's coordinates."""
        return math.sqrt(sum(float(part.sum()) for part in self.squares.values()))

    def coordinates(self, gradients: Mapping[str, Tensor]) -> list[Tensor]:
        """Return the coordinates of a gradient, those of each tensor apart."""
        return [part.coordinates(gradients[name]) for name, part in self.directions.items()]

    @torch.no_grad()
    def place(self, x: Sequence[Tensor], start: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
        """Set weights to those of the start, moved by coordinates of each tensor."""
        for (name, part), own in zip(self.directions.items(), x, strict=True):
            weights[name].copy_(start[name] + part.tensor(own, start[name]))

    def scales(self, mechanism: Mechanism, units: int, steps: int) -> list[Tensor]:
        """Return by what a noisy mean of clipped gradients is multiplied to make the step of Newton's method.

        Parameters
        ----------
        units, steps
            The number of units of the private text, and of all steps.
        """
        # Units of the private text are taken to be clipped as much as those of the public text.
        shrunk = min(1.0, mechanism.clip / self.norm)
        deviation = mechanism.noise * mechanism.clip / (mechanism.rate * units) / shrunk
        hidden = deviation**2 / steps / SIGNAL_SHARE
        numbers = sum(len(part) for part in self.squares.values())
        least = _FLOOR * self.norm**2 / numbers
        return [1.0 / (shrunk * self.tokens * (part + hidden).clamp(min=least)) for part in self.squares.values()]

    def largest(self, count: int) -> Subspace:
        """Return the subspace of the coordinates with the largest squares."""
        every = torch.cat(list(self.squares.values()))
        if count > len(every):
            raise InputError(f"privacy.numbers must be at most {len(every)} for this student, got {count}")
        chosen = torch.zeros(len(every), dtype=torch.bool, device=every.device)
        chosen[every.argsort(descending=True, stable=True)[:count]] = True
        directions = {}
        squares = {}
        sizes = [len(part) for part in self.squares.values()]
        for name, own in zip(self.directions, torch.split(chosen, sizes), strict=True):
            if own.any():
                directions[name] = self.directions[name].only(own.nonzero().flatten())
                squares[name] = self.squares[name][own]
        return Subspace(directions, squares, self.tokens)


def public_subspace(
    gradients: Callable[[np.ndarray], Mapping[str, Tensor]], public: PublicText, windows: int
) -> Subspace:
    """Return the subspace of public text: half of it gives directions, the other half chooses among coordinates.

    Parameters
    ----------
    gradients
        From the windows of a unit to the gradient of its mean loss, by tensor.
    windows
        How many windows a unit of the private text has at most; those of the public text have no more.
    """
    units = public_units(public.sequences, windows)
    half = len(units) // 2
    directions = eigen_directions(gradients(unit) for unit in units[:half])
    return measured(directions, gradients, units[half:], units[0][:, 1:].size).largest(public.numbers)


def public_units(sequences: np.ndarray, windows: int) -> list[np.ndarray]:
    """Return public sequences [S, T] in units of so many, or of fewer where there would be too few units."""
    size = max(min(windows, len(sequences) // MIN_PUBLIC_SEQUENCES), 1)
    units = [sequences[start : start + size] for start in range(0, len(sequences) - size + 1, size)]
    if len(units) < MIN_PUBLIC_SEQUENCES or sequences.shape[1] < 2:
        raise InputError(
            f"probe.contexts must make at least {MIN_PUBLIC_SEQUENCES} sequences of two tokens or more for "
            f"privacy.trained = 'subspace', got shape {sequences.shape}"
        )
    return units


def eigen_directions(gradients: Iterable[Mapping[str, Tensor]]) -> dict[str, Directions]:
    """Return all eigenvectors of the sums of G G' and of G' G over gradients, those of the largest values first."""
    left: dict[str, Tensor] = {}
    right: dict[str, Tensor] = {}
    directions: dict[str, Directions] = {}
    for each in gradients:
        for name, gradient in each.items():
            g = gradient.float()
            if g.ndim != 2:
                directions[name] = Directions()
            elif max(g.shape) <= MAX_SIDE:
                left[name] = left[name] + g @ g.T if name in left else g @ g.T
                right[name] = right[name] + g.T @ g if name in right else g.T @ g
    directions |= {name: Directions(_eigenvectors(left[name]), _eigenvectors(right[name])) for name in left}
    if not directions:
        raise InputError(f"privacy.trained must be 'all' for a student whose tensors all have a side over {MAX_SIDE}")
    return directions


def measured(
    directions: Mapping[str, Directions],
    gradients: Callable[[T], Mapping[str, Tensor]],
    units: Sequence[T],
    tokens: int,
) -> Subspace:
    """Return the subspace of some directions, with the mean squares of its coordinates over public units.

    Parameters
    ----------
    tokens
        How many tokens a unit predicts.
    """
    squares: dict[str, Tensor] = {}
    for unit in units:
        each = gradients(unit)
        for name, part in directions.items():
            square = part.coordinates(each[name]).square() / len(units)
            squares[name] = squares[name] + square if name in squares else square
    return Subspace(dict(directions), squares, tokens)


def _eigenvectors(matrix: Tensor) -> Tensor:
    vectors: Tensor = torch.linalg.eigh(matrix).eigenvectors
    return vectors.flip(1)
