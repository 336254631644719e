"""Federations whose nodes send updates of their weights: two rounds, budgets, a kill, models that are refused."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from benchmarks.kill_and_resume import begin, finish, kill, result
from fpld.codecs.updates import decode_update, encode_update, update_bytes
from fpld.config import Config, parse_config
from fpld.engines.local import run_local
from fpld.errors import BudgetError, InputError, QuorumError
from fpld.federation import workers
from fpld.federation.preflight import run_preflight
from fpld.federation.state import student_weights, update_budget
from fpld.numerics import kl
from fpld.protocol import Node
from fpld.protocol.updates import UPDATES_CODE, payload_bits
from fpld.protocol.wire import OVERHEAD_BYTES, encode_frame
from fpld.storage.arrays import previous_file
from fpld.storage.run_folder import NODE_STATE, RunFolder
from fpld.students import NGram
from fpld.students.configs import TransformerConfig
from fpld.students.transformer import Transformer
from tests.federation.conftest import CONFIG, write_texts

if TYPE_CHECKING:
    from pathlib import Path

    from fpld.protocol import Task

NODES = ["north", "east", "south"]
NGRAM = 'kind = "ngram"\norder = 2\nbuckets = 256\nbatch = 128'
TRANSFORMER = 'kind = "transformer"\nlayers = 1\nwidth = 16\nheads = 2\nlength = 16\nbatch = 16'
SMALL_NGRAM = 'kind = "ngram"\norder = 1\nbuckets = 64\nbatch = 64'


def configured(
    folder: Path, *, student: str = SMALL_NGRAM, rounds: int = 2, bits: float = 2.0, changes: str = ""
) -> Path:
    """Write texts and a configuration whose nodes send updates, and whose rebuilt models write ten sequences each."""
    write_texts(folder)
    text = CONFIG.format(folder=folder).replace("rounds = 3", f"rounds = {rounds}").replace(NGRAM, student)
    text += f"\n[send]\nupdates = {bits}\n\n[written]\ncontexts = 160\n\n[baselines]\nmethods = []\n{changes}"
    file = folder / "config.toml"
    file.write_text(text)
    return file


def run(file: Path, out: Path, *, resume: bool = False) -> dict[str, float]:
    """Run a configuration; return the held-out loss of each method."""
    text = file.read_text()
    rows = run_local(parse_config(text, "test"), text, out, resume=resume)
    return {str(row["method"]): float(str(row["heldout_loss"])) for row in rows}


def trace(out: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (out / "fpld/trace.jsonl").read_text().splitlines()]
    return [{**line, "seconds": None} for line in lines]


def student_bytes(out: Path) -> bytes:
    return (out / "student.safetensors").read_bytes()


@pytest.mark.parametrize("student", [TRANSFORMER, SMALL_NGRAM], ids=["transformer", "ngram"])
def test_two_rounds_learn_within_the_budget_and_are_the_same_twice(tmp_path: Path, student: str) -> None:
    if student is TRANSFORMER:
        pytest.importorskip("torch")
    file = configured(tmp_path, student=student)
    loss = run(file, tmp_path / "one")
    assert loss["fpld"] < loss["base"]
    lines = trace(tmp_path / "one")
    config = parse_config(file.read_text(), "test")
    weights = student_weights(config, RunFolder(tmp_path / "one"))
    size = update_bytes(weights, 2)
    for line in lines:
        assert line["nodes"] == NODES
        assert line["payload_bytes"] <= 3 * size
        # Where tensors differ in their bits, some bytes may be left for which no tensor has room.
        payloads = [sent - OVERHEAD_BYTES for sent in line["node_bytes"]]
        assert all(0.95 * size <= payload <= size for payload in payloads)
        assert line["bits_allotted"] == [payload_bits(weights, 2)] * 3
        assert line["bits_sent"] == pytest.approx([8 * payload / weights for payload in payloads])
        assert line["downlink"]["prior"] == line["downlink"]["labels"] == 0
        assert line["gain"] > 0
        assert line["refused"] == []
        assert "written" not in line
    # The first student is the base model, which all nodes have; then its weights travel.
    assert [line["downlink"]["weights"] > 0 for line in lines] == [False, True]
    assert run(file, tmp_path / "two") == loss
    assert trace(tmp_path / "two") == lines
    assert student_bytes(tmp_path / "two") == student_bytes(tmp_path / "one")


def test_rebuilt_models_teach_what_they_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lessons = []
    distill = NGram.distill_from_models

    def watched(self: NGram, sequences: np.ndarray, states: Any, shares: np.ndarray, **options: Any) -> float:
        mean = {name: np.mean([state[name] for state in states], axis=0) for name in states[0]}
        for name, array in self.state().items():
            np.testing.assert_allclose(array, mean[name], atol=1e-6)
        lessons.append((sequences, shares))
        return distill(self, sequences, states, shares, **options)

    monkeypatch.setattr(NGram, "distill_from_models", watched)
    run(configured(tmp_path, rounds=1), tmp_path / "run")
    ((sequences, shares),) = lessons
    assert sequences.shape == (30 + 3 * 10, 16)
    assert shares[:30] == pytest.approx(1 / 3)
    np.testing.assert_array_equal(shares[30:], np.repeat(np.eye(3), 10, axis=0))
    assert set(sequences[30:, 0]) <= set(sequences[:30].ravel())  # first tokens are public
    file = tmp_path / "config.toml"
    file.write_text(file.read_text().replace("[written]\ncontexts = 160\n", ""))
    run(file, tmp_path / "public")
    assert lessons[1][0].shape == (30, 16)


def test_a_round_that_was_cut_off_is_made_again_with_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = configured(tmp_path)
    run(file, tmp_path / "undisturbed")
    work = workers.distill_from_updates
    calls = []

    def fails_once(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return work(*arguments, **options)

    monkeypatch.setattr(workers, "distill_from_updates", fails_once)
    with pytest.raises(KeyboardInterrupt):
        run(file, tmp_path / "cut off")
    assert len(trace(tmp_path / "cut off")) == 1
    run(file, tmp_path / "cut off", resume=True)
    assert len(calls) == 3
    assert trace(tmp_path / "cut off") == trace(tmp_path / "undisturbed")
    assert student_bytes(tmp_path / "cut off") == student_bytes(tmp_path / "undisturbed")


@pytest.mark.slow
@pytest.mark.long
def test_a_kill_in_the_middle_of_a_round_changes_no_bit(tmp_path: Path) -> None:
    """Killed when the first node has answered in the second round, and nothing of it is in a checkpoint yet."""
    file = configured(tmp_path)
    expected = finish(file, tmp_path / "undisturbed")
    out = tmp_path / "killed"
    victim = begin(file, out)
    while victim.poll() is None and not previous_file(out / "fpld/nodes/0" / NODE_STATE).exists():
        time.sleep(0.002)
    assert kill(victim)
    assert finish(file, out) == expected == result(tmp_path / "undisturbed")


def test_hostile_updates_are_refused_and_the_reason_is_in_the_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """East's frame is sealed and has a scale that is not finite; the quorum is two."""
    answer = Node.answer_update

    def altered(self: Node, task: Task, trained: Any, *, key: bytes = b"", **_: Any) -> tuple[Node, bytes]:
        node, frame = answer(self, task, trained, key=key)
        if task.plan.node == 1:
            payload = frame[OVERHEAD_BYTES - 16 : -16]
            payload = payload[:12] + np.float32(np.inf).tobytes() + payload[16:]
            frame = encode_frame(payload, task.plan, UPDATES_CODE, key=key)
        return node, frame

    monkeypatch.setattr(Node, "answer_update", altered)
    file = configured(tmp_path, rounds=1)
    file.write_text(file.read_text().replace("[run]", "[run]\nquorum = 2"))
    loss = run(file, tmp_path / "run")
    (line,) = trace(tmp_path / "run")
    assert line["nodes"] == ["north", "south"]
    assert [(entry["node"], entry["state"]) for entry in line["refused"]] == [("east", "refused")]
    assert "scales" in line["refused"][0]["reason"]
    assert line["node_bytes"][1] == 0
    assert loss["fpld"] < loss["base"]


@pytest.mark.parametrize("quorum", [2, 3])
def test_models_that_predict_no_sound_logits_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quorum: int
) -> None:
    """A sound frame may stand for any weights, such as those of east, whose logits no label could have."""
    answer = Node.answer_update

    def altered(self: Node, task: Task, trained: Any, *, key: bytes = b"", **_: Any) -> tuple[Node, bytes]:
        factor = np.float32(1e30 if task.plan.node == 1 else 1)
        return answer(self, task, {name: array * factor for name, array in trained.items()}, key=key)

    monkeypatch.setattr(Node, "answer_update", altered)
    file = configured(tmp_path, rounds=1)
    file.write_text(file.read_text().replace("[run]", f"[run]\nquorum = {quorum}"))
    if quorum == 3:
        with pytest.raises(QuorumError, match="east: refused"):
            run(file, tmp_path / "run")
        return
    loss = run(file, tmp_path / "run")
    (line,) = trace(tmp_path / "run")
    assert line["nodes"] == ["north", "south"]
    assert [(entry["node"], entry["state"]) for entry in line["refused"]] == [("east", "refused")]
    assert loss["fpld"] < loss["base"]


def test_a_student_that_diverges_is_not_broadcast(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "mixture_divergence", lambda *_: 0.5)
    file = configured(tmp_path, rounds=1)
    with pytest.raises(InputError, match=r"distill\.rate"):
        run(file, tmp_path / "diverged")
    monkeypatch.setattr(workers, "mixture_divergence", lambda *_: 0.01)
    loss = run(file, tmp_path / "noise")
    assert loss["fpld"] == loss["base"]  # the last student stays
    assert trace(tmp_path / "noise")[0]["gain"] == 0


def test_a_nodes_limit_lowers_its_bits(tmp_path: Path) -> None:
    file = configured(tmp_path, bits=3.0)
    text = file.read_text().replace("bits = 1.5", "context_bits = 400")
    weights = 100_000
    config = parse_config(text, "test")
    budget = update_budget(config, weights=weights, contexts=480, vocab=256)
    north, east, south = budget.bits(1).tolist()
    assert 480 * 400 / 8 - 1 <= weights * north / 8 <= 480 * 400 / 8
    assert east == south == payload_bits(weights, 3)
    tight = parse_config(text.replace("context_bits = 400", "context_bits = 100"), "test")
    with pytest.raises(BudgetError, match=r"nodes\[0\]\.context_bits"):
        update_budget(tight, weights=weights, contexts=480, vocab=256)


def test_a_total_is_shared_out_by_theorem_5(tmp_path: Path) -> None:
    weights = 100_000
    text = configured(tmp_path, bits=8.0).read_text().replace("bits = 1.5", "bits = 9.0\nweight = 16.0")
    text = text.replace("[send]", "[budget]\ntotal = 9.0\n[send]")
    budget = update_budget(parse_config(text, "test"), weights=weights, contexts=480, vocab=256)
    total = 9.0 * 256 * 480 / weights
    bits = budget.bits(1)
    assert bits.sum() == pytest.approx(total)
    # Half the logarithm of the weight is what a node has more than others: two bits.
    assert bits[0] - bits[1] == pytest.approx(2)
    assert bits[1] == bits[2]
    evenly = text.replace("total = 9.0", 'total = 9.0\nallocator = "uniform"')
    shares = update_budget(parse_config(evenly, "test"), weights=weights, contexts=480, vocab=256).bits(1)
    assert shares.tolist() == pytest.approx([total / 3] * 3)
    ample = parse_config(text.replace("total = 9.0", "total = 900.0"), "test")
    within = update_budget(ample, weights=weights, contexts=480, vocab=256)
    assert within.bits(1).tolist() == pytest.approx(within.caps.tolist())
    short = parse_config(text.replace("total = 9.0", "total = 1.0"), "test")
    with pytest.raises(BudgetError, match=r"budget\.total"):
        update_budget(short, weights=weights, contexts=480, vocab=256)


def test_preflight_compares_limits_with_the_model(tmp_path: Path) -> None:
    file = configured(tmp_path, student=TRANSFORMER)
    sound = parse_config(file.read_text(), "test")
    assert not [finding for finding in run_preflight(sound, local=True) if finding.wrong]
    tight = parse_config(file.read_text().replace("bits = 1.5", "context_bits = 1.0"), "test")
    wrong = [finding for finding in run_preflight(tight, local=True) if finding.wrong]
    assert [finding.key for finding in wrong] == ["send.updates"]
    assert "nodes[0].context_bits" in wrong[0].says


@pytest.mark.parametrize(
    ("old", "new", "key"),
    [
        ("updates = 2.0", "updates = 0.5", "send.updates"),
        ("updates = 2.0", "updates = 9", "send.updates"),
        ("updates = 2.0", "update = 2", "send.update: unknown key"),
        ("[send]", '[combine]\nbroadcast = "logits"\n[send]', "combine.broadcast"),
        ("[send]", '[combine]\nrule = "median"\n[send]', "combine.rule"),
        ("[send]", '[codec]\nname = "uniform"\n[send]', "codec.name"),
        ("[send]", '[codec]\nname = "uniform"\nagainst = "own"\n[send]', "codec.against"),
        ("[send]", '[budget]\nestimator = "distortion"\n[send]', "budget.estimator"),
        ("bits = 1.5", 'bits = 1.5\nstudent = {kind = "ngram", order = 1}', "nodes[0].student"),
        ("bits = 1.5", "bits = 1.5\nclip = 9.0", "nodes[0].clip"),
    ],
)
def test_what_does_not_go_together_is_refused_by_its_key(tmp_path: Path, old: str, new: str, key: str) -> None:
    text = configured(tmp_path).read_text()
    assert text.count(old) == 1
    with pytest.raises(InputError) as caught:
        parse_config(text.replace(old, new), "test")
    assert key in str(caught.value)


def test_a_configuration_without_updates_has_the_identity_it_had(tmp_path: Path) -> None:
    text = configured(tmp_path).read_text()
    config = parse_config(text.replace("updates = 2.0", ""), "test")
    assert config.update_bits is None
    assert config.written_contexts == 160
    labels = parse_config(text.replace("[send]\nupdates = 2.0\n", ""), "test")
    assert labels.send is None
    assert "send" not in labels.to_toml()
    again: Config = parse_config(parse_config(text, "test").to_toml(), "a copy")
    assert again == parse_config(text, "test")
    assert again.written_contexts == 0
    assert again.contexts_by_model == 160


def test_bits_shared_by_curvature_rebuild_a_model_that_is_nearer() -> None:
    rng = np.random.default_rng(3)
    base = Transformer(TransformerConfig(vocab=32, layers=1, width=16, heads=2, length=16, batch=16), seed=1)
    trained = base.copy()
    trained.finetune(rng.integers(0, 8, 4000), steps=60, seed=1)
    sequences = rng.integers(0, 8, (64, 16))
    update = {name: array - base.state()[name] for name, array in trained.state().items()}
    exact = trained.logits(sequences).reshape(-1, 32)

    def distance(weights: dict[str, float] | None, seed: int) -> float:
        data = encode_update(update, bits=2.5, seed=seed, weights=weights)
        received = decode_update(data, update, seed=seed)
        rebuilt = base.copy()
        rebuilt.load_state({name: array + received[name] for name, array in base.state().items()})
        return float(kl(exact, rebuilt.logits(sequences).reshape(-1, 32) - exact).mean())

    curvature = trained.curvature(sequences[:32])
    assert np.mean([distance(curvature, seed) for seed in range(4)]) < np.mean([distance(None, s) for s in range(4)])


def test_nodes_share_their_bits_by_curvature(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = Node.answer_update
    seen = []

    def noted(self: Node, *arguments: Any, curvature: dict[str, float], **options: Any) -> tuple[Node, bytes]:
        seen.append(curvature)
        return answer(self, *arguments, curvature=curvature, **options)

    monkeypatch.setattr(Node, "answer_update", noted)
    run(configured(tmp_path, student=TRANSFORMER, rounds=1), tmp_path / "run")
    assert len(seen) == len(NODES)
    assert all(value > 0 for curvature in seen for value in curvature.values())
