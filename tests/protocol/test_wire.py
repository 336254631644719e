"""Frames: what is not exactly the expected frame is refused with a typed error that says which."""

from __future__ import annotations

import json
import struct
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fpld import BudgetError, FrameError, decode_frame, encode, encode_frame
from fpld.codecs import ArrayPrior, UniformCodec, make_prior
from fpld.codecs.predictive.codec import PREDICTIVE
from fpld.codecs.prior import in_eighths
from fpld.protocol.wire import HEADER, OVERHEAD_BYTES
from tests.helpers import make_plan

PLAN = make_plan()
PAYLOAD = encode(UniformCodec(), np.linspace(-3, 3, 300).reshape(6, 50), PLAN)
FRAME = encode_frame(PAYLOAD, PLAN, codec=1)


def test_payload_comes_back_and_overhead_is_fixed() -> None:
    assert bytes(decode_frame(FRAME, PLAN, codec=1)) == PAYLOAD
    assert len(FRAME) == len(PAYLOAD) + OVERHEAD_BYTES == len(PAYLOAD) + 136


def test_golden_frame() -> None:
    """The header byte by byte: a change here is a new version of the wire."""
    header = (
        b"FPLD" + bytes.fromhex("0500 0100") + PLAN.run_id + bytes.fromhex("03000000 01000000") + bytes(range(32))
        + bytes.fromhex("06000000 32000000") + struct.pack("<d", 3.0) + PLAN.digest
        + struct.pack("<Q", len(PAYLOAD))
    )  # fmt: skip
    assert FRAME[: HEADER.size] == header
    assert PLAN.digest.hex() == "66255645e16319b6184bf579f30a80f56ed9e5e013fe5b3026bddc8a8bb96276"
    assert PLAN.run_id.hex() == "60292a589e1ff4e1bb2d205a8857b4b4"
    assert FRAME[-16:].hex() == "509f76504d83f1eda5580e9eebe79ea2"


def test_cut_at_every_offset() -> None:
    for end in range(len(FRAME)):
        with pytest.raises(FrameError):
            decode_frame(FRAME[:end], PLAN, codec=1)


def test_every_flipped_bit() -> None:
    for place in range(8 * len(FRAME)):
        altered = bytearray(FRAME)
        altered[place // 8] ^= 1 << place % 8
        with pytest.raises(FrameError):
            decode_frame(bytes(altered), PLAN, codec=1)


@given(st.binary(max_size=2 * len(FRAME)))
def test_arbitrary_bytes(data: bytes) -> None:
    with pytest.raises(FrameError):
        decode_frame(data, PLAN, codec=1)


@given(st.binary(max_size=200))
def test_trailing_bytes(data: bytes) -> None:
    if data:
        with pytest.raises(FrameError):
            decode_frame(FRAME + data, PLAN, codec=1)


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("run id", {"run_key": b"another run key!"}),
        ("round", {"round": 4}),
        ("node", {"node": 2}),
        ("probe digest", {"probe": bytes(32)}),
        ("contexts", {"contexts": 7}),
        ("vocab", {"vocab": 51}),
        ("clip", {"clip": 2.0}),
        ("clip", {"clip": None}),
        ("plan digest", {}),  # the budget, which is 200 bits
        ("plan digest", {"slots": 2}),
        ("plan digest", {"slot": 1, "slots": 2}),
        ("plan digest", {"prior": make_prior(np.zeros((6, 50)))}),
        ("plan digest", {"learnt": np.ones(49 * 256, np.uint16)}),
    ],
)
def test_a_frame_of_another_plan_is_refused_and_named(field: str, change: dict[str, Any]) -> None:
    with pytest.raises(FrameError, match=f"frame's {field} must be"):
        decode_frame(FRAME, make_plan(bits=200.0, **change), codec=1)


def test_a_prior_or_tables_that_differ_in_one_integer_are_refused() -> None:
    """The whole plan is bound to the frame: nothing is decoded with another prior, table or budget."""
    prior = in_eighths(np.random.default_rng(0).normal(0, 2, (6, 50)))
    learnt = np.full(49 * 256, 7, np.uint16)
    plan = make_plan(clip=None, prior=ArrayPrior(prior), learnt=learnt)
    frame = encode_frame(encode(PREDICTIVE, np.zeros((6, 50)), plan), plan, PREDICTIVE.code)
    assert decode_frame(frame, plan, PREDICTIVE.code).nbytes > 0
    for place in range(0, prior.size, 3):
        other = prior.copy()
        other.flat[place] += 1 if other.flat[place] < 0 else -1
        with pytest.raises(FrameError, match="plan digest must be"):
            decode_frame(frame, make_plan(clip=None, prior=ArrayPrior(other), learnt=learnt), PREDICTIVE.code)
    for place in range(0, learnt.size, 99):
        table = learnt.copy()
        table.flat[place] += 1
        with pytest.raises(FrameError, match="the ends differ in the budget, the slots, the prior or the tables"):
            decode_frame(frame, make_plan(clip=None, prior=ArrayPrior(prior), learnt=table), PREDICTIVE.code)
    nearly = make_plan(clip=None, prior=ArrayPrior(prior), learnt=learnt, bits=float(np.nextafter(118.5, 200)))
    with pytest.raises(FrameError, match="plan digest must be"):
        decode_frame(frame, nearly, PREDICTIVE.code)


def test_other_codec_version_and_key_are_named() -> None:
    with pytest.raises(FrameError, match="codec must be 2, got 1"):
        decode_frame(FRAME, PLAN, codec=2)
    with pytest.raises(FrameError, match="this build reads version 5"):
        decode_frame(FRAME[:4] + b"\x02\x00" + FRAME[6:], PLAN, codec=1)
    with pytest.raises(FrameError, match="another key"):
        decode_frame(FRAME, PLAN, codec=1, key=b"secret")
    frame = encode_frame(PAYLOAD, PLAN, codec=1, key=b"secret")
    assert bytes(decode_frame(frame, PLAN, codec=1, key=b"secret")) == PAYLOAD


@pytest.mark.parametrize(
    "other", [b"\x80\x04\x95" + bytes(150), b"\x93NUMPY" + bytes(150), json.dumps({"a": [1] * 50}).encode()]
)
def test_other_formats_are_refused_at_the_magic(other: bytes) -> None:
    with pytest.raises(FrameError, match="magic"):
        decode_frame(other, PLAN, codec=1)


def test_over_budget_is_refused_at_both_ends() -> None:
    with pytest.raises(BudgetError, match="at most 88 bytes"):
        encode_frame(bytes(89), PLAN, codec=1)
    larger = encode_frame(bytes(100), make_plan(bits=140.0), codec=1)
    with pytest.raises(FrameError, match="budget"):
        decode_frame(larger, PLAN, codec=1)


def test_a_claim_of_huge_sizes_moves_no_memory() -> None:
    fields = list(HEADER.unpack_from(FRAME))
    fields[7] = 2**32 - 1
    fields[8] = 2**24
    fields[11] = 2**63
    hostile = HEADER.pack(*fields) + FRAME[HEADER.size :]
    tracemalloc.start()
    with pytest.raises(FrameError, match="contexts"):
        decode_frame(hostile, PLAN, codec=1)
    assert tracemalloc.get_traced_memory()[1] < 100_000
    tracemalloc.stop()


def test_budget_is_exact_where_floats_would_round_up() -> None:
    # 3 * 5.333... rounds to 16.0 in floats; the exact product is below, so only one whole byte fits.
    assert make_plan(contexts=3, vocab=2, bits=np.nextafter(16 / 3, 0)).budget_bytes == 1
