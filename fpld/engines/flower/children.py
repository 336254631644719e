"""What an aggregator starts: a SuperLink, and beside it the process of the run."""

from __future__ import annotations

import json
import logging
import secrets
import signal
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fpld.engines.flower.certs import CA, CERT, CERT_KEY
from fpld.engines.flower.identity import write_secret
from fpld.engines.flower.processes import Child, LaunchError, wait_ready

if TYPE_CHECKING:
    from fpld.config import FlowerSection

log = logging.getLogger(__name__)

DATABASE = "state.db"
_SECRET = "superexec.secret"  # noqa: S105 - a file's name
_RESTARTS = 10  # how often one that stops early is started again
_LONG = 30.0  # seconds after which it counts as one that worked


@dataclass(frozen=True, slots=True)
class Job:
    """What the run's process is told: SuperLink, secret and authority, and the run's file, folder and seed."""

    address: str
    secret: str
    ca: str | None
    config: str
    out: str
    seed: int | None


class Children:
    """A SuperLink and the process of a run, kept alive: what the SuperLink knows is in a database."""

    def __init__(self, flower: FlowerSection, folder: Path, *, insecure: bool) -> None:
        self._folder, self._flower, self._certs = folder, flower, Path(flower.certs).resolve()
        host, port = flower.address.rsplit(":", 1)
        self.address = f"{'127.0.0.1' if host == '0.0.0.0' else host}:{port}"  # noqa: S104 - as this machine reaches it
        self.ca = None if insecure else self._certs / CA
        self.superlink: Child | None = None
        self.runner: Child | None = None
        self._early = 0
        if not (folder / _SECRET).exists():
            write_secret(folder / _SECRET, secrets.token_hex(32).encode())

    def start_superlink(self) -> None:
        """Start it; `wait` waits until it answers."""
        self.superlink = self._child("flower-superlink", self._superlink_command())

    def start_runner(self, config: Path, out: Path, seed: int | None) -> None:
        """Start the process that does the run as soon as the SuperLink has it."""
        ca = None if self.ca is None else str(self.ca)
        job = Job(self.address, str(self._folder / _SECRET), ca, str(config), str(out.resolve()), seed)
        command = [sys.executable, "-m", "fpld.engines.flower.runner", json.dumps(asdict(job))]
        self.runner = self._child("runner", command)

    def wait(self) -> None:
        """Wait until the SuperLink answers."""
        assert self.superlink is not None  # noqa: S101 - it was started
        wait_ready(self.superlink, f"http{'' if self.ca is None else 's'}://{self.address}/health", self.ca)

    def tend(self) -> None:
        """Start a SuperLink that has stopped again."""
        if self.superlink is not None and not self.superlink.alive:
            self._bury(self.superlink)
            self.start_superlink()
            self.wait()

    def ended(self) -> int | None:
        """Return the exit code of the run's process, None while it goes on."""
        return None if self.runner is None else self.runner.process.poll()

    def bury_runner(self, code: int) -> None:
        """Clear away a run's process that was killed; one that has ended by itself, without a word, is an error."""
        assert self.runner is not None  # noqa: S101 - it has ended
        if code >= 0:
            raise LaunchError(f"the run's process ended: {self.runner.last_words()}; go on with --resume")
        log.warning("the run's process stopped (%s): starting it again", self.runner.last_words())
        self.runner.stop()

    def _bury(self, child: Child) -> None:
        """Say that a child has stopped, and end what it has started; one that stops again and again is an error."""
        self._early = self._early + 1 if time.monotonic() - child.begun < _LONG else 0
        if self._early > _RESTARTS:
            raise LaunchError(f"{child.name} stops again and again: {child.last_words()}")
        log.warning("%s stopped (%s): starting it again", child.name, child.last_words())
        child.stop()

    def stop(self) -> None:
        """End both, the run first."""
        for child in (self.runner, self.superlink):
            if child is not None:
                child.stop()

    def _child(self, name: str, command: list[str]) -> Child:
        """Start a program that leaves port and locks at once if this process is killed: it bears that."""
        log_file = self._folder / f"{name.removeprefix('flower-')}.log"
        return Child(command, log_file, self._folder, name=name, orphaned=signal.SIGKILL)

    def _superlink_command(self) -> list[str]:
        host, port = self._flower.address.rsplit(":", 1)
        command = [sys.executable, "-m", "fpld.engines.flower.superlink", "--isolation", "process"]
        command += ["--host", host, "--port", port]
        command += ["--database", str(self._folder / DATABASE), "--disable-runtime-dependency-installation"]
        command += ["--superexec-auth-secret-file", str(self._folder / _SECRET)]
        if self.ca is None:
            return [*command, "--insecure"]
        command += ["--ssl-ca-certfile", str(self.ca), "--ssl-certfile", str(self._certs / CERT)]
        return [*command, "--ssl-keyfile", str(self._certs / CERT_KEY), "--enable-supernode-auth"]
