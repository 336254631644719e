"""Decode and combine the payloads of a round: by blocks of contexts, nodes in a fixed order.

The result does not depend on the number of threads.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np

from fpld.protocol.audit import audit
from fpld.protocol.plain import plain
from fpld.protocol.ways import WAYS, fast_way

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fpld.codecs import Codec
    from fpld.protocol.replies import Observer, Replies
    from fpld.protocol.ways import Way
    from fpld.rules import Rule
    from fpld.rules.base import Judge
    from fpld.rules.target import Target
    from fpld.types import Floats


class Combined(NamedTuple):
    """What a round brought: the student's target, the nodes that it is from, and what a person wants to know.

    `noise` and `squares` are each node's summed variance and sum of squares, the latter if the observer wanted it;
    `lower` and `upper` bound the KL that coding has cost, in nats per context, where the paper's bounds apply: they do
    not to sampled labels. `trust` is what a rule that audits thinks of each node.
    """

    target: Target
    nodes: list[int]
    noise: Floats
    squares: Floats
    lower: float | None
    upper: float | None
    trust: Floats | None = None


def combine(
    replies: Replies,
    observer: Observer,
    threads: int = 0,
    ways: Mapping[tuple[Codec, Rule], Way] = WAYS,
) -> Combined:
    """Combine replies while the observer looks on; no threads: one for each core that this process may use."""
    trust = None
    if replies.rule.traits.audits:
        judge = cast("Judge", replies.rule)
        trust = judge.judge(audit(replies), replies.trust)
        replies = replace(replies, rule=judge.weighing(trust))
    way = fast_way(ways, replies, observer)
    run = plain if way is None else way.run
    finish, parts = run(replies, observer, threads or len(os.sched_getaffinity(0)))
    noise, squares, bracket, contexts = np.zeros(len(replies.plans)), np.zeros(len(replies.plans)), np.zeros(2), 0
    for part in parts:
        noise += part.noise
        squares += part.squares
        bracket += part.bracket
        contexts += part.contexts
        if part.sample is not None:
            observer.look(part.sample)
    lower, upper = (bracket / contexts).tolist() if contexts else (None, None)
    return Combined(finish(), [plan.node for plan in replies.plans], noise, squares, lower, upper, trust)
