"""A process that has done all imports and forks one for each message: no message waits for Python and its libraries.

Flower's SuperExec starts a fresh `flwr-clientapp` for every message. At a node its place is taken by a fork of this
process (`Spawner.take_over`, called by `fpld.engines.flower.pinned`). It has one thread, so that a fork is sound, is
started with the SuperExec and ends with it. If it cannot be reached, messages get a fresh process as ever.
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
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

_LOOK = 0.5
_FIRST = 3.0  # seconds for which the first order, which only asks who is there, is waited for before kernels are read
_MOST = 1 << 16  # bytes of an order
_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG
CHANNEL = "FPLD_SPAWNER"


class Spawner:
    """The SuperExec's end."""

    def __init__(self) -> None:
        self._socket: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def order(self, **what: Any) -> bool:
        """Let a process do this; return False if there is none that could."""
        data = json.dumps(what).encode()
        for _ in range(2):  # the second time with a new process
            if self._process is None or self._process.poll() is not None:
                self.start()
            with contextlib.suppress(OSError):
                if self._socket is not None and self._socket.send(data) == len(data):
                    return True
            self.stop()
        return False

    def start(self) -> None:
        """Start the process, which then does its imports."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            environment = {**os.environ, CHANNEL: str(theirs.fileno())}
            self._process = subprocess.Popen(
                [sys.executable, "-m", "fpld.engines.flower.spawner"],
                env=environment,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        self._socket = ours

    def take_over(self) -> None:
        """Let the SuperExec in this process hand its client apps over."""
        from flwr.supercore.constant import TaskType
        from flwr.supercore.superexec.executor.subprocess_executor import SubprocessExecutor
        from flwr.supercore.superexec.executor.types import LaunchResult

        original: Callable[[Any, Any], Any] = SubprocessExecutor.launch

        def launch(executor: Any, spec: Any) -> Any:
            if spec.task_type == TaskType.CLIENT_APP and self.order(
                address=spec.runtime_api_address,
                token=spec.token,
                insecure=spec.insecure,
                certificates=spec.root_certificates_path,
            ):
                return LaunchResult.accepted()
            return original(executor, spec)

        SubprocessExecutor.launch = launch  # type: ignore[method-assign, assignment]

    def stop(self) -> None:
        """End it."""
        if self._socket is not None:
            self._socket.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._socket = self._process = None


def main() -> None:
    """Do the imports, then fork for every order until the other end is closed."""
    from fpld.engines.flower.pinned import node_folder
    from fpld.engines.flower.preload import preload, warm

    channel = socket.socket(fileno=int(os.environ.pop(CHANNEL)))
    _die_with_parent()
    parent = os.getppid()
    _import()
    children: set[int] = set()
    warmed = False
    while os.getppid() == parent:
        ready, _, _ = select.select([channel], [], [], _LOOK if warmed else _FIRST)
        if ready and not _fork(channel, children):
            break
        ended = {process for process in children if os.waitpid(process, os.WNOHANG)[0]}
        children -= ended
        if not warmed:
            warm()
        if ended or not warmed:  # of a new run only its first message says which libraries its models need
            preload(node_folder())
        warmed = True
    for process in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGTERM)


def _fork(channel: socket.socket, children: set[int]) -> bool:
    """Take an order and let a fork do it; return False if the other end is closed, or no memory is left.

    The SuperExec starts another process then, and Flower gives the message out once more.
    """
    from fpld.engines.flower.headroom import check_room

    data = channel.recv(_MOST)
    if not data:
        return False
    try:
        check_room()
    except MemoryError as error:
        _tell(error)
        return False
    process = os.fork()
    if process == 0:
        channel.close()
        _serve(json.loads(data))
    children.add(process)
    return True


def _import() -> None:
    """Import what every message needs."""
    import flwr.supercore.tls
    import flwr.supernode.runtime.run_clientapp  # noqa: F401

    import fpld.engines.flower.client
    import fpld.engines.flower.headroom
    import fpld.federation.work  # noqa: F401


def _serve(order: dict[str, Any]) -> None:
    """Do as `flwr-clientapp` does, in a fork; never return."""
    code: int | str | None = 1
    try:
        _die_with_parent()
        from flwr.supercore.tls import validate_and_resolve_root_certificates
        from flwr.supernode.runtime.run_clientapp import run_clientapp

        certificates = validate_and_resolve_root_certificates(order["certificates"], order["insecure"])
        run_clientapp(
            runtime_api_address=order["address"],
            token=order["token"],
            insecure=order["insecure"],
            certificates=certificates,
        )
        code = 0
    except SystemExit as end:
        code = end.code
    except BaseException as error:
        traceback.print_exc()
        _tell(error)
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code if isinstance(code, int) else int(code is not None))


def _tell(error: BaseException) -> None:
    """Write into the site's log why a message got no answer: its process could not even send an error."""
    from fpld.engines.flower.journal import note
    from fpld.engines.flower.pinned import node_folder
    from fpld.errors import ran_out

    found, folder = ran_out(error), node_folder()
    why = f"{type(error).__name__}: {error}" if found is None else f"{found.what}: {found.remedy}"
    if folder is not None:
        with contextlib.suppress(Exception):
            note(folder, f"a message failed: {why}")


def _die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGTERM)


if __name__ == "__main__":
    main()
