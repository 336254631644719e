"""`fpld node`: a SuperNode for this site, started again when it stops; and `fpld node status`, a row for monitoring."""

from __future__ import annotations

import logging
import random
import re
import time
from typing import TYPE_CHECKING, Any

from fpld import __version__
from fpld.engines.flower.credentials import AUTH_KEY, expiry_warnings
from fpld.engines.flower.launch.connection import (
    SIGNED_ON,
    ConnectionWatch,
    SiteState,
    not_admitted,
    read_state,
    try_connection,
)
from fpld.engines.flower.launch.processes import ChildProcess, free_port
from fpld.engines.flower.log import OWN_MODEL_PREFIX, follow_log, last_texts, relay_log
from fpld.engines.flower.patches import is_chosen
from fpld.engines.flower.patches.bootstrap import supernode_environment
from fpld.engines.flower.site.config import NodeFile, describe_may_send
from fpld.engines.flower.site.folder import CONTACT_FILE, is_locked, read_presence, site_lock
from fpld.engines.flower.site.ledger import Ledger
from fpld.errors import InputError
from fpld.protocol.wire import VERSION

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

log = logging.getLogger(__name__)

RESTART_SECONDS = 1.0, 10.0  # before a SuperNode that stopped is started again: the first pause, and the longest
_STABLE_SECONDS = 30.0  # a SuperNode that ran for so long is started again after the first pause
_ADMISSION_SECONDS = 60.0  # in which a SuperNode is let in or turned away


def run_node(
    path: Path,
    *,
    insecure: bool,
    started: Callable[[dict[str, Any]], None],
    pauses: tuple[float, float] = RESTART_SECONDS,
) -> None:
    """Take part in the federation until this process is told to stop.

    Parameters
    ----------
    path
        The site's `node.toml`.
    insecure
        Use neither TLS nor node authentication.
    started
        Called with a row for the user at each start of the SuperNode.
    pauses
        Seconds before a SuperNode that stopped is started again: the first pause, and the longest.
    """
    file = NodeFile.read(path)
    folder = path.resolve().parent
    command = _command(file, path, folder, insecure=insecure)
    if not is_chosen("installed_app", file.patches):
        log.warning("%s: patches leave installed_app out: the code of each run is executed at this node", path.name)
    with site_lock(folder, file.name):
        lines = follow_log(folder)
        next(lines)
        watch = ConnectionWatch(folder, file.name, file.address, None if insecure else folder / file.ca)
        child = None
        pause = pauses[0]
        random_ = random.Random()  # noqa: S311 - a spread of moments, no secret
        try:
            while True:
                started({"node": file.name, "address": file.address, "time": time.strftime("%Y-%m-%d %H:%M:%S %z")})
                flower = folder / "flower"
                begun = time.monotonic()
                child = ChildProcess(
                    [*command, "--port", str(file.port or free_port())],
                    flower / "supernode.log",
                    flower,
                    supernode_environment(flower / "pinned", file.patches),
                )
                watch.start()
                while child.alive:
                    watch.look(child, relay_log(lines))
                    time.sleep(0.2)
                pause = pauses[0] if time.monotonic() - begun > _STABLE_SECONDS else min(2 * pause, pauses[1])
                wait = pause * random_.uniform(0.5, 1.0)  # nodes that lost one SuperLink do not all return at once
                if not watch.ended(child):  # Flower's words on who was turned away are in its own log
                    log.warning("SuperNode stopped (%s): starting it again in %.1f s", child.exit_reason(), wait)
                child.stop()  # and the processes that it has started
                time.sleep(wait)
        finally:
            if child is not None:
                child.stop()
            watch.set(SiteState("stopped", "told to stop"))


def try_site(path: Path) -> SiteState:
    """Connect as this site does, and leave again; return the state that came of it.

    A site that runs is not disturbed: its own state is returned. `connected` says that address, certificate, clock and
    key are right.
    """
    file = NodeFile.read(path)
    folder = path.resolve().parent
    if is_locked(folder):
        return read_state(folder)
    command = _command(file, path, folder, insecure=False)
    trial = try_connection(file.address, folder / file.ca)
    if trial.problem is not None:
        return trial.problem
    with site_lock(folder, file.name):
        flower = folder / "flower"
        environment = supernode_environment(flower / "pinned", file.patches)
        child = ChildProcess([*command, "--port", str(free_port())], flower / "trial.log", flower, environment)
        try:
            end = time.monotonic() + _ADMISSION_SECONDS
            while child.alive and time.monotonic() < end:
                if SIGNED_ON in child.output():
                    return SiteState("connected", f"{file.name} is admitted at {file.address}")
                time.sleep(0.2)
        finally:
            child.stop()
    return SiteState("not admitted", trial.clock) if trial.clock else not_admitted(file.name)


def _command(file: NodeFile, path: Path, folder: Path, *, insecure: bool) -> list[str]:
    command = ["flower-supernode", "--superlink", file.address, "--node-config", f'node="{path.resolve()}"']
    if insecure:
        return [*command, "--insecure"]
    for needed in (folder / file.ca, folder / AUTH_KEY):
        if not needed.exists():
            raise InputError(f"{needed} does not exist: `fpld init-node` makes it")
    for sentence in expiry_warnings([folder / file.ca]):
        log.warning("%s", sentence)
    return [
        *command,
        "--root-certificates",
        str(folder / file.ca),
        "--auth-supernode-private-key",
        str(folder / AUTH_KEY),
    ]


def site_status(path: Path) -> dict[str, Any]:
    """Return a site's row: how it stands and why, its last round and contact, what it has sent, its last failure."""
    file = NodeFile.read(path)
    folder = path.resolve().parent
    running = is_locked(folder)
    presence = read_presence(folder)
    contact = folder / "flower" / CONTACT_FILE
    texts = last_texts(folder)
    entries = Ledger(folder).entries
    rounds = [int(match[1]) for text in texts if (match := re.match(r"round (\d+): ", text))]
    last_contact = round(time.time() - contact.stat().st_mtime, 1) if contact.exists() else None
    state = read_state(folder) if running else SiteState("stopped", "no process takes part from this folder")
    return {
        "node": file.name,
        "state": state.state,
        "reason": state.reason,
        "process": presence["process"] if running and presence else None,
        "since": presence["since"] if running and presence else None,
        "round": rounds[-1] if rounds else None,
        "last_contact": last_contact,
        "answers": sum(entry["kind"] != "training" for entry in entries),
        "up_bytes": sum(entry["bytes"] for entry in entries),
        "text_bytes": sum((entry.get("written") or {"text_bytes": 0})["text_bytes"] for entry in entries),
        "may_send": describe_may_send(file),
        "trouble": next((text for text in reversed(texts) if " failed: " in text), None),
        "loss": next((text for text in reversed(texts) if text.startswith("nats per token")), None),
        "adopted": next((text for text in reversed(texts) if text.startswith(OWN_MODEL_PREFIX)), None),
        "version": __version__,
        "wire": VERSION,
    }
