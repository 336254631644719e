"""What an aggregator may know of an error at a site: a code and a sentence. The rest is in the site's own log."""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING

from fpld._check import printable
from fpld.engines.flower.journal import note
from fpld.errors import SPACE, BudgetError, FpldError, InputError, ProtocolError, ResourceError, StorageError, ran_out

if TYPE_CHECKING:
    from pathlib import Path

log = logging.getLogger(__name__)

_SENTENCES: tuple[tuple[type[Exception], str], ...] = (
    (BudgetError, "limit: the request goes beyond what this site allows"),
    (ProtocolError, "message: the message is not one that this site can act on"),
    (StorageError, "disk: the site cannot write to its disk"),
    (ResourceError, "resources: the site ran out of memory, time or file handles"),
    (InputError, "setup: the site's own text, files or settings do not do"),
    (FpldError, "site: the site cannot do this"),
    (Exception, "program: the site's program failed"),
)
LONGEST = 100  # characters of a sentence


class SiteError(FpldError):
    """An error at a site, as far as others may know it: one of the sentences above."""


def sentence(error: Exception) -> str:
    """Return what may be said of an error."""
    found = ran_out(error)
    if found is not None:
        error = StorageError() if found is SPACE else ResourceError()
    return next(said for kind, said in _SENTENCES if isinstance(error, kind))


def conceal(what: str, error: Exception, folder: Path | None) -> SiteError:
    """Write an error with all its details into the log of the site's folder; return what may leave."""
    said = f"{what} failed: {type(error).__name__}: {error}"
    if folder is not None:
        with contextlib.suppress(FpldError):
            note(folder, said)
    log.warning("%s", printable(said, 1000))
    return SiteError(sentence(error))
