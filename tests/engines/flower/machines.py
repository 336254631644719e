"""The programs of a real deployment on loopback, as people start them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fpld.engines.flower.launch.processes import free_port
from fpld.engines.local import run_local
from fpld.seeds import derive_key
from fpld.storage.run_folder import RunFolder
from tests.engines.flower.conftest import NAMES, Deployment

if TYPE_CHECKING:
    from collections.abc import Callable


class Machines:
    """The programs of a deployment, all in a home and a folder for temporary files of their own."""

    def __init__(self, folder: Path, *changes: tuple[str, str]) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        changes += (("wait = 0.2", f'wait = 90.0\naddress = "{self.address}"'),)
        self.folder = folder
        self.deployment = Deployment(folder, changes, address=self.address)
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self.within: list[str] = []  # a command that runs the programs, if they run within something
        for name in ("home", "temporary"):
            (folder / name).mkdir()

    def start(self, name: str, *arguments: object, module: str = "fpld") -> subprocess.Popen[bytes]:
        environment = {**os.environ, "HOME": str(self.folder / "home"), "TMPDIR": str(self.folder / "temporary")}
        with (self.folder / f"{name}.out").open("ab") as output:
            self.running[name] = subprocess.Popen(
                [*self.within, sys.executable, "-m", module, *map(str, arguments)],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        return self.running[name]

    def node(self, name: str) -> None:
        self.start(name, "node", self.folder / "nodes" / name / "node.toml")

    def aggregator(self, *more: str) -> None:
        self.start("aggregator", "aggregator", self.deployment.file, "--out", self.folder / "flower", *more)

    def said(self, name: str) -> str:
        return (self.folder / f"{name}.out").read_text()

    def wait_for(self, what: Callable[[], object], seconds: float) -> None:
        end = time.monotonic() + seconds
        while not what():
            assert time.monotonic() < end, {name: self.said(name)[-3000:] for name in self.running}
            time.sleep(0.1)

    def processes(self, *, holding: str = "") -> list[int]:
        """Find all processes of this deployment by their environment, wherever they hang in the tree.

        `holding`: only those with these words in their command line or environment.
        """
        mark = f"HOME={self.folder}/home".encode()
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError):
                identity = int(entry.name)
                environment = (entry / "environ").read_bytes()
                if mark in environment and holding.encode() in (entry / "cmdline").read_bytes() + environment:
                    found.append(identity)
        return found

    def undisturbed(self) -> None:
        """Run the same federation on this machine, into the folder `local`; the deployment gets the key of that run.

        Without it the deployment draws one at random, and its dither with it.
        """
        run_local(self.deployment.config, self.deployment.text, self.folder / "local", resume=False)
        key = derive_key(self.deployment.config.run.seed)
        RunFolder(self.folder / "flower").write_json("session.json", {"session": "ab" * 32, "key": key.hex()})

    def same(self) -> bool:
        """Return whether the deployment's trace and student are those of the undisturbed run, bit for bit."""
        one, two = (self.folder / out / "student.safetensors" for out in ("local", "flower"))
        traces = self.deployment.trace("local"), self.deployment.trace("flower")
        return traces[0] == traces[1] and one.read_bytes() == two.read_bytes()

    def start_all(self) -> None:
        """Start the aggregator, and the nodes when it has admitted them."""
        self.aggregator()
        self.wait_for(lambda: "admitted" in self.said("aggregator"), 120)
        for name in NAMES:
            self.node(name)

    def kill(self, name: str) -> None:
        """Kill what was started under a name; of a node all its processes, as a power cut does."""
        process = self.running.pop(name)
        process.kill()
        process.wait()
        for identity in self.processes(holding=f"nodes/{name}/"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(identity, signal.SIGKILL)

    def end(self, name: str) -> int:
        self.running[name].terminate()
        return self.running.pop(name).wait(40)

    def kill_all(self) -> None:
        """Leave nothing behind, whatever a test has come to."""
        for identity in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(identity, signal.SIGKILL)
        for process in self.running.values():
            process.wait(20)

    def clean_up(self) -> None:
        for process in self.running.values():
            process.terminate()
        for process in self.running.values():
            process.wait(40)
        self.wait_for(lambda: not self.processes(), 20)


def rounds(machines: Machines) -> list[dict[str, Any]]:
    file = machines.folder / "flower/fpld/trace.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
