"""What is changed of Flower itself: named patches, each of which can be left out, and which names are used at all.

Flower offers no hook for what a deployment over thin links needs: long polls, prefork, limits on a reply before it is
read, a fixed ClientApp. The modules of this package therefore replace names of Flower's in their own processes.
`PATCHES` says for each patch what is replaced, why, and what one loses without it. `patches = "auto"`, the default of
[engine] and of `node.toml`, uses every patch whose names this version of Flower has. One that lacks a name is left out,
with a line in the log. `patches = "none"` replaces nothing: a deployment then runs on stock Flower.

No other package uses names of Flower's that are not public API. `INTERNALS` lists the modules that have them;
`tests/engines/flower/test_patches.py` holds both tables against the code and the installed Flower.
"""

from __future__ import annotations

import logging
import os
from functools import cache
from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

log = logging.getLogger(__name__)

CHOICE_VARIABLE = "FPLD_PATCHES"  # "auto", "none", or names with commas: the choice, for the processes of Flower's
RUN_VARIABLE = "FPLD_RUN_FOLDER"  # the folder of a run, whose log says which patches are off in its SuperLink
ALL = "auto"
NONE = "none"


class Patch(NamedTuple):
    """A change of Flower that can be left out.

    Attributes
    ----------
    name
        As in the key `patches`.
    used_in
        The modules of `fpld.engines.flower` that make the change.
    names
        What of Flower is replaced, or reached although it is private: a module, a colon, and a dotted name in it.
    why
        What the change is for.
    without
        What one loses without it.
    versions
        The versions of Flower with which it was tested.
    test
        The tests of it.
    required
        Do without it only if the file of the site says so: for what protects a site.
    """

    name: str
    used_in: tuple[str, ...]
    names: tuple[str, ...]
    why: str
    without: str
    versions: tuple[str, ...]
    test: str
    required: bool = False


_TESTED = ("1.41", "1.42")
_FLEET = "flwr.supernode.fleet_http_connection"
_LOOP = "flwr.supernode.start_client_internal"
_HTTP = "flwr.supercore.protobuf.client"
_STATE = "flwr.server.superlink.linkstate.sql_linkstate"

PATCHES = (
    # In the processes of a site.
    Patch(
        name="installed_app",
        used_in=("patches.bootstrap",),
        names=("flwr.clientapp.utils:get_load_client_app_fn",),
        why="a node runs the ClientApp of its own installation, whatever code comes with a run",
        without="the node executes the code of each run, which whoever controls the SuperLink chooses",
        versions=_TESTED,
        test="tests/engines/flower/test_admission.py",
        required=True,
    ),
    Patch(
        name="connection",
        used_in=("patches.connection",),
        names=(
            f"{_FLEET}:FleetHttpClient",
            f"{_FLEET}:HEARTBEAT_DEFAULT_INTERVAL",
            "flwr.supernode.fleet_http_client:FleetHttpClient",
            f"{_HTTP}:ProtobufClient._client",
            f"{_HTTP}:ProtobufClient._base_url",
            f"{_HTTP}:ProtobufClient._send",
            f"{_HTTP}:ProtobufRequestContext",
        ),
        why="a node that restarts disconnects its predecessor; it waits in long polls, with few headers",
        without="a restarted node waits for up to a minute; nodes poll every three seconds",
        versions=_TESTED,
        test="tests/engines/flower/test_healing.py",
    ),
    Patch(
        name="polling",
        used_in=("patches.polling",),
        names=(
            f"{_LOOP}:time",
            f"{_LOOP}:_push_messages",
            f"{_FLEET}:HEARTBEAT_DEFAULT_INTERVAL",
            "flwr.supercore.heartbeat:HEARTBEAT_DEFAULT_INTERVAL",
            "flwr.common.constant:HEARTBEAT_DEFAULT_INTERVAL",
        ),
        why="a node sleeps as long as the stage of its loop needs; large fleets send fewer heartbeats",
        without="each message waits up to three seconds; a reply may wait for the next message after a stopped run",
        versions=_TESTED,
        test="tests/engines/flower/test_polling.py",
    ),
    Patch(
        name="prefork",
        used_in=("patches.prefork",),
        names=(
            "flwr.supercore.superexec.executor.subprocess_executor:SubprocessExecutor.launch",
            "flwr.supercore.superexec.executor.types:LaunchResult.accepted",
            "flwr.supercore.constant:TaskType.CLIENT_APP",
            "flwr.supernode.runtime.run_clientapp:run_clientapp",
            "flwr.supercore.tls:validate_and_resolve_root_certificates",
        ),
        why="a fork of a process that has done its imports works on each message",
        without="each message starts a process that imports all libraries: some seconds",
        versions=_TESTED,
        test="tests/engines/flower/test_operations.py",
    ),
    # At sites and at the aggregator.
    Patch(
        name="retry",
        used_in=("patches.retry",),
        names=(
            "flwr.supercore.retry.http_retry:RetryInvoker",
            "flwr.supercore.retry.http_retry:MAX_RETRY_DELAY",
            "flwr.supercore.retry.retry_invoker:RetryInvoker.invoke",
            "flwr.supercore.inflatable.inflatable_utils:pull_objects.__kwdefaults__",
        ),
        why="a SuperLink that was restarted is reached soon, and its first errors are no end of a process",
        without="healing takes up to a minute longer, and chunks of a message come later",
        versions=_TESTED,
        test="tests/engines/flower/test_healing.py",
    ),
    # In the processes of the aggregator.
    Patch(
        name="long_poll",
        used_in=("patches.superlink",),
        names=(
            "flwr.superlink.cli.flower_superlink:uvicorn",
            "flwr.proto.heartbeat_pb2:SendNodeHeartbeatRequest",
            f"{_STATE}:SqlLinkState.store_message_and_object_tree",
            f"{_STATE}:SqlLinkState.get_message_ins",
            f"{_STATE}:SqlLinkState._cleanup_expired_task_tokens",
        ),
        why="the SuperLink answers a waiting node when there is a message; it writes less to its database",
        without="nodes poll: some kilobytes per minute and node, and fewer nodes for one SuperLink",
        versions=_TESTED,
        test="tests/engines/flower/test_waiting.py",
    ),
    Patch(
        name="receive",
        used_in=("patches.receive",),
        names=(
            "flwr.superlink.grid.http_grid:HttpGrid._runtime_client",
            f"{_HTTP}:ProtobufClient._client",
            "flwr.app.metadata:Metadata._message_id",
            "flwr.proto.message_pb2:ConfirmMessageReceivedRequest",
            "flwr.proto.runtime_pb2:PullAppMessagesRequest",
            "flwr.supercore.inflatable.inflatable_object:get_object_body",
            "flwr.supercore.inflatable.inflatable_object:get_object_head_values_from_object_content",
            "flwr.supercore.inflatable.inflatable_object:iterate_object_tree",
            "flwr.supercore.inflatable.inflatable_utils:inflate_object_from_contents",
        ),
        why="the aggregator refuses a reply that is too long before it is read, and waits for no missing chunk",
        without="a reply is held whole before its size is checked, and a malformed one costs those that come with it",
        versions=_TESTED,
        test="tests/engines/flower/test_receive.py",
    ),
    Patch(
        name="runner",
        used_in=("patches.runner",),
        names=(
            "flwr.superlink.runtime.run_serverapp:run_",
            "flwr.superlink.runtime.run_serverapp:run_serverapp",
            "flwr.supercore.control:ControlHttpClient.from_server_address",
            "flwr.supercore.runtime:RuntimeHttpClient.from_server_address",
            "flwr.cli.build:build_fab_from_files",
        ),
        why="one process admits nodes, submits the run, and does it with the installed package's ServerApp",
        without="`flwr run` and `flower-superexec` do it: some ten seconds per start, a minute to see a killed run",
        versions=_TESTED,
        test="tests/engines/flower/test_admission.py",
    ),
)

# Modules outside of Flower's public API (flwr.app, flwr.clientapp, flwr.serverapp, flwr.simulation) that are imported.
INTERNALS = {
    "flwr.cli.build": "build the app that a run submits",
    "flwr.clientapp.utils": "the loader of ClientApps, which is replaced",
    "flwr.common.constant": "the interval between two heartbeats",
    "flwr.proto": "requests of the Control, Fleet and Runtime APIs",
    "flwr.supercore.constant": "types of tasks",
    "flwr.supercore.control": "client of the Control API",
    "flwr.supercore.error": "why the Control API refuses a request",
    "flwr.supercore.heartbeat": "the interval between two heartbeats, which is replaced",
    "flwr.supercore.inflatable": "messages as trees of objects",
    "flwr.supercore.interceptors": "headers that the Control and Runtime APIs ask for",
    "flwr.supercore.primitives.asymmetric": "the SuperLink's form of a public key",
    "flwr.supercore.protobuf": "requests over HTTP",
    "flwr.supercore.retry": "retries, which are replaced",
    "flwr.supercore.runtime": "client of the Runtime API",
    "flwr.supercore.superexec": "the start of ClientApps, which is replaced",
    "flwr.supercore.tls": "certificates of a ClientApp's process",
    "flwr.superlink.cli.flower_superlink": "the program, whose server is replaced",
    "flwr.superlink.grid.http_grid": "tell a Grid over HTTP from one in this process",
    "flwr.superlink.runtime.run_serverapp": "the process of a ServerApp, whose app is replaced",
    "flwr.supernode": "a SuperNode's loop and connection, which are replaced, and its ClientApp's process",
}

_BY_NAME = {patch.name: patch for patch in PATCHES}


def encode_choice(choice: str | Sequence[str]) -> dict[str, str]:
    """Return the variable that tells processes of Flower's which patches were chosen."""
    return {CHOICE_VARIABLE: choice if isinstance(choice, str) else ",".join(choice) or NONE}


def choose(choice: str | Sequence[str]) -> None:
    """Choose the patches of this process and of those that it starts."""
    os.environ.update(encode_choice(choice))


def is_chosen(name: str, choice: str | Sequence[str] | None = None) -> bool:
    """Return whether a patch was chosen: by this value of the key `patches`, or else for this process."""
    text = os.environ.get(CHOICE_VARIABLE, ALL) if choice is None else encode_choice(choice)[CHOICE_VARIABLE]
    return text == ALL or name in text.split(",")


def is_on(name: str) -> bool:
    """Return whether a patch was chosen and fits this version of Flower; log once in a process if it does not."""
    return is_chosen(name) and _fits(name)


@cache
def _fits(name: str) -> bool:
    patch = _BY_NAME[name]
    lacking = next((dotted.replace(":", ".") for dotted in patch.names if not has_name(dotted)), None)
    if lacking is None:
        try:
            for module in patch.used_in:
                import_module(f"{__package__.removesuffix('.patches')}.{module}")
        except ImportError as error:
            lacking = error.name or str(error)
    if lacking is not None:
        log.warning(
            "patch %s is off: Flower %s has no %s; without it %s", name, version("flwr"), lacking, patch.without
        )
    return lacking is None


def has_name(dotted: str) -> bool:
    """Return whether the installed Flower has a name, as `module:dotted.name`.

    The last part may also be an attribute that the class sets when it is made.
    """
    module, _, path = dotted.partition(":")
    try:
        owner: object = import_module(module)
    except ImportError:
        return False
    *owners, last = path.split(".")
    for part in owners:
        if not hasattr(owner, part):
            return False
        owner = getattr(owner, part)
    if hasattr(owner, last):
        return True
    maker = getattr(getattr(owner, "__init__", None), "__code__", None)
    # Keys of a dictionary are one constant, a tuple.
    return maker is not None and (last in maker.co_names or any(last in keys for keys in _tuples(maker.co_consts)))


def _tuples(constants: tuple[object, ...]) -> list[tuple[object, ...]]:
    return [each for each in constants if isinstance(each, tuple)]
