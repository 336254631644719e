"""Models that are kept for their users: the best student, and each node's models.

`fpld generate`, `fpld evaluate` and `fpld export` work with them; no round depends on them. The metadata of each names
its run. Their losses on held-out text stand beside the student's in the results. A run on one machine has them all;
over a network they belong to the site, and are sent only with its permission.

METHOD/best.safetensors             the student of the round with the lowest held-out loss
METHOD/nodes/N/alone.safetensors    node N's model after its first round: the base, trained on its own text alone
METHOD/nodes/N/own.safetensors      node N's model after its last round: the student, trained on its own text
METHOD/nodes/N/adopted.safetensors  node N's model, if it is of another kind, distilled from the last student
"""

from __future__ import annotations

import filecmp
from typing import TYPE_CHECKING, Any

import numpy as np

from fpld.errors import InputError
from fpld.node.training import open_student
from fpld.storage.arrays import read_arrays
from fpld.storage.run_folder import ADOPTED_MODEL, ALONE_MODEL, OWN_MODEL
from fpld.students.heldout import heldout_losses

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from fpld.students import Student
    from fpld.types import Arrays


def keep_node_model(folder: Path, round: int, model: Student, *, run: str) -> None:
    """Write a node's own model after a round."""
    model.save(folder / OWN_MODEL, run=run)
    if round == 1:
        model.save(folder / ALONE_MODEL, run=run)


def read_kept_model(path: Path, run: str) -> Arrays:
    """Return the parameters of a kept model; raise InputError for one of another run."""
    state, metadata = read_arrays(path)
    if metadata.get("run") != run:
        raise InputError(f"{path} is not of this run: start the run anew")
    return state


def node_model_losses(
    folder: Path, texts: Sequence[np.ndarray[Any, Any]], node: int, length: int, *, run: str | None = None
) -> dict[str, float | None]:
    """Evaluate a node's model after the federation (`own`) and without it (`alone`).

    The model after the federation is the one after the node's last training. Where it is of another kind than the
    student, it has also been distilled from the last student.

    Parameters
    ----------
    texts, node
        The held-out texts, and which of them is the node's.
    run
        Models of another run are refused (None: they are not checked).

    Returns
    -------
    dict
        `own` and `alone`: the losses on the node's text. With several texts also `own_all` and `alone_all`, the means
        over all texts. None stands for a model that is not there.
    """
    last = folder / (ADOPTED_MODEL if (folder / ADOPTED_MODEL).exists() else OWN_MODEL)
    first = folder / ALONE_MODEL
    own = _losses(last, texts, length, run)
    # After a single round both are the same model.
    same = first.exists() and last.exists() and filecmp.cmp(first, last, shallow=False)
    alone = own if same else _losses(first, texts, length, run)
    table: dict[str, float | None] = {}
    for name, losses in (("own", own), ("alone", alone)):
        table[name] = None if losses is None else losses[node]
        if len(texts) > 1:
            table[f"{name}_all"] = None if losses is None else float(np.mean(losses))
    return table


def _losses(path: Path, texts: Sequence[np.ndarray[Any, Any]], length: int, run: str | None) -> list[float] | None:
    if not path.exists():
        return None
    if run is not None:
        read_kept_model(path, run)
    return heldout_losses(open_student(path), texts, length)
