"""Where both ends are in a round, and what may happen there: whole tables, every phase with every event.

A cell is the phase that follows, or the reason for which the event is refused. A refused event changes nothing.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, TypeVar

from fpld.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Mapping


class AggregatorPhase(Enum):
    """Where the aggregator of a round is."""

    READY = "ready"
    COLLECTING = "collecting"
    CLOSED = "closed"
    COMBINED = "combined"
    ENDED = "ended"


class AggregatorEvent(Enum):
    """What can happen to the aggregator of a round."""

    OPEN = "open"
    FRAME = "frame"
    CLOSE = "close"
    COMBINE = "combine"
    END = "end"


class NodePhase(Enum):
    """Where a node is."""

    IDLE = "idle"
    TRAINING = "training"
    ANSWERED = "answered"


class NodeEvent(Enum):
    """What can happen to a node: a task, by how it relates to the last one; logits; going on from what was saved."""

    TASK = "the task of a later round"
    SAME_TASK = "the same task again"
    OTHER_TASK = "a second, different task"
    PAST_TASK = "the task of an earlier round"
    LOGITS = "logits"
    OTHER_LOGITS = "logits of another round"
    RESTORE = "restore"


_OVER = "the round is over"

AGGREGATOR: dict[AggregatorPhase, dict[AggregatorEvent, AggregatorPhase | str]] = {
    AggregatorPhase.READY: {
        AggregatorEvent.OPEN: AggregatorPhase.COLLECTING,
        AggregatorEvent.FRAME: "late: no round is open",
        AggregatorEvent.CLOSE: "no round is open",
        AggregatorEvent.COMBINE: "no round is closed",
        AggregatorEvent.END: "nothing is combined",
    },
    AggregatorPhase.COLLECTING: {
        AggregatorEvent.OPEN: "the round is open already",
        AggregatorEvent.FRAME: AggregatorPhase.COLLECTING,
        AggregatorEvent.CLOSE: AggregatorPhase.CLOSED,
        AggregatorEvent.COMBINE: "the round must be closed first",
        AggregatorEvent.END: "nothing is combined",
    },
    AggregatorPhase.CLOSED: {
        AggregatorEvent.OPEN: "the round is closed",
        AggregatorEvent.FRAME: "late: the round is closed",
        AggregatorEvent.CLOSE: "the round is closed already",
        AggregatorEvent.COMBINE: AggregatorPhase.COMBINED,
        AggregatorEvent.END: "nothing is combined",
    },
    AggregatorPhase.COMBINED: {
        AggregatorEvent.OPEN: "the round is closed",
        AggregatorEvent.FRAME: "late: the round is combined",
        AggregatorEvent.CLOSE: "the round is closed already",
        AggregatorEvent.COMBINE: "frames are added to the statistics once",
        AggregatorEvent.END: AggregatorPhase.ENDED,
    },
    AggregatorPhase.ENDED: {
        AggregatorEvent.OPEN: _OVER,
        AggregatorEvent.FRAME: "late: the round is over",
        AggregatorEvent.CLOSE: _OVER,
        AggregatorEvent.COMBINE: _OVER,
        AggregatorEvent.END: _OVER,
    },
}
"""The machine of an aggregator, which lives for one round."""

_ONE_TASK = "one task a round: the first counts"
_SAVED = "only a new node continues from what was saved"

NODE: dict[NodePhase, dict[NodeEvent, NodePhase | str]] = {
    NodePhase.IDLE: {
        NodeEvent.TASK: NodePhase.TRAINING,
        NodeEvent.SAME_TASK: "no task has come yet",
        NodeEvent.OTHER_TASK: "no task has come yet",
        NodeEvent.PAST_TASK: "no task has come yet",
        NodeEvent.LOGITS: "no task has come yet",
        NodeEvent.OTHER_LOGITS: "no task has come yet",
        NodeEvent.RESTORE: NodePhase.ANSWERED,
    },
    NodePhase.TRAINING: {
        NodeEvent.TASK: NodePhase.TRAINING,
        NodeEvent.SAME_TASK: NodePhase.TRAINING,
        NodeEvent.OTHER_TASK: _ONE_TASK,
        NodeEvent.PAST_TASK: "that round is over",
        NodeEvent.LOGITS: NodePhase.ANSWERED,
        NodeEvent.OTHER_LOGITS: "the task is of this round",
        NodeEvent.RESTORE: _SAVED,
    },
    NodePhase.ANSWERED: {
        NodeEvent.TASK: NodePhase.TRAINING,
        NodeEvent.SAME_TASK: NodePhase.ANSWERED,
        NodeEvent.OTHER_TASK: _ONE_TASK,
        NodeEvent.PAST_TASK: "that round is over",
        # The same logits under fresh dither would tell more about them than the budget allows.
        NodeEvent.LOGITS: "a round is answered once",
        NodeEvent.OTHER_LOGITS: "a round is answered once",
        NodeEvent.RESTORE: _SAVED,
    },
}
"""The node's machine."""

P = TypeVar("P", bound=Enum)
E = TypeVar("E", bound=Enum)


def follow(table: Mapping[P, Mapping[E, P | str]], phase: P, event: E, what: str = "") -> P:
    """Return the phase after an event; raise `ProtocolError` if it is refused. `what` describes the event.

    >>> follow(NODE, NodePhase.IDLE, NodeEvent.TASK)
    <NodePhase.TRAINING: 'training'>
    """
    cell = table[phase][event]
    if isinstance(cell, str):
        raise ProtocolError(f"{what or repr(event.value)} is not possible while {phase.value}: {cell}")
    return cell
