"""What may leave a site: labels, text that its model writes, updates of its weights; and of an error, a sentence.

The site says it in `node.toml`: `may_send` names what may leave, and `private_run` how long a run of private tokens in
written text may be. Both are applied before any training. A task that asks for more is refused, and nothing is spent.

Of an error an aggregator learns a code and a sentence (`redact`). The details go to the site's own log.
"""

from __future__ import annotations

import contextlib
import json
import logging
from dataclasses import dataclass
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
from fpld.node.spec import written_in_force
from fpld.protocol.updates import UPDATES
from fpld.protocol.wire import payload_of
from fpld.protocol.written import HEADER
from fpld.storage.files import read_utf8
from fpld.storage.run_folder import WRITING
from fpld.units import show_count
from fpld.validation import printable

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from fpld.engines.flower.site.config import Disclosure
    from fpld.node.spec import NodeSpec
    from fpld.protocol import Task

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


@dataclass(frozen=True, slots=True)
class WrittenCounts:
    """What a frame has of written text, as a line of the ledger says it.

    `written` sequences were written in all. `copied` of them had a run of `private_run` tokens of the private text and
    were written anew; public text has taken the place of `replaced` ones. `sequences` have left, in `text_bytes`.
    `private_run` is None where text is not checked.
    """

    sequences: int
    written: int
    copied: int
    replaced: int
    private_run: int | None
    text_bytes: int

    def describe(self) -> str:
        """Return the counts as a line of the log."""
        sent = f"{show_count(self.sequences, 'written sequence')} sent in {show_count(self.text_bytes, 'byte')} of text"
        if self.private_run is None:
            return f"{sent}; they follow from a private model, and are not compared with the private text"
        return (
            f"{sent}; {self.written} were written, {self.copied} had a run of {self.private_run} private tokens and "
            f"were written again, {self.replaced} became public text"
        )


def requested_disclosures(task: Task) -> set[Disclosure]:
    """Return what the answer to a task would disclose."""
    requested: set[Disclosure] = {"updates" if task.codec == UPDATES else "labels"}
    if task.plan.written:
        requested.add("text")
    return requested


def check_may_send(may_send: Sequence[Disclosure], task: Task) -> None:
    """Refuse a task that asks for more than may leave the site.

    Raises
    ------
    DisclosureError
        With what the task asks for, and what `may_send` in `node.toml` allows.
    """
    requested = requested_disclosures(task)
    if not requested <= set(may_send):
        raise DisclosureError(
            f"may_send: the task asks for {_listed(requested)}, this node's node.toml allows {_listed(set(may_send))}"
        )


def with_site_check(spec: NodeSpec, private_run: int) -> NodeSpec:
    """Return a node's specification with the stricter limit on private runs: the smaller one; 0 writes nothing.

    With differential privacy there is no such check (`fpld.node.spec.written_in_force`).
    """
    if spec.written is None:
        return spec
    strictest = spec.written.model_copy(update={"private_run": min(spec.written.private_run, private_run)})
    return spec.model_copy(update={"written": written_in_force(strictest, spec.privacy, spec.length)})


def written_counts(spec: NodeSpec, folder: Path, round: int, frame: bytes) -> WrittenCounts:
    """Return what a frame has of written text, from the frame and the node's folder of the run."""
    rows = {row["round"]: row for row in json.loads(read_utf8(folder / WRITING))}
    row = rows[round]
    text_bytes = HEADER.unpack_from(payload_of(memoryview(frame)))[2]
    return WrittenCounts(
        row["sequences"],
        row["written"],
        row["copied"],
        row["replaced"],
        row["private_run"] if spec.privacy is None else None,
        text_bytes,
    )


def _listed(names: set[Disclosure]) -> str:
    return ", ".join(sorted(names))


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
