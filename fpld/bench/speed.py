"""How fast codecs are: encode, decode and add, and a whole round at the aggregator, over numpy's `acc += x`.

`acc += x` on float32 arrays is what an aggregator of raw logits must do at least. Every codec is timed in turn with
it, in one process, and what is compared are medians of processor time, so that other work on the machine counts little.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fpld import kernels
from fpld.bench.accuracy import Contender, no_peers
from fpld.bench.scenes import ZIPF
from fpld.codecs.base import encode
from fpld.codecs.predictive.codec import PredictiveCodec
from fpld.codecs.prior import ArrayPrior, in_eighths
from fpld.codecs.samples.codec import SAMPLES
from fpld.codecs.uniform.codec import UniformCodec
from fpld.errors import InputError
from fpld.protocol import Aggregator, Budget, Settings
from fpld.protocol.combine import NullObserver, Replies
from fpld.protocol.fast_paths import combine_replies
from fpld.protocol.wire import encode_frame
from fpld.registry import codecs
from fpld.rules import MIXTURE
from fpld.seeds import derive_key, derive_seed
from fpld.types import Plan

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fpld.bench.accuracy import Peers
    from fpld.codecs.base import Codec
    from fpld.codecs.prior import Eighths
    from fpld.types import Floats32

Row = dict[str, Any]
CLIP = 8.0
PRIOR_DISTANCE = 0.5  # nats, of a node from the prior
_MAX_SECONDS = 2.0  # a codec that would take longer for one node is timed on fewer contexts

__all__ = ["Sizes", "SpeedRow", "contenders", "time_codecs"]


class SpeedRow(NamedTuple):
    """The time of an operation of a codec at a budget, per coordinate and per context.

    `ratio` is coordinates per second over those of `acc += x`; `nanoseconds` is the time for a coordinate of a node.
    """

    codec: str
    bits: float
    context_bits: float
    operation: str
    ratio: float
    nanoseconds: float


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is timed: contexts m, vocabulary V, nodes that are added at a time, and how often."""

    contexts: int = 512
    vocab: int = 32_000
    nodes: int = 8
    repeat: int = 5


def contenders(nodes: int, peers: Peers = no_peers) -> list[Contender]:
    """List the registered codecs, the uniform one in NumPy too, and the peers."""
    registered = [Contender(name, codecs.get(name)) for name in codecs.names()]
    reference = Contender("uniform (numpy)", UniformCodec(reference=True))
    listed = [*registered, reference, *(Contender(name, codec) for name, codec in peers(nodes).items())]
    return [replace(item, fields={"clip": CLIP} if item.name.startswith("uniform") else {}) for item in listed]


def time_codecs(
    listed: Sequence[Contender], budgets: Sequence[float], sizes: Sizes, seed: int, tick: Callable[[], None]
) -> list[Row]:
    """Time every codec at every budget (bits per coordinate) that it can meet; the rows' columns are `SpeedRow`."""
    logits, prior = _scene(sizes, np.random.default_rng(derive_seed(seed, "bench", "speed")))
    rows: list[Row] = []
    for bits in budgets:
        for item in listed:
            with suppress(InputError):  # a budget that the codec does not meet
                rows += _time(item, bits, logits, prior, sizes, seed)
            tick()
    return rows


def _scene(sizes: Sizes, rng: np.random.Generator) -> tuple[Floats32, Eighths]:
    """Draw logits as peaked as a language model's, and a prior that is about as far from them as another node."""
    shape = (sizes.contexts, sizes.vocab)
    ranks = rng.random(shape, np.float32).argsort(axis=1) + 1
    common = 2 * (rng.standard_normal(shape, np.float32) - ZIPF * np.log(ranks, dtype=np.float32))
    logits, other = (common + PRIOR_DISTANCE * rng.standard_normal(shape, np.float32) for _ in range(2))
    return logits, in_eighths(other)


def _time(item: Contender, bits: float, logits: Floats32, prior: Eighths, sizes: Sizes, seed: int) -> list[Row]:
    """Time one codec at one budget; raise `InputError` if it cannot meet it."""
    # A first trial on a few contexts compiles the kernels, and says how many contexts there is time for.
    few = logits[: max(1, min(len(logits), (1 << 18) // logits.shape[1]))]
    first = _plans(item, bits, prior[: len(few)], sizes, seed)[0]
    encode(item.codec, few, first)
    seconds = _seconds(lambda: encode(item.codec, few, first))
    contexts = min(len(logits), max(len(few), int(_MAX_SECONDS / seconds * len(few))))
    part = logits[:contexts]
    plans = _plans(item, bits, prior[:contexts], sizes, seed)
    payloads = _payloads(item.codec, part, plans)
    frames = [encode_frame(payload, plan, item.codec.code) for payload, plan in zip(payloads, plans, strict=True)]
    work: dict[str, tuple[Callable[[], object], int]] = {
        "encode": (lambda: encode(item.codec, part, plans[0]), 1),
        "decode + add": (_adder(item.codec, payloads, plans, part), len(plans)),
    }
    if item.name in codecs.names():
        work["round"] = (lambda: _round(item.name, plans, frames), len(plans))
    accumulated = logits.copy()
    scratch = logits + 1  # written before: pages that were never touched would flatter it
    times: dict[str, list[float]] = {name: [] for name in [*work, "add"]}
    for act, _ in work.values():
        act()
    for _ in range(sizes.repeat):
        for name, (act, _) in work.items():
            times["add"].append(_seconds(lambda: np.add(accumulated, scratch, out=accumulated)) / logits.size)
            times[name].append(_seconds(act) / part.size)
    base = median(times["add"])
    values = {name: median(times[name]) / count for name, (_, count) in work.items()}
    return [
        SpeedRow(item.name, bits, bits * sizes.vocab, name, base / value, 1e9 * value)._asdict()
        for name, value in values.items()
    ]


def _payloads(codec: Codec, logits: Floats32, plans: list[Plan]) -> list[bytes]:
    """Return a payload for each node; one serves all, but where a node's draws decide what can be sent."""
    used = plans if codec.traits.sparse else plans[:1]
    return [encode(codec, logits, plan) for plan in used] * (len(plans) // len(used))


def _plans(item: Contender, bits: float, prior: Eighths, sizes: Sizes, seed: int) -> list[Plan]:
    common: dict[str, Any] = {"run_key": derive_key(seed), "round": 1, "probe": bytes(32)}
    traits = item.codec.traits
    shared = ArrayPrior(prior)
    # As in a run: against a prior dither is stratified where nodes agree, which they do not here, or labels are sparse.
    stratified = traits.sparse or not traits.prior
    return [
        Plan(
            **common,
            node=node,
            slot=node if stratified else 0,
            slots=sizes.nodes if stratified else 1,
            prior=shared if traits.prior else None,
            contexts=len(prior),
            vocab=sizes.vocab,
            bits=bits * sizes.vocab,
            **item.fields,
        )
        for node in range(sizes.nodes)
    ]


def _adder(codec: Codec, payloads: list[bytes], plans: list[Plan], like: Floats32) -> Callable[[], object]:
    """Return what decodes all nodes and adds them up, in the way that combining takes."""
    total = np.ones_like(like)
    if codec == UniformCodec() and kernels.numba_available():
        from fpld.codecs.uniform import fast  # brings numba along

        return lambda: fast.add_nodes(payloads, plans, range(len(like)), total)
    if codec == PredictiveCodec():
        return partial(_add_predictive, payloads, plans, total)
    if codec == SAMPLES:
        return partial(_add_sparse, payloads, plans)
    return partial(_add_decoded, codec, payloads, plans, total)


def _add_predictive(payloads: list[bytes], plans: list[Plan], total: Floats32) -> None:
    from fpld.codecs.predictive.accumulate import add_payloads  # brings numba along

    for part in add_payloads(payloads, plans, np.empty(0, np.int64), mixture=False, threads=1):
        total[part.rows.start : part.rows.stop] += part.total


def _add_sparse(payloads: list[bytes], plans: list[Plan]) -> None:
    combine_replies(Replies(SAMPLES, MIXTURE, payloads, plans), NullObserver(), 1)


def _add_decoded(codec: Codec, payloads: list[bytes], plans: list[Plan], total: Floats32) -> None:
    for payload, plan in zip(payloads, plans, strict=True):
        start = 0
        for part in codec.reader(payload, plan).blocks():
            total[start : start + len(part.values)] += part.values
            start += len(part.values)


def _round(name: str, plans: list[Plan], frames: list[bytes]) -> object:
    """Check, spool and combine the frames of a round on one thread."""
    caps = np.array([plan.bits for plan in plans])
    first = plans[0]
    settings = Settings(
        names=[f"node {plan.node}" for plan in plans],
        run_key=first.run_key,
        probe=first.probe,
        contexts=first.contexts,
        vocab=first.vocab,
        rounds=1,
        budget=Budget(caps=caps, floors=caps, vocab=first.vocab),
        clips=[plan.clip for plan in plans],
        codec=name,
        rule="mixture" if codecs.get(name).traits.sparse else "mean",
        threads=1,
    )
    aggregator = Aggregator(settings)
    aggregator.open("none", {}, prior=first.prior)
    for node, frame in enumerate(frames):
        receipt = aggregator.frame(node, frame)
        if receipt.verdict != "accepted":
            raise InputError(f"a frame of {name} was refused: {receipt.reason}")
    aggregator.close()
    return aggregator.combine()


def _seconds(act: Callable[[], object]) -> float:
    start = time.process_time()
    act()
    return max(time.process_time() - start, 1e-9)
