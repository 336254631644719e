"""The process of a run at the aggregator: it admits the nodes, starts the run at the SuperLink, and does it.

It is started together with the SuperLink, and has done its imports when that answers. The app is that of the installed
package: of the one that is submitted, for the nodes, nothing is imported here.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from importlib import import_module
from pathlib import Path
from queue import Queue
from typing import TYPE_CHECKING, Any

from flwr.proto.runtime_pb2 import AcquireTaskRequest
from flwr.supercore.constant import TaskType
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor, SuperExecAuthHttpInterceptor
from flwr.supercore.retry import make_simple_http_retry_invoker
from flwr.supercore.runtime import RuntimeHttpClient

from fpld import config as configuration
from fpld._check import listed
from fpld.engines.flower.children import Job
from fpld.engines.flower.control import AwayError, Control
from fpld.engines.flower.headroom import note_lack, watch_room
from fpld.engines.flower.identity import PublicKeys
from fpld.engines.flower.journal import Journal
from fpld.engines.flower.keys import is_revoked, public_file
from fpld.engines.flower.returning import hurry
from fpld.engines.flower.server import server_app
from fpld.errors import FpldError, ProtocolError
from fpld.federation.log import listen

if TYPE_CHECKING:
    from flwr.serverapp import ServerApp

    from fpld.config import Config

log = logging.getLogger("fpld.engines.flower.runner")  # as a program it has another __name__

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
_ACQUIRE = "/flwr.proto.Runtime/AcquireTask"
_LOOK = 0.1  # seconds between two looks for the SuperLink, and for the run
_NEAR = 0.5  # seconds at most between two attempts to reach it later: it is on this machine


def main() -> None:
    """Do the run of the job that the command line has."""
    job = Job(**json.loads(sys.argv[1]))
    hurry(_NEAR)
    watch_room(Path(job.out))
    try:
        config, _ = configuration.load(job.config, seed=job.seed)
        with listen(Journal(Path(job.out))):
            begin(job, config)
    except FpldError as error:
        sys.stderr.write(f"ERROR: {error}\n")
        sys.exit(1)
    run(job, server_app(job.config, out=job.out, seed=job.seed))


def begin(job: Job, config: Config) -> None:
    """Admit the nodes, stop what an aggregator that was killed has left, and start a new run."""
    names = [node.name for node in config.nodes if not is_revoked(config, node.name)]
    keys = {} if job.ca is None else {name: PublicKeys.read(public_file(config, name)).auth for name in names}
    while True:
        try:
            with Control(job.address, None if job.ca is None else Path(job.ca)) as control:
                control.admit(keys)
                log.info("admitted: %s", listed(names))
                control.stop_runs()
                control.start_run(APP_FILES)
                return
        except AwayError:  # it is being started
            time.sleep(_LOOK)


def run(job: Job, app: ServerApp) -> None:
    """Do as `flwr-serverapp` does with an app that is loaded already; its output stays in this process's log."""
    module: Any = import_module("flwr.superlink.runtime.run_serverapp")
    original = getattr(module, "run_", None)
    if original is None:
        raise ProtocolError("this version of Flower runs apps in another way")

    def ours(*, grid: Any, context: Any, **_served: Any) -> Any:
        try:
            return original(grid, context, "", loaded_server_app=app)
        except Exception:
            note_lack()
            raise

    module.run_ = ours
    certificates = None if job.ca is None else Path(job.ca).read_bytes()
    module.run_serverapp(job.address, Queue(), take(job, certificates), certificates is None, certificates)


def take(job: Job, certificates: bytes | None) -> str:
    """Wait for the run, as a SuperExec does; return the token by which the SuperLink knows its process."""
    signed = SuperExecAuthHttpInterceptor(
        master_secret=Path(job.secret).read_bytes(), protected_methods=frozenset({_ACQUIRE})
    )
    client = RuntimeHttpClient.from_server_address(
        job.address,
        certificates is None,
        certificates,
        [RuntimeVersionHttpInterceptor(component_name="SuperExec"), signed],
        retry_invoker=make_simple_http_retry_invoker(),
    )
    try:
        while True:
            found = client.AcquireTask(AcquireTaskRequest(supported_task_types=[TaskType.SERVER_APP]))
            if found.HasField("task") and found.token:
                return str(found.token)
            time.sleep(_LOOK)
    finally:
        client.close()


if __name__ == "__main__":
    main()
