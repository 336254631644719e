"""How a site stands, in one row for monitoring: `fpld node status`."""

from __future__ import annotations

import json
import re
import time
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from fpld import __version__
from fpld.engines.flower.adoption import SAID
from fpld.engines.flower.home import NodeFile
from fpld.engines.flower.journal import LOG
from fpld.engines.flower.ledger import Ledger
from fpld.engines.flower.presence import CONTACT, LOCK, presence
from fpld.protocol.wire import VERSION

if TYPE_CHECKING:
    from pathlib import Path

_TAIL = 1 << 16  # bytes of the log that are looked at


def site_status(path: Path) -> dict[str, Any]:
    """Return a site's row: whether it runs, its last round and contact, what it has sent, and its last trouble."""
    file, folder = NodeFile.read(path), path.resolve().parent
    running, who = _held(folder), presence(folder)
    contact, lines, entries = folder / "flower" / CONTACT, _lines(folder / LOG), Ledger(folder).entries
    rounds = [int(found[1]) for line in lines if (found := re.match(r"round (\d+): ", line))]
    connected = running and contact.exists() and time.time() - contact.stat().st_mtime < 60
    return {
        "node": file.name,
        "state": "connected" if connected else "running" if running else "stopped",
        "process": who["process"] if running and who else None,
        "since": who["since"] if running and who else None,
        "round": rounds[-1] if rounds else None,
        "last_contact": round(time.time() - contact.stat().st_mtime, 1) if contact.exists() else None,
        "answers": len(entries),
        "up_bytes": sum(entry["bytes"] for entry in entries),
        "trouble": next((line for line in reversed(lines) if " failed: " in line), None),
        "loss": next((line for line in reversed(lines) if line.startswith("nats per token")), None),
        "adopted": next((line for line in reversed(lines) if line.startswith(SAID)), None),
        "version": __version__,
        "wire": VERSION,
    }


def _held(folder: Path) -> bool:
    """Return whether a process holds the site's lock."""
    if not (folder / LOCK).exists():
        return False
    lock = FileLock(folder / LOCK, blocking=False)
    try:
        lock.acquire()
    except Timeout:
        return True
    lock.release()
    return False


def _lines(path: Path) -> list[str]:
    """Return the last texts of a site's log."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        file.seek(max(path.stat().st_size - _TAIL, 0))
        found = file.read().split(b"\n")
    texts = []
    for line in found:
        try:
            texts.append(str(json.loads(line)["text"]))
        except (ValueError, KeyError, TypeError, RecursionError):
            continue
    return texts
