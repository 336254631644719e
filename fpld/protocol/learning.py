"""What the aggregator learns: weights or loss curves for the allocator, tables and agreement for the codec."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from fpld.codecs.prior import EIGHTHS
from fpld.estimate import Agreement, Moments, loss_curve
from fpld.theory import softmax

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fpld.codecs import Codec
    from fpld.protocol.policy import Budget
    from fpld.types import Floats, Plan

_SAMPLE = 1 << 16  # coordinates of a node that its loss curve is measured on

Array = np.ndarray[Any, np.dtype[Any]]


class Learner:
    """Hold what is known from earlier rounds; `Observer` adds a round to it."""

    def __init__(self, nodes: int, budget: Budget) -> None:
        self.nodes, self.budget = nodes, budget
        self.moments = Moments.start(nodes, forget=budget.forget)
        self.estimate: Floats | None = None
        self.noise: Floats = np.zeros(nodes)  # of the last round, for a person to see
        self.tables: Array | None = None
        self.agree = False

    def state(self) -> tuple[dict[str, Array], dict[str, Any]]:
        """Give what a checkpoint must hold: arrays, and a JSON object."""
        arrays: dict[str, Array] = {"moments_total": self.moments.total, "moments_count": self.moments.count}
        if self.estimate is not None:
            arrays["estimate"] = self.estimate
        if self.tables is not None:
            arrays["tables"] = self.tables
        return arrays, {"agree": self.agree}

    def restore(self, arrays: Mapping[str, Array], meta: Mapping[str, Any]) -> None:
        """Go on from a checkpoint's state."""
        self.moments = Moments(arrays["moments_total"], arrays["moments_count"], self.budget.forget)
        self.estimate, self.tables, self.agree = arrays.get("estimate"), arrays.get("tables"), bool(meta["agree"])

    def learn_tables(self, learnt: Mapping[int, Array]) -> None:
        """Begin the next round with the mean of what the codec has learnt at the nodes, in integers."""
        if learnt:
            tables = np.stack([learnt[node] for node in sorted(learnt)]).astype(np.int64)
            self.tables = (tables.sum(axis=0) // len(tables)).astype(np.int32)


class Observer:
    """Look at the blocks of one round as they are combined."""

    def __init__(self, learner: Learner, plans: Mapping[int, Plan]) -> None:
        self.learner, self.plans, self.nodes = learner, plans, sorted(plans)
        plan = plans[self.nodes[0]]
        self.prior, self.contexts = plan.prior, plan.contexts
        self.coordinates = plan.contexts * plan.vocab
        self.noise, self.total, self.felt = (np.zeros(learner.nodes) for _ in range(3))
        self.agreement = Agreement()
        self.every = max(self.coordinates // _SAMPLE, 1)
        self.samples: dict[int, list[Array]] = {node: [] for node in self.nodes}

    def block(self, rows: range, values: Array, variance: Array, weights: Array) -> None:
        """Take the nodes' logits and their variance [K, rows, V], and the combined probabilities [rows, V]."""
        for k, node in enumerate(self.nodes):
            self.noise[node] += float(variance[k].sum(dtype=np.float64))
            self.total[node] += float(np.square(values[k], dtype=np.float64).sum())
            if self.learner.budget.estimator == "curves":
                self.samples[node].append(values[k, -rows.start % self.every :: self.every].copy())
                self.felt[node] += float((softmax(values[k]) * variance[k]).sum()) / 2
        if self.prior is not None:
            self.agreement.add(values - self.prior[rows.start : rows.stop] / np.float32(EIGHTHS), variance, weights)

    def close(self, codec: Codec) -> None:
        """Hand over what the round has shown."""
        learner, budget = self.learner, self.learner.budget
        learner.agree, learner.noise = self.agreement.reached, self.noise / self.coordinates
        learner.moments = learner.moments.add(
            {node: (float(self.total[node]), self.coordinates) for node in self.nodes}
        )
        if budget.estimator == "second-moment" and (learner.moments.count > 0).all():
            learner.estimate = learner.moments.weights()
        if budget.estimator == "distortion":
            bits = np.array([self.plans[node].bits for node in self.nodes])
            found = self.noise[self.nodes] / self.coordinates * np.exp2(2 * bits / self.plans[self.nodes[0]].vocab)
            self._keep(found, np.ones(learner.nodes))
        if budget.estimator == "curves":
            curves = np.array([self._curve(codec, node) for node in self.nodes])
            self._keep(curves, np.tile(curves.mean(axis=0), (learner.nodes, 1)))

    def _keep(self, found: Floats, unknown: Floats) -> None:
        """Replace what is known of the nodes that answered; of the others keep the last, or what is assumed."""
        estimate = unknown if self.learner.estimate is None else self.learner.estimate.copy()
        estimate[self.nodes] = found
        self.learner.estimate = estimate

    def _curve(self, codec: Codec, node: int) -> Floats:
        values = np.concatenate(self.samples[node])
        prior = None if self.prior is None else self.prior[:: self.every]
        plan = replace(self.plans[node], contexts=len(values), prior=prior)
        return loss_curve(codec, plan, values, float(self.felt[node]) / self.contexts)
