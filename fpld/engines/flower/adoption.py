"""At the end of a run a site's own model, if it is of another kind than the student, learns from the last student.

It comes with the last message, which asks what that student is worth. The model stays at the site, its losses are in
the site's log. They leave it only as the loss of the site's own model does, with the site's permission.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fpld.engines.flower.discretion import conceal
from fpld.engines.flower.journal import note
from fpld.federation.keep import ADOPTED, OWN
from fpld.federation.own import own_losses
from fpld.federation.work import adopt_last
from fpld.storage.arrays import read_arrays
from fpld.storage.folder import RunFolder

if TYPE_CHECKING:
    from pathlib import Path

    from fpld.engines.flower.home import Home
    from fpld.federation.part import Part
    from fpld.federation.work import Place
    from fpld.storage.folder import Arrays

SAID = "own model: "  # how the line of the log begins


def adopt_here(home: Home, part: Part, place: Place, student: Arrays, heldout: Path) -> None:
    """Let the site's own model learn from the last student; that it fails must not cost the student's evaluation.

    A round asks for as much work and more, so a deadline that does for rounds does for this.
    """
    if not (place.folder / OWN).exists():  # this node was in no round
        return
    try:
        with RunFolder(place.folder).lock():
            note(home.folder, _adopted(part, place, student, heldout))
    except Exception as error:  # whatever it is, the details are the site's
        conceal("learning from the last student", error, home.folder)


def _adopted(part: Part, place: Place, student: Arrays, heldout: Path) -> str:
    """Make the model; return what it is worth, in a sentence."""
    texts, run = [read_arrays(heldout)[0]["0"]], read_arrays(place.folder / OWN)[1]["run"]
    (place.folder / ADOPTED).unlink(missing_ok=True)  # a message that comes again begins with the same model
    before = own_losses(place.folder, texts, 0, part.length)["own"]
    adopt_last(part, place, student, run)
    after = own_losses(place.folder, texts, 0, part.length)["own"]
    return f"{SAID}{before:.4f} nats per token on the held-out text, {after:.4f} after it learnt from the last student"
