"""Many nodes on one machine in Flower's simulation runtime. Needs `fpld[simulation]` (Ray).

The nodes' texts are dealt as in `fpld run`, nodes do not authenticate, and the result is that of the local engine.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
from typing import TYPE_CHECKING, Any

from flwr.app import Context  # noqa: TC002 - Flower looks at the signature

from fpld.engines.flower.client import client_app, site_of
from fpld.engines.flower.launch.processes import FLOWER_ENVIRONMENT
from fpld.engines.flower.server import server_app
from fpld.engines.flower.site.config import DISCLOSURES, Site, Terms
from fpld.errors import FpldError, InputError, MissingExtraError
from fpld.federation.prepare import node_documents
from fpld.storage.run_folder import RESULT, STATUS, RunFolder

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from fpld.config import Config


def simulated_site(config: Config, out: Path) -> Callable[[Context], Site]:
    """Return a function that gives the site of a simulated node: partition i is node i, in a folder of the run.

    A SuperNode that was started with a node file is a real node, with a site of its own.
    """

    def site(context: Context) -> Site:
        if "node" in context.node_config:
            return site_of(context)
        index = context.node_config.get("partition-id")
        if not isinstance(index, int) or not 0 <= index < len(config.nodes):
            raise InputError(f"partition-id must be from 0 to {len(config.nodes) - 1}, got {index!r}")
        return Site(
            terms=simulated_terms(config, index),
            folder=out / "nodes" / str(index),
            documents=lambda: node_documents(config, index),
            secret=lambda _session: b"",
        )

    return site


def simulated_terms(config: Config, index: int) -> Terms:
    """Return the terms of a simulated node: whatever the configuration asks for may leave."""
    name = config.nodes[index].name
    if config.written is None:
        return Terms(name=name, may_send=list(DISCLOSURES))
    return Terms(name=name, may_send=list(DISCLOSURES), private_run=config.written.private_run)


def simulate_federation(
    config: Config, file: str | Path, out: Path, *, seed: int | None = None
) -> list[dict[str, Any]]:
    """Run a federation in Flower's simulation runtime; return the rows of its table."""
    if importlib.util.find_spec("ray") is None:
        raise MissingExtraError("Flower's simulation runtime", "simulation")
    if config.flower is not None:
        raise InputError("[flower] must be left out in a simulation: nobody proves who they are")
    os.environ.update(FLOWER_ENVIRONMENT)
    from flwr.simulation import run_simulation

    out = out.resolve()
    with contextlib.suppress(SystemExit):  # raised by Flower if the ServerApp fails; the status has the reason
        run_simulation(
            server_app(file, out=out, seed=seed),
            client_app(simulated_site(config, out)),
            num_supernodes=len(config.nodes),
            backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}},
        )
    store = RunFolder(out)
    status = store.read_json(STATUS)
    if status["state"] != "done":
        raise FpldError(f"{status.get('error', 'the simulation ended early')}; continue with --resume")
    rows: list[dict[str, Any]] = store.read_json(RESULT)
    return rows
