"""The Strategy: the engine of a federation in Flower's terms.

`Federation` owns the rounds and asks this engine to gather the nodes, to collect their replies, and to evaluate a
student, as it asks the local engine. `start`, which a ServerApp calls, makes the rounds that are left. `configure_*`
make the messages of a round and `aggregate_*` take the replies.

Training, probing and coding are one `train` message a round and node. Its reply has the frame, and the held-out loss of
the student that came with the message: so the losses of a round arrive with the next one, and those of the base model
with the first. Only the student of the last round has an `evaluate` message.
"""

from __future__ import annotations

import logging
import math
import time
from itertools import repeat
from typing import TYPE_CHECKING, Any, NamedTuple

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp.strategy import Result, Strategy

from fpld.engines.base import CollectedReplies
from fpld.engines.flower.answer_schema import MAX_ANSWER_BYTES, Evaluated, EvaluationReplies
from fpld.engines.flower.credentials import SignedMessage, sign_message
from fpld.engines.flower.exchange import exchange, explain
from fpld.engines.flower.messages import (
    FRAME,
    SIGNED_MESSAGE,
    STUDENT,
    SharedArrays,
    add_field,
    arrays_record,
    check_message_size,
    content_bytes,
    downlink_by_kind,
    field_names,
    max_message_bytes,
    pack_files,
    pack_task,
    read_field,
    uplink_by_kind,
)
from fpld.engines.flower.site.ledger import MAX_LOSS_MESSAGE_BYTES
from fpld.errors import FpldError, ProtocolError, StorageError
from fpld.federation.evaluation import write_own
from fpld.federation.record import Incident
from fpld.federation.telemetry import Position
from fpld.protocol.messages import digest
from fpld.protocol.wire import OVERHEAD_BYTES
from fpld.units import show_count
from fpld.validation import printable, shortened_list

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from flwr.app import Metadata
    from flwr.serverapp import Grid

    from fpld.engines.flower.roster import Roster
    from fpld.federation.record import Heldout, RoundRecord
    from fpld.federation.rounds import Federation
    from fpld.node.spec import NodeSpec
    from fpld.protocol import Receipt, Task
    from fpld.protocol.messages import Broadcast
    from fpld.types import Arrays

log = logging.getLogger(__name__)

_RETURN_SECONDS = 30.0  # for which a round waits for a node that was lost to come back
_MAX_REPEATS = 5  # of a round's messages


class _Sent(NamedTuple):
    """What is kept of a message: the node's number, its head with Flower's id of it, and whether it has the student."""

    node: int
    head: Metadata
    student: bool


class ProbeLogitDistillation(Strategy):
    """Federated Probe-Logit Distillation as a Strategy of Flower's.

    The state is in the federation, which may have rounds behind it already: `start` makes those that are left.
    """

    def __init__(
        self,
        federation: Federation,
        roster: Roster,
        session: bytes,
        specs: Sequence[NodeSpec],
        files: Mapping[str, bytes],
        *,
        wait: float,
    ) -> None:
        self.federation = federation
        self.roster = roster
        self.session = session
        self._specs = specs
        self._files = files
        self._wait = wait
        self._keys = federation.setup.settings.mac_keys
        self._asked: list[int] = []
        self._sent: list[_Sent] = []
        self._shared_arrays = SharedArrays()
        self._again: list[int] = []
        self._lost: list[int] = []
        self._absent: dict[int, Incident] = {}
        self._tasks: Mapping[int, Task] = {}
        self._deliver: Callable[[int, bytes], Receipt] = federation.deliver
        self._connected: Grid | None = None
        self._timeout = self._deadline
        self._everyone = True
        self._losses = EvaluationReplies(len(specs))
        self._own: list[dict[str, float | None]] = [{"own": None, "alone": None} for _ in specs]

    @property
    def _deadline(self) -> float | None:
        return self.federation.setup.config.run.deadline

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord | None = None,
        num_rounds: int | None = None,
        timeout: float | None = None,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Make the rounds that are left, at most `num_rounds`; replies are taken as they come."""
        self.summary()
        self._connected = grid
        self._timeout = self._deadline if timeout is None else timeout
        federation = self.federation
        result = Result()
        last = federation.setup.settings.rounds if num_rounds is None else federation.state.round + num_rounds
        with federation.watched():
            while not federation.done and federation.state.round < last:
                evaluated = federation.pending
                record = federation.advance(self)
                arrays = result.arrays = arrays_record(federation.student)
                result.train_metrics_clientapp[record.round] = _train_metrics(record)
                if evaluated is not None:
                    result.evaluate_metrics_clientapp[evaluated.round] = _heldout_metrics(federation.trace[-1])
                if evaluate_fn is not None and (metrics := evaluate_fn(record.round, arrays)) is not None:
                    result.evaluate_metrics_serverapp[record.round] = metrics
            if federation.pending is not None:
                federation.finish(self)
                result.evaluate_metrics_clientapp[federation.state.round] = _heldout_metrics(federation.trace[-1])
        return result

    def gather(self) -> None:
        """Wait for nodes: for all in the first round of a process, later for as many as a round needs."""
        federation = self.federation
        asked = federation.asked(federation.state.round + 1)
        enough = len(asked) if self._everyone else federation.setup.settings.quorum
        self.roster.gather(self._grid, enough=enough, wait=self._wait, wanted=asked)
        self._everyone = False

    def collect(self, tasks: Mapping[int, Task], deliver: Callable[[int, bytes], Receipt]) -> CollectedReplies:
        """Send each node that is here its task, and take the frames as they come."""
        self._tasks = tasks
        self._deliver = deliver
        number = self.federation.state.round + 1
        messages = self.configure_train(number, ArrayRecord(), ConfigRecord(), self._grid)
        self.aggregate_train(number, exchange(self._grid, messages, self._timeout, self._max_reply_bytes()))
        heldout = None if self._evaluated is None else self._heldout()
        return CollectedReplies(list(self._absent.values()), heldout)

    @property
    def _evaluated(self) -> int | None:
        """Return the round whose student is evaluated with the tasks of the next one; 0 is the base model."""
        if self.federation.pending is not None:
            return self.federation.pending.round
        return 0 if self.federation.state.round == 0 else None

    def evaluate(self, student: Arrays, *, wait: bool) -> Heldout | None:
        """Ask for the losses of the last student; those of others come with the next round's replies."""
        if not wait:
            return None
        number = self.federation.state.round
        messages = self.configure_evaluate(number, ArrayRecord(), ConfigRecord(), self._grid)
        replies = exchange(self._grid, messages, self._timeout, repeat(MAX_ANSWER_BYTES, len(self._asked)))
        self.aggregate_evaluate(number, replies)
        return self._heldout()

    @property
    def _grid(self) -> Grid:
        if self._connected is None:
            raise ProtocolError("the strategy has not been started")
        return self._connected

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return a message for each node that is here, with its task and the files that it lacks.

        Each is made when it is asked for.
        """
        self._losses = EvaluationReplies(len(self._specs))
        self._shared_arrays = SharedArrays()
        self._again = []
        self._lost = []
        return self._trained({index: self._tasks[index] for index in sorted(self.roster.ids) if index in self._tasks})

    def _trained(self, tasks: Mapping[int, Task]) -> Iterator[Message]:
        """Return the messages with tasks, by the nodes' numbers, each made when it is asked for."""
        self._asked = list(tasks)
        self._sent = []
        return (self._train(index, task) for index, task in tasks.items())

    def _train(self, index: int, task: Task) -> Message:
        """Return the message with a node's task, which asks for the loss of the student that comes with it."""
        content = pack_task(task, arrays=task.broadcast != "weights", shared=self._shared_arrays)
        request = {"kind": "train", "round": task.plan.round, "task": digest(task.to_bytes())}
        if self._evaluated is not None:
            request["evaluate"] = self._evaluated
        return self._message(index, MessageType.TRAIN, content, request, task.broadcast)

    def _max_reply_bytes(self) -> Iterator[int]:
        """Return the most bytes that the answer of each node that was asked may have: a frame, and a loss."""
        return (OVERHEAD_BYTES + self._tasks[index].plan.budget_bytes + MAX_LOSS_MESSAGE_BYTES for index in self._asked)

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> tuple[None, None]:
        """Take the frames; ask again who needs blocks of the prior, and who was lost and came back."""
        names = self.federation.names
        asked = set(self._asked)
        self._absent = {index: self._missing(names[index]) for index in self._tasks if index not in asked}
        begun = time.monotonic()
        self._collect(replies)
        for _ in range(_MAX_REPEATS):
            left = None if self._deadline is None else max(begun + self._deadline - time.monotonic(), 0.0)
            alone = not self._again  # who was lost may be so by another's fault
            tasks = self._returned(left) if alone else self._with_blocks()
            if not tasks:
                break
            messages = self._trained(tasks)
            self._collect(exchange(self._grid, messages, self._deadline, self._max_reply_bytes(), alone=alone))
        return None, None

    def _missing(self, name: str) -> Incident:
        return Incident(name, "absent", "revoked" if self.roster.revoked(name) else "not connected")

    def _collect(self, replies: Iterable[Message]) -> None:
        """Take replies as they come; note who failed or is late, who asks for blocks, and who was lost on the way."""
        waiting = set(self._asked)
        for index, reply in self._recognized(replies):
            waiting.discard(index)
            failure = self._take(index, reply)
            if failure is None:
                self._absent.pop(index, None)
                continue
            self._absent[index] = failure
            self._forget(index)
            log.info("%s", failure)  # if it does not come back in this round, its end is a warning
            if failure.state == "lost":
                self._lost.append(index)
        for index in waiting:
            name = self.federation.names[index]
            self._absent[index] = Incident(name, "late", f"no answer within {self._deadline or math.inf:g} s")
            self._forget(index)

    def _with_blocks(self) -> dict[int, Task]:
        """Return the tasks once more of those who could not compute blocks of the prior, with these blocks."""
        asking = self._again
        self._again = []
        return {index: self.federation.again(index) for index in asking}

    def _returned(self, left: float | None) -> dict[int, Task]:
        """Wait a little for nodes that were lost while they worked; return the tasks once more of those who are back.

        A node that had answered sends the same frame again.
        """
        wait = _RETURN_SECONDS if left is None else min(left, _RETURN_SECONDS)
        lost = self._lost
        self._lost = []
        if not lost or wait < 1:
            return {}
        self.roster.gather(self._grid, enough=len(self.roster.ids) + len(lost), wait=wait)
        back = [index for index in lost if index in self.roster.ids]
        for index in back:
            log.info("%s is back: its task is sent again", self.federation.names[index])
        return {index: self._tasks[index] for index in back}

    def _take(self, index: int, reply: Message) -> Incident | None:
        """Deliver the frame of a reply; return why there is none."""
        name = self.federation.names[index]
        if reply.has_error():
            return explain(name, reply.error)
        try:
            more = len(field_names(reply.content) - {"frame", "letter"})
            if more:
                raise ProtocolError(f"a reply must hold one frame and, at most, an evaluation, got {more} fields more")
            receipt = self._deliver(index, read_field(reply.content, "frame", FRAME))
            self.federation.count(index, uplink_by_kind(reply.content, self._tasks[index]), up=True)
            if receipt.verdict == "asked":
                self._again.append(index)
            elif self._evaluated is not None:
                self._take_loss(index, reply, self._evaluated)
        except StorageError:
            raise  # this end's own trouble
        except FpldError as error:
            return Incident(name, "failed", str(error))
        return None

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask the nodes that are here for the student's loss on their held-out texts."""
        online = set(grid.get_node_ids())
        if online - set(self.roster.ids.values()):  # who comes back for the end, and a run that begins with its end
            self.roster.gather(grid, enough=len(self.federation.names), wait=0.0)
        self._losses = EvaluationReplies(len(self._specs))
        self._shared_arrays = SharedArrays()
        self._sent = []
        self._asked = [index for index, identity in sorted(self.roster.ids.items()) if identity in online]
        request = {"kind": "evaluate", "round": server_round}
        return (self._message(index, MessageType.EVALUATE, RecordDict(), request, "weights") for index in self._asked)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> None:
        """Take the losses of the last student."""
        for index, reply in self._recognized(replies):
            if not self._take_loss(index, reply, server_round):
                self._forget(index)

    def _take_loss(self, index: int, reply: Message, round: int) -> bool:
        """Take a node's loss of the student of a round; return whether it can be used."""
        name = self.federation.names[index]
        try:
            if reply.has_error():
                raise ProtocolError(explain(name, reply.error).reason)
            if reply.metadata.message_type == MessageType.EVALUATE:
                self.federation.count(index, uplink_by_kind(reply.content), up=True)
            message = SignedMessage.parse(read_field(reply.content, "letter", SIGNED_MESSAGE))
            answer = Evaluated.parse(message.check(self._keys.get(index, b""), "evaluated"), round=round)
            if answer.failed is not None:
                raise ProtocolError(answer.failed)
        except FpldError as error:
            reason = f"did not evaluate the student: {printable(error)}"
            self._losses.refused.append(Incident(name, "refused", reason))
            log.warning("%s %s", name, reason)
            return False
        self._losses.add(index, answer)
        return True

    def _heldout(self) -> Heldout:
        """Return the losses that came; write those of the nodes' own models, where their sites permit it."""
        for index, losses in self._losses.own.items():
            self._own[index] = losses
        if any(each["own"] is not None for each in self._own):
            write_own(self.federation.setup.run, self.federation.names, self._own)
        return self._losses.heldout

    def summary(self) -> None:
        """Log how many rounds and nodes there are."""
        settings = self.federation.setup.settings
        done = self.federation.state.round
        after = f", of which {done} are done" if done else ""
        names = shortened_list(settings.names)
        position = Position(done, settings.rounds, "waiting for nodes")
        extra = {"position": position}
        rounds = show_count(settings.rounds, "round")
        log.info("%s%s; %s: %s", rounds, after, show_count(len(settings.names), "node"), names, extra=extra)

    def _forget(self, index: int) -> None:
        """Take nothing for granted about a node that failed: it is asked who it is, and gets all that it needs."""
        self.roster.forget(index)

    def _message(
        self,
        index: int,
        kind: str,
        content: RecordDict,
        body: Mapping[str, Any],
        broadcast: Broadcast,
    ) -> Message:
        """Return a message to a node with an order, the student unless it has it, and the files that it lacks."""
        spec = self._specs[index]
        deltas = self.federation.deltas
        delta = deltas.delta(self.roster.holds.get(index) or "")
        student = bool(delta) and (broadcast == "weights" or "evaluate" in body)
        if student:
            add_field(content, "student", delta, STUDENT, shared=self._shared_arrays)
        signed = {**body, "student": deltas.digest, "session": self.session.hex(), "part": spec.model_dump()}
        add_field(content, "letter", sign_message(self._keys.get(index, b""), signed), SIGNED_MESSAGE)
        lacking = spec.files.names() & set(self.roster.missing.get(index, []))
        pack_files(content, {name: self._files[name] for name in sorted(lacking)}, self._shared_arrays)
        check_message_size(spec.name, content_bytes(content), max_message_bytes(self.federation.setup.config))
        self.federation.count(index, downlink_by_kind(content, broadcast))
        message = Message(content, self.roster.ids[index], kind, ttl=self._deadline)
        self._sent.append(_Sent(index, message.metadata, student))
        return message

    def _recognized(self, replies: Iterable[Message]) -> Iterator[tuple[int, Message]]:
        """Return each reply with the number of the node that was asked, once; others are passed over."""
        open_: dict[str, tuple[int, bool]] = {}
        for reply in replies:
            open_ |= {sent.head.message_id: (sent.node, sent.student) for sent in self._sent}
            self._sent.clear()  # an id comes with the sending; of many messages no more is kept
            node, student = open_.pop(reply.metadata.reply_to_message_id, (None, False))
            if node is None:
                continue
            if not reply.has_error():  # it has what was sent along
                self.roster.missing[node] = []
                if student:
                    self.roster.holds[node] = self.federation.deltas.digest
            yield node, reply


def _train_metrics(record: RoundRecord) -> MetricRecord:
    metrics = MetricRecord({"nodes": len(record.nodes)})
    if record.bandwidth_upper is not None:
        metrics["bandwidth_upper"] = record.bandwidth_upper
    return metrics


def _heldout_metrics(record: RoundRecord) -> MetricRecord:
    values = {"kl": record.kl, "gain": record.gain, "heldout_loss": record.heldout_loss}
    return MetricRecord({name: value for name, value in values.items() if value is not None})
