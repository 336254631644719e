"""The aggregator as a state machine: tasks out, frames in, no network, no files, no training here.

    ready --open--> collecting --close--> closed --distilled--> ready (next round) or done
                       |  ^
                 frame '--'  accepted, a duplicate, or refused: recorded, and a refused one changes nothing

A frame that comes in any other phase is late: recorded and refused. What is combined is the set of accepted frames in
the order of the nodes' numbers, so the result does not depend on the order of arrival.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fpld.codecs import check, decode_blocks
from fpld.errors import FrameError, InputError, ProtocolError, QuorumError
from fpld.protocol.learning import Learner, Observer
from fpld.protocol.messages import Against, Broadcast, Task
from fpld.registry import codecs, rules
from fpld.theory import softmax, weighted_bracket
from fpld.types import Decoded, Plan
from fpld.wire import OVERHEAD, unseal

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fpld.protocol.policy import Budget
    from fpld.types import Floats

_BLOCK = 1 << 22  # coordinates of all nodes together that are decoded at a time


class Phase(Enum):
    """Where an aggregator is in a round."""

    READY = "ready"
    COLLECTING = "collecting"
    CLOSED = "closed"
    DONE = "done"


LEGAL = {
    (Phase.READY, "open"): Phase.COLLECTING,
    (Phase.COLLECTING, "frame"): Phase.COLLECTING,
    (Phase.COLLECTING, "close"): Phase.CLOSED,
    (Phase.CLOSED, "combine"): Phase.CLOSED,
    (Phase.CLOSED, "distilled"): Phase.READY,
}


class Receipt(NamedTuple):
    """What became of a frame: `accepted`, `duplicate` (the same bytes again) or `refused`, and why."""

    round: int
    node: int
    verdict: str
    reason: str = ""


class Combined(NamedTuple):
    """The result of a round: target logits [m, V], and what a person wants to know about it."""

    target: np.ndarray[Any, np.dtype[np.float32]]
    nodes: list[int]
    upper: float
    lower: float


@dataclass(frozen=True, slots=True)
class Settings:
    """What does not change in a run."""

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
    against: Against = "nothing"
    stratified: bool = True
    quorum: int = 1
    mac_keys: Mapping[int, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 1 <= self.quorum <= len(self.names):
            raise InputError(f"quorum must be from 1 to the number of nodes, {len(self.names)}, got {self.quorum}")


class Aggregator:
    """Run the rounds. `state` and `restore` are what a checkpoint holds."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.phase = Phase.READY
        self.round = 0
        self.receipts: list[Receipt] = []
        self._plans: dict[int, Plan] = {}
        self._frames: dict[int, bytes] = {}
        self._reconstructions: dict[int, np.ndarray[Any, np.dtype[np.float32]]] = {}
        self._learner = Learner(len(settings.names), settings.budget)
        self._learnt: dict[int, np.ndarray[Any, Any]] = {}

    @property
    def bits(self) -> list[float]:
        """Give the bits per probe context that each node was allotted in this round."""
        return [self._plans[node].bits for node in sorted(self._plans)]

    @property
    def weights(self) -> Floats | None:
        """Give the nodes' estimated weights, once there are any; with loss curves, level and rate of each."""
        return self._learner.estimate

    @property
    def noise(self) -> Floats:
        """Give the mean variance of what each node's frame of the last combined round decoded to."""
        return self._learner.noise

    @property
    def missing(self) -> list[int]:
        """List the nodes that have not answered yet."""
        return [node for node in self._plans if node not in self._frames]

    @property
    def sent(self) -> dict[int, int]:
        """Give the payload bytes of each accepted frame."""
        return {node: len(self._frames[node]) - OVERHEAD for node in sorted(self._frames)}

    def open(
        self,
        broadcast: Broadcast,
        arrays: dict[str, np.ndarray[Any, Any]],
        prior: np.ndarray[Any, np.dtype[np.int16]] | None = None,
    ) -> dict[int, Task]:
        """Begin the next round: give a task for each node; `prior` is what a predictive codec codes against."""
        self._step("open")
        self.round += 1
        s = self.settings
        bits = s.budget.bits(self.round, self._learner.estimate)
        # Against a prior only nodes that agree win by dither, and whether they do is known from the round before.
        stratified = s.stratified and (prior is None or self._learner.agree)
        self._plans = {
            node: Plan(
                run_key=s.run_key,
                round=self.round,
                node=node,
                probe=s.probe,
                contexts=s.contexts,
                vocab=s.vocab,
                bits=float(bits[node]),
                clip=s.clips[node],
                slot=node if stratified else 0,
                slots=len(s.names) if stratified else 1,
                prior=prior,
                tables=self._learner.tables,
            )
            for node in range(len(s.names))
        }
        self._frames, self._learnt = {}, {}
        return {node: Task(plan, s.codec, s.against, broadcast, arrays) for node, plan in self._plans.items()}

    def frame(self, node: int, data: bytes) -> Receipt:
        """Take a frame that came over node's channel; give the receipt, which is recorded too."""
        receipt = Receipt(self.round, node, *self._judge(node, data))
        if receipt.verdict == "accepted":
            self._frames[node] = bytes(data)
        self.receipts.append(receipt)
        return receipt

    def close(self) -> list[int]:
        """End the collecting; refuse below the quorum, and go on collecting."""
        if self.phase is Phase.COLLECTING and len(self._frames) < self.settings.quorum:
            names = ", ".join(self.settings.names[node] for node in self.missing)
            raise QuorumError(
                f"round {self.round}: {len(self._frames)} of {len(self._plans)} nodes answered, the quorum is "
                f"{self.settings.quorum}; missing: {names}"
            )
        self._step("close")
        return sorted(self._frames)

    def combine(self) -> Combined:
        """Decode and combine, block by block over contexts, nodes in the order of their numbers."""
        self._step("combine")
        s, nodes = self.settings, sorted(self._frames)
        codec, rule = codecs.get(s.codec), rules.get(s.rule)
        payloads = {node: self._payload(node, self._frames[node]) for node in nodes}
        target = np.empty((s.contexts, s.vocab), np.float32)
        bracket, observer = np.zeros(2), Observer(self._learner, {node: self._plans[node] for node in nodes})
        blocks = _blocks(s.contexts, s.vocab * len(nodes))
        streams = [decode_blocks(codec, payloads[node], self._plans[node], blocks) for node in nodes]
        for rows, *replies in zip(blocks, *streams, strict=True):
            values = np.stack([self._absolute(node, rows, reply) for node, reply in zip(nodes, replies, strict=True)])
            variance = np.stack([np.broadcast_to(reply.variance, values.shape[1:]) for reply in replies])
            target[rows.start : rows.stop] = rule(values, variance)
            weights = softmax(target[rows.start : rows.stop])
            bracket += weighted_bracket(weights, variance.sum(axis=0) / len(nodes) ** 2)
            observer.block(rows, values, variance, weights)
        observer.close(codec)
        self._learner.learn_tables(self._learnt)
        lower, upper = bracket / s.contexts
        return Combined(target, nodes, float(upper), float(lower))

    def distilled(self) -> bool:
        """End the round; say whether it was the last."""
        self._step("distilled")
        if self.round >= self.settings.rounds:
            self.phase = Phase.DONE
        return self.phase is Phase.DONE

    def state(self) -> tuple[dict[str, np.ndarray[Any, Any]], dict[str, Any]]:
        """Give what a checkpoint must hold between two rounds: arrays, and a JSON object."""
        if self.phase not in (Phase.READY, Phase.DONE):
            raise ProtocolError(f"a checkpoint is taken between rounds, not while {self.phase.value}")
        arrays, learnt = self._learner.state()
        arrays.update({f"reconstruction_{node}": value for node, value in self._reconstructions.items()})
        receipts = [list(receipt) for receipt in self.receipts]
        return arrays, {"round": self.round, "receipts": receipts, **learnt}

    def restore(self, arrays: Mapping[str, np.ndarray[Any, Any]], meta: Mapping[str, Any]) -> None:
        """Go on from a checkpoint's state."""
        self.round = int(meta["round"])
        self.receipts = [Receipt(*receipt) for receipt in meta["receipts"]]
        self._learner.restore(arrays, meta)
        prefix = "reconstruction_"
        self._reconstructions = {
            int(name.removeprefix(prefix)): value.copy() for name, value in arrays.items() if name.startswith(prefix)
        }
        self.phase = Phase.DONE if self.round >= self.settings.rounds else Phase.READY

    def _step(self, event: str) -> None:
        if (self.phase, event) not in LEGAL:
            raise ProtocolError(f"'{event}' is not possible while {self.phase.value} (round {self.round})")
        self.phase = LEGAL[self.phase, event]

    def _judge(self, node: int, data: bytes) -> tuple[str, str]:
        if self.phase is not Phase.COLLECTING:
            return "refused", f"late: the aggregator is {self.phase.value}"
        if node not in self._plans:
            return "refused", f"unknown node {node}"
        if node in self._frames:
            same = self._frames[node] == data
            return (
                ("duplicate", "") if same else ("refused", "a second, different frame in this round: the first counts")
            )
        try:
            self._verify(node, data)
        except FrameError as error:
            return "refused", str(error)
        return "accepted", ""

    def _verify(self, node: int, data: bytes) -> None:
        """Check all of a frame once: after acceptance nothing can fail."""
        payload, plan, codec = self._payload(node, data), self._plans[node], codecs.get(self.settings.codec)
        learnt = check(codec, payload, plan, _blocks(plan.contexts, plan.vocab))
        if learnt is not None:
            self._learnt[node] = learnt

    def _payload(self, node: int, data: bytes) -> memoryview:
        key = self.settings.mac_keys.get(node, b"")
        return unseal(data, self._plans[node], codecs.get(self.settings.codec).code, key=key)

    def _absolute(self, node: int, rows: range, reply: Decoded) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Add what the node coded against, and keep the sum if it will be needed."""
        values = reply.values.astype(np.float32, copy=False)
        if self.settings.against == "nothing":
            return values
        s = self.settings
        own = self._reconstructions.setdefault(node, np.zeros((s.contexts, s.vocab), np.float32))
        own[rows.start : rows.stop] += values
        return own[rows.start : rows.stop]


def _blocks(contexts: int, width: int) -> list[range]:
    stride = max(_BLOCK // width, 1)
    return [range(start, min(start + stride, contexts)) for start in range(0, contexts, stride)]
