"""What training few numbers could teach, and how loud the noise of a promise is beside it.

    python -m benchmarks.privacy_limits
    python -m benchmarks.privacy_limits --nodes infection,cardiology --steps 20 --windows 512

For each way of training few numbers: the gain on a node's held-out text after some steps without noise, and the norm of
the noise over the norm of the gradient for several promises, with the units that the node has. The noise is that in the
mean of all steps, which hardly depends on how many they are. Beside it stands how many units would make the two norms
equal at the first epsilon. A way that gains less than 0.02 nats without noise is marked as dropped.

=========  ===========================================================================================
all        all weights
norms      the gains of all norms
adapters   B of low-rank adapters on all matrices but the embedding, A being random
random     X in W + L X R', with random L and R for every matrix
public     what `privacy.trained = "subspace"` trains: coordinates in which public text is largest
span       the span of the gradients of public units
=========  ===========================================================================================

All ways take a share of the step of Newton's method that public text tells, halved until the minibatch gains: without
noise that is free, and shows the way at its best. The texts are dealt by a seed that no reported run has.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from fpld import config as configuration
from fpld.cli.arguments import numbers, words
from fpld.data.probe import ProbeSet
from fpld.data.token_stream import open_text
from fpld.federation.prepare import make_bases, prepare
from fpld.node.spec import base_file
from fpld.node.training import open_student
from fpld.privacy import Mechanism, PrivateText, cut_text, noise_for
from fpld.storage.arrays import read_arrays
from fpld.storage.files import write_csv
from fpld.storage.run_folder import HELDOUT, PROBE, RunFolder, text_file
from fpld.students.gradient import GradientStudent
from fpld.students.subspace import Directions, Subspace, eigen_directions, measured, public_units

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fpld.config import Config

    Row = dict[str, Any]

LEAST_GAIN = 0.02
"""Nats without noise under which a way is dropped."""
FIRST_SHARE = 0.3
MAX_HALVINGS = 10
UNIT_WINDOWS = 8
COUNTS = (200, 1000, 8192, 32768, 131072)
"""Numbers of the way `public`; a smaller model has fewer of them."""
NO_CLIP = 1e9  # far above the norm of any gradient
DELTA = 1e-5


class Numbers(Protocol):
    """Trained numbers: `fpld.students.subspace.Subspace`, or anything with the same methods."""

    @property
    def squares(self) -> dict[str, Tensor]:
        """Return the mean squares of public gradients in each number."""

    def coordinates(self, gradients: Mapping[str, Tensor]) -> list[Tensor]:
        """Return the coordinates of a gradient."""

    def place(self, x: Sequence[Tensor], start: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
        """Set weights to those of the start, moved by coordinates."""

    def scales(self, mechanism: Mechanism, units: int, steps: int) -> list[Tensor]:
        """Return the factors of a step."""


class Span:
    """The span of public gradients, in an orthonormal basis [d, parameters]."""

    def __init__(self, gradients: Sequence[Mapping[str, Tensor]], tokens: int) -> None:
        rows = torch.stack([_flat(each) for each in gradients])
        factor = torch.linalg.cholesky((rows @ rows.T).double() + 1e-9 * torch.eye(len(rows)))
        self.basis = torch.linalg.solve_triangular(factor.float(), rows, upper=False)
        mean_square = (rows @ self.basis.T).square().mean(0)
        self.squares = {"span": mean_square}
        self.whole = Subspace({"span": Directions()}, self.squares, tokens)

    def coordinates(self, gradients: Mapping[str, Tensor]) -> list[Tensor]:
        """Return the least-squares coefficients of a gradient."""
        return [self.basis @ _flat(gradients)]

    @torch.no_grad()
    def place(self, x: Sequence[Tensor], start: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
        """Set weights to those of the start, moved within the span."""
        moves = torch.split(x[0] @ self.basis, [weight.numel() for weight in start.values()])
        for (name, weight), move in zip(start.items(), moves, strict=True):
            weights[name].copy_(weight + move.view_as(weight))

    def scales(self, mechanism: Mechanism, units: int, steps: int) -> list[Tensor]:
        """Return the factors of a step, as those of a subspace."""
        return self.whole.scales(mechanism, units, steps)


class Way(NamedTuple):
    """A way of training few numbers."""

    name: str
    numbers: Numbers

    @property
    def size(self) -> int:
        """Return how many numbers are trained."""
        return sum(len(part) for part in self.numbers.squares.values())


def make_ways(student: GradientStudent, sequences: np.ndarray) -> list[Way]:
    """Return the ways to compare, with what public text says about each."""
    units = public_units(sequences, UNIT_WINDOWS)
    half = len(units) // 2
    kept = [{name: part.clone() for name, part in student._of_unit(unit)[1].items()} for unit in units]
    weights = student._trained()
    generator = torch.Generator().manual_seed(0)

    def drawn(size: int, rank: int) -> Tensor:
        columns: Tensor = torch.linalg.qr(torch.randn(size, rank, generator=generator)).Q
        return columns

    matrices = {name: weight for name, weight in weights.items() if weight.ndim == 2}
    inner = {name: weight for name, weight in matrices.items() if name != "embedding"}
    directions = {
        "all": {name: Directions() for name in weights},
        "norms": {name: Directions() for name in weights if name not in matrices},
    }
    for rank in (1, 4):
        directions[f"adapters {rank}"] = {n: Directions(None, drawn(w.shape[1], rank)) for n, w in inner.items()}
    for rank in (5, 33):
        sides = {n: Directions(drawn(w.shape[0], rank), drawn(w.shape[1], rank)) for n, w in matrices.items()}
        directions[f"random {rank} x {rank}"] = sides
    later = range(half, len(units))
    tokens = units[0][:, 1:].size
    ways = [Way(name, measured(each, lambda index: kept[index], later, tokens)) for name, each in directions.items()]
    whole = measured(eigen_directions(kept[:half]), lambda index: kept[index], later, tokens)
    ways += [Way("public", whole.largest(count)) for count in COUNTS if count <= student.parameters]
    return [*ways, Way("span", Span(kept, tokens))]


class Signal(NamedTuple):
    """A node's mean gradient beside the gradients of its units: norms of coordinates, without the share of chance."""

    mean: float
    unit: float


def signals(student: GradientStudent, text: PrivateText, ways: Sequence[Way], units: int, seed: int) -> list[Signal]:
    """Return what the gradients of some units look like in each way."""
    rng = np.random.default_rng(seed)
    totals = [[torch.zeros_like(part) for part in way.numbers.squares.values()] for way in ways]
    squares = np.zeros(len(ways))
    chosen = rng.permutation(text.units)[:units]
    for unit in chosen:
        gradients = student._of_unit(unit_windows(text, int(unit), rng))[1]
        for index, way in enumerate(ways):
            for total, part in zip(totals[index], way.numbers.coordinates(gradients), strict=True):
                total += part
                squares[index] += float(part.square().sum())
    count = len(chosen)
    found = []
    for sums, square in zip(totals, squares, strict=True):
        # Of the squared norm of a mean, a part is chance: products of different units alone have none.
        both = sum(float(part.square().sum()) for part in sums)
        mean = max(both - square, 0.0) / (count * (count - 1))
        found.append(Signal(math.sqrt(mean), math.sqrt(square / count)))
    return found


def unit_windows(text: PrivateText, unit: int, rng: np.random.Generator) -> np.ndarray:
    """Return the windows of a unit, at most `UNIT_WINDOWS` of them."""
    rows = np.arange(text.starts[unit], text.starts[unit + 1])
    kept: np.ndarray = text.windows[np.sort(rng.permutation(rows)[:UNIT_WINDOWS])]
    return kept


def noiseless_gain(
    student: GradientStudent, way: Way, text: PrivateText, heldout: np.ndarray, *, steps: int, windows: int
) -> float:
    """Return by how much the loss on held-out text falls in some steps of large minibatches; leave the model alone."""
    rng = np.random.default_rng(0)
    weights = student._trained()
    start = {name: weight.detach().clone() for name, weight in weights.items()}
    scales = way.numbers.scales(Mechanism(0.0, 1.0, NO_CLIP, UNIT_WINDOWS), text.units, steps)
    x = [torch.zeros_like(scale) for scale in scales]
    before = mean_loss(student, heldout)
    share = FIRST_SHARE
    for _ in range(steps):
        some = text.windows[rng.permutation(len(text.windows))[:windows]]
        now = _loss_at(student, some)
        gradient = way.numbers.coordinates(student._of_unit(some)[1])
        step = [part * scale for part, scale in zip(gradient, scales, strict=True)]
        # Half as much again as the last share, halved until the minibatch itself gains.
        for _ in range(MAX_HALVINGS):
            ahead = [own - share * part for own, part in zip(x, step, strict=True)]
            way.numbers.place(ahead, start, weights)
            if _loss_at(student, some) < now:
                x = ahead
                break
            share /= 2
        way.numbers.place(x, start, weights)
        share *= 1.5
    gain = before - mean_loss(student, heldout)
    with torch.no_grad():
        for name, weight in weights.items():
            weight.copy_(start[name])
    return gain


def _loss_at(student: GradientStudent, windows: np.ndarray) -> float:
    """Return the mean loss of those windows that are not filled up."""
    with torch.no_grad():
        return float(student._token_loss(student._ids(windows[(windows >= 0).all(axis=1)])))


def mean_loss(student: GradientStudent, heldout: np.ndarray) -> float:
    """Return the mean loss of a held-out text in nats."""
    nats, count = student.loss(heldout, student.window)
    return nats / count


def _flat(gradients: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([part.flatten() for part in gradients.values()])


def node_rows(config: Config, store: RunFolder, node: int, arguments: argparse.Namespace) -> list[Row]:
    """Return the rows of a node."""
    student = open_student(store.path / base_file(config, None))
    if not isinstance(student, GradientStudent):
        raise SystemExit("student.kind must be 'transformer' or 'huggingface'")
    stored = open_text(store.path / text_file(node))
    if stored.lengths is None or stored.groups is None:
        raise SystemExit(f"{store.path} does not say where documents end: give another --out")
    text = cut_text(stored.tokens, stored.lengths, stored.groups, student.window)
    heldout = read_arrays(store.path / HELDOUT)[0][str(node)]
    ways = make_ways(student, ProbeSet.load(store.path / PROBE).sequences)
    rows = []
    for way, signal in zip(ways, signals(student, text, ways, arguments.units, seed=0), strict=True):
        gain = noiseless_gain(student, way, text, heldout, steps=arguments.steps, windows=arguments.windows)
        row: Row = {"node": config.nodes[node].name, "units": text.units, "way": way.name, "numbers": way.size}
        row |= {"gain": gain, "dropped": gain < LEAST_GAIN, "signal": signal.mean / signal.unit}
        for epsilon in arguments.epsilons:
            noise = noise_for(epsilon, DELTA, rate=1.0, steps=1) * math.sqrt(way.size) * signal.unit
            row[f"noise/signal at {epsilon:g}"] = noise / text.units / signal.mean if signal.mean else math.inf
            row.setdefault("units for equal norms", noise / signal.mean if signal.mean else math.inf)
        rows.append(row)
        print({name: float(f"{v:.4g}") if isinstance(v, float) else v for name, v in row.items()}, flush=True)
    return rows


def main() -> None:
    """Make the texts and the base model where they are missing, and print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--preset", default="private-hospitals", help="a preset (default: private-hospitals)")
    parser.add_argument("--nodes", type=words, default=["infection"], metavar="NAME,...")
    parser.add_argument("--seed", type=int, default=11, help="of the split and the base model (default: 11)")
    parser.add_argument("--epsilons", type=numbers, default=[8.0, 3.0, 1.0], metavar="E,E,...")
    parser.add_argument("--steps", type=int, default=10, help="without noise (default: 10)")
    parser.add_argument("--windows", type=int, default=128, help="in a minibatch without noise (default: 128)")
    parser.add_argument("--units", type=int, default=100, help="whose gradients are measured (default: 100)")
    parser.add_argument("--out", type=Path, default=Path("out/privacy-limits"), help="folder for texts and table")
    arguments = parser.parse_args()
    config, _ = configuration.read_config(arguments.preset, seed=arguments.seed)
    store = RunFolder(arguments.out)
    public = prepare(config, store)
    make_bases(config, store, public)
    names = [node.name for node in config.nodes]
    rows: list[Row] = []
    for name in arguments.nodes:
        rows += node_rows(config, store, names.index(name), arguments)
    write_csv(arguments.out / "privacy-limits.csv", rows)


if __name__ == "__main__":
    main()
