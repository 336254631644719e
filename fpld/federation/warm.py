"""Compile what a codec and a rule need before anybody waits for it: on one core while the other trains the base model.

Kernels are compiled when they are first called, and kept on the disk for all processes of this machine. Nodes that
start together would each compile them.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fpld.codecs import encode, make_prior
from fpld.protocol.combine import combine
from fpld.protocol.replies import Replies, Silent
from fpld.registry import codecs, rules
from fpld.types import Plan

_SHAPE = 8, 64
_NODES = 3  # what every rule has enough of


def warm_up(codec: str, rule: str) -> None:
    """Code and combine the labels of a few nodes, which are as small as can be."""
    chosen, drawn = codecs.get(codec), np.random.default_rng(0)
    prior = make_prior(drawn.normal(size=_SHAPE)) if chosen.traits.prior else None
    contexts, vocab = _SHAPE
    plan = Plan(bytes(16), 1, 0, bytes(32), contexts, vocab, 32.0 * vocab, slots=_NODES, prior=prior)
    plans = [replace(plan, node=node, slot=node) for node in range(_NODES)]
    labels = drawn.normal(size=(_NODES, *_SHAPE)).astype(np.float32)
    payloads = [encode(chosen, own, plan) for own, plan in zip(labels, plans, strict=True)]
    combine(Replies(chosen, rules.get(rule), payloads, plans), Silent())
