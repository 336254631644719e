"""The SuperLink's Control API over one connection: nodes are admitted, runs started and stopped, without `flwr`."""

from __future__ import annotations

import hashlib
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
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.error import FlowerError
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.primitives.asymmetric import public_key_to_bytes

from fpld.engines.flower.processes import LaunchError
from fpld.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path
    from types import TracebackType

_FINISHED = "finished"
_MOST_RUNS = 1000  # the newest, of which those are stopped that a killed aggregator has left


class AwayError(LaunchError):
    """The SuperLink does not answer: it is not there yet, or not any more."""


class Control:
    """A connection to the SuperLink at an address; `ca` is the authority of its certificate, None without TLS."""

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
        """Register the nodes' public keys (by name, as `ssh` writes them) that the SuperLink does not know yet."""
        known = {node.public_key for node in _ask(self._client.ListNodes, ListNodesRequest()).nodes_info}
        for name, text in keys.items():
            key = _key(name, text)
            if key not in known:
                _ask(self._client.RegisterNode, RegisterNodeRequest(public_key=key, name=name))

    def stop_runs(self) -> None:
        """Stop every run that has not ended."""
        for identity, run in _ask(self._client.ListRuns, ListRunsRequest(limit=_MOST_RUNS)).run_dict.items():
            if run.status.status != _FINISHED:
                _ask(self._client.StopRun, StopRunRequest(run_id=identity))

    def start_run(self, files: Mapping[str, bytes]) -> int:
        """Start a run of an app that consists of these files; return the run's id."""
        content, _ = build_fab_from_files(files)
        fab = Fab(hash_str=hashlib.sha256(content).hexdigest(), content=content)
        started = _ask(self._client.StartRun, StartRunRequest(fab=fab))
        if not started.HasField("run_id"):
            raise LaunchError(f"the SuperLink did not start the run: {started.note or 'it gives no reason'}")
        return int(started.run_id)


def _key(name: str, text: str) -> bytes:
    """Return a public key in the form in which the SuperLink keeps it."""
    try:
        key = load_ssh_public_key(text.encode())
    except ValueError:
        key = None
    if not isinstance(key, EllipticCurvePublicKey):
        raise InputError(f"{name}.pub must hold the ECDSA key that `fpld init-node` made")
    return public_key_to_bytes(key)


def _ask(method: Callable[[Any], Any], request: Any) -> Any:
    """Return the SuperLink's answer; what it refuses, and its silence, are errors that say why."""
    try:
        return method(request)
    except httpx.HTTPStatusError as error:
        said = FlowerError.from_json(error.response.text)
        why = str(error) if said is None else f"[code: {said.code}] {said.message} {said.public_details or ''}".strip()
        raise LaunchError(f"the SuperLink refuses {method.__name__}: {why}") from None
    except httpx.TransportError as error:
        raise AwayError(f"the SuperLink does not answer {method.__name__}: {error}") from None
