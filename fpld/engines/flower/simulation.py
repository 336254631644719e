"""Many nodes on one machine through Flower's own simulation runtime. Needs `fpld[simulation]` (Ray).

The nodes' texts are dealt as in `fpld run`, nobody proves who they are, and the result is that of the local engine.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
from typing import TYPE_CHECKING, Any

from flwr.app import Context  # noqa: TC002 - Flower looks at the signature

from fpld.engines.flower.client import client_app, home_of
from fpld.engines.flower.home import Home, Terms
from fpld.engines.flower.processes import QUIET
from fpld.engines.flower.server import server_app
from fpld.errors import FpldError, InputError, MissingExtraError
from fpld.federation.status import STATUS
from fpld.federation.texts import node_documents
from fpld.storage.folder import RunFolder

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from fpld.config import Config


def simulated_home(config: Config, out: Path) -> Callable[[Context], Home]:
    """Return the homes of simulated nodes: partition i is node i, in a folder of the run.

    A SuperNode that was started with a node file is a real node, and has its own home.
    """

    def home(context: Context) -> Home:
        if "node" in context.node_config:
            return home_of(context)
        index = context.node_config.get("partition-id")
        if not isinstance(index, int) or not 0 <= index < len(config.nodes):
            raise InputError(f"partition-id must be from 0 to {len(config.nodes) - 1}, got {index!r}")
        return Home(
            terms=Terms(name=config.nodes[index].name),
            folder=out / "nodes" / str(index),
            documents=lambda: node_documents(config, index),
            secret=lambda _session: b"",
        )

    return home


def simulate(config: Config, file: str | Path, out: Path, *, seed: int | None = None) -> list[dict[str, Any]]:
    """Run a whole federation in Flower's simulation runtime; return the table's rows."""
    if importlib.util.find_spec("ray") is None:
        raise MissingExtraError("Flower's simulation runtime", "simulation")
    if config.flower is not None:
        raise InputError("[flower] must be left out in a simulation: nobody proves who they are")
    os.environ.update(QUIET)
    from flwr.simulation import run_simulation

    out = out.resolve()
    with contextlib.suppress(SystemExit):  # how Flower says that the ServerApp has failed; the status says why
        run_simulation(
            server_app(file, out=out, seed=seed),
            client_app(simulated_home(config, out)),
            num_supernodes=len(config.nodes),
            backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}},
        )
    store = RunFolder(out)
    status = store.read_json(STATUS)
    if status["state"] != "done":
        raise FpldError(f"{status.get('error', 'the simulation ended early')}; go on with --resume")
    rows: list[dict[str, Any]] = store.read_json("result.json")
    return rows
