"""The codecs that every test of the contract goes over; a new codec is one more row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from benchmarks.peers import peers
from fpld.codecs import Codec, make_prior
from fpld.registry import codecs
from tests.helpers import make_plan

if TYPE_CHECKING:
    from fpld import Plan
    from fpld.types import Array


RICH = 33.0  # bits per coordinate: enough for every codec


@dataclass(frozen=True)
class Row:
    """A codec, and what its plans have."""

    name: str
    codec: Codec
    clip: float | None = None
    slots: int = 1
    prior: bool = False

    def plan(self, contexts: int = 6, vocab: int = 50, rate: float = RICH, node: int = 1, **changes: Any) -> Plan:
        """A plan of this size with `rate` bits per coordinate, for one of the nodes."""
        fields: dict[str, Any] = {
            "contexts": contexts,
            "vocab": vocab,
            "bits": rate * vocab,
            "node": node,
            "clip": self.clip,
            "slot": node % self.slots,
            "slots": self.slots,
        }
        if self.prior:
            fields["prior"] = make_prior(draw(contexts, vocab, seed=99))
        return make_plan(**{**fields, **changes})

    def least(self, **size: int) -> Plan:
        """A plan with the least budget."""
        plan = self.plan(**size)
        return self.plan(**size, bits=self.codec.least_bits(plan))


def draw(contexts: int, vocab: int, seed: int = 0) -> Array:
    """Logits within +-3, of nodes that agree on much."""
    common = np.random.default_rng(contexts).uniform(-2, 2, (contexts, vocab))
    return (common + np.random.default_rng(seed).uniform(-1, 1, (contexts, vocab))).astype(np.float32)


OWN = [
    Row("uniform-clip", codecs.get("uniform"), clip=3.0),
    Row("uniform-range", codecs.get("uniform")),
    Row("uniform-stratified", codecs.get("uniform"), clip=3.0, slots=5),
    Row("float32", codecs.get("float32")),
    Row("predictive", codecs.get("predictive")),
    Row("predictive-prior", codecs.get("predictive"), prior=True),
    Row("predictive-dithered", codecs.get("predictive"), slots=5),
    Row("predictive-prior-dithered", codecs.get("predictive"), slots=5, prior=True),
    Row("samples", codecs.get("samples"), prior=True),
    Row("samples-stratified", codecs.get("samples"), slots=5, prior=True),
]
ROWS = [*OWN, *(Row(name, codec) for name, codec in peers(5).items())]

each_codec = pytest.mark.parametrize("row", [pytest.param(row, id=row.name) for row in ROWS])
