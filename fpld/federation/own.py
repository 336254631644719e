"""What the federation brought each site: its own models' losses on held-out text, to lay beside the student's.

A run on one machine knows them. Over a network they are the site's, and only told with its permission.
"""

from __future__ import annotations

import filecmp
from typing import TYPE_CHECKING, Any

import numpy as np

from fpld.federation.keep import ADOPTED, ALONE, OWN, read_of_run
from fpld.federation.result import measured_row
from fpld.federation.training import heldout_losses, open_student

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from fpld.federation.result import Row
    from fpld.storage.folder import RunFolder

FILE = "own.json"


def own_losses(
    folder: Path, texts: Sequence[np.ndarray[Any, Any]], own: int, length: int, *, run: str | None = None
) -> dict[str, float | None]:
    """Return the loss of a node's model after the federation (`own`) and without it (`alone`).

    After it is after the node's last training; or, where the model is of another kind than the student, after it has
    learnt from the last student. Each is on the text number `own`, which is the node's; `own_all` and `alone_all` are
    the means over all texts, if there are more. With `run` given, models of another run are refused.
    """
    found: dict[str, float | None] = {}
    last = folder / (ADOPTED if (folder / ADOPTED).exists() else OWN)
    for name, path in (("own", last), ("alone", folder / ALONE)):
        if run is not None and path.exists():
            read_of_run(path, run)
        if name == "alone" and path.exists() and filecmp.cmp(path, last, shallow=False):
            return found | {key.replace("own", name): value for key, value in found.items()}  # one round: one model
        losses = heldout_losses(open_student(path), texts, length) if path.exists() else None
        found[name] = None if losses is None else losses[own]
        if len(texts) > 1:
            found[f"{name}_all"] = None if losses is None else float(np.mean(losses))
    return found


def write_own(run: RunFolder, names: Sequence[str], losses: Sequence[Mapping[str, float | None]]) -> None:
    """Write a row for each node."""
    rows = [{"node": name, **loss} for name, loss in zip(names, losses, strict=True)]
    run.write_json(FILE, rows)


def own_rows(names: Sequence[str], losses: Sequence[Mapping[str, float | None]], bytes_per_token: float) -> list[Row]:
    """Return a row of the table for each node's own model after the federation, where it was evaluated on all texts."""
    known = [(name, loss.get("own_all")) for name, loss in zip(names, losses, strict=True)]
    return [measured_row(f"own: {name}", [loss], bytes_per_token, 0, 0) for name, loss in known if loss is not None]
