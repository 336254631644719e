"""What the aggregator learns: weights or loss curves for the allocator, tables and agreement for the codec."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from fpld.budget.estimators import Agreement, Moments, loss_curve
from fpld.codecs.prior import EIGHTHS, ArrayPrior
from fpld.numerics import softmax

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fpld.budget.policy import Budget
    from fpld.codecs import Codec
    from fpld.protocol.combine import Combined
    from fpld.protocol.replies import Sample
    from fpld.types import Floats, Plan

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
        """Return what a checkpoint must hold: arrays, and a JSON object."""
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
            self.tables = (tables.sum(axis=0) // len(tables)).astype(np.uint16)


class Observer:
    """Look at one round as it is combined."""

    def __init__(self, learner: Learner, nodes: Sequence[int], plans: Sequence[Plan]) -> None:
        self.learner, self.nodes, self.plans = learner, list(nodes), plans
        self.curves = learner.budget.estimator == "curves"
        self.samples = plans[0].prior is not None or self.curves
        self.squares = learner.budget.estimator == "second-moment"
        self.felt = np.zeros(len(plans))
        self.agreement = Agreement()
        self.seen: list[Sample] = []

    def look(self, sample: Sample) -> None:
        """Take all nodes' logits on some contexts."""
        if self.curves:
            self.seen.append(sample)
            for k, (values, variance) in enumerate(zip(sample.values, sample.variance, strict=True)):
                self.felt[k] += float((softmax(values) * variance).sum()) / 2
        if sample.prior is not None:
            prior = sample.prior / np.float32(EIGHTHS)
            self.agreement.add(sample.values - prior, sample.variance, sample.combined)

    def close(self, codec: Codec, combined: Combined) -> None:
        """Hand over what the round has shown."""
        learner, budget = self.learner, self.learner.budget
        coordinates = combined.target.size
        learner.agree = self.agreement.reached
        learner.noise = np.zeros(learner.nodes)
        learner.noise[self.nodes] = combined.noise / coordinates
        if self.squares:
            squares = zip(self.nodes, combined.squares, strict=True)
            learner.moments = learner.moments.add({node: (float(square), coordinates) for node, square in squares})
            if (learner.moments.count > 0).all():
                learner.estimate = learner.moments.weights()
        if budget.estimator == "distortion":
            bits = np.array([plan.bits for plan in self.plans])
            found = combined.noise / coordinates * np.exp2(2 * bits / self.plans[0].vocab)
            self._keep(found, np.ones(learner.nodes))
        if self.curves:
            curves = np.array([self._curve(codec, k) for k in range(len(self.nodes))])
            self._keep(curves, np.tile(curves.mean(axis=0), (learner.nodes, 1)))

    def _keep(self, found: Floats, unknown: Floats) -> None:
        """Replace what is known of the nodes that answered; of the others keep the last, or what is assumed."""
        estimate = unknown if self.learner.estimate is None else self.learner.estimate.copy()
        estimate[self.nodes] = found
        self.learner.estimate = estimate

    def _curve(self, codec: Codec, k: int) -> Floats:
        values = np.concatenate([sample.values[k] for sample in self.seen])
        priors = [sample.prior for sample in self.seen if sample.prior is not None]
        prior = ArrayPrior(np.concatenate(priors)) if priors else None
        plan = replace(self.plans[k], contexts=len(values), prior=prior)
        return loss_curve(codec, plan, values, float(self.felt[k]) / len(values))
