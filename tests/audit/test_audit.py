"""Audits: canaries as they are made, and attacks on what a real round has sent."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pytest

from fpld.audit.attacks import ObservedReply, insert_canaries, label_scores, model_scores, probe_canaries, text_canaries
from fpld.cli import main
from fpld.codecs import encode
from fpld.errors import InputError
from fpld.numerics import log_softmax
from fpld.registry import codecs
from fpld.storage.arrays import read_arrays, write_arrays
from fpld.students import NGram, NGramConfig
from fpld.types import Plan
from tests.federation.conftest import config_file

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["config_file"]

SMALL = 'kind = "transformer"\nlayers = 1\nwidth = 32\nheads = 2\nlength = 16\nbatch = 8'


def private(text: str, section: str = "") -> str:
    """Return the small federation's configuration with a transformer, float32 labels and a section of privacy."""
    text = text.replace('kind = "ngram"\norder = 2\nbuckets = 256\nbatch = 128', SMALL)
    text = text.replace("bits = 1.5", "bits = 32.0").replace("bits = 4.0", "bits = 32.0")
    text = text.replace("rounds = 3", "rounds = 1").replace("[student]", '[codec]\nname = "float32"\n\n[student]')
    return f"{text}\n[baselines]\nmethods = []\n{section}"


def test_probe_canaries_end_in_a_token_that_their_context_does_not_tell() -> None:
    sequences = np.random.default_rng(0).integers(50, size=(400, 12)).astype(np.int32)
    canaries = probe_canaries(sequences, 50, 200, seed=3)
    assert canaries.contexts is not None
    assert canaries.tokens.shape == (200, 9)
    rows = canaries.contexts // 12
    assert np.array_equal(canaries.tokens[:, :8], sequences[rows, :8])
    assert (canaries.contexts % 12 == 7).all()
    assert len(np.unique(canaries.tokens[:, :8], axis=0)) == 200
    assert 60 < canaries.included.sum() < 140  # a fair coin each: outside with a chance of 1e-8
    assert (canaries.tokens[:, 8] != sequences[rows, 8]).mean() > 0.8
    with pytest.raises(InputError, match="canaries must be at most the different probe sequences, 400, got 500"):
        probe_canaries(sequences, 50, 500, seed=3)


def test_included_canaries_are_documents_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "text.safetensors"
    arrays = {"tokens": np.arange(7, dtype=np.int32), "lengths": np.array([3, 4]), "groups": np.array([0, 1])}
    write_arrays(path, arrays, {})
    canaries = text_canaries(np.arange(100, 160, dtype=np.int32), 5, 8, seed=0)
    insert_canaries(path, [canaries], copies=3)
    arrays, _ = read_arrays(path)
    inside = canaries.tokens[canaries.included]
    assert arrays["tokens"].tolist() == [*range(7), *np.repeat(inside, 3, axis=0).ravel().tolist()]
    assert arrays["lengths"].tolist() == [3, 4, *[5] * (3 * len(inside))]
    assert arrays["groups"].tolist() == [0, 1, *np.repeat(2 + np.arange(len(inside)), 3).tolist()]


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["float32", "uniform"])
def test_labels_are_scored_at_the_canaries_contexts(codec: str) -> None:
    rng = np.random.default_rng(0)
    before = NGram(NGramConfig(vocab=30, buckets=64))
    sequences = rng.integers(30, size=(40, 12)).astype(np.int32)
    canaries = probe_canaries(sequences, 30, 20, seed=1)
    assert canaries.contexts is not None
    logits = rng.normal(size=(480, 30)).astype(np.float32)
    plan = Plan(run_key=bytes(16), round=1, node=0, probe=bytes(32), contexts=480, vocab=30, bits=32.0 * 30)
    coding = codecs.get(codec)
    scores = label_scores(ObservedReply(coding, encode(coding, logits, plan), plan), canaries, before, sequences)
    rows = canaries.contexts
    last = canaries.tokens[:, -1]
    expected = log_softmax(logits)[rows, last] - log_softmax(before.logits(sequences))[rows, last]
    np.testing.assert_allclose(scores, expected, atol=1e-3)


def test_models_are_scored_by_what_they_make_likelier() -> None:
    rng = np.random.default_rng(0)
    before = NGram(NGramConfig(vocab=30, buckets=64))
    after = NGram(NGramConfig(vocab=30, buckets=64))
    after.load_state({name: rng.normal(size=array.shape) for name, array in after.state().items()})
    canaries = text_canaries(rng.integers(30, size=200).astype(np.int32), 9, 10, seed=0)
    scores = model_scores(after, before, canaries)
    for score, tokens in zip(scores, canaries.tokens, strict=True):
        assert score == pytest.approx(before.loss(tokens, 8)[0] - after.loss(tokens, 8)[0], rel=1e-4)


@pytest.mark.slow
@pytest.mark.long
def test_an_audit_finds_canaries_and_private_training_hides_them(
    config_file: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A canary that is in the text twenty times is found in float32 labels, and is not at an epsilon of 1."""
    text = private(config_file.read_text())
    text = text.replace("contexts = 480", "contexts = 1600").replace("steps = 25", "steps = 80")
    tables = {}
    for name, section in (("open", ""), ("private", '[privacy]\nepsilon = 1.0\nunit = "window"\nbatch = 16\n')):
        config_file.write_text(text + section)
        options = ["--canaries", "60", "--copies", "20", "--out", str(tmp_path / name), "--json"]
        assert main(["audit", str(config_file), *options]) == 0
        rows = json.loads(capsys.readouterr().out)["rows"]
        tables[name] = {(row["canaries"], row["attack"]): row for row in rows}
        assert len(rows) == 5
    row = tables["open"]["probe", "labels"]
    assert row["auc_low"] > 0.7
    assert row["epsilon_lower"] > 0.5
    assert row["epsilon_upper"] is None
    for row in tables["private"].values():
        assert row["epsilon_lower"] <= row["epsilon_upper"] <= 1.0
        assert row["auc"] < 0.75


def test_what_cannot_be_audited_is_refused(
    config_file: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    text = private(config_file.read_text())
    for changes, options, message in (
        (("length = 16\n", "length = 16\nfresh = true\n"), [], "probe.fresh must be false"),
        (('[codec]\nname = "float32"\n', "[send]\nupdates = 2.0\n"), [], "send.updates must be left out"),
        (("", ""), ["--node", "west"], "--node must be one of north, east, south, got 'west'"),
        (("", ""), ["--canaries", "2"], "--canaries must be"),
        (("", ""), ["--epsilon", "0"], "--epsilon must be greater than 0, got 0"),
    ):
        config_file.write_text(text.replace(*changes, 1) if changes[0] else text)
        assert main(["audit", str(config_file), "--out", str(tmp_path / "out"), *options]) == 2
        assert message in capsys.readouterr().err
