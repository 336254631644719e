"""The aggregator of one round as a state machine: tasks out, frames in, no network and no training here.

    ready --open--> collecting --close--> closed --combine--> combined --end--> ended, with the next state
                       |  ^
                 frame '--'  accepted, a duplicate, or refused: recorded, and a refused one changes nothing

An aggregator is made from the state that the round before has left (`blank_state` before the first), and `end` returns
the state for the next one. Nothing else goes from round to round, so a checkpoint holds the state and no aggregator.

A frame that comes in any other phase than *collecting* is late: recorded and refused; `fpld.protocol.states` has the
whole table. What is combined is the set of accepted frames in the order of the nodes' numbers, so the result does not
depend on the order of arrival.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fpld.codecs.prior import block_rows
from fpld.codecs.updates import check_update
from fpld.errors import FrameError, InputError, ProtocolError, QuorumError
from fpld.protocol.combine import Combined, Replies
from fpld.protocol.fast_paths import combine_replies
from fpld.protocol.messages import Against, Broadcast, Task, base_digest, decode_prior_request, is_prior_request
from fpld.protocol.round_statistics import RoundStatistics, RunningStatistics, TableSum
from fpld.protocol.shared_prior import describe_differing
from fpld.protocol.spool import DEFAULT_MEMORY_BYTES, Spool
from fpld.protocol.states import AGGREGATOR, follow
from fpld.protocol.states import AggregatorEvent as Event
from fpld.protocol.states import AggregatorPhase as Phase
from fpld.protocol.updates import UPDATES, UPDATES_CODE, count_weights
from fpld.protocol.wire import OVERHEAD_BYTES, decode_frame, payload_of
from fpld.protocol.written import decode_reply, public_labels
from fpld.registry import codecs, rules
from fpld.rules.base import with_trim
from fpld.types import Plan
from fpld.units import show_count

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fpld.budget.policy import Budget
    from fpld.codecs.prior import Prior
    from fpld.protocol.shared_prior import PriorNotes
    from fpld.protocol.written import WrittenText
    from fpld.rules import Rule
    from fpld.types import Arrays, Floats, Ints, Tokens

_RECONSTRUCTION = "reconstruction_"


class Receipt(NamedTuple):
    """What became of a frame: `accepted`, `duplicate` (the same bytes again) or `refused`, and why.

    `asked` is the verdict on a message that asks for blocks of the prior: the node gets its task again, with them.
    """

    round: int
    node: int
    verdict: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Settings:
    """What does not change in a run.

    Frames of a round take up to `spool` bytes of memory, more of them lie in a temporary file. Combining takes
    `threads`, or as many as there are cores. `trim` is that of the rule `trimmed`. `written` contexts are asked of each
    node besides the public ones. With the codec "updates" nodes send updates of their weights: `contexts` is then the
    number of weights (`fpld.protocol.updates`). With labels over strings `vocab` is the number of symbols, and `spaces`
    has the digest of each node's maps.
    """

    names: Sequence[str]
    run_key: bytes
    probe: bytes
    contexts: int
    vocab: int
    rounds: int
    budget: Budget
    clips: Sequence[float | None]
    codec: str = "uniform"
    rule: str = "mean"
    trim: int | None = None
    against: Against = "nothing"
    stratified: bool = True
    quorum: int = 1
    spool: int = DEFAULT_MEMORY_BYTES
    threads: int = 0
    mac_keys: Mapping[int, bytes] = field(default_factory=dict)
    written: int = 0
    spaces: Sequence[bytes] = ()

    def __post_init__(self) -> None:
        if not 1 <= self.quorum <= len(self.names):
            raise InputError(f"quorum must be from 1 to the number of nodes, {len(self.names)}, got {self.quorum}")
        if not self.updates:
            codecs.check(self.codec)
        least = self.combining.traits.least_nodes
        if self.quorum < least:
            raise InputError(
                f"rule {self.rule!r} needs at least {least} nodes in every round: quorum must be as many, "
                f"got {self.quorum}"
            )

    @property
    def updates(self) -> bool:
        """Return whether nodes send updates of their weights, and no labels."""
        return self.codec == UPDATES

    @property
    def context_coordinates(self) -> int:
        """Return how many coordinates a context has: a logit for each token, or one weight."""
        return 1 if self.updates else self.vocab

    @property
    def combining(self) -> Rule:
        """Return the rule, as it is configured."""
        return with_trim(rules.get(self.rule), trim=self.trim)


class AggregatorState(NamedTuple):
    """What an aggregator hands to that of the next round: arrays, and a JSON object with the number of the round.

    The arrays are the statistics of `round_statistics`, and with sequential refinement each node's reconstruction.
    """

    arrays: Mapping[str, np.ndarray[Any, Any]]
    meta: Mapping[str, Any]

    @property
    def round(self) -> int:
        """Return the number of the last round that has ended, 0 before the first."""
        return int(self.meta["round"])


def blank_state(settings: Settings) -> AggregatorState:
    """Return the state before the first round."""
    arrays, meta = RunningStatistics(len(settings.names), settings.budget).state()
    return AggregatorState(arrays, {"round": 0, **meta})


class Aggregator:
    """Run the round after a state (None: the first); `receipts` say what became of each frame.

    Raises
    ------
    ProtocolError
        If the state is that of the last round.
    """

    def __init__(self, settings: Settings, state: AggregatorState | None = None) -> None:
        state = blank_state(settings) if state is None else state
        if state.round >= settings.rounds:
            raise ProtocolError(f"all {settings.rounds} rounds are over")
        self.settings = settings
        self._phase = Phase.READY
        self.round = state.round + 1
        self.receipts: list[Receipt] = []
        self._plans: dict[int, Plan] = {}
        self._spool = Spool(settings.spool)
        # A node's reconstruction is updated in place while it is combined: the state that it came from stays as it is.
        self._reconstructions = {
            int(name.removeprefix(_RECONSTRUCTION)): array.copy()
            for name, array in state.arrays.items()
            if name.startswith(_RECONSTRUCTION)
        }
        self._statistics = RunningStatistics(len(settings.names), settings.budget)
        self._statistics.restore(state.arrays, state.meta)
        self._learnt = TableSum()
        self._tasks: dict[int, Task] = {}
        self._asked: dict[int, list[int]] = {}
        self._following: Ints | None = None
        self._probe: Tokens | None = None
        self._student: Arrays = {}
        self.written: dict[int, WrittenText] = {}
        """What each node has written; its labels are decoded when the round is closed (`fpld.protocol.written`)."""

    @property
    def phase(self) -> Phase:
        """Return where the aggregator is; only events change it."""
        return self._phase

    @property
    def prior(self) -> Prior | None:
        """Return what the nodes of this round code against."""
        return next(iter(self._plans.values())).prior if self._plans else None

    @property
    def bits(self) -> list[float]:
        """Return the bits per probe context that each node was allotted in this round; 0 for one that is not asked."""
        names = self.settings.names
        return [self._plans[node].bits if node in self._plans else 0.0 for node in range(len(names))]

    @property
    def asked(self) -> list[int]:
        """List the nodes that have a task in this round."""
        return list(self._plans)

    @property
    def weights(self) -> Floats | None:
        """Return the nodes' estimated weights [K], once there are any."""
        return self._statistics.weights

    @property
    def curves(self) -> list[list[float]] | None:
        """Return level and rate of each node's loss curve [K, 2], if the estimator measures them."""
        return self._statistics.curves

    @property
    def noise(self) -> Floats:
        """Return the mean variance of what each node's frame decoded to."""
        return self._statistics.noise

    @property
    def trust(self) -> Floats | None:
        """Return how far each node is trusted [K], from 1 down, if the rule audits."""
        return self._statistics.trust

    @property
    def missing(self) -> list[int]:
        """List the nodes that have not answered yet."""
        return [node for node in self._plans if node not in self._spool]

    @property
    def sent(self) -> dict[int, int]:
        """Return the payload bytes of each accepted frame."""
        return {node: len(self._spool.get(node)) - OVERHEAD_BYTES for node in self._spool.nodes}

    def open(
        self,
        broadcast: Broadcast,
        arrays: dict[str, np.ndarray[Any, Any]],
        prior: Prior | None = None,
        *,
        notes: PriorNotes | None = None,
        probe: bytes | None = None,
        following: Ints | None = None,
        sequences: Tokens | None = None,
        nodes: Sequence[int] | None = None,
    ) -> dict[int, Task]:
        """Open the round: return a task for each node, or for those of `nodes`.

        `prior` is what a predictive codec codes against; with `notes` on it the nodes compute it themselves. `probe` is
        the digest of the round's probe set, if it is not that of the settings; `following` are the tokens that follow
        its contexts, where they are known. `sequences` [S, T] are the probe set itself, if nodes are to write text.
        """
        s = self.settings
        if s.updates and (broadcast != "weights" or count_weights(arrays) != s.contexts):
            raise InputError(f"updates need the {s.contexts} weights that they are of, got {count_weights(arrays)}")
        self._step(Event.OPEN)
        self._student = arrays if s.updates else {}
        bits = s.budget.bits(self.round, self._statistics.estimate, self._statistics.useful_bits)
        stratified = s.stratified and not s.updates and self._gains_from_slots(prior)
        asked = range(len(s.names)) if nodes is None else nodes
        self._plans = {
            node: Plan(
                run_key=s.run_key,
                round=self.round,
                node=node,
                probe=s.probe if probe is None else probe,
                contexts=s.contexts,
                vocab=s.vocab,
                bits=float(bits[node]),
                clip=s.clips[node],
                slot=place if stratified else 0,
                slots=len(asked) if stratified else 1,
                written=s.written,
                space=s.spaces[node] if s.spaces else b"",
                prior=prior,
                learnt=self._statistics.learnt,
            )
            for place, node in enumerate(asked)
        }
        self._following = following
        self._probe = sequences
        self._tasks = {
            node: Task(plan, s.codec, s.against, broadcast, arrays, notes, base=self._base(node))
            for node, plan in self._plans.items()
        }
        return dict(self._tasks)

    def plan(self, node: int) -> Plan:
        """Return a node's plan of this round."""
        return self._plans[node]

    def again(self, node: int) -> Task:
        """Return a node's task with the blocks of the prior that it asked for."""
        task = self._tasks[node]
        prior = self.prior
        if prior is None:
            raise InputError(f"node {node} has no prior to ask for")
        asked = self._asked.get(node, [])
        return replace(task, sent={block: prior.block(block_rows(task.plan.shape, block)) for block in asked})

    def frame(self, node: int, data: bytes) -> Receipt:
        """Take a frame that came over node's channel; return the receipt, which is recorded too."""
        receipt = Receipt(self.round, node, *self._judge(node, data))
        if receipt.verdict == "accepted":
            self._spool.put(node, data)
        self.receipts.append(receipt)
        return receipt

    def close(self) -> list[int]:
        """End the collecting; refuse below the quorum, and go on collecting."""
        if self._phase is Phase.COLLECTING and len(self._spool) < self.settings.quorum:
            names = ", ".join(self.settings.names[node] for node in self.missing)
            answered = f"{len(self._spool)} of {show_count(len(self._plans), 'node')} answered"
            raise QuorumError(f"round {self.round}: {answered}, the quorum is {self.settings.quorum}; missing: {names}")
        self._step(Event.CLOSE)
        return self._spool.nodes

    def combine(self) -> Combined:
        """Decode and combine, block by block over contexts, nodes in the order of their numbers."""
        self._step(Event.COMBINE)
        s = self.settings
        nodes = self._spool.nodes
        codec = codecs.get(s.codec)
        plans = [self._plans[node].public for node in nodes]
        bases = [] if s.against == "nothing" else [self._reconstruction(node) for node in nodes]
        payloads = [public_labels(payload_of(self._spool.get(node)), self._plans[node]) for node in nodes]
        observer = RoundStatistics(self._statistics, nodes, plans, agreement=not codec.traits.sparse)
        combined = combine_replies(
            Replies(codec, s.combining, payloads, plans, bases, self._statistics.trust_of(nodes), self._following),
            observer,
            s.threads,
        )
        observer.close(codec, combined)
        self._statistics.update_tables(self._learnt)
        self._statistics.record_usage(self._plans, self.sent)
        return combined

    def updates(self) -> dict[int, memoryview]:
        """Return the payloads of all accepted frames, where nodes send updates: this is in the place of `combine`."""
        if not self.settings.updates:
            raise InputError("nodes of this federation send labels: combine them")
        self._step(Event.COMBINE)
        return {node: payload_of(self._spool.get(node)) for node in self._spool.nodes}

    def end(self) -> AggregatorState:
        """End the round; return what the next one needs."""
        self._step(Event.END)
        arrays, meta = self._statistics.state()
        arrays.update({f"{_RECONSTRUCTION}{node}": value for node, value in self._reconstructions.items()})
        return AggregatorState(arrays, {"round": self.round, **meta})

    def _step(self, event: Event) -> None:
        self._phase = follow(AGGREGATOR, self._phase, event)

    def _judge(self, node: int, data: bytes) -> tuple[str, str]:
        late = AGGREGATOR[self._phase][Event.FRAME]
        if isinstance(late, str):
            return "refused", late
        if node not in self._plans:
            return "refused", f"unknown node {node}"
        if node in self._spool:
            same = self._spool.get(node) == data
            return (
                ("duplicate", "") if same else ("refused", "a second, different frame in this round: the first counts")
            )
        try:
            if is_prior_request(data):
                self._ask(node, data)
                notes = self._tasks[node].notes
                total = 0 if notes is None else len(notes.counts)
                return "asked", f"for {describe_differing(len(self._asked[node]), total)}"
            self._verify(node, data)
        except FrameError as error:
            return "refused", str(error)
        return "accepted", ""

    def _ask(self, node: int, data: bytes) -> None:
        """Note the blocks of the prior that a node asks for, once a round."""
        notes = self._tasks[node].notes
        key = self.settings.mac_keys.get(node, b"")
        if notes is None or node in self._asked:
            raise FrameError("blocks of the prior may be asked for once a round, of a prior that a node computes")
        self._asked[node] = decode_prior_request(data, self._plans[node], blocks=len(notes.counts), key=key)

    def _verify(self, node: int, data: bytes) -> None:
        """Check a frame once, so that after acceptance nothing can fail."""
        plan = self._plans[node]
        key = self.settings.mac_keys.get(node, b"")
        if self.settings.updates:
            check_update(decode_frame(data, plan, UPDATES_CODE, key=key), self._student)
            return
        codec = codecs.get(self.settings.codec)
        payload = decode_frame(data, plan, codec.code, key=key)
        reply = decode_reply(payload, plan, self._probe)
        reader = codec.reader(reply.labels, plan.public)
        reader.check()
        if reply.written is not None:
            self.written[node] = reply.written
        if (learnt := reader.learnt) is not None:
            self._learnt.add(learnt)

    def _gains_from_slots(self, prior: Prior | None) -> bool:
        """Return whether dither that is stratified over the nodes helps."""
        # Against a prior only nodes that agree win by it, and whether they do is known from the round before. Sampled
        # labels always do: what rounding adds at one node it takes at another.
        return prior is None or codecs.get(self.settings.codec).traits.sparse or self._statistics.nodes_agree

    def _base(self, node: int) -> str:
        return base_digest(self._reconstructions.get(node)) if self.settings.against == "own" else ""

    def _reconstruction(self, node: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Return the sum of what a node has sent so far: what it codes against."""
        shape = self.settings.contexts, self.settings.vocab
        return self._reconstructions.setdefault(node, np.zeros(shape, np.float32))
