"""Frames: a payload with a header that binds it to its run, round, node and probe set, and a checksum.

All integers are little-endian. A frame is the header below, the payload, and a 16-byte BLAKE2b checksum over
both; with a key the checksum is a MAC.

    offset  bytes  field
         0      4  magic "FPLD"
         4      2  version
         6      2  codec
         8     16  run id
        24      4  round
        28      4  node
        32     32  SHA-256 digest of the probe set
        64      4  contexts m
        68      4  vocabulary V
        72      8  clip L as float64; 0: each context states its own range
        80     32  digest of the whole plan: budget, clip, slots, prior and tables besides all above
       112      8  payload length in bytes

The receiver knows every field but the payload before the frame arrives, and compares them. No size in a frame decides
how much it allocates.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from typing import TYPE_CHECKING

from fpld.errors import BudgetError, FrameError

if TYPE_CHECKING:
    from fpld.types import Plan

MAGIC = b"FPLD"
VERSION = 5
HEADER = struct.Struct("<4sHH16sII32sIId32sQ")
CHECKSUM_BYTES = 16
OVERHEAD_BYTES = HEADER.size + CHECKSUM_BYTES
_FIELDS = (
    "magic", "version", "codec", "run id", "round", "node", "probe digest", "contexts", "vocab", "clip", "plan digest",
)  # fmt: skip
_HINTS = {
    "version": f"; this build reads version {VERSION}",
    "plan digest": "; the ends differ in the budget, the slots, the prior or the tables",
}


def _fields(plan: Plan, codec: int) -> tuple[bytes | int | float, ...]:
    clip = 0.0 if plan.clip is None else float(plan.clip)
    identity = plan.run_id, plan.round, plan.node, plan.probe, plan.contexts, plan.vocab, clip, plan.digest
    return MAGIC, VERSION, codec, *identity


def _checksum(data: bytes | memoryview, key: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=CHECKSUM_BYTES, key=key, person=b"fpld frame").digest()


def encode_frame(payload: bytes, plan: Plan, codec: int, *, key: bytes = b"") -> bytes:
    """Encode a payload as a frame; raise BudgetError if it exceeds the plan's budget.

    >>> from fpld.types import Plan
    >>> plan = Plan(run_key=bytes(16), round=1, node=0, probe=bytes(32), contexts=4, vocab=4, bits=8.0)
    >>> frame = encode_frame(b"data", plan, codec=1)
    >>> len(frame) - OVERHEAD_BYTES, bytes(decode_frame(frame, plan, codec=1))
    (4, b'data')
    """
    if len(payload) > plan.budget_bytes:
        raise BudgetError(f"payload must be at most {plan.budget_bytes} bytes under this plan, got {len(payload)}")
    body = HEADER.pack(*_fields(plan, codec), len(payload)) + payload
    return body + _checksum(body, key)


def decode_frame(frame: bytes, plan: Plan, codec: int, *, key: bytes = b"") -> memoryview:
    """Check a frame against its plan, cheap checks first, and return its payload (not a copy).

    Raises
    ------
    FrameError
        The frame is not one of this plan and codec, is over the budget, or was altered.
    """
    longest = OVERHEAD_BYTES + plan.budget_bytes
    if len(frame) > longest:
        raise FrameError(f"frame must be at most {longest} bytes under this plan's budget, got {len(frame)}")
    if len(frame) < OVERHEAD_BYTES:
        raise FrameError(f"frame must be at least {OVERHEAD_BYTES} bytes, got {len(frame)}: cut off, or not a frame")
    *received, length = HEADER.unpack_from(frame)
    for name, expected, value in zip(_FIELDS, _fields(plan, codec), received, strict=True):
        if value != expected:
            hint = _HINTS.get(name, "")
            raise FrameError(f"frame's {name} must be {_show(expected)}, got {_show(value)}{hint}")
    # Numbers that compare equal have other bytes: a clip of -0.0.
    if not frame.startswith(HEADER.pack(*_fields(plan, codec), length)):
        raise FrameError("frame's header must have the bytes that an encoder writes: its clip is a negative zero")
    if len(frame) != OVERHEAD_BYTES + length:
        raise FrameError(
            f"frame's payload must be {length} bytes as its header says, got {len(frame) - OVERHEAD_BYTES}"
        )
    view = memoryview(frame)
    if not hmac.compare_digest(_checksum(view[:-CHECKSUM_BYTES], key), view[-CHECKSUM_BYTES:]):
        raise FrameError("frame's checksum does not match: the frame was altered, or made with another key")
    return view[HEADER.size : -CHECKSUM_BYTES]


def payload_of(frame: memoryview) -> memoryview:
    """Return the payload of a frame that `decode_frame` has accepted before, without checking it again."""
    return frame[HEADER.size : -CHECKSUM_BYTES]


def _show(value: object) -> str:
    return value.hex() if isinstance(value, bytes) else repr(value)
