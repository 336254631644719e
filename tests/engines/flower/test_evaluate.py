"""A site sees what it got: the student beside its own models, on its own text."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest

from fpld.cli import main
from tests.engines.flower.conftest import Deployment

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


OWN_KIND = [
    ('name = "south"', 'name = "south"\nstudent = {kind = "ngram", order = 1, buckets = 512}'),
    ("rounds = 3", "rounds = 2"),
]


@pytest.mark.slow
def test_a_model_of_the_sites_own_kind_learns_from_the_last_student_and_stays_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    deployment = Deployment(tmp_path, OWN_KIND)
    file = deployment.node_files[2]
    file.write_text("show_own_loss = true\n" + file.read_text())
    deployment.serve(deployment.grid())
    found = rows(capsys, "evaluate", file.parent)
    assert list(found) == ["student", "adopted", "own", "alone", "base"]
    assert main(["node", "status", str(file), "--json"]) == 0
    (status,) = json.loads(capsys.readouterr().out)["rows"]
    numbers = [float(number) for number in re.findall(r"\d\.\d+", status["adopted"])]
    assert numbers == pytest.approx([found["own"]["loss"], found["adopted"]["loss"]], abs=1e-4)
    # With the site's permission the aggregator knows the loss of the model that the site has in the end.
    told = json.loads((tmp_path / "flower/own.json").read_text())[2]
    assert told["own"] == pytest.approx(found["adopted"]["loss"])
    assert not list((tmp_path / "nodes/north").glob("runs/*/adopted.safetensors"))


@pytest.mark.slow
def test_a_model_that_cannot_learn_from_the_last_student_costs_nothing_but_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_arguments: object) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr("fpld.engines.flower.site.handlers.learn_from_student", fail)
    deployment = Deployment(tmp_path, OWN_KIND)
    deployment.serve(deployment.grid())
    assert None not in deployment.trace()[-1]["heldout_by_node"]
    assert "learning from the last student failed: MemoryError" in (tmp_path / "nodes/south/log.txt").read_text()
