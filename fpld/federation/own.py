"""What the federation brought each site: its own models' losses on its own held-out text, to lay beside the student's.

A run on one machine knows them. Over a network they are the site's, and only told with its permission.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fpld.federation.keep import ALONE, OWN, read_of_run
from fpld.federation.training import heldout_losses, open_student

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    import numpy as np

    from fpld.storage.folder import RunFolder

FILE = "own.json"


def own_losses(
    folder: Path, text: np.ndarray[Any, Any], length: int, *, run: str | None = None
) -> dict[str, float | None]:
    """Return the loss of a node's model after its last round (`own`) and without the federation (`alone`).

    With `run` given, models of another run are refused.
    """
    found: dict[str, float | None] = {}
    for name, file in (("own", OWN), ("alone", ALONE)):
        path = folder / file
        if run is not None and path.exists():
            read_of_run(path, run)
        found[name] = heldout_losses(open_student(path), [text], length)[0] if path.exists() else None
    return found


def write_own(run: RunFolder, names: Sequence[str], losses: Sequence[Mapping[str, float | None]]) -> None:
    """Write a row for each node."""
    rows = [{"node": name, **loss} for name, loss in zip(names, losses, strict=True)]
    run.write_json(FILE, rows)
