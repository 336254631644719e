"""Mods: what stands between a ClientApp and the wire."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from flwr.app import Context, Message, MessageType

from fpld.engines.flower.discretion import SiteError, conceal
from fpld.engines.flower.ledger import LOSS_BYTES
from fpld.engines.flower.payload import FRAME, LETTER, names, unpack, unpack_task
from fpld.errors import BudgetError
from fpld.protocol.wire import OVERHEAD

if TYPE_CHECKING:
    from flwr.clientapp.typing import ClientAppCallable


def discreet(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Let no detail of an error out: paths, names of fields and what is in private files stay at the site.

    A mod of Flower's, the outermost one.
    """
    try:
        return call_next(message, context)
    except SiteError:  # said already
        raise
    except Exception as error:  # whatever it is, it is ours to keep
        place = context.node_config.get("node")
        folder = Path(place).resolve().parent if isinstance(place, str) else None
        raise conceal(message.metadata.message_type, error, folder) from None


def budget_guard(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Pass a round's reply on only if it is one frame within the task's budget, with a student's loss at most.

    A mod of Flower's. An app of your own keeps the bit budget with it, whatever its other mods do.
    """
    if message.metadata.message_type != MessageType.TRAIN:
        return call_next(message, context)
    plan = unpack_task(message.content).plan
    reply = call_next(message, context)
    if not reply.has_content():
        return reply
    frame = unpack(reply.content, "frame", FRAME)
    held = names(reply.content)
    letter = unpack(reply.content, "letter", LETTER) if "letter" in held else b""
    if not held <= {"frame", "letter"} or len(frame) > OVERHEAD + plan.budget_bytes:
        raise BudgetError(
            f"a reply must be one frame of at most {OVERHEAD + plan.budget_bytes} bytes, got {len(frame)} bytes in "
            f"{sorted(held)}: nothing was sent"
        )
    if len(letter) > LOSS_BYTES:
        raise BudgetError(f"the letter beside a frame must have at most {LOSS_BYTES} bytes, got {len(letter)}")
    return reply
