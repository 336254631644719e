"""`fpld aggregator`: a SuperLink and the process of a run, watched until the run is done.

Both are child processes, and both are started again if they are killed: the SuperLink keeps its state in a database,
the run in its folder. The run reports how it ends in its status, before its process ends.
"""

from __future__ import annotations

import json
import logging
import secrets
import shutil
import signal
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fpld.engines.flower.credentials import (
    AGGREGATOR_KEY,
    CA,
    CERT,
    CERT_KEY,
    PublicKeys,
    expiry_warnings,
    public_key_file,
    write_secret,
)
from fpld.engines.flower.launch.processes import ChildProcess, LaunchError, check_port, wait_ready
from fpld.engines.flower.log import follow_log, relay_log
from fpld.engines.flower.patches import RUN_VARIABLE, encode_choice, is_chosen
from fpld.errors import FpldError, InputError, ResourceError, StorageError
from fpld.storage.run_folder import MAIN, RESULT, STATUS, TRACE, RunFolder

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from fpld.config import Config, FlowerSection, Patches

log = logging.getLogger(__name__)

DATABASE = "state.db"
MIN_DISK_BYTES = 4_000_000  # a run is stopped when less is left
KILLED_CODE = 75  # exit code of a run's process that saw the run end without a word
_SECRET = "superexec.secret"  # noqa: S105 - a file's name
_MAX_EARLY_STOPS = 10  # of a program, one after the other
_STABLE_SECONDS = 30.0  # a program that ran for so long has not stopped early
_POLL_SECONDS = 0.25


@dataclass(frozen=True, slots=True)
class RunnerJob:
    """The argument of a run's process: how to reach the SuperLink, and the run's file, folder and seed."""

    address: str
    secret: str
    ca: str | None
    config: str
    out: str
    seed: int | None


class AggregatorProcesses:
    """The SuperLink and the process of a run."""

    def __init__(self, flower: FlowerSection, folder: Path, *, insecure: bool, patches: Patches = "auto") -> None:
        self._folder = folder
        self._flower = flower
        self._patches = patches
        self._certs = Path(flower.certs).resolve()
        host, port = flower.address.rsplit(":", 1)
        self.address = f"{'127.0.0.1' if host == '0.0.0.0' else host}:{port}"  # noqa: S104 - as this machine reaches it
        self.ca = None if insecure else self._certs / CA
        self.superlink: ChildProcess | None = None
        self.runner: ChildProcess | None = None
        self._early_stops = 0
        if not (folder / _SECRET).exists():
            write_secret(folder / _SECRET, secrets.token_hex(32).encode())

    def start_superlink(self) -> None:
        """Start the SuperLink; `wait` waits until it answers."""
        self.superlink = self._child("flower-superlink", self._superlink_command())

    def start_runner(self, config: Path, out: Path, seed: int | None) -> None:
        """Start the process that submits the run to the SuperLink, and does it."""
        ca = None if self.ca is None else str(self.ca)
        job = RunnerJob(self.address, str(self._folder / _SECRET), ca, str(config), str(out.resolve()), seed)
        command = [sys.executable, "-m", "fpld.engines.flower.launch.runner", json.dumps(asdict(job))]
        self.runner = self._child("runner", command)

    def wait(self) -> None:
        """Wait until the SuperLink answers."""
        assert self.superlink is not None  # noqa: S101 - it was started
        wait_ready(self.superlink, f"http{'' if self.ca is None else 's'}://{self.address}/health", self.ca)

    def restart_superlink(self) -> None:
        """Start the SuperLink again if it has stopped."""
        if self.superlink is not None and not self.superlink.alive:
            self._clear(self.superlink)
            self.start_superlink()
            self.wait()

    def runner_exit_code(self) -> int | None:
        """Return the exit code of the run's process; None while it runs."""
        return None if self.runner is None else self.runner.process.poll()

    def clear_runner(self, code: int) -> None:
        """Clear away a run's process that was killed; raise `LaunchError` for one that ended by itself."""
        assert self.runner is not None  # noqa: S101 - it has ended
        if code >= 0 and code != KILLED_CODE:
            raise LaunchError(f"the run's process ended: {self.runner.exit_reason()}; continue with --resume")
        log.warning("the run's process stopped (%s): starting it again", self.runner.exit_reason())
        self.runner.stop()

    def _clear(self, child: ChildProcess) -> None:
        """Log that a child has stopped, and end what it has started; raise `LaunchError` if it keeps stopping."""
        self._early_stops = self._early_stops + 1 if time.monotonic() - child.begun < _STABLE_SECONDS else 0
        if self._early_stops > _MAX_EARLY_STOPS:
            raise LaunchError(f"{child.name} stops again and again: {child.exit_reason()}")
        log.warning("%s stopped (%s): starting it again", child.name, child.exit_reason())
        child.stop()

    def stop(self) -> None:
        """End both, the run's process first."""
        for child in (self.runner, self.superlink):
            if child is not None:
                child.stop()

    def _child(self, name: str, command: list[str]) -> ChildProcess:
        """Start a program that is killed with this process, so that its port and locks are free at once."""
        log_file = self._folder / f"{name.removeprefix('flower-')}.log"
        more = {**encode_choice(self._patches), RUN_VARIABLE: str(self._folder.parent)}
        return ChildProcess(command, log_file, self._folder, more, name=name, orphaned=signal.SIGKILL)

    def _superlink_command(self) -> list[str]:
        host, port = self._flower.address.rsplit(":", 1)
        patched = is_chosen("long_poll", self._patches)
        program = [sys.executable, "-m", "fpld.engines.flower.patches.superlink"] if patched else ["flower-superlink"]
        command = [*program, "--isolation", "process", "--host", host, "--port", port]
        command += ["--database", str(self._folder / DATABASE), "--disable-runtime-dependency-installation"]
        command += ["--superexec-auth-secret-file", str(self._folder / _SECRET)]
        if self.ca is None:
            return [*command, "--insecure"]
        command += ["--ssl-ca-certfile", str(self.ca), "--ssl-certfile", str(self._certs / CERT)]
        return [*command, "--ssl-keyfile", str(self._certs / CERT_KEY), "--enable-supernode-auth"]


@dataclass(frozen=True, slots=True)
class AggregatorOptions:
    """The options of `fpld aggregator`."""

    config: Config
    file: Path
    out: Path
    seed: int | None
    insecure: bool


def run_aggregator(options: AggregatorOptions) -> list[dict[str, Any]]:
    """Run the federation to its end; return the rows of its table.

    Raises
    ------
    InputError
        If keys or certificates are missing.
    LaunchError
        If a program does not start, or keeps stopping.
    FpldError
        If the run has failed; `--resume` goes on with it.
    """
    flower = _check(options)
    folder = RunFolder(options.out / "flower")
    with folder.lock():
        patches = options.config.engine.patches
        processes = AggregatorProcesses(flower, folder.path, insecure=options.insecure, patches=patches)
        lines = follow_log(options.out)
        next(lines)
        log.info("starting the SuperLink at %s", flower.address, extra={"done": 0, "total": options.config.run.rounds})
        try:
            processes.start_superlink()
            _start_run(options, processes)
            processes.wait()
            return _watch(options, processes, lines)
        finally:
            processes.stop()


def _check(options: AggregatorOptions) -> FlowerSection:
    """Check, before anything starts, that all keys and certificates are there; return the section [flower]."""
    flower = options.config.flower
    if flower is None:
        raise InputError(
            f"{options.file}: [flower] is missing: where to listen, and the folders of certificates and keys"
        )
    problems = missing_files(options.config, insecure=options.insecure)
    if problems:
        raise InputError("; ".join(problems))
    if options.insecure:
        log.warning("INSECURE: no TLS and no node authentication; anyone who reaches the port can join and start runs")
    else:
        for warning in expiry_warnings(Path(flower.certs) / name for name in (CA, CERT)):
            log.warning("%s", warning)
    host, port = flower.address.rsplit(":", 1)
    check_port(host, int(port))
    return flower


def missing_files(config: Config, *, insecure: bool = False) -> list[str]:
    """Return a sentence for each public key of a node, and each file of the aggregator, that is missing or invalid."""
    problems = []
    for node in config.nodes:
        try:
            PublicKeys.read(public_key_file(config, node.name))
        except InputError as error:
            problems.append(str(error))
    folder = Path(config.flower.certs) if config.flower is not None else Path()
    names = [AGGREGATOR_KEY] if insecure else [AGGREGATOR_KEY, CA, CERT, CERT_KEY]
    missing = [folder / name for name in names if not (folder / name).exists()]
    return [*problems, *(f"{file} does not exist: put it there, or make it with `fpld certs`" for file in missing)]


def _start_run(options: AggregatorOptions, processes: AggregatorProcesses) -> None:
    RunFolder(options.out).write_json(STATUS, {"state": "starting"})
    processes.start_runner(options.file, options.out, options.seed)


def _watch(
    options: AggregatorOptions, processes: AggregatorProcesses, lines: Iterator[list[Mapping[str, Any]]]
) -> list[dict[str, Any]]:
    """Relay the run's log until it has ended; start again what was killed."""
    store = RunFolder(options.out)
    trace_bytes = -1
    while True:
        check_disk_space(options.out)
        processes.restart_superlink()
        code = processes.runner_exit_code()  # before the status: a run writes its status, then its process ends
        status = store.read_json(STATUS)
        relay_log(lines)  # after the status: the last lines are shown too
        if status["state"] == "done":
            rows: list[dict[str, Any]] = store.read_json(RESULT)
            return rows
        if status["state"] == "failed":
            raise FpldError(f"{status['error']}; continue with --resume")
        if code is not None:
            processes.clear_runner(code)
            trace_bytes = _check_progress(options.out, trace_bytes)
            _start_run(options, processes)
        time.sleep(_POLL_SECONDS)


def _check_progress(out: Path, before: int) -> int:
    """Return the size of the trace; raise `ResourceError` if it has not grown since the run was killed before."""
    trace = out / f"{MAIN}/{TRACE}"
    size = trace.stat().st_size if trace.exists() else 0
    if size == before:
        raise ResourceError(
            "the run's process was killed twice in the same round: most likely memory ran out; free some, or choose a "
            "smaller student, and continue with --resume"
        )
    return size


def check_disk_space(folder: Path) -> None:
    """Raise `StorageError` while the disk has room for the reason: on a full disk a SuperLink answers no node."""
    free = shutil.disk_usage(folder).free
    if free < MIN_DISK_BYTES:
        raise StorageError(
            f"{folder}: {free:,} bytes are left on the disk, at least {MIN_DISK_BYTES:,} are needed: free some space, "
            "and continue with --resume; what was written before is intact"
        )
