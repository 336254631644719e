"""The Strategy: a federation's rounds in Flower's terms. `configure_*` ask the nodes, `aggregate_*` take the answers.

Training, probing and coding are one `train` message a round and node, and its reply says what the student is worth that
came with it; only the student of the last round has an `evaluate` message. Everything else (bits, checks, combining,
distilling, trace, checkpoint) is the same `Federation` that the local engine drives.
"""

from __future__ import annotations

import logging
import math
import time
from itertools import repeat
from typing import TYPE_CHECKING, Any, NamedTuple

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp.strategy import Result, Strategy

from fpld._check import listed, printable
from fpld.engines.flower.answers import MOST_BYTES, Evaluated, Worth
from fpld.engines.flower.counting import down_kinds, up_kinds
from fpld.engines.flower.exchange import exchange, explain
from fpld.engines.flower.identity import Letter, write_letter
from fpld.engines.flower.ledger import LOSS_BYTES
from fpld.engines.flower.limits import check_content, most_message
from fpld.engines.flower.payload import (
    FRAME,
    LETTER,
    STUDENT,
    Shelf,
    arrays_record,
    content_bytes,
    pack_files,
    pack_task,
    put,
    unpack,
)
from fpld.errors import FpldError, ProtocolError, StorageError
from fpld.federation.engine import Absence, Refusal
from fpld.federation.own import write_own
from fpld.protocol.messages import digest
from fpld.protocol.wire import OVERHEAD

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from flwr.app import Metadata
    from flwr.serverapp import Grid

    from fpld.engines.flower.roster import Roster
    from fpld.federation.engine import Heldout
    from fpld.federation.federation import Federation
    from fpld.federation.part import Part
    from fpld.federation.state import Line
    from fpld.protocol import Task
    from fpld.protocol.messages import Broadcast

log = logging.getLogger(__name__)

_RETURN = 30.0  # seconds for which a round waits for a node that was lost to come back
_TIMES = 5  # how often a round's messages are sent again at most


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
        parts: Sequence[Part],
        files: Mapping[str, bytes],
        *,
        wait: float,
    ) -> None:
        self.federation, self.roster, self.session = federation, roster, session
        self._parts, self._files, self._wait = parts, files, wait
        self._keys = federation.setup.settings.mac_keys
        self._asked: list[int] = []
        self._sent: list[_Sent] = []
        self._shelf = Shelf()
        self._again: list[int] = []
        self._lost: list[int] = []
        self._tasks: Mapping[int, Task] = {}
        self._grid: Grid | None = None
        self._everyone = True
        self._worth = Worth(len(parts))
        self._own: list[dict[str, float | None]] = [{"own": None, "alone": None} for _ in parts]

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
        result, made = Result(), 0
        timeout = self._deadline if timeout is None else timeout
        arrays = arrays_record(self.federation.student)
        while not self.federation.done and (num_rounds is None or made < num_rounds):
            number, made = self.federation.state.round + 1, made + 1
            asked = self.configure_train(number, arrays, train_config or ConfigRecord(), grid)
            before = self.federation.unjudged
            student, metrics = self.aggregate_train(number, exchange(grid, asked, timeout, self._frame_bytes()))
            arrays = result.arrays = student
            result.train_metrics_clientapp[number] = metrics
            if before is not None:
                result.evaluate_metrics_clientapp[before] = _metrics(self.federation.trace[-1])
            if evaluate_fn is not None and (found := evaluate_fn(number, arrays)) is not None:
                result.evaluate_metrics_serverapp[number] = found
        last = self.federation.unjudged
        if last is not None:
            asked = self.configure_evaluate(last, arrays, evaluate_config or ConfigRecord(), grid)
            replies = exchange(grid, asked, timeout, repeat(MOST_BYTES, len(self._asked)))
            result.evaluate_metrics_clientapp[last] = self.aggregate_evaluate(last, replies)
        return result

    def configure_train(
        self,
        server_round: int,
        arrays: ArrayRecord,
        config: ConfigRecord,
        grid: Grid,
    ) -> Iterable[Message]:
        """Open a round: a message for each node that is here, with its task and the files that it lacks.

        Each is made when it is asked for.
        """
        settings = self.federation.setup.settings
        # The first round of a process waits for all, later ones for as many as a round needs.
        enough = len(settings.names) if self._everyone else settings.quorum
        self.roster.gather(grid, enough=enough, wait=self._wait)
        self._everyone = False
        tasks = self._tasks = self.federation.open()
        self._grid, self._worth, self._shelf = grid, Worth(len(self._parts)), Shelf()
        self._again, self._lost = [], []
        return self._trained({index: tasks[index] for index in sorted(self.roster.ids)})

    def _trained(self, tasks: Mapping[int, Task]) -> Iterator[Message]:
        """Return the messages with tasks, by the nodes' numbers, each made when it is asked for."""
        self._asked, self._sent = list(tasks), []
        return (self._train(index, task) for index, task in tasks.items())

    def _train(self, index: int, task: Task) -> Message:
        """Return the message with a node's task, which asks what the student is worth that comes with it."""
        content = pack_task(task, arrays=task.broadcast != "weights", shelf=self._shelf)
        letter = {"kind": "train", "round": task.plan.round, "task": digest(task.to_bytes())}
        if self.federation.unjudged is not None:
            letter["evaluate"] = self.federation.unjudged
        return self._message(index, MessageType.TRAIN, content, letter, task.broadcast)

    def _frame_bytes(self) -> Iterator[int]:
        """Return the most bytes that the answer of each node that was asked may have: a frame, and a loss."""
        return (OVERHEAD + self._tasks[index].plan.budget_bytes + LOSS_BYTES for index in self._asked)

    def aggregate_train(
        self,
        server_round: int,
        replies: Iterable[Message],
    ) -> tuple[ArrayRecord, MetricRecord]:
        """Take the frames, close the round, combine and distil; return the student."""
        names, asked = self.federation.names, set(self._asked)
        absent = {i: self._missing(names[i]) for i in range(len(names)) if i not in asked}
        begun = time.monotonic()
        self._collect(replies, absent)
        for _ in range(_TIMES):
            left = None if self._deadline is None else max(begun + self._deadline - time.monotonic(), 0.0)
            alone = not self._again  # who was lost may be so by another's fault
            tasks = self._returned(left) if alone else self._with_blocks()
            if not tasks or self._grid is None:
                break
            messages = self._trained(tasks)
            self._collect(exchange(self._grid, messages, self._deadline, self._frame_bytes(), alone=alone), absent)
        if self.federation.unjudged is not None:
            self._judged(self.federation.judge)
        combined = self.federation.close(list(absent.values()))
        self.federation.keep()
        metrics = MetricRecord({"nodes": len(combined.nodes)})
        if combined.upper is not None:
            metrics["bandwidth_upper"] = combined.upper
        return arrays_record(self.federation.student), metrics

    def _missing(self, name: str) -> Absence:
        return Absence(name, "absent", "revoked" if self.roster.revoked(name) else "not connected")

    def _collect(self, replies: Iterable[Message], absent: dict[int, Absence]) -> None:
        """Take replies as they come; note who failed or is late, who asks for blocks, and who was lost on the way."""
        waiting = set(self._asked)
        for index, reply in self._recognized(replies):
            waiting.discard(index)
            failure = self._take(index, reply)
            if failure is None:
                absent.pop(index, None)
                continue
            absent[index] = failure
            self._forget(index)
            log.warning("%s", failure)
            if failure.state == "lost":
                self._lost.append(index)
        for index in waiting:
            name = self.federation.names[index]
            absent[index] = Absence(name, "late", f"no answer within {self._deadline or math.inf:g} s")
            self._forget(index)

    def _with_blocks(self) -> dict[int, Task]:
        """Return the tasks once more of those who could not compute blocks of the prior, with these blocks."""
        asking, self._again = self._again, []
        return {index: self.federation.again(index) for index in asking}

    def _returned(self, left: float | None) -> dict[int, Task]:
        """Wait a little for nodes that were lost while they worked; return the tasks once more of those who are back.

        A node that had answered sends the same frame again.
        """
        wait = _RETURN if left is None else min(left, _RETURN)
        lost, self._lost = self._lost, []
        if not lost or self._grid is None or wait < 1:
            return {}
        self.roster.gather(self._grid, enough=len(self.roster.ids) + len(lost), wait=wait)
        back = [index for index in lost if index in self.roster.ids]
        for index in back:
            log.info("%s is back: its task is sent again", self.federation.names[index])
        return {index: self._tasks[index] for index in back}

    def _take(self, index: int, reply: Message) -> Absence | None:
        """Deliver the frame of a reply; return why there is none."""
        name = self.federation.names[index]
        if reply.has_error():
            return explain(name, reply.error)
        try:
            receipt = self.federation.deliver(index, unpack(reply.content, "frame", FRAME))
            self.federation.carried(index, up_kinds(reply.content), up=True)
            if receipt.verdict == "asked":
                self._again.append(index)
            elif self.federation.unjudged is not None:
                self._weigh(index, reply, self.federation.unjudged)
        except StorageError:
            raise  # this end's own trouble
        except FpldError as error:
            return Absence(name, "failed", str(error))
        return None

    def configure_evaluate(
        self,
        server_round: int,
        arrays: ArrayRecord,
        config: ConfigRecord,
        grid: Grid,
    ) -> Iterable[Message]:
        """Ask the nodes that are here what the student is worth on their held-out texts."""
        online = set(grid.get_node_ids())
        if online - set(self.roster.ids.values()):  # who comes back for the end, and a run that begins with its end
            self.roster.gather(grid, enough=len(self.federation.names), wait=0.0)
        self._worth, self._shelf, self._sent = Worth(len(self._parts)), Shelf(), []
        self._asked = [index for index, identity in sorted(self.roster.ids.items()) if identity in online]
        letter = {"kind": "evaluate", "round": server_round}
        return (self._message(index, MessageType.EVALUATE, RecordDict(), letter, "weights") for index in self._asked)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord:
        """Take the losses of the last student; write trace and checkpoint."""
        for index, reply in self._recognized(replies):
            if not self._weigh(index, reply, server_round):
                self._forget(index)
        return _metrics(self._judged(self.federation.finish))

    def _weigh(self, index: int, reply: Message, round: int) -> bool:
        """Take what a node says the student of a round is worth; return whether it can be used."""
        name = self.federation.names[index]
        try:
            if reply.has_error():
                raise ProtocolError(explain(name, reply.error).reason)
            if reply.metadata.message_type == MessageType.EVALUATE:
                self.federation.carried(index, up_kinds(reply.content), up=True)
            letter = Letter.parse(unpack(reply.content, "letter", LETTER))
            found = Evaluated.parse(letter.check(self._keys.get(index, b""), "evaluated"), round=round)
            if found.failed is not None:
                raise ProtocolError(found.failed)
        except FpldError as error:
            self._worth.refused.append(Refusal(name, f"did not evaluate the student: {printable(error)}"))
            log.warning("%s %s", *self._worth.refused[-1])
            return False
        self._worth.add(index, found)
        return True

    def _judged(self, end: Callable[[Heldout], Line]) -> Line:
        """Hand over what the last student is worth."""
        for index, own in self._worth.own.items():
            self._own[index] = own
        if any(each["own"] is not None for each in self._own):  # sites that permit it
            write_own(self.federation.setup.run, self.federation.names, self._own)
        return end(self._worth.heldout)

    def summary(self) -> None:
        """Log how many rounds and nodes there are."""
        settings, done = self.federation.setup.settings, self.federation.state.round
        after = f", of which {done} are done" if done else ""
        names = listed(settings.names)
        log.info("%d rounds%s; %d nodes: %s", settings.rounds, after, len(settings.names), names)

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
        part, parcels = self._parts[index], self.federation.parcels
        parcel = parcels.parcel(self.roster.holds.get(index) or "")
        student = bool(parcel) and (broadcast == "weights" or "evaluate" in body)
        if student:
            put(content, "student", parcel, STUDENT, shared=self._shelf)
        letter = {**body, "student": parcels.digest, "session": self.session.hex(), "part": part.model_dump()}
        sealed = write_letter(self._keys.get(index, b""), letter)
        put(content, "letter", sealed, LETTER)
        lacking = part.files.names() & set(self.roster.missing.get(index, []))
        pack_files(content, {name: self._files[name] for name in sorted(lacking)}, self._shelf)
        check_content(part.name, content_bytes(content), most_message(self.federation.setup.config))
        self.federation.carried(index, down_kinds(content, broadcast))
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
                    self.roster.holds[node] = self.federation.parcels.digest
            yield node, reply


def _metrics(line: Line) -> MetricRecord:
    """Return what a line of the trace says of a student."""
    known = {name: line[name] for name in ("kl", "gain", "heldout_loss")}
    return MetricRecord({name: value for name, value in known.items() if value is not None})
