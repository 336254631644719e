"""Flower's programs as child processes: with the right environment, watched, and never left behind."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from fpld.engines.flower.log import rotate_log
from fpld.errors import FpldError, MissingExtraError, exhausted_resource_in_log

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# No telemetry, no check for updates and no installation at run time: a machine without internet must do. A SuperExec
# looks for work more often than once a second. One thread for each library, since the bits of a result depend on their
# number. One heap of the C library for all threads: each of several heaps would keep what it once needed.
FLOWER_ENVIRONMENT = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.4",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "MALLOC_ARENA_MAX": "1",
    "NO_COLOR": "1",
}
_STOP_SECONDS = 10.0  # from SIGTERM to SIGKILL
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


class LaunchError(FpldError):
    """A program of Flower's did not start, or stopped; the message has the reason from its log."""


def find_program(name: str) -> str:
    """Find one of Flower's programs: beside this Python, or on the path."""
    beside = Path(sys.executable).parent / name
    path = str(beside) if beside.exists() else shutil.which(name)
    if path is None:
        raise MissingExtraError(f"the program {name}", "flower")
    return path


def flower_environment(home: Path) -> dict[str, str]:
    """Return the environment of Flower's programs: `home` as their folder, and on the path what they start in turn."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    return {**os.environ, **FLOWER_ENVIRONMENT, "FLWR_HOME": str(home), "PATH": path}


class ChildProcess:
    """A program that ends with this process: by `stop`, or by the kernel if this process is killed (on Linux).

    Parameters
    ----------
    command
        The program and its arguments.
    log
        The file of its output.
    home
        Flower's folder.
    more
        Further variables of its environment.
    name
        For messages; by default the program's.
    orphaned
        The signal that ends it if this process is killed.
    """

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        home: Path,
        more: Mapping[str, str] | None = None,
        *,
        name: str = "",
        orphaned: signal.Signals = signal.SIGTERM,
    ) -> None:
        self.name = name or Path(command[0]).name
        self.log = log
        self.begun = time.monotonic()
        log.parent.mkdir(parents=True, exist_ok=True)
        rotate_log(log)
        with log.open("ab") as output:
            self._log_start = output.tell()
            self.process = subprocess.Popen(  # noqa: S603 - our own command line
                [find_program(command[0]), *command[1:]],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**flower_environment(home), **(more or {})},
                start_new_session=True,
                preexec_fn=partial(prepare_child, orphaned),
            )

    @property
    def alive(self) -> bool:
        """Return whether it runs."""
        return self.process.poll() is None

    def stop(self) -> None:
        """End it and what it has started: SIGTERM, then SIGKILL."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_STOP_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def output(self) -> str:
        """Return what it has written so far, without colours."""
        with self.log.open("rb") as file:
            file.seek(self._log_start)
            return re.sub(r"\x1b\[[0-9;]*m", "", file.read().decode("utf-8", "replace"))

    def exit_reason(self) -> str:
        """Return why it stopped: a signal, the last error in its log, or else the last lines of it."""
        if (self.process.poll() or 0) < 0:
            return f"ended by {signal.Signals(-self.process.returncode).name}"
        text = self.output()
        if (resource := exhausted_resource_in_log(text)) is not None:
            return f"{resource.what}: {resource.remedy}"
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        errors = [number for number, line in enumerate(lines) if "ERROR" in line or "Error:" in line]
        chosen = lines[errors[-1] : errors[-1] + 4] if errors else lines[-2:]
        return " | ".join(line for line in chosen if "INFO" not in line) or f"no word in {self.log}"


def wait_ready(child: ChildProcess, url: str, ca: Path | None, *, timeout: float = 60.0) -> None:
    """Wait until a child answers over HTTP; raise `LaunchError` if it stops, or does not answer in time."""
    context = ssl.create_default_context(cafile=str(ca)) if ca is not None else None
    end = time.monotonic() + timeout
    reason = ""
    while time.monotonic() < end:
        if not child.alive:
            raise LaunchError(f"{child.name} stopped at once: {child.exit_reason()}")
        try:
            with urllib.request.urlopen(url, timeout=5, context=context):  # noqa: S310 - our own address
                return
        except (OSError, urllib.error.URLError) as error:
            reason = str(error)
        time.sleep(0.2)
    raise LaunchError(f"{child.name} does not answer at {url} ({reason}): {child.exit_reason()}")


def free_port() -> int:
    """Return a port of this machine that is not in use."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def check_port(host: str, port: int) -> None:
    """Refuse an address that is in use, or not of this machine, before anything is started."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            raise LaunchError(
                f"cannot listen at {host}:{port} ({error.strerror}): choose another [flower] address"
            ) from None


def prepare_child(by: signal.Signals) -> None:
    """Have the kernel end this child with its parent, and let it be interrupted.

    Flower's programs end with the process that started them by raising SIGINT in themselves. A shell starts background
    jobs with SIGINT ignored, which children inherit: a ServerApp would then outlive a killed aggregator.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    end_with_parent(by)


def end_with_parent(by: signal.Signals) -> None:
    """Have the kernel send this process a signal when its parent ends (on Linux).

    Flower's programs look whether the process that started them is there. One that has ended is, until it is reaped,
    which the first process of a container may do late or never.
    """
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, by)
