"""Models that are kept for their users: the best student of the rounds, and at a node the models of its own.

No round depends on them: they are what `fpld generate`, `fpld evaluate` and `fpld export` work with. Each says of
which run it is.

METHOD/best.safetensors             the student of the round with the lowest held-out loss
METHOD/nodes/N/alone.safetensors    node N's model after its first round: the base, trained on its own text alone
METHOD/nodes/N/own.safetensors      node N's model after its last round: the student, trained on its own text
METHOD/nodes/N/adopted.safetensors  node N's model, if it is of another kind, distilled from the last student
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from fpld import students
from fpld.errors import InputError
from fpld.federation.worth import common_sites
from fpld.storage.arrays import read_arrays

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from fpld.federation.state import Line
    from fpld.storage.folder import Arrays
    from fpld.students import Student

BEST, ALONE, OWN, ADOPTED = "best.safetensors", "alone.safetensors", "own.safetensors", "adopted.safetensors"


def keep_best(folder: Path, student: Arrays, trace: Sequence[Line], *, like: Path, run: str) -> None:
    """Write the student of the last line of a trace if none of the rounds before was better."""
    if best_round(trace) == trace[-1]["round"]:
        students.write_state(folder / BEST, student, like=like, run=run)


def best_round(trace: Sequence[Line]) -> int:
    """Return the round with the lowest mean held-out loss over the sites of `common_sites`; the last of ties.

    Where there is no such site, it is the last round.

    >>> best_round([{"round": 1, "heldout_by_node": [3.0, None]}, {"round": 2, "heldout_by_node": [3.5, 1.0]}])
    1
    """
    sites = common_sites(trace)
    if not sites:
        return int(trace[-1]["round"])
    chosen = [[line["heldout_by_node"][site] for site in sites] for line in trace]
    means = [math.inf if None in losses else float(np.mean(losses)) for losses in chosen]
    return int(trace[len(means) - 1 - int(np.argmin(means[::-1]))]["round"])


def keep_own(folder: Path, round: int, model: Student, *, run: str) -> None:
    """Write a node's own model after a round."""
    model.save(folder / OWN, run=run)
    if round == 1:
        model.save(folder / ALONE, run=run)


def read_of_run(path: Path, run: str) -> Arrays:
    """Return the parameters of a model that was kept; one of another run is refused."""
    state, said = read_arrays(path)
    if said.get("run") != run:
        raise InputError(f"{path} is not of this run: start the run anew")
    return state
