"""Statistics that the aggregator keeps over rounds, and how a round updates them.

The allocator goes by the nodes' weights or loss curves, and by how many bits each node could use. The codec starts from
the symbol tables of the round before, and its dither is stratified if the nodes agree. Rules that audit remember the
nodes' trust. `RunningStatistics` holds all of these between rounds and is part of a checkpoint; `RoundStatistics`
observes one round while it is combined, and updates them at its end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fpld.budget.policy import ROOM
from fpld.codecs.prior import EIGHTHS_PER_NAT
from fpld.protocol.combine import Observation
from fpld.registry import estimators

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fpld.budget.estimators import EstimatorState
    from fpld.budget.policy import Budget
    from fpld.codecs.base import Codec
    from fpld.protocol.combine import Combined, LogitSample
    from fpld.types import Array, Arrays, Floats, Plan, Reals

_ESTIMATE = "estimate/"  # the prefix of the estimator's arrays in a checkpoint


class TableSum:
    """Sum the symbol tables that the codec has learnt at the nodes of a round: one array of integers for all nodes."""

    def __init__(self) -> None:
        self.count = 0
        self._sum = np.zeros(1, np.int64)

    def add(self, learnt: Array) -> None:
        """Add a node's table."""
        self._sum = self._sum + learnt
        self.count += 1

    def mean(self) -> Array:
        """Return the mean of all tables, rounded down."""
        mean: Array = (self._sum // self.count).astype(np.uint16)
        return mean


@dataclass(slots=True)
class Agreement:
    """Measure whether the nodes agree about what the prior does not know: then stratified dither pays.

    The fields are sums over sampled contexts, weighted by the combined probabilities: the residuals' mean square, their
    variance over nodes, and the variance of the codec's error. Nodes agree if their residuals differ by far less than
    their size, and by about as much as the codec's error.
    """

    signal: float = 0.0
    spread: float = 0.0
    noise: float = 0.0

    def add(self, residuals: Reals, variance: Reals, weights: Reals) -> None:
        """Take a block: residuals to the prior and their variance [K, rows, V], combined probabilities [rows, V]."""
        if len(residuals) > 1:
            self.signal += float(np.einsum("kij,ij->", np.square(residuals), weights) / len(residuals))
            self.spread += float((residuals.var(axis=0, ddof=1) * weights).sum())
            self.noise += float(np.einsum("kij,ij->", variance, weights) / len(residuals))

    @property
    def reached(self) -> bool:
        """Return whether the nodes agree."""
        return self.spread < min(0.1 * self.signal, 2 * self.noise)


class RunningStatistics:
    """Hold what earlier rounds have shown; `RoundStatistics` adds a round to it."""

    def __init__(self, nodes: int, budget: Budget) -> None:
        self.nodes = nodes
        self.estimator = estimators.get(budget.estimator)
        self.estimate: EstimatorState = self.estimator.start(nodes, budget.forget)
        # The mean variance of each node in the last round is reported only: nothing depends on it.
        self.noise: Floats = np.zeros(nodes)
        # Beyond so many bits per context a node's codec has no use for more.
        self.useful_bits: Floats = np.full(nodes, np.inf)
        self.learnt: Array | None = None
        self.nodes_agree = False
        # Trust exists under rules that audit.
        self.trust: Floats | None = None

    @property
    def weights(self) -> Floats | None:
        """Return the nodes' estimated weights [K], once there are any."""
        return self.estimator.weights(self.estimate)

    @property
    def curves(self) -> list[list[float]] | None:
        """Return level and rate of each node's loss curve [K, 2], once all are measured."""
        if "levels" not in self.estimate or np.isnan(self.estimate["levels"]).any():
            return None
        curves: list[list[float]] = np.stack([self.estimate["levels"], self.estimate["rates"]], axis=1).tolist()
        return curves

    def trust_of(self, nodes: Sequence[int]) -> Floats | None:
        """Return the trust of these nodes before the round, if the rule audits."""
        return None if self.trust is None else self.trust[list(nodes)]

    def record_usage(self, plans: Mapping[int, Plan], payload_bytes: Mapping[int, int]) -> None:
        """Limit nodes that left bits unused to what they used and some room, until they use that up."""
        for node, count in payload_bytes.items():
            limit = ROOM * 8 * count / plans[node].contexts
            self.useful_bits[node] = limit if limit < plans[node].bits else np.inf

    def update_tables(self, tables: TableSum) -> None:
        """Let the next round begin with the mean of the tables that the codec has learnt at the nodes."""
        if tables.count:
            self.learnt = tables.mean()

    def state(self) -> tuple[Arrays, dict[str, Any]]:
        """Return the arrays and the JSON object of a checkpoint."""
        arrays: Arrays = {_ESTIMATE + name: value for name, value in self.estimate.items()}
        arrays["useful"] = self.useful_bits.copy()
        if self.learnt is not None:
            arrays["tables"] = self.learnt
        if self.trust is not None:
            arrays["trust"] = self.trust
        return arrays, {"agree": self.nodes_agree}

    def restore(self, arrays: Mapping[str, Array], meta: Mapping[str, Any]) -> None:
        """Take the statistics of a checkpoint."""
        self.estimate = {name.removeprefix(_ESTIMATE): a for name, a in arrays.items() if name.startswith(_ESTIMATE)}
        self.useful_bits = np.array(arrays.get("useful", np.full(self.nodes, np.inf)))
        self.learnt = arrays.get("tables")
        self.nodes_agree = bool(meta["agree"])
        self.trust = arrays.get("trust")


class RoundStatistics:
    """Observe one round while it is combined, and update the running statistics at its end.

    With `agreement`, and with a prior, it measures whether the nodes agree.
    """

    def __init__(
        self, running: RunningStatistics, nodes: Sequence[int], plans: Sequence[Plan], *, agreement: bool = True
    ) -> None:
        self.running = running
        self.nodes = list(nodes)
        self.plans = plans
        self.traits = running.estimator.traits
        self.wants_samples = (agreement and plans[0].prior is not None) or self.traits.samples
        self.wants_squares = self.traits.squares
        self.agreement = Agreement()
        self.samples: list[LogitSample] = []

    def observe(self, sample: LogitSample) -> None:
        """Take all nodes' logits on some contexts."""
        if self.traits.samples:
            self.samples.append(sample)
        if sample.prior is not None:
            prior = sample.prior / np.float32(EIGHTHS_PER_NAT)
            self.agreement.add(sample.values - prior, sample.variance, sample.combined)

    def close(self, codec: Codec, combined: Combined) -> None:
        """Update the running statistics with the result of the round."""
        running = self.running
        noise = combined.noise / combined.target.size
        running.nodes_agree = self.agreement.reached
        running.noise = np.zeros(running.nodes)
        running.noise[self.nodes] = noise
        if combined.trust is not None:
            before = np.ones(running.nodes) if running.trust is None else running.trust
            running.trust = before.copy()
            running.trust[self.nodes] = combined.trust
        observation = Observation(self.nodes, self.plans, codec, noise, combined.squares, self.samples)
        running.estimate = running.estimator.observe(running.estimate, observation)
