"""The allocator and the estimator of docs/extending.md: short, used as written, inside a real `fpld run`."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from fpld import registry
from fpld.cli import main
from tests.federation.conftest import config_file

__all__ = ["config_file"]

PAGE = Path(__file__).parent.parent.parent / "docs/extending.md"


@pytest.fixture(autouse=True)
def extended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the page's blocks of these two, in tables that the next test finds as they were."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    for table in (registry.allocators, registry.estimators):
        monkeypatch.setattr(table, "_loaded", dict(table._loaded))
        (code,) = [block for block in blocks if f"registry.{table.kind}s.register" in block]
        assert len(code.splitlines()) < 40
        exec(compile(code, str(PAGE), "exec"), {})  # noqa: S102


@pytest.mark.parametrize(
    ("caps", "floors", "expected"),
    [
        (None, None, [100.0, 200.0]),
        ([400.0, 400.0], [0.0, 0.0], [100.0, 200.0]),
        ([400.0, 150.0], [0.0, 0.0], [150.0, 150.0]),
        ([400.0, 400.0], [120.0, 0.0], [120.0, 180.0]),
    ],
)
def test_the_allocator_shares_out_within_caps_and_floors(
    caps: list[float] | None, floors: list[float] | None, expected: list[float]
) -> None:
    bits = registry.allocators.get("roots")([1.0, 4.0], 300.0, 8, caps, floors)
    assert bits == pytest.approx(expected)


def test_the_command_takes_it(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--weights", "1,4", "--total", "300", "--vocab", "8", "--caps", "400", "--policy", "roots"]
    assert main(["allocate", *arguments, "--json"]) == 0
    assert [row["bits"] for row in json.loads(capsys.readouterr().out)["rows"]] == pytest.approx([100.0, 200.0])


def run(file: Path, folder: Path, budget: str, capsys: pytest.CaptureFixture[str]) -> list[dict[str, list[float]]]:
    text = file.read_text().replace("bits = 1.5", "bits = 4.0\nweight = 4.0").replace("rounds = 3", "rounds = 2")
    file.write_text(f"{text}\n[baselines]\nmethods = []\n\n[budget]\ntotal = 4.0\n{budget}\n")
    assert main(["run", str(file), "--out", str(folder), "--json"]) == 0
    capsys.readouterr()
    return [json.loads(line) for line in (folder / "trace.jsonl").read_text().splitlines()]


def test_a_run_uses_the_allocator_as_written(
    config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = run(config_file, tmp_path / "run", 'allocator = "roots"', capsys)
    for line in lines:
        assert line["bits_allotted"] == pytest.approx([2.0, 1.0, 1.0])


def test_a_run_follows_the_estimator(config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = run(config_file, tmp_path / "run", 'allocator = "roots"\nestimator = "disagreement"\nwarmup = 1', capsys)
    assert lines[0]["bits_allotted"] == pytest.approx([4 / 3] * 3)
    roots = np.sqrt(lines[0]["weights"])
    assert lines[1]["bits_allotted"] == pytest.approx(4.0 * roots / roots.sum())
    assert np.ptp(roots) > 0
