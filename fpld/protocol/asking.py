"""A node asks for blocks of the prior that it cannot compute as the aggregator did.

offset  bytes  field
0      4  magic "FPAS"
4      4  number of blocks n
8   4 * n  the blocks' numbers, rising
16    checksum over all before it and over the plan; with a key it is a MAC
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from typing import TYPE_CHECKING

import numpy as np

from fpld.errors import FrameError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fpld.types import Plan

MAGIC = b"FPAS"
_CHECKSUM_BYTES = 16


def write_ask(blocks: Sequence[int], plan: Plan, *, key: bytes = b"") -> bytes:
    """Return the message that asks for blocks of the prior under a plan.

    >>> from fpld.types import Plan
    >>> plan = Plan(run_key=bytes(16), round=1, node=0, probe=bytes(32), contexts=4, vocab=4, bits=8.0)
    >>> read_ask(write_ask([0, 2], plan), plan, blocks=3)
    [0, 2]
    """
    body = MAGIC + struct.pack("<I", len(blocks)) + np.asarray(blocks, "<u4").tobytes()
    return body + _checksum(body, plan, key)


def is_ask(data: bytes) -> bool:
    """Return whether a message asks for blocks, and is no frame."""
    return data[: len(MAGIC)] == MAGIC


def read_ask(data: bytes, plan: Plan, *, blocks: int, key: bytes = b"") -> list[int]:
    """Check such a message, and return the blocks that it asks for, of so many that there are."""
    least = len(MAGIC) + 4 + _CHECKSUM_BYTES
    if not least < len(data) <= least + 4 * blocks or (len(data) - least) % 4:
        raise FrameError(f"a message that asks for blocks of the prior has one to {blocks}, got {len(data)} bytes")
    body, said = data[:-_CHECKSUM_BYTES], data[-_CHECKSUM_BYTES:]
    if not hmac.compare_digest(_checksum(body, plan, key), said):
        raise FrameError("the message that asks for blocks of the prior was altered, or is of another round or node")
    wanted = np.frombuffer(body[len(MAGIC) + 4 :], "<u4").astype(np.int64)
    (count,) = struct.unpack_from("<I", body, len(MAGIC))
    if count != wanted.size or (np.diff(wanted) <= 0).any() or wanted[-1] >= blocks:
        raise FrameError(f"blocks of the prior must be asked for by rising numbers below {blocks}")
    found: list[int] = wanted.tolist()
    return found


def _checksum(body: bytes, plan: Plan, key: bytes) -> bytes:
    hashed = hashlib.blake2b(digest_size=_CHECKSUM_BYTES, key=key, person=b"fpld ask")
    hashed.update(plan.run_id + struct.pack("<II", plan.round, plan.node) + plan.probe)
    hashed.update(body)
    return hashed.digest()
