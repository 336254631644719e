"""The tokens of a site's private text: one copy that all runs share, where it is, and how it is removed."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from fpld.data.stored import TEXT_CACHE
from fpld.data.token_cache import clear_texts
from fpld.engines.flower.site.config import NodeFile
from fpld.engines.flower.site.lock import site_lock
from fpld.storage.files import storage_error

if TYPE_CHECKING:
    from pathlib import Path

TEXT = "text.safetensors"
HELDOUT = "heldout.safetensors"
OWN_HELDOUT = "heldout-own.safetensors"  # the same text in the tokens of the site's own model, if it has others


class ClearedTexts(NamedTuple):
    """What `fpld node clear` removed: the folder of tokens, its bytes, and in how many runs held-out tokens were."""

    folder: str
    bytes: int
    runs: int


def clear_site(path: Path) -> ClearedTexts:
    """Remove the tokens of a site's text, of all runs; models, answers and the ledger stay.

    A run that goes on prepares the text again.

    Raises
    ------
    InputError
        If the site takes part in a federation at the moment.
    """
    file = NodeFile.read(path)
    folder = path.resolve().parent
    runs = 0
    with site_lock(folder, file.name):
        size = clear_texts(folder / TEXT_CACHE)
        for run in folder.glob("runs/*"):
            files = [run / name for name in (HELDOUT, OWN_HELDOUT, TEXT) if (run / name).exists()]
            runs += bool(files)
            size += sum(each.stat().st_size for each in files)
            try:
                for each in files:
                    each.unlink()
            except OSError as error:
                raise storage_error(run, error) from error
    return ClearedTexts(str(folder / TEXT_CACHE), size, runs)
