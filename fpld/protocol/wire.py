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

The receiver knows every field but the payload before the frame arrives: it compares, and believes nothing. No
size in a frame makes it allocate.
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
OVERHEAD = HEADER.size + CHECKSUM_BYTES
_FIELDS = (
    "magic", "version", "codec", "run id", "round", "node", "probe digest", "contexts", "vocab", "clip", "plan digest",
)  # fmt: skip
_HINTS = {
    "version": f"; this build reads version {VERSION}",
    "plan digest": "; the ends differ in the budget, the slots, the prior or the tables",
}


def _fields(plan: Plan, codec: int) -> tuple[bytes | int | float, ...]:
    clip = 0.0 if plan.clip is None else float(plan.clip)
    known = plan.run_id, plan.round, plan.node, plan.probe, plan.contexts, plan.vocab, clip, plan.digest
    return MAGIC, VERSION, codec, *known


def _checksum(data: bytes | memoryview, key: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=CHECKSUM_BYTES, key=key, person=b"fpld frame").digest()


def seal(payload: bytes, plan: Plan, codec: int, *, key: bytes = b"") -> bytes:
    """Wrap a payload into a frame; refuse one that is over the plan's budget.

    >>> from fpld.types import Plan
    >>> plan = Plan(run_key=bytes(16), round=1, node=0, probe=bytes(32), contexts=4, vocab=4, bits=8.0)
    >>> frame = seal(b"data", plan, codec=1)
    >>> len(frame) - OVERHEAD, bytes(unseal(frame, plan, codec=1))
    (4, b'data')
    """
    if len(payload) > plan.budget_bytes:
        raise BudgetError(f"payload must be at most {plan.budget_bytes} bytes under this plan, got {len(payload)}")
    body = HEADER.pack(*_fields(plan, codec), len(payload)) + payload
    return body + _checksum(body, key)


def unseal(frame: bytes, plan: Plan, codec: int, *, key: bytes = b"") -> memoryview:
    """Check a frame against what this plan expects, cheap checks first, and return its payload (not a copy)."""
    longest = OVERHEAD + plan.budget_bytes
    if len(frame) > longest:
        raise FrameError(f"frame must be at most {longest} bytes under this plan's budget, got {len(frame)}")
    if len(frame) < OVERHEAD:
        raise FrameError(f"frame must be at least {OVERHEAD} bytes, got {len(frame)}: cut off, or not a frame")
    *got, length = HEADER.unpack_from(frame)
    for name, expected, found in zip(_FIELDS, _fields(plan, codec), got, strict=True):
        if found != expected:
            hint = _HINTS.get(name, "")
            raise FrameError(f"frame's {name} must be {_show(expected)}, got {_show(found)}{hint}")
    if len(frame) != OVERHEAD + length:
        raise FrameError(f"frame's payload must be {length} bytes as its header says, got {len(frame) - OVERHEAD}")
    view = memoryview(frame)
    if not hmac.compare_digest(_checksum(view[:-CHECKSUM_BYTES], key), view[-CHECKSUM_BYTES:]):
        raise FrameError("frame's checksum does not match: the frame was altered, or made with another key")
    return view[HEADER.size : -CHECKSUM_BYTES]


def payload_of(frame: memoryview) -> memoryview:
    """Return the payload of a frame that `unseal` has passed before, without checking it again."""
    return frame[HEADER.size : -CHECKSUM_BYTES]


def _show(value: object) -> str:
    return value.hex() if isinstance(value, bytes) else repr(value)
