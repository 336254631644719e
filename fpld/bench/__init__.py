"""Codecs side by side: the same logits, the same budgets, what arrives and how fast."""

from fpld.bench.contenders import Contender, contenders, no_peers, read_peers
from fpld.bench.limit import Limit
from fpld.bench.measure import COLUMNS, Left, draw, measure
from fpld.bench.scenes import SCENES, SYNTHETIC, Scene, read_scene

__all__ = [
    "COLUMNS",
    "SCENES",
    "SYNTHETIC",
    "Contender",
    "Left",
    "Limit",
    "Scene",
    "contenders",
    "draw",
    "measure",
    "no_peers",
    "read_peers",
    "read_scene",
]
