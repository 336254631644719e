"""Base models: one for each way to make one, and a model that is taught by the aggregator's comes near to it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pytest

from fpld import config as configuration
from fpld.cli import main
from fpld.engines.local import run_local
from fpld.federation.prepare import MAX_TAUGHT_CONTEXTS, read_use, windows
from fpld.node.spec import BaseSpec, base_file, node_specs
from fpld.numerics import kl
from fpld.report.model_card import model_card
from fpld.report.run import read_run_data
from fpld.storage.run_folder import RunFolder
from fpld.students import load, read_state
from fpld.students.devices import available_devices

if TYPE_CHECKING:
    from pathlib import Path

    from fpld.config import Config

OWN = 'student = {kind = "ngram", order = 2, buckets = 512, batch = 128}'


def changed(text: str, **additions: str) -> Config:
    for node, more in additions.items():
        text = text.replace(f'name = "{node}"', f'name = "{node}"\n{more}')
    return configuration.parse_config(f'{text}\n[baselines]\nmethods = ["alone"]\n', "t")


def test_nodes_share_a_base_model_where_all_of_it_is_the_same(config_file: Path) -> None:
    config = changed(config_file.read_text(), east=OWN, south=f"{OWN}\neffort = 2.0")
    assert [base_file(config, index) for index in (None, 0, 1, 2)] == [
        f"base-{number}.safetensors" for number in (0, 0, 1, 2)
    ]
    assert BaseSpec.of(config, 2).effort == 2
    assert [part.local.steps for part in node_specs(config)] == [25, 25, 50]


@pytest.mark.slow
def test_a_taught_model_predicts_what_its_teacher_does(config_file: Path, tmp_path: Path) -> None:
    text = config_file.read_text()
    config = changed(
        text.replace("rounds = 3", "rounds = 1").replace("[base]\nsteps = 20", "[base]\nsteps = 60"),
        east=f"{OWN}\neffort = 6.0",
        south=f"{OWN}\neffort = 6.0\ntaught = true",
    )
    rows = run_local(config, text, tmp_path / "out", resume=False)
    assert {"own: east", "own: south"} <= {row["method"] for row in rows}
    public = RunFolder(tmp_path / "out").read_arrays("public.safetensors")[0]["tokens"]
    teacher, alone, taught = (load(tmp_path / "out" / base_file(config, index)) for index in (None, 1, 2))
    sequences = windows(public, 16, seed=1)[:200]
    logits = teacher.logits(sequences)
    far, near = (float(kl(logits, other.logits(sequences) - logits).mean()) for other in (alone, taught))
    assert near < 0.5 * far


def test_windows_are_pieces_of_the_text_and_bounded() -> None:
    tokens = np.arange(3 * MAX_TAUGHT_CONTEXTS, dtype=np.int32)
    pieces = windows(tokens, 64, seed=0)
    assert pieces.shape == (MAX_TAUGHT_CONTEXTS // 64, 64)
    assert (np.diff(pieces, axis=1) == 1).all()
    assert windows(tokens[:64], 64, seed=0).tolist() == [list(range(64))]


LIMITED = [("heldout = 0.25", "heldout = 0.25\nlimit = 4000"), ("length = 16", "length = 16\nlimit = 5000")]


def limited_run(config_file: Path, out: Path, *changes: tuple[str, str]) -> list[str]:
    text = config_file.read_text() + "\n[baselines]\nmethods = []\n"
    for old, new in (("rounds = 3", "rounds = 1"), *changes):
        text = text.replace(old, new)
    config_file.write_text(text)
    assert main(["run", str(config_file), "--out", str(out)]) == 0
    return [use.left_out for use in read_use(RunFolder(out)) if use.left_out]


def test_without_a_limit_all_text_is_used(config_file: Path, tmp_path: Path) -> None:
    # A text that is above what a default limit of some MB would leave of it.
    large = tmp_path / "texts" / "north" / "large.txt"
    large.write_text("snow and ice in the north wind\n\n" * 150_000)
    assert limited_run(config_file, tmp_path / "out") == []
    size = sum(file.stat().st_size for file in (tmp_path / "texts" / "north").iterdir())
    use = {use.name: use for use in read_use(RunFolder(tmp_path / "out"))}["north"]
    assert use.bytes == use.used == size
    tokens = RunFolder(tmp_path / "out").read_arrays("private/text/0.safetensors")[0]["tokens"]
    assert len(tokens) >= use.used - use.heldout
    # The large document is split: it is on both sides, and the share is as asked.
    assert 0.25 <= use.heldout / use.used < 0.26


def test_what_a_limit_leaves_out_is_said_everywhere(
    config_file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    with caplog.at_level("WARNING", "fpld"):
        left_out = limited_run(config_file, out, *LIMITED)
    assert [line.partition(":")[0] for line in left_out] == ["public text", "north", "east", "south"]
    assert all(use.used <= (5000 if use.name == "public text" else 4000) for use in read_use(RunFolder(out)))
    assert "(probe.limit)" in left_out[0]
    assert all("(data.limit)" in line for line in left_out[1:])
    capsys.readouterr()
    assert main(["check", str(config_file), "--json"]) == 0
    checked = capsys.readouterr().out
    assert main(["report", str(out)]) == 0
    places = {
        "check": checked,
        "log": caplog.text,
        "result.json": (out / "result.json").read_text(),
        "report": (out / "report" / "report.html").read_text(),
        "model card": data_table(out),
    }
    missing = [(place, line) for place, text in places.items() for line in left_out if line not in text]
    assert missing == []


def data_table(out: Path) -> str:
    run = read_run_data(out)
    return model_card(run, {}, licence=None, adapter=False)


def test_the_device_that_is_found_computes_the_same_bits_as_the_one_that_is_named(
    config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By default the device is `auto`; where there is no GPU, that is the CPU to the last bit."""
    if available_devices() != ["cpu"]:
        pytest.skip("a GPU is there: auto is not the CPU")
    student = 'kind = "transformer"\nwidth = 16\nheads = 2\nlayers = 1\nlength = 16\nbatch = 4'
    text = config_file.read_text().replace('kind = "ngram"\norder = 2\nbuckets = 256\nbatch = 128', student)
    text = text.replace("rounds = 3", "rounds = 2") + "\n[baselines]\nmethods = []\n"
    outcomes = {}
    for name, more in (("none", ""), ("engine", 'device = "auto"'), ("cpu", 'device = "cpu"')):
        config_file.write_text(text.replace("workers = 0", f"workers = 0\n{more}"))
        out = tmp_path / name
        assert main(["run", str(config_file), "--out", str(out)]) == 0
        records = [json.loads(line) for line in (out / "trace.jsonl").read_text().splitlines()]
        untimed = [{key: value for key, value in record.items() if key != "seconds"} for record in records]
        state = {key: value.tobytes() for key, value in read_state(out / "student.safetensors").items()}
        outcomes[name] = (untimed, state)
    assert outcomes["none"] == outcomes["engine"] == outcomes["cpu"]
    capsys.readouterr()
    assert main(["check", str(config_file), "--json"]) == 0
    rows = {row["key"]: row["says"] for row in json.loads(capsys.readouterr().out)["rows"]}
    assert "on cpu" in rows["engine.device"]
