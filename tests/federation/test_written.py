"""Federations whose nodes write text: two rounds of them, twice, after a kill, and with a node that differs or lies."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from benchmarks.kill_and_resume import begin, finish, kill, result
from fpld.cli import main
from fpld.config import parse_config
from fpld.engines.local import run_local
from fpld.federation import lessons, rounds, workers
from fpld.node import round as node_round
from fpld.node import writing
from fpld.protocol.written import HEADER, least_bits
from tests.federation.conftest import CONFIG, write_texts

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from fpld.protocol import Aggregator, Combined, Task
    from fpld.target import Target

WRITTEN = 96
NODES = ["north", "east", "south"]
STUDENTS = {
    "ngram": 'kind = "ngram"\norder = 2\nbuckets = 256\nbatch = 128',
    "transformer": 'kind = "transformer"\nlayers = 1\nwidth = 32\nheads = 2\nlength = 16\nbatch = 8',
}


def configured(folder: Path, *, kind: str = "ngram", rule: str = "mixture", rounds: int = 2) -> Path:
    """Write texts and a configuration: nodes write as many contexts as there are public ones, with 128 bits each."""
    write_texts(folder)
    text = CONFIG.format(folder=folder).replace("rounds = 3", f"rounds = {rounds}")
    text = text.replace(STUDENTS["ngram"], STUDENTS[kind]).replace("contexts = 480", "contexts = 96")
    text = text.replace("bits = 1.5", "bits = 0.5").replace("bits = 4.0", "bits = 0.5")
    text += f'\n[written]\ncontexts = {WRITTEN}\n\n[combine]\nrule = "{rule}"\n\n[baselines]\nmethods = []\n'
    file = folder / "config.toml"
    file.write_text(text)
    return file


def run(file: Path, out: Path) -> dict[str, float]:
    """Run a configuration; return the held-out loss of each method."""
    text = file.read_text()
    rows = run_local(parse_config(text, "test"), text, out, resume=False)
    return {str(row["method"]): float(str(row["heldout_loss"])) for row in rows}


def trace(out: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (out / "fpld/trace.jsonl").read_text().splitlines()]
    return [{**line, "seconds": None} for line in lines]


@pytest.mark.parametrize("kind", [pytest.param("ngram"), pytest.param("transformer", marks=pytest.mark.slow)])
def test_two_rounds_learn_and_are_the_same_twice(tmp_path: Path, kind: str) -> None:
    if kind == "transformer":
        pytest.importorskip("torch")
    file = configured(tmp_path, kind=kind)
    loss = run(file, tmp_path / "one")
    assert loss["fpld"] < loss["base"]
    lines = trace(tmp_path / "one")
    assert [line["written"] for line in lines] == [[WRITTEN] * 3] * 2
    assert all(line["refused"] == [] for line in lines)
    for line in lines:
        assert all(sent <= allotted for sent, allotted in zip(line["bits_sent"], line["bits_allotted"], strict=True))
    for node in range(3):
        rows = json.loads((tmp_path / f"one/fpld/nodes/{node}/written.json").read_text())
        assert [(row["round"], row["sequences"], row["private_run"]) for row in rows] == [(1, 6, 8), (2, 6, 8)]
        assert all(row["written"] == 6 + row["copied"] - row["replaced"] for row in rows)
    assert not list((tmp_path / "one").rglob("*written.i16"))
    assert run(file, tmp_path / "two") == loss
    assert trace(tmp_path / "two") == lines
    one, two = ((tmp_path / out / "student.safetensors").read_bytes() for out in ("one", "two"))
    assert one == two


def test_without_written_text_the_trace_says_nothing_of_it(tmp_path: Path) -> None:
    file = configured(tmp_path, rounds=1)
    file.write_text(file.read_text().replace(f"[written]\ncontexts = {WRITTEN}\n", ""))
    run(file, tmp_path / "run")
    assert "written" not in trace(tmp_path / "run")[0]


def test_sites_that_write_nothing_send_labels_all_the_same(tmp_path: Path) -> None:
    file = configured(tmp_path, rounds=1)
    file.write_text(file.read_text().replace("[written]\n", "[written]\nprivate_run = 0\n"))
    loss = run(file, tmp_path / "run")
    assert loss["fpld"] < loss["base"]
    assert trace(tmp_path / "run")[0]["written"] == [0, 0, 0]


def test_a_budget_without_room_for_the_header_of_written_text_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Labels on public contexts may take all bits of these, so the header needs those of the written ones."""
    file = configured(tmp_path, rounds=1)
    text = file.read_text().replace(f"contexts = {WRITTEN}\n\n[combine]", "contexts = 16\n\n[combine]")
    needed = least_bits(16)
    file.write_text(text.replace("bits = 0.5", f"context_bits = {0.99 * needed}"))
    assert main(["check", str(file), "--json"]) == 2
    wrong = {row["key"]: row["says"] for row in json.loads(capsys.readouterr().out)["rows"] if row["state"] == "wrong"}
    assert wrong.keys() == {f"nodes[{node}].context_bits" for node in range(3)}
    assert "written text beside its labels needs" in wrong["nodes[0].context_bits"]
    file.write_text(text.replace("bits = 0.5", f"context_bits = {needed}"))
    run(file, tmp_path / "run")
    assert trace(tmp_path / "run")[0]["payload_bytes"] > 0


@pytest.mark.slow
@pytest.mark.long
def test_a_kill_in_the_middle_of_a_round_changes_no_bit(tmp_path: Path) -> None:
    """Killed when the first node has written in the second round, and its frame has not been combined yet."""
    file = configured(tmp_path)
    expected = finish(file, tmp_path / "undisturbed")
    out = tmp_path / "killed"
    victim = begin(file, out)
    while victim.poll() is None and not any(
        '"round": 2' in record.read_text() for record in (out / "fpld").rglob("written.json")
    ):
        time.sleep(0.002)
    assert kill(victim)
    assert len(trace(out)) == 1
    assert finish(file, out) == expected == result(tmp_path / "undisturbed")


def other_digest(counts: list[int], digest: bytes, body: bytes) -> bytes:
    return HEADER.pack(*counts, bytes(byte ^ 1 for byte in digest)) + body


def notes_beyond_the_end(counts: list[int], digest: bytes, body: bytes) -> bytes:
    """Put a note on coordinate 32,766 of 24,576 in the place of the last bytes."""
    public, count, text, entries = counts
    at = public + text
    return HEADER.pack(public, count, text, entries + 1, digest) + body[:at] + b"\xfc\xff" + body[at:-2]


def other_labels(counts: list[int], digest: bytes, body: bytes) -> bytes:
    return HEADER.pack(*counts, digest) + body[:-40] + bytes(range(40))


@pytest.mark.parametrize(
    ("alter", "reason"),
    [(other_digest, "probe.margin"), (notes_beyond_the_end, "coordinates below 24576"), (other_labels, "")],
)
def test_labels_on_text_that_cannot_be_read_are_refused_and_the_public_ones_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alter: Callable[..., bytes], reason: str
) -> None:
    """One node's prediction differs, as on a machine whose floats are far away, or it sends what no node does."""
    write = writing.write_reply
    lessons = []

    def altered(model: Any, shared: Any, task: Task, *rest: Any, **options: Any) -> Any:
        payload, wrote = write(model, shared, task, *rest, **options)
        if task.plan.node == 1:
            *counts, digest = HEADER.unpack_from(payload)
            payload = alter(counts, digest, payload[HEADER.size :])
        return payload, wrote

    distilled = workers.distill

    def watched(base: Any, state: Any, sequences: Any, target: Target, *rest: Any) -> Any:
        lessons.append((sequences.shape, target.contexts))
        return distilled(base, state, sequences, target, *rest)

    monkeypatch.setattr(node_round, "write_reply", altered)
    monkeypatch.setattr(workers, "distill", watched)
    loss = run(configured(tmp_path, rounds=1), tmp_path / "run")
    (line,) = trace(tmp_path / "run")
    assert [(entry["node"], entry["state"]) for entry in line["refused"]] == [("east", "refused")]
    assert reason in line["refused"][0]["reason"]
    assert line["nodes"] == NODES
    assert lessons == [((6 + 2 * 6, 16), 96 + 2 * WRITTEN)]
    assert loss["fpld"] < loss["base"]


def test_a_node_without_trust_has_its_text_scaled_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The target of what it wrote is the student's own prediction; those of the others are as with full trust."""
    original = lessons.lesson_of
    seen: list[dict[str, Target]] = []

    def compared(setup: Any, state: Any, aggregator: Aggregator, combined: Combined) -> Any:
        assert combined.trust is not None  # the rule audits
        shares = {"full": np.ones(3), "without east": np.array([1.0, 1e-9, 1.0]), "half": np.array([1.0, 0.5, 1.0])}
        lessons = {
            name: original(setup, state, aggregator, combined._replace(trust=trust))[0]
            for name, trust in shares.items()
        }
        seen.append({name: lesson.target for name, lesson in lessons.items()})
        return original(setup, state, aggregator, combined)

    monkeypatch.setattr(rounds, "lesson_of", compared)
    run(configured(tmp_path, rule="guarded", rounds=1), tmp_path / "run")
    (targets,) = seen
    contexts = np.arange(96 + 3 * WRITTEN)
    places, _, full = targets["full"].changed(contexts)
    _, _, none = targets["without east"].changed(contexts)
    _, _, half = targets["half"].changed(contexts)
    east = (places >= 96 + WRITTEN) & (places < 96 + 2 * WRITTEN)
    assert np.abs(full[east]).sum() > 1
    assert np.abs(none[east]).max() < 1e-8
    assert np.array_equal(half[east], full[east] * np.float32(0.5))
    assert np.array_equal(none[~east], full[~east])
