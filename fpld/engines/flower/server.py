"""The ServerApp: a whole run of a federation in a folder, resumed if it was begun before."""

from __future__ import annotations

import os
import secrets
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flwr.app import Context  # noqa: TC002 - Flower looks at the signature
from flwr.serverapp import Grid, ServerApp

from fpld import config as configuration
from fpld.engines.flower.certs import AGGREGATOR_KEY
from fpld.engines.flower.identity import PublicKeys, run_secret
from fpld.engines.flower.journal import FlowerLog, Journal
from fpld.engines.flower.keys import is_revoked, public_file
from fpld.engines.flower.limits import check_run
from fpld.engines.flower.publish import publish
from fpld.engines.flower.returning import hurry
from fpld.engines.flower.roster import Roster
from fpld.engines.flower.strategy import ProbeLogitDistillation
from fpld.engines.pool import Inline
from fpld.errors import InputError
from fpld.federation.claim import claim
from fpld.federation.federation import Federation
from fpld.federation.log import listen
from fpld.federation.prepare import prepare_public
from fpld.federation.result import finish_run
from fpld.federation.status import Status
from fpld.federation.watch import watch
from fpld.seeds import derive_key
from fpld.storage.folder import RunFolder

if TYPE_CHECKING:
    from fpld.config import Config

SESSION = "session.json"


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
        given = context.run_config
        if given.get("folder"):
            os.chdir(str(given["folder"]))
        file = config if config is not None else str(given.get("config", ""))
        drawn = given.get("seed", -1) if seed is None else seed
        checked, text = configuration.load(file, seed=drawn if isinstance(drawn, int) and drawn >= 0 else None)
        serve(grid, checked, text, Path(str(out or given.get("out") or checked.run.out)))

    return app


def serve(grid: Grid, config: Config, text: str, out: Path) -> list[dict[str, Any]]:
    """Run a federation over a Grid into a folder, from where it stands; return the table's rows."""
    hurry()
    store = RunFolder(out)
    with store.lock(), Status(store) as status, listen(Journal(store.path)), listen(FlowerLog()), watch(store):
        status.say("preparing")
        claim(store, text, resume=store.has("config.toml"))
        public = prepare_public(config, store)
        status.say("running")
        session, key = session_of(store, config)
        parts, files = publish(config, store)
        keys = node_keys(config, session)
        federation = Federation(config, store, public, "fpld", pool=Inline(), mac_keys=keys, run_key=key)
        check_run(config, federation.setup.settings, parts, files, federation.state.student)
        roster = Roster(federation.names, keys, session, files, partial(is_revoked, config))
        wait = config.flower.wait if config.flower is not None else 60.0
        ProbeLogitDistillation(federation, roster, session, parts, files, wait=wait).start(grid)
        return finish_run(federation)


def node_keys(config: Config, session: bytes) -> dict[int, bytes]:
    """Return the secret of each node in this run; without [flower] there are none, and nobody proves who they are."""
    if config.flower is None:
        return {}
    own = Path(config.flower.certs) / AGGREGATOR_KEY
    return {
        index: run_secret(own, PublicKeys.read(public_file(config, node.name)).mac, session, node.name)
        for index, node in enumerate(config.nodes)
    }


def session_of(store: RunFolder, config: Config) -> tuple[bytes, bytes]:
    """Draw what sets this run apart from every other, once: its session and its key. A resumed run finds them.

    A simulation, which has no [flower], has the key that follows from the seed: it gives what the local engine gives.
    """
    if not store.has(SESSION):
        key = derive_key(config.run.seed) if config.flower is None else secrets.token_bytes(32)
        store.write_json(SESSION, {"session": secrets.token_hex(32), "key": key.hex()})
    found = store.read_json(SESSION)
    try:
        session, key = bytes.fromhex(found["session"]), bytes.fromhex(found["key"])
    except (KeyError, TypeError, ValueError):
        session, key = b"", b""
    if (len(session), len(key)) != (32, 32):
        raise InputError(f"{store.path / SESSION} must hold the session and the key of this run: start the run anew")
    return session, key
