"""Who takes part: every registered codec, and peers that the caller brings along to compare with."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np

from fpld.codecs import make_prior
from fpld.errors import InputError
from fpld.registry import codecs

if TYPE_CHECKING:
    from collections.abc import Callable

    from fpld.bench.scenes import Scene
    from fpld.codecs import Codec

    Peers = Callable[[int], dict[str, Codec]]


@dataclass(frozen=True, slots=True)
class Contender:
    """Hold one row of the bench: a name, a codec, and the fields of the plan that it is tried under.

    `stratified`: the nodes share a grid of the dither, as they do in a run.
    """

    name: str
    codec: Codec
    fields: dict[str, Any] = field(default_factory=dict)
    stratified: bool = False


def no_peers(nodes: int) -> dict[str, Codec]:  # noqa: ARG001  # the form of all peers
    """Return no peers."""
    return {}


def read_peers(module: str) -> Peers:
    """Return a module's function `peers(nodes)`, which returns codecs by name for a federation of so many nodes."""
    try:
        found: Peers = import_module(module).peers
    except (ImportError, AttributeError, ValueError) as error:
        raise InputError(f"--peers must name a module with a function peers(nodes), got {module!r}: {error}") from None
    return found


def contenders(scene: Scene, peers: Peers = no_peers) -> list[Contender]:
    """List all rows for a scene; the uniform codec stands twice, with a range for each context and with one clip."""
    own = [_own(name, codecs.get(name), scene) for name in codecs.names()]
    clip = float(max(np.abs(logits).max() for logits in scene.logits))
    one_clip = Contender("uniform-clip", codecs.get("uniform"), {"clip": max(clip, 1e-6)}, stratified=True)
    return [*own, one_clip, *(Contender(name, codec) for name, codec in peers(scene.nodes).items())]


def _own(name: str, codec: Codec, scene: Scene) -> Contender:
    """Return a codec with what a run would give it: a prior if the scene has one; if not, a slot of the dither.

    Sampled labels have both.
    """
    traits = codec.traits
    prior = {"prior": make_prior(scene.prior)} if traits.prior and scene.prior is not None else {}
    return Contender(name, codec, prior, stratified=traits.dither and (not prior or traits.sparse))
