"""The process of a run at the aggregator over Flower's own clients of the SuperLink: the patch `runner`.

Nodes are admitted and runs started over the SuperLink's Control API (`ControlClient`), without Flower's command line.
The ServerApp is that of the installed package: nothing of the app that is submitted, for the nodes, is imported here.
"""

from __future__ import annotations

import hashlib
import logging
import time
from importlib import import_module
from pathlib import Path
from queue import Queue
from typing import TYPE_CHECKING, Any, Self

import httpx
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
from cryptography.hazmat.primitives.serialization import load_ssh_public_key
from flwr.cli.build import build_fab_from_files
from flwr.proto.control_pb2 import (
    ListNodesRequest,
    ListRunsRequest,
    RegisterNodeRequest,
    StartRunRequest,
    StopRunRequest,
)
from flwr.proto.fab_pb2 import Fab
from flwr.proto.runtime_pb2 import AcquireTaskRequest
from flwr.supercore.constant import TaskType
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.error import FlowerError
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor, SuperExecAuthHttpInterceptor
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supercore.retry import make_simple_http_retry_invoker
from flwr.supercore.runtime import RuntimeHttpClient

from fpld.engines.flower.launch.processes import LaunchError
from fpld.engines.flower.site.resources import report_shortage
from fpld.errors import InputError
from fpld.validation import shortened_list

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import TracebackType

    from flwr.serverapp import ServerApp

    from fpld.engines.flower.launch.aggregator import RunnerJob

log = logging.getLogger(__name__)

_ACQUIRE_TASK = "/flwr.proto.Runtime/AcquireTask"
_FINISHED = "finished"
_MAX_RUNS = 1000  # the newest, among which are those that a killed aggregator has left
_POLL_SECONDS = 0.1  # between two attempts to reach the SuperLink, and two requests for the run


class UnreachableError(LaunchError):
    """The SuperLink does not answer: it has not started yet, or has stopped."""


class ControlClient:
    """A connection to the Control API of a SuperLink; `ca` is the authority of its certificate, None without TLS."""

    def __init__(self, address: str, ca: Path | None) -> None:
        self._client = ControlHttpClient.from_server_address(
            address,
            ca is None,
            None if ca is None else ca.read_bytes(),
            [RuntimeVersionHttpInterceptor(component_name="flwr CLI")],
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.close()

    def admit(self, keys: Mapping[str, str]) -> None:
        """Register public keys of nodes, by name and in the form of OpenSSH, that the SuperLink does not have yet."""
        registered = {node.public_key for node in _call(self._client.ListNodes, ListNodesRequest()).nodes_info}
        for name, text in keys.items():
            key = _public_key(name, text)
            if key not in registered:
                _call(self._client.RegisterNode, RegisterNodeRequest(public_key=key, name=name))

    def stop_runs(self) -> None:
        """Stop every run that has not finished."""
        for identity, run_serverapp in _call(self._client.ListRuns, ListRunsRequest(limit=_MAX_RUNS)).run_dict.items():
            if run_serverapp.status.status != _FINISHED:
                _call(self._client.StopRun, StopRunRequest(run_id=identity))

    def start_run(self, files: Mapping[str, bytes]) -> int:
        """Start a run of the app with these files; return the run's id."""
        content, _ = build_fab_from_files(files)
        fab = Fab(hash_str=hashlib.sha256(content).hexdigest(), content=content)
        started = _call(self._client.StartRun, StartRunRequest(fab=fab))
        if not started.HasField("run_id"):
            raise LaunchError(f"the SuperLink did not start the run: {started.note or 'it gives no reason'}")
        return int(started.run_id)


def _public_key(name: str, text: str) -> bytes:
    """Return a public key in the SuperLink's form."""
    try:
        key = load_ssh_public_key(text.encode())
    except ValueError:
        key = None
    if not isinstance(key, EllipticCurvePublicKey):
        raise InputError(f"{name}.pub must hold the ECDSA key that `fpld init-node` made")
    return public_key_to_bytes(key)


def _call(method: Callable[[Any], Any], request: Any) -> Any:
    """Call a method of the Control API; raise `LaunchError` if it refuses, `UnreachableError` if it does not answer."""
    try:
        return method(request)
    except httpx.HTTPStatusError as error:
        refusal = FlowerError.from_json(error.response.text)
        reason = str(error)
        if refusal is not None:
            reason = f"[code: {refusal.code}] {refusal.message} {refusal.public_details or ''}".strip()
        raise LaunchError(f"the SuperLink refuses {method.__name__}: {reason}") from None
    except httpx.TransportError as error:
        raise UnreachableError(f"the SuperLink does not answer {method.__name__}: {error}") from None


def submit_run(job: RunnerJob, keys: Mapping[str, str], files: Mapping[str, bytes]) -> None:
    """Admit nodes by their public keys, stop runs that a killed aggregator has left, and start one of an app's files.

    Without TLS there are no keys to be admitted.
    """
    while True:
        try:
            with ControlClient(job.address, None if job.ca is None else Path(job.ca)) as control:
                control.admit({} if job.ca is None else keys)
                log.info("admitted: %s", shortened_list(list(keys)))
                control.stop_runs()
                control.start_run(files)
                return
        except UnreachableError:  # the SuperLink is still starting
            time.sleep(_POLL_SECONDS)


def run_serverapp(job: RunnerJob, app: ServerApp) -> None:
    """Do as `flwr-serverapp` does, with an app that is loaded already; its output stays in this process's log."""
    module: Any = import_module("flwr.superlink.runtime.run_serverapp")
    original = module.run_

    def run_app(*, grid: Any, context: Any, **_served: Any) -> Any:
        try:
            return original(grid, context, "", loaded_server_app=app)
        except Exception:
            report_shortage()
            raise

    module.run_ = run_app
    certificates = None if job.ca is None else Path(job.ca).read_bytes()
    module.run_serverapp(job.address, Queue(), acquire_task(job, certificates), certificates is None, certificates)


def acquire_task(job: RunnerJob, certificates: bytes | None) -> str:
    """Wait for the run's task, as a SuperExec does; return the token of its process."""
    authentication = SuperExecAuthHttpInterceptor(
        master_secret=Path(job.secret).read_bytes(), protected_methods=frozenset({_ACQUIRE_TASK})
    )
    client = RuntimeHttpClient.from_server_address(
        job.address,
        certificates is None,
        certificates,
        [RuntimeVersionHttpInterceptor(component_name="SuperExec"), authentication],
        retry_invoker=make_simple_http_retry_invoker(),
    )
    try:
        while True:
            response = client.AcquireTask(AcquireTaskRequest(supported_task_types=[TaskType.SERVER_APP]))
            if response.HasField("task") and response.token:
                return str(response.token)
            time.sleep(_POLL_SECONDS)
    finally:
        client.close()
