"""Codecs side by side: the same logits, the same budgets, what arrives and how fast."""

from fpld.bench.contenders import Contender, contenders
from fpld.bench.measure import COLUMNS, Left, draw, measure
from fpld.bench.scenes import SCENES, Scene, read_scene

__all__ = ["COLUMNS", "SCENES", "Contender", "Left", "Scene", "contenders", "draw", "measure", "read_scene"]
