"""A node's writing: no run of private text leaves, public text replaces what has one, and counts are right."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fpld.codecs.prior import coarse_grid, make_prior
from fpld.codecs.samples.codec import SAMPLES
from fpld.config import WrittenSection
from fpld.node.prior_cache import read_rounded_prior
from fpld.node.writing import ATTEMPTS, PrivateRuns, Writing, record_writing, write_checked, write_reply
from fpld.protocol import Task
from fpld.protocol.written import beginnings, decode_reply, encode_text
from fpld.students import NGram, NGramConfig
from fpld.students.generate import write_sequences
from tests.helpers import make_plan

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from fpld.types import Plan

V = 24
T = 8
PROBE = np.random.default_rng(0).integers(V, size=(6, T)).astype(np.int32)


def ngram(seed: int, vocab: int = V, scale: float = 0.5) -> NGram:
    """Return a model of order 2 with random parameters."""
    student = NGram(NGramConfig(vocab=vocab, order=2, buckets=64, batch=64))
    rng = np.random.default_rng(seed)
    student.load_state({name: scale * rng.standard_normal(a.shape) for name, a in student.state().items()})
    return student


def all_runs(text: np.ndarray, length: int) -> set[tuple[int, ...]]:
    return {tuple(text[k : k + length].tolist()) for k in range(len(text) - length + 1)}


def around(probe: np.ndarray, more: int) -> np.ndarray:
    """Return the probe set as one text that begins again at its end."""
    return np.concatenate([probe.ravel()] * (2 + more // probe.size))[: probe.size + more]


small_texts = st.integers(2, 3).flatmap(
    lambda vocab: st.tuples(
        st.just(vocab),
        st.lists(st.integers(0, vocab - 1), min_size=1, max_size=60),
        st.lists(st.integers(0, vocab - 1), min_size=6, max_size=18).map(lambda x: x[: len(x) // 6 * 6]),
    )
)


@settings(max_examples=150)
@given(small_texts, st.integers(1, 8), st.integers(0, 2**20))
def test_no_run_of_the_private_text_leaves(texts: tuple[int, list[int], list[int]], length: int, seed: int) -> None:
    """Two or three kinds of tokens, so that nearly everything that a model writes is a run of the private text."""
    vocab = texts[0]
    private = np.array(texts[1], np.int32)
    probe = np.array(texts[2], np.int32).reshape(-1, 6)
    rng = np.random.default_rng(seed)
    places = rng.integers(probe.size, size=5)
    writing = write_checked(
        NGram(NGramConfig(vocab=vocab)), probe, places, PrivateRuns(private, probe, length), seed=seed, temperature=1.0
    )
    public = around(probe, max(length, 6))
    forbidden = all_runs(private, length) - all_runs(public[: probe.size + length - 1], length)
    for sequence in writing.sequences:
        assert not all_runs(sequence, length) & forbidden
    assert writing.sequences[:, 0].tolist() == probe.ravel()[places].tolist()
    assert writing.sequences.shape == (5, 6)
    assert 0 <= writing.replaced <= writing.copied <= writing.written
    assert writing.written == 5 + writing.copied - writing.replaced


def test_what_is_replaced_is_public_text_and_counted() -> None:
    """All runs with a one are private: a sequence passes with a chance of 1/32, and public text is all zeros."""
    private = np.array([int(bit) for number in range(1 << 6) for bit in f"{number:06b}"], np.int32)
    probe = np.zeros((2, 6), np.int32)
    places = np.arange(8)
    writing = write_checked(
        NGram(NGramConfig(vocab=2)), probe, places, PrivateRuns(private, probe, 3), seed=1, temperature=1.0
    )
    assert (writing.sequences == 0).all()
    assert 1 <= writing.replaced <= 8
    assert writing.written == 8 + writing.copied - writing.replaced <= 8 * ATTEMPTS


def test_a_model_that_repeats_one_sentence_is_replaced_by_public_text() -> None:
    """One that was trained to certainty: every attempt is a copy."""
    sentence = np.arange(12, dtype=np.int32)
    private = np.tile(sentence, 30)
    probe = np.arange(24, dtype=np.int32).reshape(2, 12) % 12  # the same tokens, each sequence once
    probe[0] = probe[0][::-1]
    model = NGram(NGramConfig(vocab=12, order=2, buckets=64, batch=64))
    model.finetune(private, steps=300, seed=0)
    places = np.array([3, 5])
    run = 11  # the private text goes round and round: no probe sequence has a run of 11 across its ends
    writing = write_checked(model, probe, places, PrivateRuns(private, probe, run), seed=0, temperature=0.05)
    assert writing == Writing(writing.sequences, 2 * ATTEMPTS, 2 * ATTEMPTS, 2)
    public = around(probe, 12)
    assert writing.sequences.tolist() == [public[place : place + 12].tolist() for place in places]
    free = write_checked(model, probe, places, PrivateRuns(private, probe, 13), seed=0, temperature=0.05)
    assert (free.written, free.copied, free.replaced) == (2, 0, 0)


def test_runs_longer_than_a_text_stand_nowhere() -> None:
    assert not PrivateRuns(np.arange(5, dtype=np.int32), PROBE, 6).stand_in(PROBE).any()
    assert not PrivateRuns(np.arange(5, dtype=np.int32), PROBE, 9).stand_in(PROBE).any()
    assert not PrivateRuns(PROBE.ravel(), PROBE, T).stand_in(PROBE).any()


def test_a_site_that_writes_nothing_asks_nothing_of_its_model() -> None:
    writing = write_checked(
        ngram(0), PROBE, np.empty(0, np.int64), PrivateRuns(PROBE[0], PROBE, 1), seed=0, temperature=1.0
    )
    assert (writing.sequences.shape, *writing[1:]) == ((0, T), 0, 0, 0, 0, 0)


def test_rows_of_a_record_are_by_round_and_a_repeated_round_replaces_its_own(tmp_path: Path) -> None:
    sequences = np.zeros((3, T), np.int32)
    for round, copied in ((2, 5), (1, 4), (2, 6)):
        record_writing(tmp_path, round, Writing(sequences, 9, copied, 1, 70, 12), 8)
    rows = json.loads((tmp_path / "written.json").read_text())
    common = {"sequences": 3, "written": 9, "replaced": 1, "private_run": 8, "text_bytes": 70, "note_bytes": 12}
    assert rows == [{"round": 1, "copied": 4, **common}, {"round": 2, "copied": 6, **common}]


def task_of(plan: Plan) -> Task:
    return Task(plan, "samples", broadcast="weights")


def plan_of(shared: NGram, bits: float, count: int = 5) -> Plan:
    prior = make_prior(shared.logits(PROBE), coarse_grid(V))
    return make_plan(contexts=PROBE.size, vocab=V, bits=bits, clip=None, written=count * T, prior=prior)


def written(
    folder: Path, bits: float, *, private_run: int = 3, count: int = 5, labels: bytes | None = None
) -> tuple[Plan, bytes, Writing]:
    model = ngram(1)
    shared = ngram(2)
    plan = plan_of(shared, bits, count)
    public = SAMPLES.encode(model.logit_blocks(PROBE), plan.public) if labels is None else labels
    payload, writing = write_reply(
        model,
        shared,
        task_of(plan),
        PROBE,
        np.random.default_rng(4).integers(V, size=500).astype(np.int32),
        WrittenSection(contexts=plan.written, private_run=private_run),
        public,
        margin=2e-5,
        seed=3,
        scratch=folder / "scratch.i16",
    )
    assert not (folder / "scratch.i16").exists()
    return plan, payload, writing


@pytest.mark.parametrize("private_run", [1, 2, 3])
def test_a_whole_reply_is_decoded_against_the_students_prediction(tmp_path: Path, private_run: int) -> None:
    plan, payload, writing = written(tmp_path, 300.0, private_run=private_run)
    assert len(payload) <= plan.budget_bytes
    parts = decode_reply(payload, plan, PROBE)
    assert parts.written is not None
    assert np.array_equal(parts.written.sequences, writing.sequences)
    coded = 48 + len(parts.labels) + writing.text_bytes + writing.note_bytes + len(parts.written.labels)
    assert len(payload) == coded
    assert writing.text_bytes == len(encode_text(writing.sequences, V)) > 0
    assert parts.written.sequences[:, 0].tolist() == PROBE.ravel()[beginnings(plan, PROBE)].tolist()
    with read_rounded_prior(
        ngram(2), parts.written.sequences, parts.written.notes, tmp_path / "prior.i16", coarse_grid(V)
    ) as prior:
        SAMPLES.reader(parts.written.labels, parts.written.plan(plan, prior)).check()
    assert list(tmp_path.iterdir()) == []


@settings(max_examples=25, deadline=None)
@given(st.floats(8.0, 200.0), st.sampled_from([1, 5, 40]))
def test_the_budget_is_never_exceeded(tmp_path_factory: pytest.TempPathFactory, bits: float, count: int) -> None:
    """From budgets with hardly room for the header to those with room for all; public labels take none of it."""
    folder = tmp_path_factory.mktemp("written")
    plan, payload, writing = written(folder, bits, count=count, labels=b"")
    parts = decode_reply(payload, plan, PROBE)
    assert len(payload) <= plan.budget_bytes
    assert len(writing.sequences) == (0 if parts.written is None else len(parts.written.sequences)) <= count
    needed = 48 + 16 + 2.3 * count * T  # header, labels' header, and per token at most 8 bits of labels, 10 of text
    if plan.budget_bytes > needed:
        assert len(writing.sequences) == count


def test_a_budget_below_the_text_of_all_is_for_fewer_sequences(tmp_path: Path) -> None:
    plan, payload, writing = written(tmp_path, 6.0, count=40, labels=b"")
    text_of_all = 40 * T * 5 // 8  # random tokens of 24 kinds, about 5 bits each
    assert plan.budget_bytes < text_of_all + 40 * T
    assert 0 < len(writing.sequences) < 40
    assert len(payload) <= plan.budget_bytes


def test_no_written_text_where_the_site_wants_none(tmp_path: Path) -> None:
    plan, payload, writing = written(tmp_path, 300.0, private_run=0)
    parts = decode_reply(payload, plan, PROBE)
    assert parts.written is None
    assert (writing.sequences.shape, *writing[1:]) == ((0, T), 0, 0, 0, 0, 0)
    assert len(payload) == 48 + len(parts.labels)


def test_the_same_seed_writes_the_same_bytes(tmp_path: Path) -> None:
    assert written(tmp_path, 100.0)[1] == written(tmp_path, 100.0)[1]


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_tokens_are_drawn_from_the_models_prediction(temperature: float) -> None:
    """Chi-square of 20,000 second tokens, and of third ones after the most frequent second; false alarms 1e-6 each."""
    stats = pytest.importorskip("scipy.stats")
    student = ngram(5)
    count = 20_000
    sequences = write_sequences(student, np.full(count, 3), 3, seed=11, temperature=temperature)
    assert (sequences[:, 0] == 3).all()
    common = int(np.bincount(sequences[:, 1]).argmax())
    for prefix, following in (
        ([3], sequences[:, 1]),
        ([3, common], sequences[sequences[:, 1] == common, 2]),
    ):
        logits = student.logits(np.array([prefix]))[-1].astype(np.float64) / temperature
        chances = np.exp(logits - logits.max())
        chances /= chances.sum()
        expected = chances * len(following)
        rare = expected < 5
        observed = np.bincount(following, minlength=V)
        if rare.any():
            expected = np.append(expected[~rare], expected[rare].sum())
            observed = np.append(observed[~rare], observed[rare].sum())
        statistic = float((np.square(observed - expected) / np.maximum(expected, 1e-9)).sum())
        assert statistic < stats.chi2.isf(1e-6, len(expected) - 1)


def test_sequences_of_several_batches_are_each_the_models_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch begins with an empty cache: certain models write what follows from their own tokens alone."""
    from fpld.students import generate

    monkeypatch.setattr(generate, "_SEQUENCES_AT_ONCE", 3)
    model = NGram(NGramConfig(vocab=12, order=1, buckets=64, batch=64))
    model.finetune(np.tile(np.arange(12, dtype=np.int32), 30), steps=300, seed=0)
    first = np.arange(8)
    sequences = write_sequences(model, first, 5, seed=0, temperature=0.05)
    assert np.array_equal(sequences, (first[:, None] + np.arange(5)) % 12)


BAD: dict[str, Callable[[], Any]] = {
    "length": lambda: write_sequences(ngram(0), np.array([1]), 0, seed=0),
    "temperature": lambda: write_sequences(ngram(0), np.array([1]), 2, seed=0, temperature=0.0),
    "first": lambda: write_sequences(ngram(0), np.array([V]), 2, seed=0),
    "seed": lambda: write_sequences(ngram(0), np.array([1]), 2, seed=-1),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_call_names_its_parameter(name: str) -> None:
    from fpld.errors import InputError

    with pytest.raises(InputError, match=name):
        BAD[name]()
