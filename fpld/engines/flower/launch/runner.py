"""The process of a run at the aggregator: it admits the nodes, submits the run to the SuperLink, and does it.

    python -m fpld.engines.flower.launch.runner JOB      (a `RunnerJob` in JSON)

It is started together with the SuperLink, and has done its imports when that answers. Nodes are admitted and runs
started over the SuperLink's Control API (`ControlClient`), without Flower's command line. The ServerApp is that of the
installed package: nothing of the app that is submitted, for the nodes, is imported here.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sys
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

from fpld import config as configuration
from fpld.engines.flower.credentials import PublicKeys, is_revoked, public_key_file
from fpld.engines.flower.launch.aggregator import RunnerJob
from fpld.engines.flower.launch.processes import LaunchError
from fpld.engines.flower.log import FolderLogHandler
from fpld.engines.flower.patches.retry import retry_sooner
from fpld.engines.flower.server import server_app
from fpld.engines.flower.site.resources import report_shortage, watch_memory
from fpld.errors import FpldError, InputError, ProtocolError
from fpld.federation.telemetry import listen
from fpld.validation import shortened_list

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import TracebackType

    from flwr.serverapp import ServerApp

    from fpld.config import Config

log = logging.getLogger("fpld.engines.flower.launch.runner")  # as a program the module has another __name__

_APP = """\
from fpld.engines.flower import client_app, server_app

client = client_app()
server = server_app()
"""
_PROJECT = """\
[project]
name = "fpld-run"
version = "1.0.0"
description = "A federation of fpld"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "fpld"

[tool.flwr.app.components]
serverapp = "fpld_app:server"
clientapp = "fpld_app:client"
"""
APP_FILES = {"fpld_app.py": _APP.encode(), "pyproject.toml": _PROJECT.encode()}
_ACQUIRE_TASK = "/flwr.proto.Runtime/AcquireTask"
_FINISHED = "finished"
_MAX_RUNS = 1000  # the newest, among which are those that a killed aggregator has left
_POLL_SECONDS = 0.1  # between two attempts to reach the SuperLink, and two requests for the run
_MAX_RETRY_SECONDS = 0.5  # the SuperLink is on this machine


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


def run_job() -> None:
    """Do the run of the job on the command line."""
    job = RunnerJob(**json.loads(sys.argv[1]))
    retry_sooner(_MAX_RETRY_SECONDS)
    watch_memory(Path(job.out))
    try:
        config, _ = configuration.read_config(job.config, seed=job.seed)
        with listen(FolderLogHandler(Path(job.out))):
            submit_run(job, config)
    except FpldError as error:
        sys.stderr.write(f"ERROR: {error}\n")
        sys.exit(1)
    run_serverapp(job, server_app(job.config, out=job.out, seed=job.seed))


def submit_run(job: RunnerJob, config: Config) -> None:
    """Admit the nodes, stop runs that a killed aggregator has left, and start a new one."""
    names = [node.name for node in config.nodes if not is_revoked(config, node.name)]
    keys = {} if job.ca is None else {name: PublicKeys.read(public_key_file(config, name)).auth for name in names}
    while True:
        try:
            with ControlClient(job.address, None if job.ca is None else Path(job.ca)) as control:
                control.admit(keys)
                log.info("admitted: %s", shortened_list(names))
                control.stop_runs()
                control.start_run(APP_FILES)
                return
        except UnreachableError:  # the SuperLink is still starting
            time.sleep(_POLL_SECONDS)


def run_serverapp(job: RunnerJob, app: ServerApp) -> None:
    """Do as `flwr-serverapp` does, with an app that is loaded already; its output stays in this process's log."""
    module: Any = import_module("flwr.superlink.runtime.run_serverapp")
    original = getattr(module, "run_", None)
    if original is None:
        raise ProtocolError("this version of Flower runs apps in another way")

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


if __name__ == "__main__":
    run_job()
