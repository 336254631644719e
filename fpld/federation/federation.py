"""A federation in a folder of the run: its rounds one after the other, each committed before the next begins.

`advance` is a round with the two calls of an engine in it. An engine with a loop of its own, as Flower's, makes the
same steps: `open`, `deliver` for each frame, `close`, `keep`. Its nodes evaluate a student when they get it, with the
next round's task: `judge` takes their losses then, and `finish` those of the last student.
"""

from __future__ import annotations

import logging
from dataclasses import asdict
from typing import TYPE_CHECKING

from fpld._check import printable
from fpld.errors import ProtocolError, QuorumError
from fpld.federation.engine import Heldout
from fpld.federation.keep import keep_best
from fpld.federation.log import RESULT
from fpld.federation.parcels import Parcels
from fpld.federation.progress import Progress, next_phase
from fpld.federation.rounds import Setup, begin, close_round, identity, open_round, settings, submit_continuations
from fpld.federation.state import commit, recall
from fpld.federation.traffic import Traffic
from fpld.federation.worth import measured, with_means
from fpld.pace import show_seconds
from fpld.protocol import Aggregator
from fpld.storage.folder import RunFolder
from fpld.types import run_id

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from concurrent.futures import Executor, Future

    from fpld.config import Config
    from fpld.federation.engine import Absence, Engine
    from fpld.federation.prepare import Public
    from fpld.federation.state import Line, State
    from fpld.protocol import Combined, Receipt, Task
    from fpld.storage.folder import Arrays

log = logging.getLogger(__name__)


class Federation:
    """The rounds of a configuration, from where they stand.

    `pool` does the aggregator's own heavy work; `mac_keys` are the keys that frames of node i must be made with.
    `run_key` sets the run apart from all others; without one it follows from the seed.
    """

    def __init__(
        self,
        config: Config,
        run: RunFolder,
        public: Public,
        name: str,
        *,
        pool: Executor,
        mac_keys: Mapping[int, bytes] | None = None,
        run_key: bytes | None = None,
    ) -> None:
        self.name, self.store = name, RunFolder(run.path / name)
        self.setup = Setup(config, run, self.store, settings(config, public, mac_keys or {}, run_key), pool)
        self.identity = identity(self.setup, name)
        self.state, trace, self._pending = recall(self.store, run=self.identity) or (begin(self.setup), [], None)
        self.trace = with_means(trace, self.names)
        self.aggregator = Aggregator(self.setup.settings)
        self._progress = Progress(self.store, self.names, config.run.rounds, config.run.deadline)
        self._closed: tuple[State, Line] = self.state, {}
        self._traffic = Traffic(len(self.names))
        self.parcels = Parcels(begin(self.setup).student)
        self.parcels.turn(self.state.student)
        self._continuations: Future[list[dict[str, str]]] | None = None

    @property
    def done(self) -> bool:
        """Return whether all rounds are closed."""
        return self.state.round >= self.setup.settings.rounds

    @property
    def unjudged(self) -> int | None:
        """Return the last round if its student is still to be evaluated."""
        return None if self._pending is None else int(self._pending["round"])

    @property
    def run_id(self) -> str:
        """Return the run's id, as it is in every plan and in what the nodes keep."""
        return run_id(self.setup.settings.run_key).hex()

    @property
    def names(self) -> Sequence[str]:
        """Return the nodes' names, by their numbers."""
        return self.setup.settings.names

    @property
    def student(self) -> Arrays:
        """Return the student's weights, as of the last close."""
        return self._closed[0].student

    def advance(self, engine: Engine) -> Line:
        """Run one round; return its line of the trace."""
        tasks = self.open()
        self.close(engine.collect(tasks, self.deliver))
        return self.finish(engine.evaluate(self.student))

    def open(self) -> dict[int, Task]:
        """Begin the next round: return the task of each node."""
        self._progress.start()
        self._traffic.clear()
        self.aggregator, tasks = open_round(self.setup, self.state)
        self._progress.open(self.aggregator.round, [bits / self.setup.settings.vocab for bits in self.aggregator.bits])
        self._say(f"local training at {len(tasks)} nodes; next: {self._next('collecting')}")
        return tasks

    def carried(self, node: int, sizes: Mapping[str, int], *, up: bool = False) -> None:
        """Count bytes that went to a node in this round, or came `up` from it, by kind (`fpld.federation.traffic`)."""
        self._traffic.add(node, sizes, up=up)

    def worked(self, node: int, seconds: float) -> None:
        """Add to the time for which a node was at work in this round, where the engine knows it."""
        self._progress.worked(node, seconds)

    def again(self, node: int) -> Task:
        """Return a node's task with the blocks of the prior that it asked for."""
        return self.aggregator.again(node)

    def deliver(self, node: int, data: bytes) -> Receipt:
        """Take a frame that came over a node's channel."""
        receipt = self.aggregator.frame(node, data)
        receipt = receipt._replace(reason=printable(receipt.reason))
        self._progress.answered(node, receipt.verdict, receipt.reason, len(data))
        why = f" ({receipt.reason})" if receipt.reason else ""
        self._say(f"{self.names[node]} {receipt.verdict}{why}; {len(self.aggregator.missing)} nodes to come")
        return receipt

    def close(self, absent: Sequence[Absence]) -> Combined:
        """End the collecting, combine and distil; `absent` are the nodes that did not answer."""
        missing = {self.names[node] for node in self.aggregator.missing}
        absent = sorted(absence for absence in absent if absence.node in missing)  # a late frame may just have come
        for absence in absent:
            self._progress.missing(absence)
            self._say(str(absence))
        try:
            state, info = close_round(self.setup, self.state, self.aggregator, self._phase)
        except QuorumError as error:
            raise QuorumError("; ".join([str(error), *map(str, absent)])) from None
        self._continuations = submit_continuations(self.setup, state)
        self._phase("evaluating")
        self._closed = state, info.line | {"absent": [asdict(absence) for absence in absent]}
        return info.combined

    def keep(self) -> None:
        """Commit the round, with what its student is worth still to come."""
        self._hold()
        trace = with_means([*self.trace, *([] if self._pending is None else [self._pending])], self.names)
        commit(self.store, self.state, trace, run=self.identity, pending=True)
        self._progress.phase("closed")

    def judge(self, heldout: Heldout) -> Line:
        """Complete the line of the last round with what its student is worth; the next commit writes it."""
        line = self._pending
        if line is None:
            raise ProtocolError("no student waits to be evaluated")
        refused = [
            {"node": refusal.node, "state": "refused", "reason": printable(refusal.reason)}
            for refusal in heldout.refused
        ]
        line = line | measured(heldout) | {"refused": [*line["refused"], *refused]}
        self.trace, self._pending = with_means([*self.trace, line], self.names), None
        # Which round is best is asked of held-out text, which a promise does not cover: then it is the last.
        asked = self.trace if self.setup.config.privacy is None else self.trace[-1:]
        keep_best(self.store.path, self.state.student, asked, like=self.setup.base, run=self.identity)
        line = self.trace[-1]
        log.info("%s, round %d: %s", self.name, line["round"], self._brought(line), extra=RESULT)
        return line

    def finish(self, heldout: Heldout) -> Line:
        """End the round with what the student is worth; commit it, and return its line of the trace."""
        if self._pending is None:
            self._hold()
            if self.done and self.setup.config.combine.broadcast == "weights":
                for node in range(len(self.names)):  # the last student goes to the nodes too, though in no message here
                    self._traffic.add(node, {"weights": self.parcels.size})
        # What the evaluation of the last student took.
        self._pending = self._traffic.added(self._pending or {})
        line = self.judge(heldout)
        commit(self.store, self.state, self.trace, run=self.identity)
        self._progress.phase("closed")
        return line

    def _hold(self) -> None:
        """Take the closed round as the state; its line lacks what the student is worth."""
        self.state, line = self._closed
        self.parcels.turn(self.state.student)
        line = line | measured(Heldout([None] * len(self.names), None))
        line = self._traffic.added(line) | {"student_bytes": self.parcels.size}
        line = line | {"continuations": [] if self._continuations is None else self._continuations.result()}
        self._pending = line | {"seconds": self._progress.seconds}
        self._traffic.clear()

    def _brought(self, line: Line) -> str:
        """Say what a round has brought, over which sites if not all, and how long the others will take."""
        loss, sites = line["heldout_loss"], line["heldout_sites"]
        said = "nobody evaluated the student" if loss is None else f"held-out loss {loss:.4f} nats per token"
        if loss is not None and len(sites) < len(self.names):
            said += f" (over {', '.join(sites)}, who evaluated every round)"
        to_come = self.setup.settings.rounds - line["round"]
        left = to_come * self._progress.mean
        return f"{said}; {to_come} to go, about {show_seconds(left)}" if to_come else said

    def _phase(self, name: str) -> None:
        self._progress.phase(name)
        self._say(f"{name}; next: {self._next(name)}")

    def _next(self, phase: str) -> str:
        return next_phase(phase, self.aggregator.round, self.setup.settings.rounds)

    def _say(self, text: str) -> None:
        log.info("%s, round %d: %s", self.name, self.aggregator.round, text)
