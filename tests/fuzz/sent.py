"""Fuzzers of what nodes send besides labels: codes of text, frames with written text, frames with updates.

Frames are made with the right key, plan and checksum, so an aggregator looks at all of the payload. What it accepts is
used as a round would use it; memory is watched all the way, since a payload of some hundred bytes may claim anything.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import numpy as np

from fpld.codecs.prior import ArrayPrior, coarse_grid
from fpld.codecs.samples.codec import SAMPLES
from fpld.codecs.text import decode_tokens, encode_tokens
from fpld.codecs.updates import encode_update
from fpld.errors import FrameError
from fpld.federation.workers import NodeUpdate, WritingOptions, write_rebuilt
from fpld.protocol import Aggregator, Budget, Settings
from fpld.protocol.updates import UPDATES, UPDATES_CODE, count_weights, payload_bits, rebuild_weights, update_seed
from fpld.protocol.wire import encode_frame, payload_of
from fpld.protocol.written import HEADER
from fpld.students import NGram, NGramConfig
from fpld.target import Target as SparseTarget
from tests.fuzz.target import Target, limited_memory, mutated
from tests.protocol import test_written as written_scene

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from fpld.protocol.written import WrittenText
    from fpld.types import Plan

    Once = Callable[[np.random.Generator], int]

KEY = b"north's key"
MAX_EXAMPLE_BYTES = 1 << 20
"""Memory that an aggregator may take for a frame of about a kilobyte, and for what it makes of it."""
ALTERED_FRAMES = 0.1  # of the examples: the frame itself is altered, and its checksum no longer fits


def texts(_folder: Path) -> Once:
    """Codes of text, altered or random: refused, or the one code of the text that they decode to."""
    rows = []
    for vocab, count, length in ((2, 3, 40), (24, 4, 6), (1000, 2, 30), (65536, 1, 9)):
        sequences = np.random.default_rng(vocab).integers(vocab, size=(count, length)).astype(np.int32)
        rows.append((vocab, sequences, encode_tokens(sequences, vocab, capacity=1 << 12)))

    def once(rng: np.random.Generator) -> int:
        vocab, sequences, code = rows[int(rng.integers(len(rows)))]
        data = mutated(code, rng) if rng.random() < 0.7 else rng.bytes(int(rng.integers(len(code) + 3)))
        with contextlib.suppress(FrameError):
            decoded = decode_tokens(data, sequences[:, 0], sequences.shape[1], vocab)
            if decoded.max() >= vocab or encode_tokens(decoded, vocab, capacity=1 << 12) != data:
                raise AssertionError("a code was taken that no encoder writes")
        return 1

    return once


def _accepted(aggregator: Aggregator, frame: bytes, good: bytes) -> bool:
    """Give an aggregator a frame of node 0; return whether it was accepted, which no altered one may be."""
    verdict = aggregator.frame(0, frame).verdict
    if verdict == "accepted" and frame != good:
        raise AssertionError("an altered frame was taken")
    if verdict not in ("accepted", "refused"):
        raise AssertionError(f"a frame was {verdict}")
    if verdict == "refused" and (aggregator.written or 0 not in aggregator.missing):
        raise AssertionError("a refused frame has left something")
    return verdict == "accepted"


def written(_folder: Path) -> Once:
    """Frames with written text, altered anywhere or in one part of them: refused, or sound down to their labels."""
    scene = written_scene.scene(quorum=1, mac_keys={0: KEY})
    plan = scene.tasks[0].plan
    sent = written_scene.reply(plan)
    parts = [sent.public, sent.text, sent.written.notes.entries.tobytes(), sent.written.labels]

    def altered(rng: np.random.Generator) -> bytes:
        """Return a payload with one part altered, below a header that fits it."""
        place = int(rng.integers(4))
        changed = [mutated(part, rng) if place == index else part for index, part in enumerate(parts)]
        changed[2] = changed[2][: len(changed[2]) // 2 * 2]
        lengths = [len(part) for part in changed]
        head = (lengths[0], len(sent.written.sequences), lengths[1], lengths[2] // 2, sent.written.notes.digest)
        return HEADER.pack(*head) + b"".join(changed)

    def judge(frame: bytes, good: bytes) -> None:
        aggregator, _ = written_scene.scene(quorum=1, mac_keys={0: KEY})
        if _accepted(aggregator, frame, good):
            aggregator.close()
            target = aggregator.combine().target
            if not np.isfinite(target.changes).all():
                raise AssertionError("a target is not finite")
            for text in aggregator.written.values():
                with contextlib.suppress(FrameError):
                    _read_labels(text, plan)

    def once(rng: np.random.Generator) -> int:
        data = mutated(sent.payload, rng) if rng.random() < 0.4 else altered(rng)
        good = encode_frame(data[: plan.budget_bytes], plan, SAMPLES.code, key=KEY)
        frame = mutated(good, rng) if rng.random() < ALTERED_FRAMES else good
        with limited_memory(MAX_EXAMPLE_BYTES):
            judge(frame, good)
        return 1

    right = encode_frame(sent.payload, plan, SAMPLES.code, key=KEY)
    judge(right, right)  # compiles kernels, which takes memory
    return once


def _read_labels(text: WrittenText, plan: Plan) -> None:
    """Decode labels as an aggregator does, but for the digest of the prior: so it is done more often."""
    if text.sequences.min() < 0 or text.sequences.max() >= plan.vocab or text.sequences.size > plan.written:
        raise AssertionError("sequences were taken that nobody was asked for")
    shape = text.sequences.size, plan.vocab
    blocks = text.notes.apply(written_scene.predicted(text.sequences), shape, coarse_grid(plan.vocab))
    prior = ArrayPrior(np.concatenate(list(blocks)))
    for part in SAMPLES.reader(text.labels, text.plan(plan, prior)).sparse():
        SparseTarget.sparse(part.starts, part.tokens, part.changes, vocab=plan.vocab)


def updates(folder: Path) -> Once:
    """Frames with updates, altered or random: refused, or finite weights of a model that writes text or is refused."""
    base = folder / "base.safetensors"
    student = NGram(NGramConfig(vocab=24, order=1, buckets=31))
    student.save(base)
    rng = np.random.default_rng(6)
    state = {name: rng.normal(0, 0.2, array.shape).astype(np.float32) for name, array in student.state().items()}
    probe = rng.integers(24, size=(4, 6)).astype(np.int32)
    count = count_weights(state)

    def opened(bits: float) -> Aggregator:
        settings = Settings(
            names=["north"],
            run_key=bytes(16),
            probe=bytes(32),
            contexts=count,
            vocab=24,
            rounds=1,
            budget=Budget(np.array([payload_bits(count, bits)]), np.zeros(1), 24),
            clips=[None],
            codec=UPDATES,
            mac_keys={0: KEY},
        )
        aggregator = Aggregator(settings)
        aggregator.open("weights", state)
        return aggregator

    def judge(frame: bytes, good: bytes, bits: float) -> None:
        aggregator = opened(bits)
        plan = aggregator.plan(0)
        if _accepted(aggregator, frame, good):
            aggregator.close()
            (payload,) = aggregator.updates().values()
            use(NodeUpdate(plan, bytes(payload)))
        elif frame == good:
            with contextlib.suppress(FrameError):
                rebuild_weights(payload_of(memoryview(frame)), state, plan)
                raise AssertionError("an update can be decoded that the aggregator refuses")

    def use(update: NodeUpdate) -> None:
        for name, array in rebuild_weights(update.payload, state, update.plan).items():
            if array.shape != state[name].shape or not np.isfinite(array).all():
                raise AssertionError(f"{name} of an update that was taken is {array.shape}, or not finite")
        text = write_rebuilt(base, state, update, probe, WritingOptions(1, 1.0, 0))
        if text is not None and (text.shape != (1, 6) or text.min() < 0 or text.max() >= 24):
            raise AssertionError("a rebuilt model has written what is no text")

    rows = []
    for bits in (1.0, 2.0, 2.5, 3.0, 8.0):
        plan = opened(bits).plan(0)
        code = encode_update(state, bits=bits, seed=update_seed(plan))
        right = encode_frame(code, plan, UPDATES_CODE, key=KEY)
        judge(right, right, bits)
        rows.append((bits, plan, code))

    def once(rng: np.random.Generator) -> int:
        bits, plan, code = rows[int(rng.integers(len(rows)))]
        data = mutated(code, rng) if rng.random() < 0.9 else rng.bytes(int(rng.integers(len(code) + 3)))
        good = encode_frame(data[: plan.budget_bytes], plan, UPDATES_CODE, key=KEY)
        frame = mutated(good, rng) if rng.random() < ALTERED_FRAMES else good
        with limited_memory(MAX_EXAMPLE_BYTES):
            judge(frame, good, bits)
        return 1

    return once


TARGETS = [
    Target("texts", "codes of text", 2, texts),
    Target("written", "frames with written text", 4, written),
    Target("updates", "frames with updates", 4, updates),
]
