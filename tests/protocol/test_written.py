"""Replies with written text: their bytes, their budget, and every way in which one can be wrong."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fpld import encode, encode_frame
from fpld.codecs.prior import FINE_GRID, ArrayPrior, block_ranges, coarse_grid, exact_eighths, make_prior
from fpld.codecs.samples.codec import SAMPLES
from fpld.errors import BudgetError, FrameError, InputError
from fpld.protocol import Aggregator, Budget, Node, Settings, Task
from fpld.protocol.shared_prior import RoundingNotes, round_blocks
from fpld.protocol.written import (
    HEADER,
    WrittenText,
    beginnings,
    decode_reply,
    encode_reply,
    encode_text,
    labels_plan,
    left_for_labels,
    public_labels,
    text_bytes,
)
from tests.helpers import make_plan

if TYPE_CHECKING:
    from collections.abc import Callable

    from fpld.types import Plan

V = 24
S, T = 8, 6
COUNT = 4  # sequences that are asked for
GRID = coarse_grid(V)
PROBE = (np.arange(S * T, dtype=np.int32).reshape(S, T) * 7 + 3) % V
MARGIN = 5e-3  # large, so that there are notes on a few contexts
LAST, NEXT = np.ogrid[:V, :V]
STUDENT = ((37 * LAST * LAST + 101 * NEXT * NEXT + 13 * LAST * NEXT) % 97 / 16).astype(np.float32)  # by the last token
TEACHER = STUDENT + ((53 * LAST * NEXT + 29 * NEXT) % 89 / 64).astype(np.float32)


def plan(**changes: Any) -> Plan:
    prior = make_prior(STUDENT[PROBE.ravel()], GRID)
    fields: dict[str, Any] = {"contexts": S * T, "vocab": V, "bits": 120.0, "clip": None, "written": COUNT * T}
    return make_plan(**{**fields, "prior": prior, **changes})


def predicted(sequences: np.ndarray) -> list[np.ndarray]:
    logits = STUDENT[sequences.ravel()]
    return [logits[rows.start : rows.stop] for rows in block_ranges(logits.shape)]


def rounded(sequences: np.ndarray) -> tuple[ArrayPrior, RoundingNotes]:
    """Return the prior of sequences, and the node's notes on it."""
    blocks = list(round_blocks(predicted(sequences), (sequences.size, V), margin=MARGIN, grid=GRID))
    return ArrayPrior(np.concatenate([block.integers for block in blocks])), RoundingNotes.collect(blocks, V)


class Reply(NamedTuple):
    """A payload, and what it was made of."""

    payload: bytes
    public: bytes
    text: bytes
    written: WrittenText


def reply(plan: Plan, count: int = COUNT) -> Reply:
    """Return what a node answers: so many sequences, each token 5 more than the one before."""
    first = PROBE.ravel()[beginnings(plan, PROBE)[:count]]
    sequences = ((first[:, None] + 5 * np.arange(T)) % V).astype(np.int32)
    public = encode(SAMPLES, TEACHER[PROBE.ravel()], plan.public)
    text = encode_text(sequences, V)
    prior, notes = rounded(sequences)
    capacity = left_for_labels(plan, len(public), len(text), len(notes.entries))
    labels = encode(SAMPLES, TEACHER[sequences.ravel()], labels_plan(plan, sequences, prior, capacity))
    written = WrittenText(sequences, notes, labels, capacity)
    return Reply(encode_reply(public, text, written), public, text, written)


def without_text(public: bytes) -> bytes:
    """Return the reply of a node that writes nothing."""
    nothing = RoundingNotes(np.empty(0, np.uint16), bytes(32))
    return encode_reply(public, b"", WrittenText(np.empty((0, T), np.int32), nothing, b"", 0))


@pytest.mark.parametrize("count", range(1, COUNT + 1))
def test_round_trip_and_the_budget_is_kept(count: int) -> None:
    asked = plan()
    sent = reply(asked, count)
    assert len(sent.payload) <= asked.budget_bytes == (S * T + COUNT * T) * 120 // 8
    parts = decode_reply(memoryview(sent.payload), asked, PROBE)
    assert bytes(parts.labels) == sent.public == bytes(public_labels(memoryview(sent.payload), asked))
    assert parts.written is not None
    assert np.array_equal(parts.written.sequences, sent.written.sequences)
    assert parts.written.sequences.shape == (count, T)
    assert np.array_equal(parts.written.notes.entries, sent.written.notes.entries)
    assert parts.written.notes.digest == sent.written.notes.digest
    assert (parts.written.labels, parts.written.capacity) == (sent.written.labels, sent.written.capacity)
    labels = len(sent.public) + len(sent.written.labels)
    assert text_bytes(memoryview(sent.payload), asked) == len(sent.payload) - labels
    assert text_bytes(memoryview(sent.payload), asked.public) == 0
    prior, _ = rounded(parts.written.sequences)
    under = parts.written.plan(asked, prior)
    assert under == labels_plan(asked, sent.written.sequences, prior, sent.written.capacity)
    assert under.digest == labels_plan(asked, sent.written.sequences, prior, sent.written.capacity).digest
    SAMPLES.reader(parts.written.labels, under).check()


def test_labels_on_written_contexts_are_near_the_nodes_own() -> None:
    """With 200 bits a context the step is far below the largest probabilities."""
    sent = reply(plan(bits=200.0))
    prior, _ = rounded(sent.written.sequences)
    (part,) = SAMPLES.reader(sent.written.labels, sent.written.plan(plan(bits=200.0), prior)).sparse()
    found = np.exp(prior.array / 8.0)
    found /= found.sum(axis=1, keepdims=True)
    np.add.at(found, (np.repeat(np.arange(COUNT * T), np.diff(part.starts)), part.tokens), part.changes)
    exact = np.exp(TEACHER[sent.written.sequences.ravel()].astype(np.float64))
    exact /= exact.sum(axis=1, keepdims=True)
    assert np.abs(found - exact).sum(axis=1).mean() < 0.05


@settings(max_examples=40)
@given(st.floats(120, 2000), st.integers(1, COUNT))
def test_labels_get_what_is_left_and_no_more(bits: float, count: int) -> None:
    """Also where a few sequences leave more for their labels than any plan may have."""
    asked = plan(bits=bits)
    sent = reply(asked, count)
    assert len(sent.payload) <= asked.budget_bytes
    prior, _ = rounded(sent.written.sequences)
    assert labels_plan(asked, sent.written.sequences, prior, sent.written.capacity).budget_bytes <= (
        sent.written.capacity
    )
    assert decode_reply(sent.payload, asked, PROBE).written is not None


def test_one_sequence_of_a_large_budget_has_a_sound_plan() -> None:
    asked = plan(written=400_000 * T, bits=1000.0 * V)
    sequences = PROBE[:1]
    prior, _ = rounded(sequences)
    assert labels_plan(asked, sequences, prior, asked.budget_bytes).bits == 1024 * V


def test_a_reply_over_the_budget_makes_no_frame() -> None:
    asked = plan()
    sent = reply(asked)
    with pytest.raises(BudgetError):
        encode_frame(sent.payload + bytes(asked.budget_bytes), asked, SAMPLES.code)


def test_golden_bytes_of_a_whole_reply() -> None:
    """Positions of first tokens, text, notes and labels: none of them may change with the version as it is."""
    asked = plan()
    assert beginnings(asked, PROBE).tolist() == BEGINNINGS
    sent = reply(asked)
    head = HEADER.unpack_from(sent.payload)
    assert head[:4] == (len(sent.public), COUNT, len(sent.text), len(sent.written.notes.entries))
    assert sent.text.hex() == TEXT
    assert hashlib.sha256(sent.payload).hexdigest() == PAYLOAD


BEGINNINGS = [17, 34, 26, 2]
TEXT = "c3ad7f438c31707a72161e94"
PAYLOAD = "ed8882d6e77a06726773095508eec10eeef7512c1ac7de3b31f86e5e0788ad7b"


def test_first_tokens_are_others_in_another_round_run_or_node() -> None:
    asked = plan(written=64 * T)
    drawn = beginnings(asked, PROBE).tolist()
    assert len(drawn) == 64
    assert all(0 <= place < PROBE.size for place in drawn)
    others = [
        plan(written=64 * T, **change) for change in ({"round": 4}, {"node": 2}, {"run_key": b"another key here"})
    ]
    assert all(beginnings(other, PROBE).tolist() != drawn for other in others)
    assert beginnings(plan(written=10 * T + 5), PROBE).tolist() == drawn[:10]  # whole sequences, and a prefix


def test_a_reply_without_text() -> None:
    asked = plan()
    public = reply(asked).public
    parts = decode_reply(without_text(public), asked, PROBE)
    assert parts.written is None
    assert bytes(parts.labels) == public


def test_a_plan_without_written_text_passes_payloads_on() -> None:
    assert decode_reply(b"labels", plan(written=0), None).labels == b"labels"
    assert bytes(public_labels(memoryview(b"labels"), plan(written=0))) == b"labels"
    with pytest.raises(InputError, match="probe set"):
        decode_reply(reply(plan()).payload, plan(), None)


def with_header(payload: bytes, **changes: Any) -> bytes:
    fields = dict(zip(("public", "count", "text", "entries", "digest"), HEADER.unpack_from(payload), strict=True))
    return HEADER.pack(*(fields | changes).values()) + payload[HEADER.size :]


BAD: dict[str, Callable[[Plan, Reply], bytes]] = {
    "empty": lambda _plan, _sent: b"",
    "header cut": lambda p, sent: sent.payload[: HEADER.size - 1],
    "labels cut": lambda p, sent: sent.payload[: HEADER.size + len(sent.public) - 1],
    "text cut": lambda p, sent: sent.payload[: HEADER.size + len(sent.public) + len(sent.text) - 1],
    "fewer sequences than the text": lambda p, sent: with_header(sent.payload, count=COUNT - 1),
    "more sequences than the text": lambda p, sent: with_header(reply(p, COUNT - 1).payload, count=COUNT),
    "more sequences than asked for": lambda p, sent: with_header(sent.payload, count=COUNT + 1),
    "far more sequences": lambda p, sent: with_header(sent.payload, count=2**32 - 1),
    "public overflows": lambda p, sent: with_header(sent.payload, public=2**32 - 1),
    "text overflows": lambda p, sent: with_header(sent.payload, text=2**32 - 1),
    "entries overflow": lambda p, sent: with_header(sent.payload, entries=2**32 - 1),
    "entries overflow into negative": lambda p, sent: with_header(sent.payload, entries=2**31),
    "all overflow": lambda p, sent: with_header(
        sent.payload, public=2**32 - 1, count=2**32 - 1, text=2**32 - 1, entries=2**32 - 1
    ),
    "text longer by a byte": lambda p, sent: with_header(sent.payload, text=len(sent.text) + 1),
    "text shorter by a byte": lambda p, sent: with_header(sent.payload, text=len(sent.text) - 1),
    "sequences without text": lambda p, sent: with_header(without_text(sent.public), count=COUNT),
    "no sequences, and text": lambda p, sent: with_header(sent.payload, count=0),
    "no sequences, and labels": lambda p, sent: without_text(sent.public) + b"labels",
    "no sequences, and a digest": lambda p, sent: with_header(without_text(sent.public), digest=bytes(range(32))),
    "beyond the budget": lambda p, sent: sent.payload + bytes(p.budget_bytes - len(sent.payload) + 1),
}


@pytest.mark.parametrize("case", BAD)
def test_what_no_node_writes_is_refused(case: str) -> None:
    asked = plan()
    bad = BAD[case](asked, reply(asked))
    with pytest.raises(FrameError):
        decode_reply(bad, asked, PROBE)
    assert 0 <= text_bytes(memoryview(bad), asked) <= len(bad)


def test_notes_beyond_the_end_are_refused() -> None:
    """At the last coordinate they are not."""
    sequences = PROBE[:1]
    _, notes = rounded(sequences)
    for gap, sound in ((T * V - 1, True), (T * V, False), (32766, False)):
        named = RoundingNotes(np.array([gap << 1], np.uint16), notes.digest)
        if sound:
            assert len(list(named.apply(predicted(sequences), (T, V), GRID))) == 1
        else:
            with pytest.raises(FrameError, match="must name coordinates below"):
                list(named.apply(predicted(sequences), (T, V), GRID))
    far = RoundingNotes(np.full(1000, 65535, np.uint16), notes.digest)  # entries that only skip name nothing
    assert np.array_equal(
        np.concatenate(list(far.apply(predicted(sequences), (T, V), GRID))), rounded(sequences)[0].array
    )


class Scene(NamedTuple):
    """An aggregator that collects, and the tasks of its nodes."""

    aggregator: Aggregator
    tasks: dict[int, Task]


def scene(**changes: Any) -> Scene:
    fields: dict[str, Any] = {
        "names": ["north", "east"],
        "run_key": bytes(16),
        "probe": bytes(32),
        "contexts": S * T,
        "vocab": V,
        "rounds": 1,
        "budget": Budget(caps=np.full(2, 120.0), floors=np.full(2, 10.0), vocab=V),
        "clips": [None] * 2,
        "codec": "samples",
        "rule": "mixture",
        "quorum": 2,
        "written": COUNT * T,
    }
    aggregator = Aggregator(Settings(**{**fields, **changes}))
    prior = make_prior(STUDENT[PROBE.ravel()], GRID)
    return Scene(aggregator, aggregator.open("weights", {}, prior, sequences=PROBE))


def answered(made: Reply, _labels: bytes) -> bytes:
    """Return the whole payload, whose labels are those of logits that are not centred."""
    return made.payload


def test_the_aggregator_takes_replies_and_keeps_the_text() -> None:
    aggregator, tasks = scene()
    sent = {}
    for number, task in tasks.items():
        made = reply(task.plan, COUNT - number)
        node, _ = Node(number, bytes(32)).receive(task)
        _, frame = node.answer(task, TEACHER[PROBE.ravel()], write=partial(answered, made))
        assert aggregator.frame(number, frame).verdict == "accepted"
        sent[number] = made
    assert {node: len(text.sequences) for node, text in aggregator.written.items()} == {0: COUNT, 1: COUNT - 1}
    assert aggregator.sent == {number: len(made.payload) for number, made in sent.items()}
    aggregator.close()
    with_text = aggregator.combine()
    # The target of public contexts is that of labels alone.
    plain = Aggregator(replace(aggregator.settings, written=0))
    for number, task in plain.open("weights", {}, make_prior(STUDENT[PROBE.ravel()], GRID)).items():
        frame = encode_frame(sent[number].public, task.plan, SAMPLES.code)
        assert plain.frame(number, frame).verdict == "accepted"
    plain.close()
    alone = plain.combine()
    assert np.array_equal(with_text.target.changes, alone.target.changes)
    assert np.array_equal(with_text.target.tokens, alone.target.tokens)


@pytest.mark.parametrize("case", [case for case in BAD if case != "beyond the budget"])
def test_the_aggregator_refuses_and_goes_on(case: str) -> None:
    aggregator, tasks = scene()
    asked = tasks[0].plan
    bad = encode_frame(BAD[case](asked, reply(asked)), asked, SAMPLES.code)
    assert aggregator.frame(0, bad).verdict == "refused"
    assert aggregator.written == {}
    good = encode_frame(reply(asked).payload, asked, SAMPLES.code)
    assert aggregator.frame(0, good).verdict == "accepted"
    assert list(aggregator.written) == [0]


def test_a_reply_with_bad_public_labels_leaves_no_text() -> None:
    aggregator, tasks = scene()
    asked = tasks[0].plan
    sent = reply(asked)
    bad = encode_reply(bytes(len(sent.public)), sent.text, sent.written)
    assert aggregator.frame(0, encode_frame(bad, asked, SAMPLES.code)).verdict == "refused"
    assert aggregator.written == {}


def test_a_node_that_is_asked_to_write_and_cannot_says_so() -> None:
    _, tasks = scene()
    node, _ = Node(0, bytes(32)).receive(tasks[0])
    with pytest.raises(InputError, match="nothing writes them"):
        node.answer(tasks[0], TEACHER[PROBE.ravel()])


def test_the_digest_of_a_plan_follows_written() -> None:
    digests = {plan(written=written).digest for written in (0, T, 2 * T)}
    assert len(digests) == 3
    assert plan(written=T).public.digest == plan(written=0).digest


def test_a_task_without_written_text_has_the_bytes_of_releases_without_it() -> None:
    task = Task(make_plan(), "uniform", "own", "weights", {"a": np.arange(6, dtype=np.float32).reshape(2, 3)})
    expected = "10d47cc61c162ed5abd599b1bc551edd598ef1436b0ae2358ed54bc4c42ff09d"
    assert hashlib.sha256(task.to_bytes()).hexdigest() == expected
    assert task.plan.digest.hex() == "66255645e16319b6184bf579f30a80f56ed9e5e013fe5b3026bddc8a8bb96276"
    written = Task(make_plan(written=12), "samples", broadcast="weights")
    assert Task.from_bytes(written.to_bytes()).plan.written == 12


@pytest.mark.parametrize("way", [1.0, -1.0], ids=["node to aggregator", "aggregator to node"])
def test_notes_let_a_perturbed_prediction_round_to_the_same_integers(way: float) -> None:
    """Noise below the margin, on the coarse grid; without the notes some integers would differ."""
    shape = 3000, 200  # three blocks
    margin = 1e-3
    rng = np.random.default_rng(7)
    logits = rng.normal(0, 1, shape)
    noise = rng.uniform(-0.49, 0.49, shape) * margin  # the logarithm of the sum moves by as much at most
    one, other = (logits, logits + noise) if way > 0 else (logits + noise, logits)
    grid = coarse_grid(shape[1])
    ranges = block_ranges(shape)
    assert len(ranges) == 3
    blocks = list(round_blocks((one[rows.start : rows.stop] for rows in ranges), shape, margin=margin, grid=grid))
    integers = np.concatenate([block.integers for block in blocks])
    notes = RoundingNotes.collect(blocks, shape[1])
    assert np.array_equal(integers, grid.round(exact_eighths(one)))
    differing = int((grid.round(exact_eighths(other)) != integers).sum())
    assert differing > 100
    again = np.concatenate(list(notes.apply((other[rows.start : rows.stop] for rows in ranges), shape, grid)))
    assert np.array_equal(again, integers)
    assert notes.digest == ArrayPrior(integers).digest


def test_the_coarse_grid() -> None:
    """Every eighth of a nat above -5 nats, whole nats below it, and none below about 1 / (16 V)."""
    for vocab in (2, 24, 1024, 50257, 2**24):
        grid = coarse_grid(vocab)
        integers = np.unique(grid.round(np.linspace(-330, 0, 33001)))
        likely = range(max(-39, grid.least), 1)
        nats = range(grid.least, -39, 8)
        assert integers.tolist() == [*nats, *likely]
        assert -np.log(16 * vocab) - 1.2 < grid.least / 8 < -np.log(16 * vocab) + 1.2


def test_a_coarse_prior_takes_fewer_notes() -> None:
    shape = 3000, 200
    logits = np.random.default_rng(8).normal(0, 3, shape)
    ranges = block_ranges(shape)
    counts = []
    for grid in (coarse_grid(200), FINE_GRID):
        blocks = round_blocks((logits[rows.start : rows.stop] for rows in ranges), shape, grid=grid)
        counts.append(sum(block.places.size for block in blocks))
    assert counts[0] < 0.4 * counts[1]
