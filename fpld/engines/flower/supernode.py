"""`fpld node`: a SuperNode for this site, started again when it stops, with the pause that Flower needs."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

from fpld.engines.flower.home import NodeFile
from fpld.engines.flower.identity import AUTH_KEY
from fpld.engines.flower.journal import follow, retell
from fpld.engines.flower.pinned import pinned_environment
from fpld.engines.flower.processes import Child, free_port
from fpld.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

log = logging.getLogger(__name__)

# A SuperLink holds a node that died for alive until two heartbeats are missed, and turns its return away till then.
PAUSE = 20.0


def run_node(
    path: Path,
    *,
    insecure: bool,
    started: Callable[[dict[str, Any]], None],
    pause: float = PAUSE,
) -> None:
    """Take part in the federation for ever: until this process is told to stop. `started` gets a row a start."""
    file, folder = NodeFile.read(path), path.resolve().parent
    command = _command(file, path, folder, insecure=insecure)
    lines = follow(folder)
    next(lines)
    child = None
    try:
        while True:
            port = file.port or free_port()
            started({"node": file.name, "address": file.address, "time": time.strftime("%Y-%m-%d %H:%M:%S %z")})
            log.info("%s: connecting to %s", file.name, file.address)
            log_file, flower = folder / "flower" / "supernode.log", folder / "flower"
            child = Child([*command, "--port", str(port)], log_file, flower, pinned_environment(flower / "pinned"))
            while child.alive:
                retell(lines)
                time.sleep(0.5)
            log.warning("SuperNode stopped (%s): starting it again in %g s", child.last_words(), pause)
            child.stop()  # what it may have left
            time.sleep(pause)
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
    return [
        *command,
        "--root-certificates",
        str(folder / file.ca),
        "--auth-supernode-private-key",
        str(folder / AUTH_KEY),
    ]
