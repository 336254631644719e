"""Random draws for private training: uniform and normal numbers, made of random bytes."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Self

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    Floats = np.ndarray[Any, np.dtype[np.float64]]


class Chance:
    """Draw numbers from a source of random bytes.

    Whoever knows the draws can take the noise off again: at a real site they are `secret`. A simulation on one machine
    takes `seeded` ones, so that it can be repeated; its seed must then be kept as secret as the text.
    """

    def __init__(self, source: Callable[[int], bytes]) -> None:
        self._source = source

    @classmethod
    def secret(cls) -> Self:
        """Return draws from the system's cryptographic generator: nobody can repeat them."""
        return cls(os.urandom)

    @classmethod
    def seeded(cls, seed: int) -> Self:
        """Return draws that follow from a seed.

        >>> bool(np.array_equal(Chance.seeded(7).normals(5), Chance.seeded(7).normals(5)))
        True
        """
        return cls(np.random.default_rng(seed).bytes)

    def uniforms(self, count: int) -> Floats:
        """Draw numbers from 0 to below 1, multiples of 2^-53."""
        bits = np.frombuffer(self._source(8 * count), "<u8") >> np.uint64(11)
        return np.asarray(bits * 2.0**-53, np.float64)

    def normals(self, count: int) -> Floats:
        """Draw standard normal numbers, two of each pair of uniform ones (Box and Muller, 1958)."""
        half = -(-count // 2)
        radius = np.sqrt(-2.0 * np.log1p(-self.uniforms(half)))
        angle = 2.0 * np.pi * self.uniforms(half)
        return np.concatenate((radius * np.cos(angle), radius * np.sin(angle)))[:count]

    def choose(self, most: int, count: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Draw `most` different numbers below `count`, or all of them if there are no more."""
        return np.arange(count) if count <= most else np.sort(np.argsort(self.uniforms(count))[:most])
