"""What the aggregator learns: weights or loss curves for the allocator, probabilities and agreement for the codec."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fpld.budget.agreement import Agreement
from fpld.budget.estimators import Seen
from fpld.budget.policy import ROOM
from fpld.codecs.prior import EIGHTHS
from fpld.registry import estimators

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fpld.budget.estimators import State
    from fpld.budget.policy import Budget
    from fpld.codecs import Codec
    from fpld.protocol.combine import Combined
    from fpld.protocol.replies import Sample
    from fpld.types import Floats, Plan

Array = np.ndarray[Any, np.dtype[Any]]
_ESTIMATE = "estimate/"


class Tables:
    """What the codec has learnt at the nodes of a round, added up in integers: their number costs no memory."""

    def __init__(self) -> None:
        self.count, self._sum = 0, np.zeros(1, np.int64)

    def add(self, learnt: Array) -> None:
        """Add a node's table."""
        self._sum = self._sum + learnt
        self.count += 1

    def mean(self) -> Array:
        """Return the mean of all tables, rounded down."""
        found: Array = (self._sum // self.count).astype(np.uint16)
        return found


class Learner:
    """Hold what is known from earlier rounds; `RoundObserver` adds a round to it."""

    def __init__(self, nodes: int, budget: Budget) -> None:
        self.nodes = nodes
        self.estimator = estimators.get(budget.estimator)
        self.estimate: State = self.estimator.start(nodes, budget.forget)
        self.noise: Floats = np.zeros(nodes)  # of the last round, for a person to see
        self.useful: Floats = np.full(nodes, np.inf)  # bits per context beyond which a node's codec has no use for more
        self.learnt: Array | None = None
        self.agree = False
        self.trust: Floats | None = None  # of each node, if the rule audits

    @property
    def weights(self) -> Floats | None:
        """Return the nodes' estimated weights [K], once there are any."""
        return self.estimator.weights(self.estimate)

    @property
    def curves(self) -> list[list[float]] | None:
        """Return level and rate of each node's loss curve [K, 2], once all are measured."""
        if "levels" not in self.estimate or np.isnan(self.estimate["levels"]).any():
            return None
        found: list[list[float]] = np.stack([self.estimate["levels"], self.estimate["rates"]], axis=1).tolist()
        return found

    def used(self, plans: Mapping[int, Plan], sent: Mapping[int, int]) -> None:
        """Note which nodes left bits unused: they are allotted what they used and some room, until they use that up."""
        for node, count in sent.items():
            room = ROOM * 8 * count / plans[node].contexts
            self.useful[node] = room if room < plans[node].bits else np.inf

    def state(self) -> tuple[dict[str, Array], dict[str, Any]]:
        """Return what a checkpoint must hold: arrays, and a JSON object."""
        arrays: dict[str, Array] = {_ESTIMATE + name: value for name, value in self.estimate.items()}
        arrays["useful"] = self.useful.copy()
        if self.learnt is not None:
            arrays["tables"] = self.learnt
        if self.trust is not None:
            arrays["trust"] = self.trust
        return arrays, {"agree": self.agree}

    def restore(self, arrays: Mapping[str, Array], meta: Mapping[str, Any]) -> None:
        """Go on from a checkpoint's state."""
        self.estimate = {name.removeprefix(_ESTIMATE): a for name, a in arrays.items() if name.startswith(_ESTIMATE)}
        self.useful = np.array(arrays.get("useful", np.full(self.nodes, np.inf)))
        self.learnt, self.agree = arrays.get("tables"), bool(meta["agree"])
        self.trust = arrays.get("trust")

    def trusted(self, nodes: Sequence[int]) -> Floats | None:
        """Return how far these nodes were trusted so far, if the rule audits."""
        return None if self.trust is None else self.trust[list(nodes)]

    def learn(self, tables: Tables) -> None:
        """Begin the next round with the mean of what the codec has learnt at the nodes."""
        if tables.count:
            self.learnt = tables.mean()


class RoundObserver:
    """Look at one round as it is combined, and hand over to the learner what it has shown."""

    def __init__(
        self, learner: Learner, nodes: Sequence[int], plans: Sequence[Plan], *, agreement: bool = True
    ) -> None:
        self.learner, self.nodes, self.plans = learner, list(nodes), plans
        self.wants = learner.estimator.wants
        self.samples = (agreement and plans[0].prior is not None) or self.wants.samples
        self.squares = self.wants.squares
        self.agreement = Agreement()
        self.seen: list[Sample] = []

    def look(self, sample: Sample) -> None:
        """Take all nodes' logits on some contexts."""
        if self.wants.samples:
            self.seen.append(sample)
        if sample.prior is not None:
            prior = sample.prior / np.float32(EIGHTHS)
            self.agreement.add(sample.values - prior, sample.variance, sample.combined)

    def close(self, codec: Codec, combined: Combined) -> None:
        """Update the learner with the sums of the round."""
        learner, noise = self.learner, combined.noise / combined.target.size
        learner.agree = self.agreement.reached
        learner.noise = np.zeros(learner.nodes)
        learner.noise[self.nodes] = noise
        if combined.trust is not None:
            before = np.ones(learner.nodes) if learner.trust is None else learner.trust
            learner.trust = before.copy()
            learner.trust[self.nodes] = combined.trust
        seen = Seen(self.nodes, self.plans, codec, noise, combined.squares, self.seen)
        learner.estimate = learner.estimator.observe(learner.estimate, seen)
