"""The paper's figures and theorems as simulations, with our numbers next to the paper's."""

from fpld.reproduce.adaptive import ADAPTIVE
from fpld.reproduce.base import Claim, Reproduction, Row
from fpld.reproduce.fig1 import FIG1
from fpld.reproduce.fig2 import FIG2
from fpld.reproduce.refinement import REFINEMENT
from fpld.reproduce.stratified import STRATIFIED

REPRODUCTIONS = {r.name: r for r in (FIG1, FIG2, REFINEMENT, ADAPTIVE, STRATIFIED)}

__all__ = ["REPRODUCTIONS", "Claim", "Reproduction", "Row"]
