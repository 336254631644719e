"""Flower's own programs as children: started with the right environment, watched, and never left behind."""

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

from fpld.engines.flower.journal import rotate
from fpld.errors import FpldError, MissingExtraError, ran_out_by

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# No telemetry, no look for updates, no installation at run time: a machine without internet must do. One thread for
# each library: the bits of a result depend on it. One heap of the C library for all threads: with heaps of their own
# each keeps what it once needed.
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "MALLOC_ARENA_MAX": "1",
    "NO_COLOR": "1",
}
_PATIENCE = 10.0
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


class LaunchError(FpldError):
    """A program of Flower's did not start, or stopped; the message has its last words."""


def program(name: str) -> str:
    """Find one of Flower's programs: beside this Python, or on the path."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise MissingExtraError(f"the program {name}", "flower")
    return found


def environment(home: Path) -> dict[str, str]:
    """Return the environment of Flower's programs: their folder in ours, and on the path what they start in turn."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    return {**os.environ, **QUIET, "FLWR_HOME": str(home), "PATH": path}


class Child:
    """A program that ends with us: by `stop`, and if we are killed, by a signal of the kernel's (on Linux)."""

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
        self.name, self.log, self.begun = name or Path(command[0]).name, log, time.monotonic()
        log.parent.mkdir(parents=True, exist_ok=True)
        rotate(log)
        with log.open("ab") as output:
            self._from = output.tell()
            self.process = subprocess.Popen(  # noqa: S603 - our own command line
                [program(command[0]), *command[1:]],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**environment(home), **(more or {})},
                start_new_session=True,
                preexec_fn=partial(_die_with_parent, orphaned),
            )

    @property
    def alive(self) -> bool:
        """Return whether it runs."""
        return self.process.poll() is None

    def stop(self) -> None:
        """End it and what it has started: ask first, then insist."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_PATIENCE)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def last_words(self) -> str:
        """Return why it stopped: a signal, or what its log says: its last error, or else its last lines."""
        if (self.process.poll() or 0) < 0:
            return f"ended by {signal.Signals(-self.process.returncode).name}"
        with self.log.open("rb") as file:
            file.seek(self._from)
            text = re.sub(r"\x1b\[[0-9;]*m", "", file.read().decode("utf-8", "replace"))
        if (found := ran_out_by(text)) is not None:
            return f"{found.what}: {found.remedy}"
        said = [line.strip() for line in text.splitlines() if line.strip()]
        errors = [number for number, line in enumerate(said) if "ERROR" in line or "Error:" in line]
        chosen = said[errors[-1] : errors[-1] + 4] if errors else said[-2:]
        return " | ".join(line for line in chosen if "INFO" not in line) or "no word in " + str(self.log)


def wait_ready(child: Child, url: str, ca: Path | None, *, timeout: float = 60.0) -> None:
    """Wait until a child answers over HTTP; its end, or too long a silence, is an error with its last words."""
    context = ssl.create_default_context(cafile=str(ca)) if ca is not None else None
    end, reason = time.monotonic() + timeout, ""
    while time.monotonic() < end:
        if not child.alive:
            raise LaunchError(f"{child.name} stopped at once: {child.last_words()}")
        try:
            with urllib.request.urlopen(url, timeout=5, context=context):  # noqa: S310 - our own address
                return
        except (OSError, urllib.error.URLError) as error:
            reason = str(error)
        time.sleep(0.2)
    raise LaunchError(f"{child.name} does not answer at {url} ({reason}): {child.last_words()}")


def free_port() -> int:
    """Find a port of this machine that nobody uses."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def check_port(host: str, port: int) -> None:
    """Refuse an address that is taken or not ours before anything is started."""
    with socket.socket() as found:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            found.bind((host, port))
        except OSError as error:
            raise LaunchError(
                f"cannot listen at {host}:{port} ({error.strerror}): choose another [flower] address"
            ) from None


def _die_with_parent(by: signal.Signals) -> None:
    if _LIBC is not None:
        _LIBC.prctl(1, by)  # PR_SET_PDEATHSIG
