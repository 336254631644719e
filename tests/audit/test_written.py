"""The audit of written text: runs, near matches and n-grams against plain versions, and a run with canaries."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pytest

from fpld import config as configuration
from fpld.audit.attacks import Canaries, text_canaries
from fpld.audit.written import (
    MAX_ORDER,
    SMOOTHING,
    WrittenSample,
    canary_matches,
    canary_rows,
    copied_share,
    copy_rows,
    ngram_scores,
)
from fpld.cli import main
from fpld.node.spec import node_specs
from fpld.numerics import log_softmax
from fpld.students import NGram, NGramConfig
from tests.audit.test_audit import SMALL
from tests.federation.conftest import config_file

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["config_file"]


def edit_distance(one: list[int], two: list[int]) -> int:
    """Return the edit distance of two sequences, as in a textbook."""
    row = list(range(len(two) + 1))
    for i, a in enumerate(one, 1):
        above, row[0] = row[0], i
        for j, b in enumerate(two, 1):
            above, row[j] = row[j], min(above + (a != b), row[j] + 1, row[j - 1] + 1)
    return row[-1]


def longest_run(canary: list[int], text: list[int], first: int) -> int:
    """Return the longest run of a canary in a text that ends at or after token `first` of it."""
    runs = [(i, j) for i in range(len(canary)) for j in range(max(i, first), len(canary))]
    texts = [text[a:b] for a in range(len(text)) for b in range(a + 1, len(text) + 1)]
    return max((j - i + 1 for i, j in runs if canary[i : j + 1] in texts), default=0)


def test_matches_are_those_of_brute_force() -> None:
    rng = np.random.default_rng(0)
    sequences = rng.integers(4, size=(3, 10)).astype(np.int32)
    tokens = rng.integers(4, size=(12, 7)).astype(np.int32)
    tokens[0, :5] = sequences[1, 3:8]
    for first in (1, 6):
        matches = canary_matches(Canaries("text", tokens, np.ones(12, bool), first), sequences)
        for canary, run, edits in zip(tokens.tolist(), matches.runs, matches.edits, strict=True):
            assert run == max(longest_run(canary, text, first) for text in sequences.tolist())
            pieces = [text[a:b] for text in sequences.tolist() for a in range(11) for b in range(a, 11)]
            assert edits == min(edit_distance(canary, piece) for piece in pieces)
    none = canary_matches(Canaries("text", tokens, np.ones(12, bool), 1), sequences[:0])
    assert (none.runs.tolist(), none.edits.tolist()) == ([0] * 12, [7] * 12)


def test_the_ngram_model_refines_the_students_prediction_by_counts() -> None:
    rng = np.random.default_rng(1)
    before = NGram(NGramConfig(vocab=5, buckets=64))
    sequences = rng.integers(5, size=(6, 12)).astype(np.int32)
    canaries = text_canaries(rng.integers(5, size=60).astype(np.int32), 11, 5, seed=0)
    texts = sequences.tolist()
    logs = log_softmax(before.logits(canaries.tokens[:, :-1])).reshape(5, 10, 5)
    for number, score in enumerate(ngram_scores(canaries, sequences, before)):
        canary = canaries.tokens[number].tolist()
        expected = 0.0
        for place in range(1, 11):
            reference = float(np.exp(logs[number, place - 1, canary[place]]))
            p = reference
            for order in range(1, min(MAX_ORDER, place) + 1):
                context = canary[place - order : place]
                after = [t[a + order] for t in texts for a in range(12 - order) if t[a : a + order] == context]
                p = (after.count(canary[place]) + SMOOTHING * p) / (len(after) + SMOOTHING)
            expected += np.log(p / reference)
        assert score == pytest.approx(expected, rel=1e-4)
    assert not ngram_scores(canaries, sequences[:0], before).any()


def test_copies_are_private_runs_that_are_not_public() -> None:
    private = np.arange(40, dtype=np.int32)
    public = np.arange(20, 30, dtype=np.int32)[None]
    sent = np.array([[*range(21, 29), 0, 1], [*range(7), 60, 61, 62]], np.int32)  # public, private
    sample = WrittenSample(sent, sent[::-1])
    assert copied_share(sent, private, public, 6) == 0.5
    assert copied_share(sent[:0], private, public, 6) is None
    rows = copy_rows(sample, private, public)
    assert [row["sent"] for row in rows] == [row["unchecked"] for row in rows] == [0.5, 0.0, 0.0, 0.0]
    canaries = Canaries("text", np.stack([private[:9], private[:9] + 50]), np.array([True, False]), 1)
    found = canary_matches(canaries, sent)
    shares = {(row["of"], row["match"]): row["sent"] for row in canary_rows(canaries, found, found)}
    assert shares["text canaries, in", "a run of 6 tokens"] == 1.0
    assert shares["text canaries, in", "a run of 8 tokens"] == 0.0
    assert shares["text canaries, in", "all within 2 edits"] == 1.0
    assert shares["text canaries, out", "a run of 6 tokens"] == 0.0


def writing(text: str, section: str = "") -> str:
    """Return the small federation's configuration with a transformer, sampled labels and written text."""
    text = text.replace('kind = "ngram"\norder = 2\nbuckets = 256\nbatch = 128', SMALL)
    text = text.replace("bits = 1.5", "bits = 0.25").replace("bits = 4.0", "bits = 0.25")
    text = text.replace("rounds = 3", "rounds = 2").replace("contexts = 480", "contexts = 1600")
    tables = '[codec]\nname = "samples"\n\n[combine]\nrule = "mixture"\n\n[written]\ncontexts = 1600\n\n[student]'
    return f"{text.replace('[student]', tables)}\n[baselines]\nmethods = []\n{section}"


@pytest.mark.slow
def test_an_audit_attacks_written_text_as_sent_and_unchecked(
    config_file: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config_file.write_text(writing(config_file.read_text()).replace("steps = 25", "steps = 150"))
    options = ["--canaries", "40", "--copies", "20", "--out", str(tmp_path / "out"), "--json"]
    assert main(["audit", str(config_file), *options]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    attacks = [f"{text} text, {attack}" for text in ("sent", "unchecked") for attack in ("run", "edit", "ngram")]
    expected = [("probe", "labels"), *(("probe", name) for name in ("surrogate", "student", *attacks))]
    expected += [("text", name) for name in ("surrogate", "student", *attacks)]
    assert [(row["canaries"], row["attack"]) for row in rows] == expected
    assert len({tuple(row) for row in rows}) == 1
    copies = json.loads((tmp_path / "out/copies.json").read_text())
    shares = {(row["of"], row["match"]): row for row in copies}
    assert shares["sequences", "a run of 6 tokens"]["count"] == 200
    for length in (8, 12, 16):  # those that the check lets through have no run of eight
        assert shares["sequences", f"a run of {length} tokens"]["sent"] == 0.0
    assert shares["sequences", "a run of 8 tokens"]["unchecked"] > 0.0


def test_with_privacy_nothing_is_compared_with_the_private_text(config_file: Path) -> None:
    """On one machine as at sites: which sequences are written anew would depend on the private text."""
    section = '[privacy]\nepsilon = 4.0\nunit = "window"\nbatch = 8\n'
    for text, longer in ((writing(config_file.read_text()), False), (writing(config_file.read_text(), section), True)):
        config = configuration.parse_config(text, "test")
        for spec in node_specs(config):
            assert spec.written is not None
            assert (spec.written.private_run > config.probe.length) == longer
