"""Who takes part: every registered codec, and the peers of `benchmarks.peers` where that folder can be imported.

The peers are references to compare with, not part of the package: an installed fpld lists its own codecs only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np

from fpld.codecs import make_prior
from fpld.registry import codecs

if TYPE_CHECKING:
    from fpld.bench.scenes import Scene
    from fpld.codecs import Codec

PEERS = "benchmarks.peers"


@dataclass(frozen=True, slots=True)
class Contender:
    """Hold one row of the bench: a name, a codec, and the fields of the plan that it is tried under.

    `stratified`: the nodes share a grid of the dither, as they do in a run.
    """

    name: str
    codec: Codec
    fields: dict[str, Any] = field(default_factory=dict)
    stratified: bool = False


def contenders(scene: Scene) -> list[Contender]:
    """List all rows for a scene; the uniform codec stands twice, with a range for each context and with one clip."""
    own = [_own(name, codec, scene) for name, codec in _registered()]
    clip = float(max(np.abs(logits).max() for logits in scene.logits))
    one_clip = Contender("uniform-clip", codecs.get("uniform"), {"clip": max(clip, 1e-6)}, stratified=True)
    return [*own, one_clip, *(Contender(name, codec) for name, codec in peers(scene.nodes).items())]


def _registered() -> list[tuple[str, Codec]]:
    return [(name, codecs.get(name)) for name in codecs.names()]


def _own(name: str, codec: Codec, scene: Scene) -> Contender:
    """Return a codec what a run would give it: a prior if the scene has one, and otherwise a slot of the dither."""
    if getattr(codec, "uses_prior", False) and scene.prior is not None:
        return Contender(name, codec, {"prior": make_prior(scene.prior)})
    return Contender(name, codec, stratified=True)


def peers(nodes: int) -> dict[str, Codec]:
    """Return the peers, or none: another package's `benchmarks` is not ours."""
    try:
        found: dict[str, Codec] = import_module(PEERS).peers(nodes)
    except (ImportError, AttributeError):
        return {}
    return found
