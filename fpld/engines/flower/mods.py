"""Mods: what stands between a ClientApp and the wire."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flwr.app import Context, Message, MessageType

from fpld.engines.flower.payload import FRAME, TASK, unpack
from fpld.errors import BudgetError
from fpld.protocol.messages import Task
from fpld.protocol.wire import OVERHEAD

if TYPE_CHECKING:
    from flwr.clientapp.typing import ClientAppCallable


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
