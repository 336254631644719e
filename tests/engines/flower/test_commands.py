"""The commands of a deployment as their users call them, their files, and their errors."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

from fpld import config as configuration
from fpld import registry, students
from fpld.cli import main
from fpld.engines.flower.launch.processes import FLOWER_ENVIRONMENT
from fpld.engines.flower.site.config import NodeFile, open_site
from fpld.engines.local import run_local
from fpld.seeds import derive_key
from fpld.storage.run_folder import RunFolder
from fpld.students import NGram
from tests.engines.flower.conftest import Deployment
from tests.test_package import ROOT


def rows(capsys: pytest.CaptureFixture[str], *arguments: object) -> list[dict[str, object]]:
    assert main([*map(str, arguments), "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    found: list[dict[str, object]] = json.loads(captured.out)["rows"]
    return found


def test_certs_and_init_node_make_files_that_fit_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    certs = tmp_path / "certs"
    home = tmp_path / "a site"
    made = rows(capsys, "certs", "--address", "host.example:8000", "--out", certs)
    assert [str(row["made"]).rsplit("/", 1)[1] for row in made] == [
        "ca.pem", "ca.key", "server.pem", "server.key", "aggregator.key", "federation.toml",
    ]  # fmt: skip
    (tmp_path / "text").mkdir()
    (tmp_path / "text/note.txt").write_text("snow")
    (tmp_path / "text/other.txt").write_text("ice")
    arguments = ["init-node", "a site", "--join", certs / "federation.toml", "--data", tmp_path / "text", "--out", home]
    assert rows(capsys, *arguments)[0]["public_keys"] == str(home / "a site.pub")
    node = NodeFile.read(home / "node.toml")
    assert (node.name, node.address, node.data) == ("a site", "host.example:8000", str(tmp_path / "text"))
    for secret in (
        certs / "server.key",
        certs / "ca.key",
        certs / "aggregator.key",
        home / "auth.key",
        home / "mac.key",
    ):
        assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    # What is there is left as it is: certificates of one's own, keys, nodes.
    before = {file.name: file.read_bytes() for file in certs.iterdir()}
    assert len(rows(capsys, "certs", "--address", "host.example:8000", "--out", certs)) == 1
    assert {file.name: file.read_bytes() for file in certs.iterdir()} == before
    assert main([str(word) for word in arguments]) == 2
    assert "node.toml exists already" in capsys.readouterr().err


def test_errors_are_said_before_anything_starts(
    deployment: Deployment, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def error(*arguments: object) -> str:
        assert main([*map(str, arguments)]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        return captured.err

    out = tmp_path / "out"
    plain = tmp_path / "plain.toml"
    plain.write_text(deployment.text.partition("[flower]")[0])
    assert "[flower] is missing" in error("aggregator", plain, "--out", out)
    assert "holds no run to resume" in error("aggregator", deployment.file, "--out", out, "--resume")
    assert "--address must be HOST:PORT" in error("certs", "--address", "nowhere", "--out", out)
    assert "--days must be" in error("certs", "--address", "a:1", "--out", out, "--days", "0")
    join = tmp_path / "certs/federation.toml"
    assert "NAME must be letters" in error("init-node", "../x", "--join", join, "--data", ".")
    assert "--data: nothing does not exist" in error("init-node", "x", "--join", join, "--data", "nothing")
    (tmp_path / "one.txt").write_text("snow")
    assert "at least two groups" in error("init-node", "x", "--join", join, "--data", tmp_path / "one.txt")
    assert "corpus" in error("init-node", "x", "--join", join, "--corpus", "none", "--out", out / "x")
    (tmp_path / "nodes/north/auth.key").unlink()
    assert "auth.key does not exist" in error("node", tmp_path / "nodes/north/node.toml")
    assert "node.toml does not exist" in error("node", tmp_path / "node.toml")
    (tmp_path / "keys/east.pub").unlink()
    assert "east.pub does not exist: put the file there" in error("aggregator", deployment.file, "--out", out)
    assert not out.exists()


def test_a_node_file_is_checked(deployment: Deployment) -> None:
    file = deployment.node_files[0]
    text = file.read_text()
    for change, message in (
        ('data = "', "needs either data, a path, or corpus"),
        ("name = 'north'", "name: is missing"),
        ("aggregator = '", "aggregator: is missing"),
    ):
        file.write_text("\n".join(line for line in text.splitlines() if not line.startswith(change[:8])))
        with pytest.raises(ValueError, match=message):
            NodeFile.read(file)
    file.write_text(text + '\ncorpus = "sotu"\n')
    with pytest.raises(ValueError, match="needs either"):
        NodeFile.read(file)
    file.write_text(text.replace("aggregator = '", "aggregator = 'AA"))
    with pytest.raises(ValueError, match="must be the public key"):
        open_site(file)


@pytest.mark.slow
def test_the_example_is_an_app_that_flower_takes(tmp_path: Path) -> None:
    """`flwr build` checks the app as `flwr run` does, imports included, and packs what `flwr run` would send."""
    app = tmp_path / "app"
    shutil.copytree(ROOT / "examples/flower", app)
    flwr = Path(sys.executable).with_name("flwr")
    environment = {**os.environ, **FLOWER_ENVIRONMENT, "FLWR_HOME": str(tmp_path)}
    done = subprocess.run([flwr, "build", "--app", app], capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    (bundle,) = tmp_path.glob("*.fab")
    with zipfile.ZipFile(bundle) as packed:
        assert {"app.py", "federation.toml", "pyproject.toml"} <= set(packed.namelist())
    assert configuration.read_config(app / "federation.toml")[0].run.rounds == 2


class Mine(NGram):
    """A model that a Flower user brings."""

    kind = "mine"


@pytest.mark.slow
def test_a_student_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry.students, "_loaded", dict(registry.students._loaded))
    registry.students.register("mine", Mine)
    with pytest.raises(ValueError, match="'mine' exists already"):
        registry.students.register("mine", Mine)
    deployment = Deployment(tmp_path, [('kind = "ngram"', 'kind = "mine"'), ("rounds = 3", "rounds = 1")])
    key = derive_key(deployment.config.run.seed)  # the local run's
    RunFolder(tmp_path / "flower").write_json("session.json", {"session": "ab" * 32, "key": key.hex()})
    deployment.serve(deployment.grid())
    run_local(deployment.config, deployment.text, tmp_path / "local", resume=False)
    assert isinstance(students.load(tmp_path / "flower/student.safetensors"), Mine)
    states = [students.read_state(tmp_path / name / "student.safetensors") for name in ("flower", "local")]
    assert all(np.array_equal(states[0][name], states[1][name]) for name in states[1])


@pytest.mark.slow
def test_a_simulation_gives_what_the_local_engine_gives(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="needs fpld[simulation]")
    deployment = Deployment(tmp_path, [("rounds = 3", "rounds = 2")])
    file = tmp_path / "plain.toml"
    file.write_text(deployment.text.partition("[flower]")[0])
    # A process of its own: Ray changes much in the one that it is started in.
    arguments = ["aggregator", str(file), "--simulate", "--out", str(tmp_path / "simulated"), "--json"]
    command = [sys.executable, "-m", "fpld", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["rows"][0]["method"] == "fpld"
    run_local(deployment.config, file.read_text(), tmp_path / "local", resume=False)
    one, two = (tmp_path / name / "student.safetensors" for name in ("simulated", "local"))
    assert one.read_bytes() == two.read_bytes()
    assert deployment.trace("simulated") == deployment.trace("local")
