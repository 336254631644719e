"""Runs to look at: a real one, one that is open, and one whose every text is hostile."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from fpld.cli import main
from tests.federation.conftest import CONFIG, write_texts

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

EVIL = "<img src=x onerror=alert(1)>"
EVIL_SCRIPT = "</script><script>alert(2)</script>"
EVIL_PATH = "../../etc/passwd"


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a real, finished run: two rounds, three nodes, all baselines; in a folder of its own."""
    place = tmp_path_factory.mktemp("finished")
    write_texts(place)
    config = place / "config.toml"
    config.write_text(CONFIG.format(folder=place).replace("rounds = 3", "rounds = 2"))
    assert main(["run", str(config), "--out", str(place / "runs" / "toy"), "--json"]) == 0
    return place / "runs" / "toy"


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """The folder of a run by someone who wants to run a script in the operator's browser."""
    folder = tmp_path / "runs" / EVIL
    (folder / "fpld").mkdir(parents=True)
    names = [EVIL_SCRIPT, EVIL_PATH, f'" onmouseover="alert(3) {EVIL}']
    nodes = "".join(f"[[nodes]]\nname = {json.dumps(name)}\nbits = 2.0\n" for name in names)
    (folder / "config.toml").write_text(f"[run]\nrounds = 2\nout = {json.dumps(EVIL_PATH + EVIL)}\n{nodes}")
    (folder / "versions.json").write_text(json.dumps({EVIL: EVIL_SCRIPT}))
    line = {
        "round": 1,
        "nodes": names[:2],
        "bits_allotted": [2.0] * 3,
        "bits_sent": [2.0, 2.0, 0.0],
        "payload_bytes": 100,
        "overhead_bytes": 20,
        "node_bytes": [60, 60, 0],
        "weights": [1.0, 2.0, 3.0],
        "kl": 0.1,
        "heldout_loss": 2.0,
        "heldout_by_node": [2.0, 2.0, 2.0],
        "bandwidth_upper": 0.2,
        "bandwidth_lower": 0.1,
        "refused": [{"node": names[0], "state": EVIL_SCRIPT, "reason": EVIL}],
        "absent": [{"node": names[2], "state": "late", "reason": EVIL_SCRIPT}],
        "seconds": {"local": 1.0, EVIL_SCRIPT: 2.0, "nodes": [1.0, 2.0, None]},
    }
    (folder / "fpld" / "trace.jsonl").write_text(json.dumps(line) + "\n")
    progress = {
        "round": 2,
        "rounds": 2,
        "phase": EVIL,
        "opened": 1.0,
        "updated": 2.0,
        "nodes": [{"name": name, "state": EVIL, "reason": EVIL_SCRIPT} for name in names],
    }
    (folder / "fpld" / "progress.json").write_text(json.dumps(progress))
    return folder


class Served(NamedTuple):
    """A dashboard that runs: where, and its token if it has one."""

    url: str
    token: str | None


@contextmanager
def serve(folder: Path, *arguments: str, **environment: str) -> Iterator[Served]:
    """Run `fpld dashboard` as its user does, on a free port."""
    command = [sys.executable, "-m", "fpld", "dashboard", str(folder), "--port", "0", "--json", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **environment}) as process:
        try:
            assert process.stdout is not None
            text = ""
            for line in process.stdout:
                text += line
                if line == "}\n":
                    break
            row: dict[str, Any] = json.loads(text)["rows"][0]
            yield Served(row["url"].replace("0.0.0.0", "127.0.0.1"), row["token"])  # noqa: S104
        finally:
            process.terminate()
