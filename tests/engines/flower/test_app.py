"""`examples/flower` as its users run it: `flwr run` on a SuperLink of their own, with a mod, read by `flwr log`."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from fpld.engines.flower.launch.processes import FLOWER_ENVIRONMENT, ChildProcess, free_port, wait_ready
from tests.test_package import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [
    pytest.mark.slow,
    pytest.mark.waits,
    pytest.mark.skipif(sys.platform != "linux", reason="children end with their parent on Linux alone"),
]
NODES = 3


def words(name: str) -> list[list[str]]:
    """Return the commands of docs/deploy.md that call a program of Flower's, in order."""
    text = (ROOT / "docs/deploy.md").read_text().replace("\\\n", " ")
    return [line.partition("#")[0].split() for line in text.splitlines() if line.startswith(f"{name} ")]


class Own:
    """A SuperLink and SuperNodes as a user of Flower has them, started by the words of docs/deploy.md."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        shutil.copytree(ROOT / "examples/flower", folder / "app")
        connection = f'[superlink.local]\naddress = "127.0.0.1:{self.port}"\ninsecure = true\n'
        (folder / "config.toml").write_text(connection)
        self.children: list[ChildProcess] = []

    def start(self) -> None:
        (link,) = words("flower-superlink")
        link = [word.replace("8000", str(self.port)) for word in link]
        self.children.append(self._child(link, "superlink"))
        wait_ready(self.children[0], f"http://127.0.0.1:{self.port}/health", None)
        (node,) = words("flower-supernode")
        for index in range(NODES):
            changed = {"127.0.0.1:8000": f"127.0.0.1:{self.port}", "9001": str(free_port())}
            changed["partition-id=0"] = f"partition-id={index}"
            self.children.append(self._child([changed.get(word, word) for word in node], f"node-{index}"))

    def _child(self, command: list[str], name: str) -> ChildProcess:
        return ChildProcess(command, self.folder / f"{name}.log", self.folder)

    def flwr(self, *arguments: str) -> str:
        environment = {**os.environ, **FLOWER_ENVIRONMENT, "FLWR_HOME": str(self.folder)}
        command = [str(Path(sys.executable).with_name("flwr")), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, cwd=self.folder / "app", env=environment)
        assert done.returncode == 0, done.stderr + done.stdout
        return done.stdout

    def state(self, run: str) -> str:
        found: dict[str, Any] = json.loads(self.flwr("list", "local", "--run-id", run, "--format", "json"))
        return str(found["runs"][0]["status"])

    def stop(self) -> None:
        for child in reversed(self.children):
            child.stop()


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Own]:
    monkeypatch.chdir(tmp_path)
    made = Own(tmp_path)
    try:
        yield made
    finally:
        made.stop()


def test_the_example_runs_on_a_superlink_of_ones_own(own: Own) -> None:
    assert len((own.folder / "app/app.py").read_text().splitlines()) < 50
    own.start()
    run = str(json.loads(own.flwr("run", ".", "local", "--format", "json"))["run-id"])
    end = time.monotonic() + 240
    while not own.state(run).startswith("finished"):
        assert time.monotonic() < end, own.flwr("log", run, "local", "--show")
        time.sleep(3)
    said = own.flwr("log", run, "local", "--show")
    assert own.state(run) == "finished:completed", said
    # What fpld says of its rounds, and what the app says itself, is in Flower's log of the run.
    assert re.search(r"2 rounds; 3 nodes", said), said
    rows = json.loads((own.folder / "runs/flower/result.json").read_text())
    row = next(row for row in rows if row["method"] == "fpld")
    assert f"fpld: {row['heldout_loss']:.4f} nats per token" in said
    # The mod of the app sees each reply of each node: one to join, one for each round, one for the last student.
    for index in range(NODES):
        heard = re.findall(r"(\S+): (\d+) bytes leave this node", (own.folder / f"node-{index}.log").read_text())
        assert [kind for kind, _ in heard] == ["query.join", "train", "train", "evaluate"]
        assert all(int(size) > 0 for _, size in heard)
