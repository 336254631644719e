"""Reproductions of the paper: simulations of its figures and theorems, with the measured numbers beside the paper's.

Each module defines one `Reproduction`; `fpld reproduce NAME` runs it.
"""

from fpld.paper.reproduce.adaptive import ADAPTIVE
from fpld.paper.reproduce.base import Claim, Reproduction, Row
from fpld.paper.reproduce.fig1 import FIG1
from fpld.paper.reproduce.fig2 import FIG2
from fpld.paper.reproduce.labels import LABELS
from fpld.paper.reproduce.refinement import REFINEMENT
from fpld.paper.reproduce.stratified import STRATIFIED

REPRODUCTIONS = {r.name: r for r in (FIG1, FIG2, REFINEMENT, ADAPTIVE, STRATIFIED, LABELS)}

__all__ = ["REPRODUCTIONS", "Claim", "Reproduction", "Row"]
