"""A node's writing: its model writes sequences, the site checks them, and the node labels them.

Text that a model writes may repeat what it was trained on. So the site looks at every sequence before it leaves: one
with a run of `private_run` tokens that stands in the private text, and not in the public one, is written anew, with
other draws. If it still has such a run after a few attempts, public text takes its place. This bounds exact copies, and
nothing else: docs/privacy.md says what written text tells about the private text all the same.
"""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fpld.codecs.prior import coarse_grid
from fpld.data.token_stream import is_stream
from fpld.node.prior_cache import write_prior
from fpld.protocol.shared_prior import RoundingNotes
from fpld.protocol.written import WrittenText, beginnings, encode_reply, encode_text, labels_plan, left_for_labels
from fpld.registry import codecs
from fpld.seeds import derive_seed
from fpld.storage.files import read_utf8, write_atomic
from fpld.storage.run_folder import WRITING
from fpld.students.generate import write_sequences
from fpld.units import show_count

if TYPE_CHECKING:
    from pathlib import Path

    from fpld.config import WrittenSection
    from fpld.protocol.messages import Task
    from fpld.students import Student
    from fpld.types import Array, Ints, Tokens

log = logging.getLogger(__name__)

ATTEMPTS = 6
"""How often a sequence is written, before public text takes its place."""
_LEAST_LABEL_BITS = 8  # per written context; a smaller budget is for fewer contexts
_LEAST_LABEL_BYTES = 16  # besides, for the payload of labels as such
_NO_DIGEST = bytes(32)
_HASH_FACTOR = np.uint64(0x9E3779B97F4A7C15)


class Writing(NamedTuple):
    """Hold the sequences that may leave, and what the site's check found.

    `written` sequences were written in all, `copied` of them had a run of private text, and public text has taken the
    place of `replaced` ones. The code of the sequences that leave has `text_bytes`, the notes on rounding `note_bytes`.
    """

    sequences: Tokens
    written: int
    copied: int
    replaced: int
    text_bytes: int = 0
    note_bytes: int = 0


class PrivateRuns:
    """The runs of `length` tokens of a private text that do not stand in the public one, as sorted hashes.

    The public text is that of all sequences one after the other, and again from the first: any part of it may take the
    place of a written sequence.

    >>> runs = PrivateRuns(np.array([1, 2, 3, 4, 5]), np.array([[2, 3, 4]]), 3)
    >>> runs.stand_in(np.array([[9, 1, 2, 3], [1, 2, 9, 3], [2, 3, 4, 9]])).tolist()
    [True, False, False]
    """

    def __init__(self, private: Any, public: Tokens, length: int) -> None:
        self._length = length
        text = public.ravel()
        ring = np.resize(text, text.size + length - 1)
        self._public = np.unique(_run_hashes(ring[None], length))
        self._private = private
        # The hashes of a text in memory are sorted once; a longer text is gone through for each look at sequences.
        self._hashes = None if is_stream(private) else _run_hashes(private[None], length)
        if self._hashes is not None:
            self._hashes = np.unique(self._hashes)

    def stand_in(self, sequences: Tokens) -> Array:
        """Return whether such a run stands in each of the sequences [S, T]."""
        if sequences.shape[1] < self._length:
            return np.zeros(len(sequences), bool)
        hashes = _run_hashes(sequences, self._length)
        candidates = np.setdiff1d(hashes, self._public)
        private = np.isin(hashes, candidates[self._in_private(candidates)])
        return np.asarray(private.reshape(len(sequences), -1).any(axis=1))

    def _in_private(self, candidates: Array) -> Array:
        """Return which of some sorted hashes are of runs of the private text."""
        if self._hashes is not None:
            return _stand_among(candidates, self._hashes)
        there = np.zeros(len(candidates), bool)
        for block in self._private.blocks(self._length - 1):
            hashes = _run_hashes(block[None], self._length)
            there[np.searchsorted(candidates, hashes[_stand_among(hashes, candidates)])] = True
        return there


def _stand_among(hashes: Array, table: Array) -> Array:
    """Return which hashes are in a sorted table."""
    if not len(table):
        return np.zeros(len(hashes), bool)
    places = np.minimum(np.searchsorted(table, hashes), len(table) - 1)
    return np.asarray(table[places] == hashes)


def _run_hashes(sequences: Tokens, length: int) -> Array:
    """Return the hashes of all runs of tokens in sequences [S, T]; they are compared on this machine only."""
    count = sequences.shape[1] - length + 1
    if count < 1:
        return np.empty(0, np.uint64)
    tokens = sequences.astype(np.uint64) + np.uint64(1)
    hashes = np.zeros((len(sequences), count), np.uint64)
    for k in range(length):
        hashes = (hashes ^ (hashes >> np.uint64(29)) ^ tokens[:, k : k + count]) * _HASH_FACTOR
    return hashes.ravel()


def write_checked(
    model: Student, probe: Tokens, places: Ints, runs: PrivateRuns, *, seed: int, temperature: float
) -> Writing:
    """Let a model write sequences, and anew those in which a run of the private text stands.

    Each begins with the token at one of the `places` of the probe set [S, T], read as one text.
    """
    tokens = probe.ravel()
    length = probe.shape[1]
    sequences = np.empty((len(places), length), np.int32)
    bad = np.arange(len(places))
    written = 0
    copied = 0
    for attempt in range(ATTEMPTS):
        if not bad.size:
            break
        draws = derive_seed(seed, "writing", attempt)
        some = write_sequences(model, tokens[places[bad]], length, seed=draws, temperature=temperature)
        sequences[bad] = some
        written += len(some)
        bad = bad[runs.stand_in(some)]
        copied += bad.size
    sequences[bad] = tokens[(places[bad, None] + np.arange(length)) % tokens.size]
    return Writing(sequences, written, copied, bad.size)


def record_writing(folder: Path, round: int, writing: Writing, private_run: int) -> None:
    """Record what a node has written in a round, and what its check found; a repeated round replaces its row."""
    path = folder / WRITING
    rows = {row["round"]: row for row in (json.loads(read_utf8(path)) if path.exists() else [])}
    rows[round] = {
        "round": round,
        "sequences": len(writing.sequences),
        "written": writing.written,
        "copied": writing.copied,
        "replaced": writing.replaced,
        "private_run": private_run,
        "text_bytes": writing.text_bytes,
        "note_bytes": writing.note_bytes,
    }
    write_atomic(path, (json.dumps([rows[number] for number in sorted(rows)], indent=1) + "\n").encode())


def write_reply(
    model: Student,
    shared: Student,
    task: Task,
    probe: Tokens,
    private: Tokens,
    options: WrittenSection,
    public_labels: bytes,
    *,
    margin: float,
    seed: int,
    scratch: Path,
) -> tuple[bytes, Writing]:
    """Return the payload of a reply with written text, and what was written.

    Parameters
    ----------
    model, shared
        The node's trained model, and the aggregator's student: the prior is its prediction.
    task, probe, private
        The node's task, the probe set [S, T] and the tokens of the private text.
    options
        Temperature, and the runs of private text that must not leave.
    public_labels
        The labels on the probe set, which the budget covers too.
    margin
        How far the floats of two machines may differ, in nats.
    seed, scratch
        Of the draws, and a file for the prior, which is deleted.
    """
    plan = task.plan
    codec = codecs.get(task.codec)
    places = beginnings(plan, probe) if options.private_run else np.empty(0, np.int64)
    runs = PrivateRuns(private, probe, max(options.private_run, 1))
    writing = write_checked(model, probe, places, runs, seed=seed, temperature=options.temperature)
    sequences = writing.sequences
    part = WrittenText(sequences[:0], RoundingNotes(np.empty(0, np.uint16), _NO_DIGEST), b"", 0)
    text = b""
    # Fewer sequences, if the budget leaves too little for labels on all of them.
    while len(sequences) and not len(part.sequences):
        text = encode_text(sequences, plan.vocab)
        with write_prior(shared, sequences, scratch, coarse_grid(plan.vocab), margin=margin) as (prior, notes):
            capacity = left_for_labels(plan, len(public_labels), len(text), len(notes.entries))
            # The part of the sequences that fits, if text, notes and the least labels are as long for each of them.
            room = left_for_labels(plan, len(public_labels), 0, 0)
            needed = room - capacity + _LEAST_LABEL_BYTES + _LEAST_LABEL_BITS * sequences.size / 8
            share = room / needed
            if share >= 1:
                labels = codec.encode(model.logit_blocks(sequences), labels_plan(plan, sequences, prior, capacity))
                part = WrittenText(sequences, notes, labels, capacity)
        sequences = sequences[: int(len(sequences) * min(max(share, 0.0), 0.9))]
    text = text if len(part.sequences) else b""
    if options.private_run > probe.shape[1]:
        log.info("%s written; none was compared with the private text", show_count(writing.written, "sequence"))
    else:
        log.info(
            "%s written; %d had a run of %d tokens of the private text, public text takes the place of %d",
            show_count(writing.written, "sequence"),
            writing.copied,
            options.private_run,
            writing.replaced,
        )
    sent = writing._replace(sequences=part.sequences, text_bytes=len(text), note_bytes=part.notes.entries.nbytes)
    return encode_reply(public_labels, text, part), sent
