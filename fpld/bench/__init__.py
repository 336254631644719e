"""Codecs side by side: the same logits, the same budgets, what arrives and how fast."""

from fpld.bench.accuracy import (
    COLUMNS,
    Contender,
    MeanTarget,
    RateLimit,
    SkippedBudget,
    compare_codecs,
    draw_comparison,
    no_peers,
    read_peers,
    scene_contenders,
)
from fpld.bench.scenes import SCENES, SYNTHETIC, LogitScene, read_scene

__all__ = [
    "COLUMNS",
    "SCENES",
    "SYNTHETIC",
    "Contender",
    "LogitScene",
    "MeanTarget",
    "RateLimit",
    "SkippedBudget",
    "compare_codecs",
    "draw_comparison",
    "no_peers",
    "read_peers",
    "read_scene",
    "scene_contenders",
]
