"""Scenes: logits of K nodes on m contexts, synthetic or from a file."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from fpld.errors import InputError
from fpld.seeds import derive_seed
from fpld.storage.arrays import read_arrays
from fpld.types import MAX_VOCAB

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from fpld.types import Floats32

NODES = 4
PAPER_SAMPLES = 30_000  # n of the paper: a node's logits scatter around P* by N(0, 1/n)
ZIPF = 1.1  # the exponent of probability over rank
# The scale of the logits of `large`, and how far in nats its nodes moved from the prior: together, and each by itself.
LARGE_SCALE = 1.3
SHARED_SHIFT = 0.85
NODE_SHIFT = 0.65


@dataclass(frozen=True, eq=False, slots=True)
class LogitScene:
    """Hold logits [K, m, V] under a name, and the prior [m, V] that both ends have, if there is one."""

    name: str
    logits: Floats32
    prior: Floats32 | None = None

    @property
    def nodes(self) -> int:
        """Return the number of nodes K."""
        return len(self.logits)

    @property
    def shape(self) -> tuple[int, int]:
        """Return the shape [m, V] of one node's logits."""
        return self.logits.shape[1], self.logits.shape[2]


def gaussian(seed: int, *, contexts: int = 256, vocab: int = 256) -> LogitScene:
    """Draw the paper's scene: logits N(0, 1), and nodes that differ from them by N(0, 1/n)."""
    rng = np.random.default_rng(derive_seed(seed, "bench", "gaussian"))
    target = rng.normal(size=(contexts, vocab))
    noise = rng.normal(scale=PAPER_SAMPLES**-0.5, size=(NODES, contexts, vocab))
    return LogitScene("gaussian", (target + noise).astype(np.float32))


def zipf(seed: int, *, contexts: int = 64, vocab: int = 32_000, factor: float = 1.0, name: str = "zipf") -> LogitScene:
    """Draw logits of a language model's shape: -1.1 log(rank) in an order of its own for each context, plus N(0, 1).

    All nodes hold the same logits: what is left to compare is the codecs.
    """
    rng = np.random.default_rng(derive_seed(seed, "bench", "zipf"))
    ranks = rng.permuted(np.tile(np.arange(1, vocab + 1), (contexts, 1)), axis=1)
    logits = factor * (rng.normal(size=(contexts, vocab)) - ZIPF * np.log(ranks))
    return LogitScene(name, np.broadcast_to(logits.astype(np.float32), (NODES, contexts, vocab)))


def zipf_peaked(seed: int) -> LogitScene:
    """Double the logits of `zipf`: as peaked as a real model's."""
    return zipf(seed, factor=2.0, name="zipf-peaked")


def large(seed: int, *, contexts: int = 64, vocab: int = 49_152) -> LogitScene:
    """Draw a language model with a large vocabulary as the prior, and nodes that were trained on from it.

    In total variation a node is about 0.36 from the prior, and KL(node || prior) is about 0.45 nats, as with the
    demonstration's nodes; part of the way they went together.
    """
    rng = np.random.default_rng(derive_seed(seed, "bench", "large"))
    ranks = rng.permuted(np.tile(np.arange(1, vocab + 1), (contexts, 1)), axis=1)
    prior = LARGE_SCALE * (rng.standard_normal((contexts, vocab), np.float32) - ZIPF * np.log(ranks, dtype=np.float32))
    moved = prior + SHARED_SHIFT * rng.standard_normal((contexts, vocab), np.float32)
    logits = moved + NODE_SHIFT * rng.standard_normal((NODES, contexts, vocab), np.float32)
    return LogitScene("large", logits.astype(np.float32), prior.astype(np.float32))


def student_scene(seed: int, *, round: int) -> LogitScene:
    """Return the logits of real students in a round of a federation; trains them when it is first asked for."""
    from fpld.bench.students import cached_scene  # brings PyTorch along

    return cached_scene(seed, round)


SYNTHETIC: dict[str, Callable[[int], LogitScene]] = {
    "gaussian": gaussian,
    "zipf": zipf,
    "zipf-peaked": zipf_peaked,
    "large": large,
}
SCENES: dict[str, Callable[[int], LogitScene]] = {
    **SYNTHETIC,
    "students-1": partial(student_scene, round=1),
    "students-3": partial(student_scene, round=3),
}


def read_scene(path: Path) -> LogitScene:
    """Read `logits` [K, m, V] and, if it is there, `prior` [m, V] from a safetensors file."""
    arrays, _ = read_arrays(path)
    if "logits" not in arrays:
        raise InputError(f"{path}: must hold an array 'logits', got {sorted(arrays) or 'no arrays'}")
    logits = _numbers(path, "logits", arrays["logits"], ("node", "context", "token"))
    if 0 in logits.shape or not 2 <= logits.shape[2] <= MAX_VOCAB:
        raise InputError(f"{path}: logits must hold a node, a context and two tokens at least, got {logits.shape}")
    prior = arrays.get("prior")
    if prior is not None:
        prior = _numbers(path, "prior", prior, ("context", "token"))
        if prior.shape != logits.shape[1:]:
            raise InputError(f"{path}: prior must have shape (contexts, vocab) = {logits.shape[1:]}, got {prior.shape}")
    return LogitScene(path.stem, logits, prior)


def _numbers(path: Path, name: str, array: np.ndarray[Any, Any], axes: tuple[str, ...]) -> Floats32:
    if array.ndim != len(axes):
        raise InputError(f"{path}: {name} must have the axes [{', '.join(axes)}], got shape {array.shape}")
    if name == "logits" and not np.issubdtype(array.dtype, np.floating):
        raise InputError(f"{path}: {name} must be floating-point, got {array.dtype}")
    with np.errstate(over="ignore"):
        numbers: Floats32 = array.astype(np.float32)
    finite = np.isfinite(numbers)
    if not finite.all():
        place = tuple(int(i) for i in np.argwhere(~finite)[0])
        where = ", ".join(f"{axis} {i}" for axis, i in zip(axes, place, strict=True))
        raise InputError(f"{path}: {name} must be finite in float32, got {array[place]} at {where}")
    return numbers
