"""Error redaction: an aggregator learns a code and a sentence, and the details go to the site's own log."""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING

from fpld.engines.flower.log import append_log
from fpld.errors import (
    DISK_SPACE,
    BudgetError,
    DisclosureError,
    FpldError,
    InputError,
    MismatchError,
    ProtocolError,
    ResourceError,
    StorageError,
    exhausted_resource,
)
from fpld.validation import printable

if TYPE_CHECKING:
    from pathlib import Path

log = logging.getLogger(__name__)

_REASONS: tuple[tuple[type[Exception], str], ...] = (
    (BudgetError, "limit: the request goes beyond what this node allows"),
    (ProtocolError, "message: the message is not one that this node can act on"),
    (StorageError, "disk: the node cannot write to its disk"),
    (ResourceError, "resources: the node ran out of memory, time or file handles"),
    (InputError, "setup: the node's own text, files or settings do not do"),
    (FpldError, "node: the node cannot do this"),
    (Exception, "program: the node's program failed"),
)
_OPEN = (DisclosureError, MismatchError)  # errors whose own words may leave


class SiteError(FpldError):
    """An error at a site as others may see it: one of `_REASONS`, or the message of an error of `_OPEN`."""


def public_reason(error: Exception) -> str:
    """Return the sentence that may leave the site in the place of an error."""
    if isinstance(error, _OPEN):
        return str(error)
    resource = exhausted_resource(error)
    if resource is not None:
        error = StorageError() if resource is DISK_SPACE else ResourceError()
    return next(reason for kind, reason in _REASONS if isinstance(error, kind))


def redact(what: str, error: Exception, folder: Path | None) -> SiteError:
    """Log an error with all its details in the site's folder; return the error that may leave the site.

    Parameters
    ----------
    what
        What failed, for the log.
    error
        The error with its details.
    folder
        The site's folder; None if it is not known.
    """
    details = f"{what} failed: {type(error).__name__}: {error}"
    if folder is not None:
        with contextlib.suppress(FpldError):
            append_log(folder, details)
    log.warning("%s", printable(details, 1000))
    return SiteError(public_reason(error))
