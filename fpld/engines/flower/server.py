"""The ServerApp: a whole run of a federation in a folder, resumed if it was begun before.

The specification of each node travels with the run's files: they are named by the SHA-256 of their content.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import signal
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from flwr.app import Context  # noqa: TC002 - Flower looks at the signature
from flwr.serverapp import Grid, ServerApp

from fpld import config as configuration
from fpld.engines.flower.credentials import AGGREGATOR_KEY, PublicKeys, is_revoked, public_key_file, run_secret
from fpld.engines.flower.launch.processes import end_with_parent
from fpld.engines.flower.log import FlowerLogHandler, FolderLogHandler
from fpld.engines.flower.messages import check_message_sizes
from fpld.engines.flower.patches import choose
from fpld.engines.flower.patches.retry import retry_sooner
from fpld.engines.flower.roster import Roster
from fpld.engines.flower.strategy import ProbeLogitDistillation
from fpld.engines.pool import Inline
from fpld.errors import InputError
from fpld.federation.evaluation import finish_run
from fpld.federation.prepare import claim, prepare_public
from fpld.federation.rounds import Federation
from fpld.federation.sources import record_sources
from fpld.federation.telemetry import Status, listen, loop_files
from fpld.node.spec import NodeFiles, make_node_spec
from fpld.seeds import derive_key
from fpld.storage.run_folder import CONFIG, RunFolder

if TYPE_CHECKING:
    from fpld.config import Config
    from fpld.node.spec import NodeSpec

SESSION = "session.json"
RUN_VARIABLE = "FPLD_RUN"  # `config`, `out`, `seed` and `folder` of a run that `fpld aggregator` started


class NodeSpecs(Sequence["NodeSpec"]):
    """The nodes' specifications, each made when it is asked for: their number costs no memory."""

    def __init__(self, config: Config, digests: dict[str, str]) -> None:
        self._config = config
        self._digests = digests

    def __len__(self) -> int:
        return len(self._config.nodes)

    @overload
    def __getitem__(self, index: int) -> NodeSpec: ...
    @overload
    def __getitem__(self, index: slice) -> list[NodeSpec]: ...
    def __getitem__(self, index: int | slice) -> NodeSpec | list[NodeSpec]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        spec = make_node_spec(self._config, range(len(self))[index])
        named = {field: self._digests[file] for field, file in spec.files.model_dump(exclude_none=True).items()}
        return spec.model_copy(update={"files": NodeFiles(**named)})


def publish(config: Config, run: RunFolder) -> tuple[NodeSpecs, dict[str, bytes]]:
    """Return each node's specification, and the files that these name."""
    digests = dict[str, str]()
    contents = dict[str, bytes]()
    for index in range(len(config.nodes)):
        for file in sorted(make_node_spec(config, index).files.names() - set(digests)):
            data = (run.path / file).read_bytes()
            digests[file] = hashlib.sha256(data).hexdigest()
            contents[digests[file]] = data
    return NodeSpecs(config, digests), contents


def server_app(
    config: str | Path | None = None, *, out: str | Path | None = None, seed: int | None = None
) -> ServerApp:
    """Make a ServerApp that runs a federation: `config` is a file or a preset, `out` the run's folder.

    What is not given here is taken from the run's own configuration, by the same names; `folder` there is what paths
    are relative to. A folder that holds a run already is resumed.
    """
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        if RUN_VARIABLE in os.environ:  # a process of `fpld aggregator`'s, with which it ends
            end_with_parent(signal.SIGKILL)
        options = {**context.run_config, **json.loads(os.environ.get(RUN_VARIABLE, "{}"))}
        if options.get("folder"):
            os.chdir(str(options["folder"]))
        file = config if config is not None else str(options.get("config", ""))
        drawn = options.get("seed", -1) if seed is None else seed
        checked, text = configuration.read_config(file, seed=drawn if isinstance(drawn, int) and drawn >= 0 else None)
        serve(grid, checked, text, Path(str(out or options.get("out") or checked.run.out)))

    return app


def serve(grid: Grid, config: Config, text: str, out: Path) -> list[dict[str, Any]]:
    """Run a federation over a Grid into a folder, from where it stands; return the table's rows."""
    store = RunFolder(out)
    with (
        store.lock(),
        Status(store) as status,
        listen(FolderLogHandler(store.path)),
        listen(FlowerLogHandler()),
        loop_files(store),
    ):
        choose(config.engine.patches)
        retry_sooner()
        status.set("preparing")
        claim(store, text, resume=store.has(CONFIG))
        record_sources(config, store)
        public = prepare_public(config, store)
        status.set("running")
        session, key = session_of(store, config)
        specs, files = publish(config, store)
        keys = node_keys(config, session)
        federation = Federation(config, store, public, "fpld", pool=Inline(), mac_keys=keys, run_key=key)
        check_message_sizes(config, federation.setup.settings, specs, files, federation.state.student)
        roster = Roster(federation.names, keys, session, files, partial(is_revoked, config))
        wait = config.flower.wait if config.flower is not None else 60.0
        ProbeLogitDistillation(federation, roster, session, specs, files, wait=wait).start(grid)
        return finish_run(federation)


def node_keys(config: Config, session: bytes) -> dict[int, bytes]:
    """Return the secret of each node in this run; without [flower] there are none, and nobody proves who they are."""
    if config.flower is None:
        return {}
    key = Path(config.flower.certs) / AGGREGATOR_KEY
    return {
        index: run_secret(key, PublicKeys.read(public_key_file(config, node.name)).mac, session, node.name)
        for index, node in enumerate(config.nodes)
    }


def session_of(store: RunFolder, config: Config) -> tuple[bytes, bytes]:
    """Draw what sets this run apart from every other, once: its session and its key. A resumed run finds them.

    A simulation, which has no [flower], has the key that follows from the seed: it gives what the local engine gives.
    """
    if not store.has(SESSION):
        key = derive_key(config.run.seed) if config.flower is None else secrets.token_bytes(32)
        store.write_json(SESSION, {"session": secrets.token_hex(32), "key": key.hex()})
    secrets_ = store.read_json(SESSION)
    try:
        session = bytes.fromhex(secrets_["session"])
        key = bytes.fromhex(secrets_["key"])
    except (KeyError, TypeError, ValueError):
        session = b""
        key = b""
    if (len(session), len(key)) != (32, 32):
        raise InputError(f"{store.path / SESSION} must hold the session and the key of this run: start the run again")
    return session, key
