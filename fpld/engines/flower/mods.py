"""Mods: what stands between a ClientApp and the wire."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from flwr.app import Context, Message, MessageType

from fpld._check import printable
from fpld.engines.flower.journal import note
from fpld.engines.flower.payload import FRAME, TASK, unpack
from fpld.errors import BudgetError, FpldError, InputError, ProtocolError, StorageError
from fpld.protocol.messages import Task
from fpld.protocol.wire import OVERHEAD

if TYPE_CHECKING:
    from flwr.clientapp.typing import ClientAppCallable


log = logging.getLogger(__name__)

_SENTENCES: tuple[tuple[type[Exception], str], ...] = (
    (BudgetError, "limit: the request goes beyond what this site allows"),
    (ProtocolError, "message: the message is not one that this site can act on"),
    (StorageError, "disk: the site cannot write to its disk"),
    (InputError, "setup: the site's own text, files or settings do not do"),
    (FpldError, "site: the site cannot do this"),
    (Exception, "program: the site's program failed"),
)


class SiteError(FpldError):
    """What an aggregator may know of an error at a site: a code and a sentence. The rest is in the site's own log."""

    def __init__(self, error: Exception) -> None:
        super().__init__(next(sentence for kind, sentence in _SENTENCES if isinstance(error, kind)))


def discreet(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Let no detail of an error out: paths, names of fields and what is in private files stay at the site.

    A mod of Flower's, the outermost one.
    """
    try:
        return call_next(message, context)
    except Exception as error:  # whatever it is, it is ours to keep
        said = f"{message.metadata.message_type} failed: {type(error).__name__}: {error}"
        place = context.node_config.get("node")
        if isinstance(place, str):
            with contextlib.suppress(FpldError):
                note(Path(place).resolve().parent, said)
        log.warning("%s", printable(said, 1000))
        raise SiteError(error) from None


def budget_guard(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Pass a round's reply on only if it is one frame within the task's budget, and nothing else.

    A mod of Flower's. An app of your own keeps the bit budget with it, whatever its other mods do.
    """
    if message.metadata.message_type != MessageType.TRAIN:
        return call_next(message, context)
    plan = Task.from_bytes(unpack(message.content, "task", TASK)).plan
    reply = call_next(message, context)
    if not reply.has_content():
        return reply
    frame = unpack(reply.content, "frame", FRAME)
    if set(reply.content) != {"frame"} or len(frame) > OVERHEAD + plan.budget_bytes:
        raise BudgetError(
            f"a reply must be one frame of at most {OVERHEAD + plan.budget_bytes} bytes, got {len(frame)} bytes in "
            f"{sorted(reply.content)}: nothing was sent"
        )
    return reply
