"""`fpld node`: a SuperNode for this site, started again when it stops. A site takes part once: it has a lock."""

from __future__ import annotations

import logging
import random
import time
from typing import TYPE_CHECKING, Any

from fpld.engines.flower.expiry import ending
from fpld.engines.flower.home import NodeFile
from fpld.engines.flower.identity import AUTH_KEY
from fpld.engines.flower.journal import follow, retell
from fpld.engines.flower.pinned import pinned_environment
from fpld.engines.flower.presence import hold
from fpld.engines.flower.processes import Child, free_port
from fpld.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

log = logging.getLogger(__name__)

PAUSES = 1.0, 10.0  # seconds before a SuperNode that stopped is started again: first, and at most
_LONG = 30.0  # seconds after which a SuperNode counts as one that worked
_TURNED_AWAY = "Failed to activate SuperNode"
_WHY = (
    "the aggregator has not admitted this node's key yet, or a process elsewhere is connected with the same key (a "
    "copy of this folder?): then one of the two must go"
)


def run_node(
    path: Path,
    *,
    insecure: bool,
    started: Callable[[dict[str, Any]], None],
    pauses: tuple[float, float] = PAUSES,
) -> None:
    """Take part in the federation for ever: until this process is told to stop. `started` gets a row a start."""
    file, folder = NodeFile.read(path), path.resolve().parent
    command = _command(file, path, folder, insecure=insecure)
    with hold(folder, file.name):
        lines = follow(folder)
        next(lines)
        child, pause, random_ = None, pauses[0], random.Random()  # noqa: S311 - a spread of moments, no secret
        try:
            while True:
                port = file.port or free_port()
                started({"node": file.name, "address": file.address, "time": time.strftime("%Y-%m-%d %H:%M:%S %z")})
                log.info("%s: connecting to %s", file.name, file.address)
                log_file, flower = folder / "flower" / "supernode.log", folder / "flower"
                begun = time.monotonic()
                child = Child([*command, "--port", str(port)], log_file, flower, pinned_environment(flower / "pinned"))
                while child.alive:
                    retell(lines)
                    time.sleep(0.2)
                pause = pauses[0] if time.monotonic() - begun > _LONG else min(2 * pause, pauses[1])
                wait = pause * random_.uniform(0.5, 1.0)  # many that lost one SuperLink do not return at one moment
                words = child.last_words()
                why = f": {_WHY}" if _TURNED_AWAY in words else ""
                log.warning("SuperNode stopped (%s)%s: starting it again in %.1f s", words, why, wait)
                child.stop()  # what it may have left
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
    for sentence in ending([folder / file.ca]):
        log.warning("%s", sentence)
    return [
        *command,
        "--root-certificates",
        str(folder / file.ca),
        "--auth-supernode-private-key",
        str(folder / AUTH_KEY),
    ]
