"""`fpld bench codecs`: columns, files, scenes from a file, bad input, and the package without its peers."""

from __future__ import annotations

import csv
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fpld
from benchmarks.peers import peers
from fpld import bench
from fpld.bench.scenes import gaussian, large, zipf
from fpld.cli import main
from fpld.codecs import encode
from fpld.codecs.samples.codec import SAMPLES
from fpld.numerics import softmax
from fpld.storage.arrays import write_arrays
from fpld.types import Plan
from tests.federation.conftest import CONFIG, write_texts

COLUMNS = ["scene", "codec", "bits", "context_bits", "bits_sent", "kl", "mse", "noise", "slope", "slope_se"]
COLUMNS += ["encode_ratio", "decode_ratio", "above_limit"]
OWN = {"float32", "predictive", "uniform", "uniform-clip"}


def scene_file(folder: Path, **arrays: np.ndarray[Any, Any]) -> Path:
    path = folder / "tiny.safetensors"
    rng = np.random.default_rng(0)
    write_arrays(path, {"logits": rng.normal(size=(3, 5, 40)).astype(np.float32), **arrays}, {})
    return path


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    assert main(["bench", "codecs", *arguments, "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    result = json.loads(captured.out)
    assert result["command"] == "bench codecs"
    rows: list[dict[str, Any]] = result["rows"]
    assert {row["codec"] for row in rows} > {"limit"}
    return [row for row in rows if row["codec"] != "limit"]


@pytest.mark.slow
def test_columns_budgets_and_files(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = scene_file(tmp_path, prior=np.zeros((5, 40), np.float32))
    arguments = "--logits", str(path), "--bits", "1,4,32", "--out", str(tmp_path / "out")
    rows = run_json(capsys, *arguments, "--peers", "benchmarks.peers")
    assert all(list(row) == COLUMNS for row in rows)
    assert {row["scene"] for row in rows} == {"tiny"}
    assert {row["codec"] for row in rows} >= {*OWN, "samples", "eden", "top-k"}
    assert all(row["context_bits"] == 40 * row["bits"] for row in rows)
    assert all(0 <= row["bits_sent"] <= row["bits"] for row in rows)
    assert all(row[name] > 0 for row in rows for name in ("encode_ratio", "decode_ratio"))
    exact = [row for row in rows if row["codec"] == "float32"]
    assert all(row["bits"] == 32 and row["kl"] < 1e-12 > row["noise"] for row in exact)
    assert all(row["slope"] == pytest.approx(1) for row in exact)
    with (tmp_path / "out/bench-codecs.csv").open() as file:
        table = list(csv.DictReader(file))
    assert [float(row["kl"]) for row in table if row["codec"] != "limit"] == [row["kl"] for row in rows]
    assert (tmp_path / "out/bench-codecs.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "out/bench-codecs.svg").read_text()


@pytest.mark.slow
def test_a_table_for_people_says_who_is_left_out(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = scene_file(tmp_path)
    assert main(["bench", "codecs", "--logits", str(path), "--bits", "4", "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "encode_ratio" in out
    assert "left out: float32 on tiny: 4 (bits must be at least 1280" in out


@pytest.mark.slow
def test_without_peers_the_package_lists_its_own(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    rows = run_json(capsys, "--logits", str(scene_file(tmp_path)), "--bits", "4,32", "--out", str(tmp_path))
    assert {row["codec"] for row in rows} == OWN


def test_the_package_imports_nothing_of_the_benchmarks() -> None:
    """Not even where they could be imported: an installed package has no such folder."""
    for path in Path(fpld.__file__).parent.rglob("*.py"):
        assert not re.search(r"^\s*(import|from) benchmarks|import_module\(.benchmarks", path.read_text(), re.MULTILINE)


def test_without_matplotlib_the_table_is_still_written(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert run_json(capsys, "--logits", str(scene_file(tmp_path)), "--bits", "4", "--out", str(tmp_path))
    assert (tmp_path / "bench-codecs.csv").exists()
    assert not (tmp_path / "bench-codecs.png").exists()


@pytest.mark.slow
def test_the_same_seed_gives_the_same_numbers(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    def numbers(seed: int) -> list[tuple[float, float]]:
        arguments = ["--logits", str(path), "--bits", "3", "--out", str(tmp_path), "--seed", str(seed)]
        return [(row["kl"], row["mse"]) for row in run_json(capsys, *arguments)]

    path = scene_file(tmp_path)
    assert numbers(1) == numbers(1) != numbers(2)


def test_the_limit_is_that_of_gaussian_residuals() -> None:
    """Flat weights and unit variance: KL = 2^(-2 R) V w / (2 K), and no codec of one node is below it."""
    scene = gaussian(0, contexts=100)
    one = bench.LogitScene("one", scene.logits[:1])
    limit = bench.RateLimit(one)
    assert limit.kl(3.0) == pytest.approx(limit.kl(2.0) / 4, rel=0.05)
    assert limit.bits(limit.kl(0.7)) == pytest.approx(0.7)
    rows, _ = bench.compare_codecs(one, bench.scene_contenders(one, peers), [2.0, 4.0], 0, lambda: None)
    assert all(row["above_limit"] >= 0 for row in rows)


@pytest.mark.slow
def test_predictive_is_ahead_of_all_others_on_a_small_scene_of_each_kind() -> None:
    """The whole scenes are in docs/results.md."""
    for scene in (gaussian(1, contexts=64), zipf(1, contexts=4, vocab=4000), zipf(1, contexts=4, vocab=4000, factor=2)):
        rows, _ = bench.compare_codecs(scene, bench.scene_contenders(scene, peers), [0.1, 1.0, 4.0], 0, lambda: None)
        for bits in (0.1, 1.0, 4.0):
            kl = {row["codec"]: row["kl"] for row in rows if row["bits"] == bits and row["codec"] != "limit"}
            assert min(kl, key=lambda name: kl[name]) == "predictive"


@pytest.mark.parametrize(("stratified", "fewer"), [(False, 4), (True, 16)])
def test_kl_is_half_the_variance_of_the_mean_on_the_gaussian_scene(stratified: bool, fewer: int) -> None:
    """The second-order law binds kl, mse and step^2 / 12: over K, or over K^2 where the dither is stratified."""
    scene = gaussian(0, contexts=100)
    uniform = [item for item in bench.scene_contenders(scene) if item.name == "uniform-clip"]
    uniform = [replace(item, stratified=stratified) for item in uniform]
    (row, _), left = bench.compare_codecs(scene, uniform, [4.0], 0, lambda: None)
    step = 2 * np.abs(scene.logits).max() / 15
    assert not left
    assert row["mse"] == pytest.approx(step**2 / 12 / fewer, rel=0.05)
    assert row["kl"] == pytest.approx(row["mse"] / 2, rel=0.1)


def test_scenes_are_what_they_say() -> None:
    small, doubled = (zipf(0, contexts=3, vocab=500, factor=factor) for factor in (1.0, 2.0))
    assert small.logits.shape == (4, 3, 500)
    assert np.allclose(doubled.logits, 2 * small.logits)
    assert (small.logits[0] == small.logits[3]).all()
    assert set(bench.SYNTHETIC) == {"gaussian", "zipf", "zipf-peaked", "large"}
    assert set(bench.SCENES) == {*bench.SYNTHETIC, "students-1", "students-3"}


def test_the_large_scene_is_as_far_from_its_prior_as_real_nodes() -> None:
    scene = large(0)
    assert scene.shape == (64, 49_152)
    assert scene.prior is not None
    p = softmax(scene.logits[0])
    prior = softmax(scene.prior)
    assert 0.5 * np.abs(p - prior).sum(axis=1).mean() == pytest.approx(0.36, abs=0.03)
    assert 0.3 < (p * np.log(p / prior)).sum(axis=1).mean() < 0.5


def labelled(codec: str, **changes: Any) -> dict[str, Any]:
    scene = large(3, contexts=100, vocab=1000)
    listed = [replace(item, **changes) for item in bench.scene_contenders(scene) if item.name == codec]
    return bench.compare_codecs(scene, listed, [0.03], 0, lambda: None)[0][0]


def test_sampled_labels_are_unbiased_and_coding_with_a_dead_zone_is_not() -> None:
    """30 bits per context. Beyond 4.5 standard errors: a false alarm in 150,000."""
    sampled = labelled("samples")
    predicted = labelled("predictive")
    assert abs(sampled["slope"] - 1) < 4.5 * sampled["slope_se"] < 0.1
    assert predicted["slope"] < 1 - 4.5 * predicted["slope_se"]


def test_the_noise_of_the_mean_target_is_what_the_labels_report() -> None:
    """Independent draws: the sum over nodes of the noise in their heads, over K^2.

    Of 100 contexts the sum of squares scatters by 4 %, as repeated draws show: a false alarm is beyond five of that.
    """
    scene = large(3, contexts=100, vocab=1000)
    (item,) = (item for item in bench.scene_contenders(scene) if item.name == "samples")
    plan: dict[str, Any] = {
        "run_key": bytes(16),
        "round": 1,
        "probe": bytes(32),
        "contexts": 100,
        "vocab": 1000,
        "bits": 30.0,
    }
    noise = 0.0
    for node, logits in enumerate(scene.logits):
        own = Plan(**plan, node=node, **item.fields)
        noise += sum(part.noise for part in SAMPLES.reader(encode(SAMPLES, logits, own), own).sparse()) / 100
    independent = labelled("samples", stratified=False)
    stratified = labelled("samples")
    assert independent["noise"] == pytest.approx(noise / scene.nodes**2, rel=0.2)
    assert stratified["noise"] < 0.9 * independent["noise"]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) for name in ("gaussian", "zipf", "zipf-peaked")]
)
def test_the_kept_table_is_what_is_measured(name: str) -> None:
    kept = json.loads((Path(__file__).parents[2] / "docs/results/codecs.json").read_text())["rows"]
    scene = bench.SCENES[name](0)
    listed = bench.scene_contenders(scene, peers)
    names = {item.name for item in listed}  # the kept file has a codec more, which was removed
    kept_kl = {(row["codec"], row["bits"]): row["kl"] for row in kept if row["scene"] == name and row["codec"] in names}
    listed = [item for item in listed if item.name in {codec for codec, _ in kept_kl}]
    some = {"gaussian": {bits for _, bits in kept_kl}, "zipf": {1, 2}, "zipf-peaked": {1}}
    budgets = sorted({bits for _, bits in kept_kl} & some[name])
    rows, left = bench.compare_codecs(scene, listed, budgets, 0, lambda: None)
    assert {(item.codec, item.bits) for item in left} == {
        key for key, kl in kept_kl.items() if kl is None and key[1] in budgets
    }
    for row in (row for row in rows if row["codec"] != "limit"):
        assert row["kl"] == pytest.approx(kept_kl[row["codec"], row["bits"]], rel=0.06)


def broken(kind: str) -> dict[str, np.ndarray[Any, Any]]:
    logits = np.zeros((2, 3, 4), np.float32)
    logits[1, 2, 3] = np.nan
    found: dict[str, dict[str, np.ndarray[Any, Any]]] = {
        "nan": {"logits": logits},
        "flat": {"logits": np.zeros((3, 4), np.float32)},
        "whole": {"logits": np.zeros((2, 3, 4), np.int64)},
        "empty": {"logits": np.zeros((2, 0, 4), np.float32)},
        "large": {"logits": np.full((2, 3, 4), 1e300)},
        "prior": {"prior": np.zeros((5, 39), np.float32)},
    }
    return found[kind]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("nan", "logits must be finite in float32, got nan at node 1, context 2, token 3"),
        ("flat", "logits must have the axes [node, context, token], got shape (3, 4)"),
        ("whole", "logits must be floating-point"),
        ("empty", "logits must hold a node, a context and two tokens at least"),
        ("large", "logits must be finite in float32, got 1e+300 at node 0"),
        ("prior", "prior must have shape (contexts, vocab) = (5, 40), got (5, 39)"),
    ],
)
def test_bad_files_are_one_clear_line(
    kind: str, message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = scene_file(tmp_path, **broken(kind))
    assert main(["bench", "codecs", "--logits", str(path), "--out", str(tmp_path)]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--logits", "no/such/file.safetensors"], "no/such/file.safetensors"),
        (["--logits", __file__], "safetensors"),
        (["--scene", "moon"], "gaussian"),
        (["--bits", "0"], "--bits must be greater than 0"),
        (["--bits", "nan"], "--bits must be finite"),
        (["--context-bits", "-3"], "--context-bits must be greater than 0"),
        (["--bits", "two"], "numbers with commas"),
        (["--scene", "gaussian", "--bits", "0.001"], "no codec meets a budget of 0.001"),
        (["--seed", "-1"], "--seed"),
        (
            ["--peers", "no.such.module"],
            "--peers must name a module with a function peers(nodes), got 'no.such.module'",
        ),
        (["--peers", "json"], "--peers must name a module with a function peers(nodes), got 'json'"),
        (["--out", "/dev/null/folder"], "--out: cannot write"),
    ],
)
def test_bad_arguments_are_one_clear_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    try:
        code = main(["bench", "codecs", "--out", str(tmp_path), *arguments])
    except SystemExit as stop:
        code = int(str(stop.code))
    captured = capsys.readouterr()
    assert code == 2
    assert message in captured.err
    assert captured.out == ""


def test_speed_gives_a_ratio_for_every_operation(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    command = ["bench", "speed", "--json", "--contexts", "4", "--vocab", "500", "--nodes", "3", "--repeat", "1"]
    assert main([*command, "--bits", "0.5,2,32", "--out", str(tmp_path)]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert list(rows[0]) == ["codec", "bits", "context_bits", "operation", "ratio", "nanoseconds"]
    assert all(row["context_bits"] == 500 * row["bits"] for row in rows)
    found = {(row["codec"], row["bits"], row["operation"]) for row in rows}
    assert {("uniform", 2.0, name) for name in ("encode", "decode + add", "round")} <= found
    assert {("predictive", 0.5, "round"), ("float32", 32.0, "round"), ("uniform (numpy)", 2.0, "encode")} <= found
    assert ("uniform", 0.5, "encode") not in found  # below its least budget
    assert all(row["ratio"] > 0 for row in rows)
    assert (tmp_path / "bench-speed.csv").exists()
    assert main([*command, "--context-bits", "100", "--codec", "samples", "uniform", "--out", str(tmp_path)]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    found = {(row["codec"], row["context_bits"], row["operation"]) for row in rows}
    assert found == {("samples", 100.0, name) for name in ("encode", "decode + add", "round")}
    assert main(["bench", "speed", "--codec", "unknown"]) == 2
    assert "--codec must be of" in capsys.readouterr().err


def test_training_gives_a_ratio_for_every_job(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "small.toml"
    text = (Path(__file__).parents[2] / "experiments" / "demo.toml").read_text()
    path.write_text(text.replace("width = 192", "width = 32"))
    command = ["bench", "training", "--json", "--config", str(path), "--steps", "2", "--repeat", "1"]
    assert main([*command, "--out", str(tmp_path)]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["job"] for row in rows] == ["training", "labelling", "distillation"]
    assert list(rows[0]) == ["job", "tokens_per_second", "bare_tokens_per_second", "ratio"]
    assert all(0 < row["ratio"] < 100 and row["tokens_per_second"] > 0 for row in rows)
    assert (tmp_path / "bench-training.csv").exists()
    assert main(["bench", "training", "--steps", "0"]) == 2
    assert "--steps" in capsys.readouterr().err


def test_training_is_for_students_in_pytorch(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["bench", "training", "--config", "tiny", "--out", str(tmp_path)]) == 2
    assert "student.kind must be in PyTorch" in capsys.readouterr().err


def test_training_takes_models_and_text_of_a_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    write_texts(tmp_path)
    student = '[student]\nkind = "transformer"\nlayers = 1\nwidth = 16\nheads = 2\nlength = 16\nbatch = 4\n\n'
    text = CONFIG.format(folder=tmp_path)
    text = re.sub(r"\[student\].*?\n\n", student, text, flags=re.DOTALL)
    text += "\n[baselines]\nmethods = []\n"
    file = tmp_path / "config.toml"
    file.write_text(re.sub(r"rounds = \d+", "rounds = 1", text))
    assert main(["run", str(file), "--out", str(tmp_path / "run"), "--json"]) == 0
    command = ["bench", "training", "--json", "--config", str(tmp_path / "run"), "--steps", "2", "--repeat", "1"]
    capsys.readouterr()
    assert main([*command, "--out", str(tmp_path)]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["job"] for row in rows] == ["training", "labelling", "distillation"]
    (tmp_path / "run/fpld/nodes/0/own.safetensors").unlink()
    assert main([*command, "--out", str(tmp_path)]) == 2
    assert "must be the folder of a finished run" in capsys.readouterr().err
