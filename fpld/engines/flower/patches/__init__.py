"""What is changed of Flower itself, and which of its names are used that are not public.

Flower offers no hook for what a deployment over thin links needs: long polls, prefork, limits on a reply before it is
read, a fixed ClientApp. The modules of this package therefore replace names of Flower's in their own processes, and
check first that the names are there. A version of Flower that lacks one is refused with a sentence.

`PATCHES` lists every replaced or private name, `INTERNALS` every import from a module that is not part of Flower's
public API. `tests/engines/flower/test_patches.py` holds both tables against the code and the installed Flower.
"""

from typing import NamedTuple


class Patch(NamedTuple):
    """A name of Flower's that is replaced or reached although it is private.

    `used_in` is a module of `fpld.engines.flower`, `module` one of Flower's, `name` a dotted name in it.
    """

    used_in: str
    module: str
    name: str
    reason: str


_FLEET_CONNECTION = "flwr.supernode.fleet_http_connection"
_NODE_LOOP = "flwr.supernode.start_client_internal"
_HTTP_CLIENT = "flwr.supercore.protobuf.client"
_LINKSTATE = "flwr.server.superlink.linkstate.sql_linkstate"

# Replaced in the processes of a site.
_AT_SITES = (
    Patch("patches.bootstrap", "flwr.clientapp.utils", "get_load_client_app_fn", "run only the installed app"),
    Patch("patches.connection", _FLEET_CONNECTION, "FleetHttpClient", "sign a dead predecessor off; long polls"),
    Patch("patches.long_poll", _HTTP_CLIENT, "ProtobufClient._client", "keep idle connections, whose TLS is expensive"),
    Patch("patches.long_poll", _HTTP_CLIENT, "ProtobufClient._base_url", "address of a long poll"),
    Patch("patches.long_poll", _HTTP_CLIENT, "ProtobufClient._send", "send a long poll through the interceptors"),
    Patch("patches.long_poll", _FLEET_CONNECTION, "HEARTBEAT_DEFAULT_INTERVAL", "longest wait of a long poll"),
    Patch("patches.polling", _NODE_LOOP, "time", "sleep as long as the stage of the loop needs"),
    Patch("patches.polling", _NODE_LOOP, "_push_messages", "know the reply stage; send pending replies while idle"),
    Patch("patches.polling", _FLEET_CONNECTION, "HEARTBEAT_DEFAULT_INTERVAL", "fewer heartbeats in a fleet"),
    Patch("patches.polling", "flwr.supercore.heartbeat", "HEARTBEAT_DEFAULT_INTERVAL", "fewer heartbeats in a fleet"),
    Patch(
        "patches.prefork",
        "flwr.supercore.superexec.executor.subprocess_executor",
        "SubprocessExecutor.launch",
        "fork a process that has done its imports",
    ),
)
# Replaced at sites and at the aggregator.
_AT_BOTH = (
    Patch("patches.retry", "flwr.supercore.retry.http_retry", "RetryInvoker", "retry a SuperLink's first errors"),
    Patch("patches.retry", "flwr.supercore.retry.http_retry", "MAX_RETRY_DELAY", "reach a restarted SuperLink soon"),
    Patch(
        "patches.retry",
        "flwr.supercore.inflatable.inflatable_utils",
        "pull_objects.__kwdefaults__",
        "ask sooner for pieces of a message",
    ),
)
# Replaced in the processes of the aggregator.
_AT_AGGREGATOR = (
    Patch("launch.runner", "flwr.superlink.runtime.run_serverapp", "run_", "run the installed package's ServerApp"),
    Patch("patches.receive", "flwr.superlink.grid.http_grid", "HttpGrid._runtime_client", "fetch replies in pieces"),
    Patch("patches.receive", _HTTP_CLIENT, "ProtobufClient._client", "refuse a long response before it is read"),
    Patch("patches.receive", "flwr.app.metadata", "Metadata._message_id", "set the id of a reply made from pieces"),
    Patch("patches.superlink", "flwr.superlink.cli.flower_superlink", "uvicorn", "serve the app with long polls"),
    Patch("patches.superlink", _LINKSTATE, "SqlLinkState.store_message_and_object_tree", "wake the node that waits"),
    Patch("patches.superlink", _LINKSTATE, "SqlLinkState.get_message_ins", "know which nodes found no message"),
    Patch("patches.superlink", _LINKSTATE, "SqlLinkState._cleanup_expired_task_tokens", "write less to the database"),
)
PATCHES = (*_AT_SITES, *_AT_BOTH, *_AT_AGGREGATOR)

# Modules outside of Flower's public API (flwr.app, flwr.clientapp, flwr.serverapp, flwr.simulation) that are imported.
INTERNALS = {
    "flwr.app.message": "make the message that replaces an unusable reply",
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
    "flwr.supercore.run": "the error of a run that was stopped",
    "flwr.supercore.runtime": "client of the Runtime API",
    "flwr.supercore.superexec": "the start of ClientApps, which is replaced",
    "flwr.supercore.tls": "certificates of a ClientApp's process",
    "flwr.superlink.cli.flower_superlink": "the program, whose server is replaced",
    "flwr.superlink.grid.http_grid": "tell a Grid over HTTP from one in this process",
    "flwr.superlink.runtime.run_serverapp": "the process of a ServerApp, whose app is replaced",
    "flwr.supernode": "a SuperNode's loop and connection, which are replaced, and its ClientApp's process",
}
