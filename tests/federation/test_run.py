"""`fpld run` as its users call it: the table, the folder, resuming, bad input."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from fpld import students
from fpld.cli import main
from fpld.report.tables import gap_closed

if TYPE_CHECKING:
    from pathlib import Path


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> list[dict[str, Any]]:
    assert main(["run", *map(str, arguments), "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    rows: list[dict[str, Any]] = json.loads(captured.out)["rows"]
    return rows


def edited(file: Path, *changes: tuple[str, str]) -> Path:
    text = file.read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    other = file.with_name(f"config-{len(list(file.parent.iterdir()))}.toml")
    other.write_text(text)
    return other


PREDICTIVE = '[codec]\nname = "predictive"\n\n'


def trace(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "trace.jsonl").read_text().splitlines()]


def test_the_student_beats_every_node_alone_and_every_byte_is_counted(
    config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    rows = run_json(capsys, edited(config_file, ("[engine]", f"{PREDICTIVE}[engine]")), "--out", out)
    loss = {row["method"]: row["heldout_loss"] for row in rows}
    assert set(loss) == {
        "base", "alone: north", "alone: east", "alone: south", "pooled", "fedavg", "float32 logits", "fpld",
    }  # fmt: skip
    assert loss["fpld"] < min(value for name, value in loss.items() if name.startswith("alone"))
    assert gap_closed(rows) is None  # no training on all text with the steps of all nodes
    closed = gap_closed([*rows, {"method": "pooled-all", "heldout_loss": loss["pooled"]}])
    assert closed is not None
    assert closed > 0.25  # toy texts whose probe lacks most words: the demonstration is measured on real ones
    lines = trace(out)
    assert [line["round"] for line in lines] == [1, 2, 3]
    uplink = {row["method"]: row["uplink_bytes"] for row in rows}
    # The frames that the nodes stored are what was sent: 3 rounds, 3 nodes, header and checksum counted.
    assert uplink["fpld"] == sum(line["payload_bytes"] + line["overhead_bytes"] for line in lines)
    allowed = 3 * (sum(int(480 * 256 * bits) // 8 for bits in (1.5, 4.0, 4.0)) + 3 * 136)
    assert 0.99 * allowed < uplink["fpld"] <= allowed
    assert uplink["float32 logits"] == 9 * (4 * 480 * 256 + 136)
    assert uplink["fedavg"] == 9 * 4 * students.load(out / "student.safetensors").parameters
    for line in lines:
        # Within one per cent, though an n-gram model's logits tie.
        assert line["bits_sent"] == pytest.approx(line["bits_allotted"], rel=1e-2)
        assert 0 < line["bandwidth_lower"] < line["bandwidth_upper"]
        assert line["kl"] > 0
    assert {"config.toml", "versions.json", "result.json", "student.safetensors", "tokenizer.json", "probe.json"} <= {
        file.name for file in out.iterdir()
    }
    assert json.loads((out / "result.json").read_text()) == rows


def test_sampled_labels_by_default(config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    rows = run_json(
        capsys, edited(config_file, ("[engine]", '[baselines]\nmethods = ["alone"]\n\n[engine]')), "--out", out
    )
    loss = {row["method"]: row["heldout_loss"] for row in rows}
    assert loss["fpld"] < min(value for name, value in loss.items() if name.startswith("alone"))
    for line in trace(out):
        # An n-gram model's chances tie, and with them the lengths of neighbouring steps jump: two steps fill the gap.
        for sent, allotted in zip(line["bits_sent"], line["bits_allotted"], strict=True):
            assert 0.99 * allotted < sent <= allotted
        assert line["kl"] is line["bandwidth_lower"] is line["bandwidth_upper"] is None  # of dense labels only
        assert line["gain"] > 0


@pytest.mark.slow
def test_the_same_configuration_gives_the_same_bits_with_processes_and_without(
    config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quick = ("[engine]", '[baselines]\nmethods = ["alone"]\n\n[engine]')
    inline = edited(config_file, quick)
    processes = edited(config_file, quick, ("workers = 0", "workers = 2"))
    run_json(capsys, inline, "--out", tmp_path / "one")
    run_json(capsys, processes, "--out", tmp_path / "two")
    assert (tmp_path / "one/student.safetensors").read_bytes() == (tmp_path / "two/student.safetensors").read_bytes()
    for one, two in zip(trace(tmp_path / "one"), trace(tmp_path / "two"), strict=True):
        assert {**one, "seconds": None} == {**two, "seconds": None}


@pytest.mark.slow
def test_another_seed_gives_another_run(config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few = edited(config_file, ("[engine]", "[baselines]\nmethods = []\n\n[engine]"), ("rounds = 3", "rounds = 1"))
    for seed in ("1", "2"):
        run_json(capsys, few, "--out", tmp_path / seed, "--seed", seed)
    assert (tmp_path / "1/student.safetensors").read_bytes() != (tmp_path / "2/student.safetensors").read_bytes()


VARIANTS = {
    "adaptive": [
        ("bits = 1.5", "bits = 6.0\nclip = 4.0"),
        ("bits = 4.0", "bits = 6.0\nclip = 12.0"),
        ("[engine]", '[codec]\nname = "uniform"\n\n[budget]\ntotal = 9.0\nestimator = "distortion"\n\n[engine]'),
    ],
    "curves": [
        ("bits = 1.5", "bits = 4.0"),
        ("[engine]", '[budget]\ntotal = 3.0\nestimator = "curves"\n\n[engine]'),
    ],
    # Refinement pays where models move little between rounds, and with three levels or more: two do not contract.
    "refinement": [
        ("bits = 1.5", "bits = 4.0"),
        ("[engine]", '[codec]\nname = "uniform"\nagainst = "own"\n\n[engine]'),
        ("steps = 25", "steps = 5\nrate = 0.05"),
        ("steps = 60", "steps = 60\nrate = 0.05"),
    ],
    "mean": [("[engine]", '[combine]\nrule = "mean"\n\n[engine]')],
    "uplink": [("bits = 1.5", 'uplink = "4 kbit/s"'), ("[engine]", "[budget]\ndeadline = 60\n\n[engine]")],
    "own models": [
        (
            'name = "south"\nbits = 4.0',
            'name = "south"\nbits = 4.0\n[nodes.student]\nkind = "ngram"\norder = 1\nbuckets = 512',
        ),
        ("[engine]", '[combine]\nbroadcast = "logits"\n\n[engine]'),
    ],
    "iid": [("heldout = 0.25", 'heldout = 0.25\nsplit = "iid"')],
    "dirichlet": [("heldout = 0.25", 'heldout = 0.25\nsplit = "dirichlet"\nalpha = 2.0')],
}


@pytest.mark.parametrize(
    "variant", [pytest.param(name, marks=[pytest.mark.slow] * (name != "curves")) for name in VARIANTS]
)
def test_variants_are_assemblies_of_the_same_pieces(
    variant: str, config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = edited(config_file, *VARIANTS[variant], ("[engine]", "[baselines]\nmethods = []\n\n[engine]"))
    rows = run_json(capsys, file, "--out", tmp_path / "run")
    loss = {row["method"]: row["heldout_loss"] for row in rows}
    assert loss["fpld"] < loss["base"]
    lines = trace(tmp_path / "run")
    if variant == "adaptive":
        assert lines[0]["bits_allotted"] == pytest.approx([3.0, 3.0, 3.0])
        assert lines[1]["bits_allotted"][0] < 2.2 < 3.2 < lines[1]["bits_allotted"][1]
        assert lines[2]["weights"] is not None
    if variant == "curves":  # a weight of every node, and all of the total given out by its loss curve
        assert lines[0]["bits_allotted"] == pytest.approx([1.0, 1.0, 1.0])
        assert np.shape(lines[0]["weights"]) == (3,)
        assert sum(lines[1]["bits_allotted"]) == pytest.approx(3.0)
        assert lines[1]["bits_allotted"] != pytest.approx([1.0, 1.0, 1.0], rel=1e-3)
    if variant == "refinement":
        assert lines[2]["bandwidth_upper"] < lines[0]["bandwidth_upper"] / 4
    if variant == "uplink":
        assert lines[0]["bits_allotted"][0] == pytest.approx((4000 * 60 - 8 * 136) / 480 / 256)


@pytest.mark.slow
def test_resume_goes_on_and_a_finished_run_stays(
    config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    rows = run_json(capsys, config_file, "--out", out)
    before = (out / "student.safetensors").read_bytes()
    assert run_json(capsys, config_file, "--out", out, "--resume") == rows
    assert (out / "student.safetensors").read_bytes() == before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ([("rounds = 3", "rounds = 0")], "run.rounds: Input should be greater than or equal to 1, got 0"),
        ([("rounds = 3", "round = 3")], "run.round: unknown key"),
        ([("contexts = 480", "contexts = 9999999")], "fewer than probe.contexts = 9,999,999: give m"),
        (
            [("bits = 1.5", "bits = 0.005")],
            "'north' may send 1.28 bits per context a round, the codec 'samples' needs",
        ),
        ([("bits = 1.5", "")], "nodes[0]: needs one of bits, context_bits and uplink"),
        ([("bits = 1.5", 'uplink = "9 parsec"')], "nodes[0].uplink: must be a rate such as '64 kbit/s'"),
        ([('name = "north"', 'name = "../north"')], "nodes[0].name"),
        ([('name = "north"', 'name = "east"')], "nodes: names must differ"),
        ([('name = "north"', 'name = "west"')], "node 'west' has no documents: the labels are"),
        ([('kind = "ngram"', 'kind = "oracle"')], "student.kind: student kind must be one of huggingface"),
        ([("order = 2", "depth = 2")], "student.depth: unknown key: a student of kind 'ngram' has"),
        ([("order = 2", 'order = "two"')], "student.order: Input should be a valid integer, got 'two'"),
        ([("order = 2", "order = 0")], "student.order: must be an integer of at least 1, got 0"),
        ([('source = "public"', 'source = "nowhere"')], "/nowhere'"),
        ([("[engine]", "[budget]\ntotal = 90.0\n\n[engine]")], "the sum of the caps"),
        (
            [("[engine]", '[combine]\nrule = "wish"\n\n[engine]')],
            "combine.rule: rule must be one of fitted, geometric, guarded, mean, median",
        ),
        ([("rounds = 3", "rounds = 3\nquorum = 4")], "run.quorum must be at most the number of nodes, 3"),
        ([("rounds = 3", "rounds = ")], "must be TOML"),
    ],
)
def test_bad_configurations_are_one_line_that_names_the_key(
    changes: list[tuple[str, str]],
    message: str,
    config_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["run", str(edited(config_file, *changes)), "--out", str(tmp_path / "run")]) == 2
    error = [line for line in capsys.readouterr().err.splitlines() if "error:" in line]
    assert len(error) == 1
    assert message in error[0]


def test_short_texts_are_named(config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for file in (tmp_path / "texts/east").iterdir():
        file.write_text("sun")
    assert main(["run", str(config_file), "--out", str(tmp_path / "run")]) == 2
    assert re.search(r"nodes\[1\].name: its held-out text has \d+ bytes", capsys.readouterr().err)


def test_folders_in_use_or_of_another_run_are_refused(
    config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    few = edited(config_file, ("[engine]", "[baselines]\nmethods = []\n\n[engine]"), ("rounds = 3", "rounds = 1"))
    assert main(["run", str(few), "--out", str(out), "--resume"]) == 2
    assert "no run to resume" in capsys.readouterr().err
    run_json(capsys, few, "--out", out)
    assert main(["run", str(few), "--out", str(out)]) == 2
    assert "holds a run already" in capsys.readouterr().err
    assert main(["run", str(config_file), "--out", str(out), "--resume"]) == 2
    assert "another configuration" in capsys.readouterr().err
    from fpld.storage.run_folder import RunFolder

    with RunFolder(out).lock():
        assert main(["run", str(few), "--out", str(out), "--resume"]) == 2
    assert "in use by another run" in capsys.readouterr().err
    assert main(["run", str(tmp_path / "none.toml")]) == 2
    assert "one of the presets" in capsys.readouterr().err


def test_a_diverging_student_is_not_broadcast(
    config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wild = edited(config_file, ("[distill]\nsteps = 60", "[distill]\nsteps = 60\nrate = 1e30"))
    assert main(["run", str(wild), "--out", str(tmp_path / "run")]) == 2
    assert "diverged" in capsys.readouterr().err
    assert not (tmp_path / "run/student.safetensors").exists()


def test_the_tokens_of_nodes_are_their_own(
    config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = edited(config_file, ("[engine]", "[baselines]\nmethods = []\n\n[engine]"), ("rounds = 3", "rounds = 1"))
    run_json(capsys, few, "--out", tmp_path / "run")
    from fpld.storage.arrays import read_arrays

    for index, word in enumerate(("wolf", "camel", "parrot")):
        text = bytes(
            read_arrays(tmp_path / f"run/private/text/{index}.safetensors")[0]["tokens"].astype(np.uint8)
        ).decode()
        assert word in text
        assert sum(other in text for other in ("wolf", "camel", "parrot")) == 1
