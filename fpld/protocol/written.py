"""Written text: contexts that a node's own model writes, and that this node alone labels.

Public text is not the nodes' text, and a mixture of all nodes is the wrong teacher for text of one of them. So a plan
may ask for *written* contexts besides the public ones. After local training the node's model writes sequences, each
after a first token that both ends draw from the probe set, and the node labels them. The target of such a context is
the prior plus this node's change; no rule combines it, since nobody else speaks for it.

The payload of a frame under such a plan, little-endian:

    offset  bytes  field
         0      4  bytes of the labels on public contexts, L
         4      4  number of sequences, n
         8      4  bytes of the text, X
        12      4  entries of the rounding notes, E
        16     32  digest of the prior of the written contexts
        48      L  labels on public contexts, as without written ones
                X  the sequences but for their first tokens (`fpld.codecs.text`)
              2 E  how the node has rounded the student's prediction (`shared_prior.RoundingNotes`)
             rest  labels on written contexts, coded against that prior

A node may write fewer sequences than it is asked for. The budget covers all of it: the labels on written contexts get
the bytes that are left.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fpld.codecs.text import decode_tokens, encode_tokens
from fpld.errors import FrameError, InputError
from fpld.protocol.shared_prior import RoundingNotes
from fpld.types import LEAST_TOKENS, MAX_BITS

if TYPE_CHECKING:
    from fpld.codecs.prior import Prior
    from fpld.types import Ints, Plan, Tokens

HEADER = struct.Struct("<IIII32s")
_ENTRY_BYTES = 2


def least_bits(written: int) -> float:
    """Return the least bits per context of a plan with `written` contexts, 0 without any.

    The labels on public contexts may take all bits of these, so the header has to fit into those of the written ones:
    whole bytes of them, hence a bit more.

    >>> least_bits(77)
    5.0
    """
    return (8 * HEADER.size + 1) / written if written else 0.0


@dataclass(frozen=True, eq=False, slots=True)
class WrittenText:
    """Hold a node's sequences [n, T], how it rounded the prior of their contexts, and its labels on them.

    `capacity` is how many bytes the labels may have under the plan.
    """

    sequences: Tokens
    notes: RoundingNotes
    labels: bytes
    capacity: int

    def plan(self, plan: Plan, prior: Prior) -> Plan:
        """Return the plan that the labels are coded under."""
        return labels_plan(plan, self.sequences, prior, self.capacity)


class ReplyParts(NamedTuple):
    """Hold the parts of a payload: labels on public contexts, and what is written."""

    labels: bytes | memoryview
    written: WrittenText | None


def beginnings(plan: Plan, probe: Tokens) -> Ints:
    """Return where in the probe set [S, T], read as one text, the first token of each sequence stands."""
    count = plan.written // probe.shape[1]
    person = struct.pack("<II", plan.round, plan.node)
    drawn = hashlib.shake_256(b"fpld written" + plan.run_id + person).digest(8 * count)
    return (np.frombuffer(drawn, "<u8") % np.uint64(probe.size)).astype(np.int64)


def labels_plan(plan: Plan, sequences: Tokens, prior: Prior, capacity: int) -> Plan:
    """Return the plan for labels of `capacity` bytes on written sequences; no other node has their contexts."""
    text = hashlib.sha256(sequences.astype("<i4").tobytes()).digest()
    # What a few sequences leave of a large budget may be more than any plan has.
    bits = min(8 * capacity / sequences.size, MAX_BITS * max(plan.vocab, LEAST_TOKENS))
    return replace(
        plan, probe=text, contexts=sequences.size, bits=bits, written=0, slot=0, slots=1, clip=None, prior=prior
    )


def encode_text(sequences: Tokens, vocab: int) -> bytes:
    """Encode sequences, whatever they hold: no bit of a token costs more than `log2(2^16 / 24)` bits, below 12."""
    capacity = 2 * sequences.size * vocab.bit_length() + 64
    return encode_tokens(sequences, vocab, capacity=capacity) if sequences.size else b""


def encode_reply(public: bytes, text: bytes, written: WrittenText) -> bytes:
    """Return the payload of a frame with written text, which `text` is the code of."""
    notes = written.notes
    head = HEADER.pack(len(public), len(written.sequences), len(text), len(notes.entries), notes.digest)
    return b"".join([head, public, text, notes.entries.astype("<u2").tobytes(), written.labels])


def left_for_labels(plan: Plan, public: int, text: int, entries: int) -> int:
    """Return the bytes that a plan leaves for the labels on written contexts."""
    return plan.budget_bytes - HEADER.size - public - text - _ENTRY_BYTES * entries


def public_labels(payload: memoryview, plan: Plan) -> memoryview:
    """Return the labels on public contexts of a payload that `decode_reply` has accepted before."""
    if not plan.written:
        return payload
    return payload[HEADER.size : HEADER.size + _header(payload)[0]]


def text_bytes(payload: memoryview, plan: Plan) -> int:
    """Return how many bytes of a payload are not labels: its header, the text and the notes on it.

    Of a payload that `decode_reply` refuses it is what the header says, and at most all of it.
    """
    if not plan.written or len(payload) < HEADER.size:
        return 0
    _, _, text, entries, _ = HEADER.unpack_from(payload)
    return min(HEADER.size + int(text) + _ENTRY_BYTES * int(entries), len(payload))


def decode_reply(payload: bytes | memoryview, plan: Plan, probe: Tokens | None) -> ReplyParts:
    """Decode the payload of a frame; raise `FrameError` for one that no node writes.

    `probe` [S, T] is the probe set, which a plan without written contexts does not need. Labels are not decoded: those
    on written contexts need the prior.
    """
    if not plan.written:
        return ReplyParts(payload, None)
    if probe is None:
        raise InputError("the probe set must be known where nodes write text: first tokens are drawn from it")
    public, count, text, entries, digest = _header(payload)
    places = beginnings(plan, probe)
    if count > len(places):
        raise FrameError(f"a reply must have at most the {len(places)} sequences that it was asked for, got {count}")
    capacity = left_for_labels(plan, public, text, entries)
    start = HEADER.size + public
    end = start + text + _ENTRY_BYTES * entries
    if len(payload) < end or capacity < len(payload) - end:
        raise FrameError(f"a reply of {len(payload)} bytes must have the parts that its header says within the budget")
    view = memoryview(payload)
    if count == 0:
        if end != start or len(payload) != end or any(digest):
            raise FrameError("a reply without sequences must have neither text nor notes nor labels on them")
        return ReplyParts(view[HEADER.size : start], None)
    first = probe.ravel()[places[:count]]
    sequences = decode_tokens(view[start : start + text], first, probe.shape[1], plan.vocab)
    notes = RoundingNotes(np.frombuffer(view[start + text : end], "<u2").astype(np.uint16), digest)
    return ReplyParts(view[HEADER.size : start], WrittenText(sequences, notes, bytes(view[end:]), capacity))


def _header(payload: bytes | memoryview) -> tuple[int, int, int, int, bytes]:
    if len(payload) < HEADER.size:
        raise FrameError(f"a reply with written text must have at least {HEADER.size} bytes, got {len(payload)}")
    public, count, text, entries, digest = HEADER.unpack_from(payload)
    if HEADER.size + public > len(payload):
        raise FrameError(f"a reply's labels must be {public} bytes as its header says, got {len(payload)} in all")
    return public, count, text, entries, digest
