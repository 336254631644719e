"""`fpld node`: a SuperNode for this site, started again when it stops; and `fpld node status`, a row for monitoring."""

from __future__ import annotations

import logging
import random
import re
import time
from typing import TYPE_CHECKING, Any

from fpld import __version__
from fpld.engines.flower.credentials import AUTH_KEY, expiry_warnings
from fpld.engines.flower.launch.processes import ChildProcess, free_port
from fpld.engines.flower.log import OWN_MODEL_PREFIX, follow_log, last_texts, relay_log
from fpld.engines.flower.patches.bootstrap import supernode_environment
from fpld.engines.flower.site.config import NodeFile, describe_may_send
from fpld.engines.flower.site.ledger import Ledger
from fpld.engines.flower.site.lock import CONTACT_FILE, is_locked, read_presence, site_lock
from fpld.errors import InputError
from fpld.protocol.wire import VERSION

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

log = logging.getLogger(__name__)

RESTART_SECONDS = 1.0, 10.0  # before a SuperNode that stopped is started again: the first pause, and the longest
_STABLE_SECONDS = 30.0  # a SuperNode that ran for so long is started again after the first pause
_CONTACT_SECONDS = 60.0  # a node without contact for longer is not connected
_REFUSED = "Failed to activate SuperNode"
_REFUSED_HINT = (
    "the aggregator has not admitted this node's key yet, or a process elsewhere is connected with the same key (a "
    "copy of this folder?): then one of the two must go"
)


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
    with site_lock(folder, file.name):
        lines = follow_log(folder)
        next(lines)
        child = None
        pause = pauses[0]
        random_ = random.Random()  # noqa: S311 - a spread of moments, no secret
        try:
            while True:
                started({"node": file.name, "address": file.address, "time": time.strftime("%Y-%m-%d %H:%M:%S %z")})
                log.info("%s: connecting to %s", file.name, file.address)
                flower = folder / "flower"
                begun = time.monotonic()
                child = ChildProcess(
                    [*command, "--port", str(file.port or free_port())],
                    flower / "supernode.log",
                    flower,
                    supernode_environment(flower / "pinned"),
                )
                while child.alive:
                    relay_log(lines)
                    time.sleep(0.2)
                pause = pauses[0] if time.monotonic() - begun > _STABLE_SECONDS else min(2 * pause, pauses[1])
                wait = pause * random_.uniform(0.5, 1.0)  # nodes that lost one SuperLink do not all return at once
                reason = child.exit_reason()
                hint = f": {_REFUSED_HINT}" if _REFUSED in reason else ""
                log.warning("SuperNode stopped (%s)%s: starting it again in %.1f s", reason, hint, wait)
                child.stop()  # and the processes that it has started
                time.sleep(wait)
        finally:
            if child is not None:
                child.stop()


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
    """Return a site's row: whether it runs, its last round and contact, what it has sent, and its last failure."""
    file = NodeFile.read(path)
    folder = path.resolve().parent
    running = is_locked(folder)
    presence = read_presence(folder)
    contact = folder / "flower" / CONTACT_FILE
    texts = last_texts(folder)
    entries = Ledger(folder).entries
    rounds = [int(match[1]) for text in texts if (match := re.match(r"round (\d+): ", text))]
    last_contact = round(time.time() - contact.stat().st_mtime, 1) if contact.exists() else None
    connected = running and last_contact is not None and last_contact < _CONTACT_SECONDS
    return {
        "node": file.name,
        "state": "connected" if connected else "running" if running else "stopped",
        "process": presence["process"] if running and presence else None,
        "since": presence["since"] if running and presence else None,
        "round": rounds[-1] if rounds else None,
        "last_contact": last_contact,
        "answers": len(entries),
        "up_bytes": sum(entry["bytes"] for entry in entries),
        "text_bytes": sum((entry.get("written") or {"text_bytes": 0})["text_bytes"] for entry in entries),
        "may_send": describe_may_send(file),
        "trouble": next((text for text in reversed(texts) if " failed: " in text), None),
        "loss": next((text for text in reversed(texts) if text.startswith("nats per token")), None),
        "adopted": next((text for text in reversed(texts) if text.startswith(OWN_MODEL_PREFIX)), None),
        "version": __version__,
        "wire": VERSION,
    }
