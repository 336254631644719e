"""The node as a state machine: tasks in, frames out, no training and no files here.

    idle ----task----> training ----logits----> answered ----task of a later round----> training
                          |                        |
                          '---the same task again--'---the same task again: the same frame, no new dither

Anything else is refused and changes nothing; `fpld.protocol.states` has the whole table. The same logits under fresh
dither would tell more about them than the budget allows, so an answered round is answered with the very same bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from fpld import validation
from fpld.codecs.base import decode
from fpld.errors import InputError, ProtocolError
from fpld.numerics import centre
from fpld.protocol.messages import base_digest
from fpld.protocol.states import NODE, follow
from fpld.protocol.states import NodeEvent as Event
from fpld.protocol.states import NodePhase as Phase
from fpld.protocol.updates import UPDATES, UPDATES_CODE, encode_weights
from fpld.protocol.wire import decode_frame, encode_frame
from fpld.registry import codecs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from fpld.protocol.messages import Task
    from fpld.types import Array, Plan, Reals

_BLOCK = 1 << 20  # coordinates of an array that are centred at a time


@dataclass(frozen=True, eq=False, slots=True)
class Node:
    """What a node must keep between messages; `receive` and `answer` return the next one."""

    index: int
    probe: bytes
    phase: Phase = field(default=Phase.IDLE, init=False)
    round: int = 0
    task: str = ""
    frame: bytes = b""
    reconstruction: np.ndarray[Any, np.dtype[np.float32]] | None = None

    def receive(self, task: Task) -> tuple[Node, bytes | None]:
        """Take a task; return the frame if it was answered before, and None if there is work to do.

        A task that comes again with blocks of the prior that were asked for is the same task.
        """
        plan = task.plan
        if plan.node != self.index:
            raise ProtocolError(f"the task is for node {plan.node}, this is node {self.index}")
        if plan.probe != self.probe:
            raise ProtocolError(
                f"the task's probe set is {plan.probe.hex()}, this node's is {self.probe.hex()}: fetch the same one"
            )
        event = self._relation(plan.round, task.identity)
        node = self._step(event, f"{event.value} (for round {plan.round}, this node is in round {self.round})")
        if event is Event.SAME_TASK:
            return node, node.frame or None
        # Where the aggregator has nothing of this node, as after a first frame that came late, the node begins anew.
        base = self.reconstruction if task.base else None
        if task.against == "own" and task.base != base_digest(base):
            raise ProtocolError("the task codes against a reconstruction that this node does not have")
        return node._with(round=plan.round, task=task.identity, frame=b"", reconstruction=base), None

    def restore(
        self, round: int, task: str, frame: bytes, reconstruction: np.ndarray[Any, np.dtype[np.float32]] | None
    ) -> Node:
        """Go on from what was saved after an answer."""
        return self._step(Event.RESTORE)._with(round=round, task=task, frame=frame, reconstruction=reconstruction)

    def answer(
        self,
        task: Task,
        logits: Reals | Iterable[Reals],
        *,
        key: bytes = b"",
        write: Callable[[bytes], bytes] | None = None,
    ) -> tuple[Node, bytes]:
        """Code the logits of the trained model under the task's plan; return the frame to send.

        `logits` are an array or tensor [m, V], or blocks of its rows in order, as a model makes them: then no more than
        a block is held, if the codec can work so. `write` makes the payload with written text, if the plan asks for
        some, from that of the labels.
        """
        node = self._answering(task, "logits")
        codec = codecs.get(task.codec)
        plan = task.plan
        base = self.reconstruction if task.against == "own" else None
        payload = codec.encode(_centred(logits, plan, base), plan.public)
        if plan.written:
            if write is None:
                raise InputError(f"the task asks for {plan.written} written contexts, and nothing writes them")
            payload = write(payload)
        frame = encode_frame(payload, plan, codec.code, key=key)
        reconstruction = None
        if task.against == "own":
            sent = decode(codec, decode_frame(frame, plan, codec.code, key=key), plan).values.astype(
                np.float32, copy=False
            )
            reconstruction = sent if base is None else base + sent
        return node._with(frame=frame, reconstruction=reconstruction), frame

    def answer_update(
        self,
        task: Task,
        trained: Mapping[str, Array],
        *,
        curvature: Mapping[str, float] | None = None,
        key: bytes = b"",
    ) -> tuple[Node, bytes]:
        """Code the weights of the trained model as an update of the task's student; return the frame to send.

        Bits are shared over the tensors by their curvature, or equally if it is not known.
        """
        node = self._answering(task, "weights")
        if task.codec != UPDATES or task.broadcast != "weights":
            raise ProtocolError(f"a task for an update must have the codec {UPDATES!r} and the student's weights")
        payload = encode_weights(trained, task.arrays, task.plan, curvature)
        frame = encode_frame(payload, task.plan, UPDATES_CODE, key=key)
        return node._with(frame=frame, reconstruction=None), frame

    def _answering(self, task: Task, what: str) -> Node:
        """Return this node after the event that its model's answer is there."""
        event = Event.LOGITS if task.plan.round == self.round else Event.OTHER_LOGITS
        return self._step(event, f"{what} for round {task.plan.round} at a node in round {self.round}")

    def _step(self, event: Event, what: str = "") -> Node:
        """Return this node in the phase after an event; `what` describes the event."""
        node = replace(self)
        object.__setattr__(node, "phase", follow(NODE, self.phase, event, what))
        return node

    def _with(self, **changes: Any) -> Node:
        """Return this node in its phase with other contents."""
        node = replace(self, **changes)
        object.__setattr__(node, "phase", self.phase)
        return node

    def _relation(self, round: int, task: str) -> Event:
        """Return what a task is to a node that has done or is doing its last one."""
        if self.phase is Phase.IDLE or round > self.round:
            return Event.TASK
        if round < self.round:
            return Event.PAST_TASK
        return Event.SAME_TASK if task == self.task else Event.OTHER_TASK


def _centred(
    logits: Reals | Iterable[Reals], plan: Plan, base: np.ndarray[Any, np.dtype[np.float32]] | None
) -> Iterator[Reals]:
    """Return logits block by block, centred and less what the node codes against."""
    start = 0
    for block in _blocks(logits, plan) if hasattr(logits, "shape") else logits:
        # Softmax does not see a constant, but clips and robust rules do: all nodes centre alike.
        part = centre(validation.host_array(block).astype(np.float32, copy=False))
        if base is not None:
            part -= base[start : start + len(part)]
        start += len(part)
        yield part


def _blocks(logits: Any, plan: Plan) -> Iterator[Reals]:
    if tuple(logits.shape) != plan.shape:
        raise InputError(f"logits must have shape {plan.shape}, got {tuple(logits.shape)}")
    stride = max(_BLOCK // plan.vocab, 1)
    for start in range(0, plan.contexts, stride):
        yield logits[start : start + stride]
