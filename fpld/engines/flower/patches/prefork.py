"""A prefork server at a site: one process does all imports, and forks for each message.

Flower's SuperExec starts a fresh `flwr-clientapp` for every message, which imports Python's libraries anew. At a site
`PreforkServer.take_over` hands messages to this program instead (`python -m fpld.engines.flower.patches.prefork`). It
has a single thread, so that a fork is sound; it is started with the SuperExec, and ends with it. If it cannot be
reached, a message gets a fresh process as in Flower.

The SuperExec imports this module too: what only the server needs is imported in its functions.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import traceback
from importlib import import_module
from typing import TYPE_CHECKING, Any

from fpld.errors import FpldError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

CHANNEL_VARIABLE = "FPLD_SPAWNER"  # the file descriptor of the socket to the SuperExec
_POLL_SECONDS = 0.5
_FIRST_LAUNCH_SECONDS = 3.0  # kernels are read after the first message, which only asks for the node's name
_MAX_LAUNCH_BYTES = 1 << 16
_PR_SET_PDEATHSIG = 1
# The codecs with kernels, and the modules of those that encode.
_ENCODERS = {
    "uniform": "fpld.codecs.uniform.kernels",
    "predictive": "fpld.codecs.predictive.encoder",
    "samples": "fpld.codecs.samples.collector",
}


class PreforkServer:
    """The SuperExec's end of the connection to its prefork server."""

    def __init__(self) -> None:
        self._socket: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def launch(self, **arguments: Any) -> bool:
        """Let a fork run a ClientApp with these arguments; return False if the server cannot be reached."""
        data = json.dumps(arguments).encode()
        for _ in range(2):  # the second time with a new server
            if self._process is None or self._process.poll() is not None:
                self.start()
            with contextlib.suppress(OSError):
                if self._socket is not None and self._socket.send(data) == len(data):
                    return True
            self.stop()
        return False

    def start(self) -> None:
        """Start the server, which then does its imports."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            environment = {**os.environ, CHANNEL_VARIABLE: str(theirs.fileno())}
            self._process = subprocess.Popen(
                [sys.executable, "-m", "fpld.engines.flower.patches.prefork"],
                env=environment,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        self._socket = ours

    def take_over(self) -> None:
        """Let the SuperExec in this process hand its ClientApps over."""
        from flwr.supercore.constant import TaskType
        from flwr.supercore.superexec.executor.subprocess_executor import SubprocessExecutor
        from flwr.supercore.superexec.executor.types import LaunchResult

        original: Callable[[Any, Any], Any] = SubprocessExecutor.launch

        def launch(executor: Any, spec: Any) -> Any:
            if spec.task_type == TaskType.CLIENT_APP and self.launch(
                address=spec.runtime_api_address,
                token=spec.token,
                insecure=spec.insecure,
                certificates=spec.root_certificates_path,
            ):
                return LaunchResult.accepted()
            return original(executor, spec)

        SubprocessExecutor.launch = launch  # type: ignore[method-assign, assignment]

    def stop(self) -> None:
        """End the server."""
        if self._socket is not None:
            self._socket.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._socket = self._process = None


def serve_forks() -> None:
    """Do the imports, then fork for every message until the SuperExec has gone."""
    from fpld.engines.flower.patches.bootstrap import node_folder

    channel = socket.socket(fileno=int(os.environ.pop(CHANNEL_VARIABLE)))
    _die_with_parent()
    parent = os.getppid()
    _import()
    children: set[int] = set()
    unread = dict(_ENCODERS)
    first = True
    while os.getppid() == parent:
        ready, _, _ = select.select([channel], [], [], _FIRST_LAUNCH_SECONDS if first else _POLL_SECONDS)
        if ready and not _fork(channel, children):
            break
        ended = {process for process in children if os.waitpid(process, os.WNOHANG)[0]}
        children -= ended
        # The first message of a new run brings the models, and its fork compiles the codec's kernels if no process has
        # done so before: only then is it clear what later forks need.
        if ended or first:
            _read_kernels(unread)
            _import_models(node_folder())
        first = False
    for process in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGTERM)


def _fork(channel: socket.socket, children: set[int]) -> bool:
    """Let a fork run the next ClientApp; return False if the SuperExec has gone, or no memory is left.

    After lack of memory the SuperExec starts another server, and Flower hands the message out once more.
    """
    from fpld.engines.flower.site.resources import check_memory

    data = channel.recv(_MAX_LAUNCH_BYTES)
    if not data:
        return False
    try:
        check_memory()
    except MemoryError as error:
        _log_failure(error)
        return False
    process = os.fork()
    if process == 0:
        channel.close()
        _run_clientapp(json.loads(data))
    children.add(process)
    return True


def _import() -> None:
    """Import what every message needs."""
    import flwr.supercore.tls
    import flwr.supernode.runtime.run_clientapp  # noqa: F401

    import fpld.engines.flower.client
    import fpld.engines.flower.site.disclosure
    import fpld.node.round  # noqa: F401


def _read_kernels(unread: dict[str, str]) -> None:
    """Encode a few numbers with each codec whose kernels are compiled: they are read once, and not by each fork.

    Kernels that are not in the cache are left alone, since messages would wait for their compilation. `unread` are the
    codecs in question with the modules of their kernels; those that are read leave it.
    """
    import numpy as np

    from fpld.codecs.prior import ArrayPrior
    from fpld.kernels import in_cache
    from fpld.registry import codecs
    from fpld.types import Plan

    logits = np.zeros((2, 8), np.float32)
    prior = ArrayPrior(np.full((2, 8), -16, np.int16))
    for name in [name for name, module in unread.items() if in_cache(import_module(module))]:
        del unread[name]
        plan = Plan(
            run_key=bytes(16),
            round=1,
            node=0,
            probe=bytes(32),
            contexts=2,
            vocab=8,
            bits=64.0,
            prior=prior if codecs.get(name).traits.prior else None,
        )
        with contextlib.suppress(FpldError):
            codecs.get(name).encode(iter([logits]), plan)


def _import_models(folder: Path | None) -> None:
    """Import the libraries of the models of a site's last run; a message reports those that cannot be imported."""
    from fpld.registry import students

    for kind in set() if folder is None else _model_kinds(folder):
        with contextlib.suppress(FpldError, ImportError):
            students.get(kind)


def _model_kinds(folder: Path) -> set[str]:
    """Return the kinds of the models in a site's last run: of its own model, and of the student."""
    from fpld.storage.arrays import read_arrays

    parts = sorted(folder.glob("runs/*/part.json"), key=lambda path: path.stat().st_mtime)
    kinds: set[str] = set()
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, FpldError):
        files = json.loads(parts[-1].read_bytes())["files"] if parts else {}
        for name in {str(files["base"]), str(files["student"])} if files else set():
            kinds.add(read_arrays(folder / "files" / name)[1]["kind"])
    return kinds


def _run_clientapp(launch: dict[str, Any]) -> None:
    """Do as `flwr-clientapp` does, in a fork; never return."""
    code: int | str | None = 1
    try:
        _die_with_parent()
        from flwr.supercore.tls import validate_and_resolve_root_certificates
        from flwr.supernode.runtime.run_clientapp import run_clientapp

        certificates = validate_and_resolve_root_certificates(launch["certificates"], launch["insecure"])
        run_clientapp(
            runtime_api_address=launch["address"],
            token=launch["token"],
            insecure=launch["insecure"],
            certificates=certificates,
        )
        code = 0
    except SystemExit as end:
        code = end.code
    except BaseException as error:
        traceback.print_exc()
        _log_failure(error)
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code if isinstance(code, int) else int(code is not None))


def _log_failure(error: BaseException) -> None:
    """Write into the site's log why a message got no answer: its process could not even send an error."""
    from fpld.engines.flower.log import append_log
    from fpld.engines.flower.patches.bootstrap import node_folder
    from fpld.errors import exhausted_resource

    resource = exhausted_resource(error)
    folder = node_folder()
    why = f"{type(error).__name__}: {error}" if resource is None else f"{resource.what}: {resource.remedy}"
    if folder is not None:
        with contextlib.suppress(Exception):
            append_log(folder, f"a message failed: {why}")


def _die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


if __name__ == "__main__":
    serve_forks()
