"""Try codecs on many random and adversarial blocks of logits: never one bit over the budget, and decoded as encoded.

    python benchmarks/budget.py [--blocks 100000] [--seed 0] [--jobs 2]

V from 2 to 50,000, budgets from 0.01 to 16 bits per coordinate, priors that fit, mislead or are missing. Of every
block: the payload is within the budget; the decoder finds the very symbols that quantizing gives; values and variances
are finite; a decoder that goes block by block gives the same. Prints how many blocks of each kind were tried.
"""

from __future__ import annotations

import argparse
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np

from fpld import Plan
from fpld.codecs import ArrayPrior, PredictiveCodec, UniformCodec, decode, encode, make_prior
from fpld.codecs.predictive import companding
from fpld.codecs.predictive.decoder import SymbolReader, block_dither, coder_blocks
from fpld.codecs.predictive.header import DITHER, PRIOR, PredictiveHeader
from fpld.codecs.prior import whole_prior

if TYPE_CHECKING:
    from fpld.types import Array

KINDS = ("random", "constant", "huge", "one-hot", "ties", "tiny", "zipf")
PRIORS = ("none", "near", "exact", "wrong", "extreme")
CODECS = {
    "predictive": PredictiveCodec(),
    "uniform": UniformCodec(),
}


def draw_logits(kind: str, rng: np.random.Generator, shape: tuple[int, int]) -> Array:
    """Draw logits that a codec might stumble over."""
    if kind == "random":
        return rng.normal(0, rng.exponential(4), shape)
    if kind == "constant":
        return np.full(shape, rng.normal())
    if kind == "huge":
        return rng.choice([-1.6e4, 1.6e4], shape)
    if kind == "one-hot":
        return np.eye(*shape) * 50.0
    if kind == "ties":
        return rng.integers(0, 3, shape).astype(float)
    if kind == "tiny":
        return rng.normal(0, 1e-30, shape)
    ranks: Array = rng.permuted(np.tile(np.arange(1.0, shape[1] + 1), (shape[0], 1)), axis=1)
    return np.log(ranks) * -2


def draw_prior(kind: str, rng: np.random.Generator, values: Array) -> ArrayPrior | None:
    """Draw a prior that fits, misleads or is missing."""
    if kind == "none":
        return None
    if kind == "extreme":
        return ArrayPrior(rng.choice(np.array([0, -320], np.int16), values.shape))
    if kind == "wrong":
        return make_prior(np.asarray(rng.normal(0, 5, values.shape)))
    near: Array = values + rng.normal(0, 0.5 if kind == "near" else 0.0, values.shape)
    return make_prior(near)


def main() -> None:
    """Read the arguments, try the blocks, print what was tried."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--blocks", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    a = parser.parse_args()
    tried: Counter[str] = Counter()
    chunk = 500
    tasks = [(a.seed, start, min(start + chunk, a.blocks)) for start in range(0, a.blocks, chunk)]
    with ProcessPoolExecutor(a.jobs) as pool:
        for done, found in enumerate(pool.map(try_blocks, tasks), 1):
            tried += found
            print(f"\r{min(done * chunk, a.blocks)} of {a.blocks} blocks, none over its budget", end="", flush=True)
    print()
    for name, count in sorted(tried.items()):
        print(f"  {name:28} {count}")


def try_blocks(task: tuple[int, int, int]) -> Counter[str]:
    """Try blocks number first to last; stop at the first that is wrong."""
    seed, first, last = task
    return Counter(name for number in range(first, last) for name in try_block(seed, number))


def try_block(seed: int, number: int) -> list[str]:
    """Try one block; return what it was."""
    rng = np.random.default_rng([seed, number])
    codec_name = str(rng.choice(list(CODECS), p=[0.75, 0.25]))
    kind = str(rng.choice(KINDS))
    prior_kind = str(rng.choice(PRIORS))
    vocab = int(np.exp(rng.uniform(np.log(2), np.log(50_000))))
    contexts = int(rng.integers(1, max(6000 // vocab, 1) + 1))
    rate = float(np.exp(rng.uniform(np.log(0.0101), np.log(16))))
    values = draw_logits(kind, rng, (contexts, vocab))
    slots = int(rng.choice([1, 1, 3]))
    codec: Any = CODECS[codec_name]
    plan = Plan(
        run_key=bytes(16),
        round=1,
        node=0,
        probe=bytes(32),
        contexts=contexts,
        vocab=vocab,
        bits=vocab * rate,
        slot=int(rng.integers(slots)),
        slots=slots,
        prior=None if codec_name == "uniform" else draw_prior(prior_kind, rng, values),
    )
    if codec.least_bits(plan) > plan.bits:
        return [f"{codec_name}: below its least"]
    payload = encode(codec, values, plan)
    where = (
        f"seed {seed}, block {number}: {codec_name}, {kind}, prior {prior_kind}, {contexts} x {vocab} at {rate} bits"
    )
    if 8 * len(payload) > contexts * Fraction(plan.bits):
        raise AssertionError(f"{where}: {len(payload)} bytes are over the budget of {contexts * plan.bits} bits")
    whole = decode(codec, payload, plan)
    if not (np.isfinite(whole.values).all() and np.isfinite(whole.variance).all() and (whole.variance >= 0).all()):
        raise AssertionError(f"{where}: decoded to what is not finite")
    third = -(-contexts // 3)
    rows = [range(start, min(start + third, contexts)) for start in range(0, contexts, third)]
    parts = [part.values for part in codec.reader(payload, plan).blocks(rows)]
    if not np.array_equal(np.concatenate(parts), whole.values):
        raise AssertionError(f"{where}: block by block gives something else")
    if (
        codec_name == "predictive"
        and payload
        and not (found(payload, plan) == meant(values, plan, payload)).any(axis=0).all()
    ):
        raise AssertionError(f"{where}: the decoder finds other symbols than the encoder meant")
    return [codec_name, f"logits {kind}", f"prior {prior_kind}"]


def found(payload: bytes, plan: Plan) -> Array:
    """Return the symbols that a decoder finds."""
    reader = SymbolReader(payload, plan)
    out = np.zeros(plan.shape, np.int64)
    for rows in coder_blocks(plan):
        places, symbols, _ = reader.block(rows)
        out[rows.start : rows.stop].flat[places] = symbols
    return out


def meant(values: Array, plan: Plan, payload: bytes) -> Array:
    """Return the symbols that plain quantizing gives with the payload's step, and with the next: ties may be parted."""
    head, _ = PredictiveHeader.from_bytes(payload)
    y = companding.compand(values, whole_prior(plan) if head.mode & PRIOR else None).astype(np.float64)
    shift = block_dither(plan, range(plan.contexts)) if head.mode & DITHER else 0.0
    heads = head, PredictiveHeader(head.mode, head.step + 1)
    scaled = np.stack([y * (1 / each.size) + shift for each in heads])
    limits = np.array([each.rounding for each in heads])[:, None, None]
    symbols: Array = (np.sign(scaled) * np.floor(np.abs(scaled) + limits)).astype(np.int64)
    return symbols


if __name__ == "__main__":
    main()
