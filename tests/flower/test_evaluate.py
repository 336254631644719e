"""A site sees what it got: the student beside its own models, on its own text."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest

from fpld.cli import main
from tests.flower.conftest import Deployment

if TYPE_CHECKING:
    from pathlib import Path


def rows(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, dict[str, Any]]:
    assert main([*map(str, arguments), "--json"]) == 0
    return {row["model"]: row for row in json.loads(capsys.readouterr().out)["rows"]}


@pytest.mark.slow
def test_a_node_evaluates_the_student_beside_its_own_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    deployment = Deployment(tmp_path, [("rounds = 3", "rounds = 2")])
    home = deployment.node_files[0].parent
    assert main(["evaluate", str(home)]) == 2
    assert "has got no student yet" in capsys.readouterr().err
    file = deployment.node_files[0]
    file.write_text("show_own_loss = true\n" + file.read_text())
    deployment.serve(deployment.grid())
    found = rows(capsys, "evaluate", home)
    assert list(found) == ["student", "own", "alone", "base"]
    last = deployment.trace()[-1]["heldout_by_node"][0]
    assert found["student"]["loss"] == pytest.approx(last)
    assert found["alone"]["loss"] < found["base"]["loss"]
    said = (home / "log.txt").read_text()
    (line,) = re.findall(r"held-out text of north: (.*?)\"", said)[-1:]
    numbers = [float(number) for number in re.findall(r"\d\.\d+", line)]
    assert numbers == pytest.approx([found[name]["loss"] for name in ("student", "own", "alone")], abs=1e-4)
    # North permits that its own losses are shown; the others do not.
    first, *others = json.loads((tmp_path / "flower/own.json").read_text())
    assert (first["own"], first["alone"]) == pytest.approx((found["own"]["loss"], found["alone"]["loss"]))
    assert all((row["own"], row["alone"]) == (None, None) for row in others)
    other = rows(capsys, "evaluate", home, "--data", tmp_path / "texts/east")
    assert other["student"]["bytes"] > found["student"]["bytes"]
    assert main(["generate", str(home), "--model", "own", "--tokens", "5", "--json"]) == 0
    # The aggregator has no text of the nodes.
    capsys.readouterr()
    assert main(["evaluate", str(tmp_path / "flower")]) == 2
    assert "--data must be given" in capsys.readouterr().err
    assert not (tmp_path / "flower/private").exists()
