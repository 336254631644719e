"""How a run stands, in one row for monitoring: `fpld aggregator status` and the dashboard's `/metrics`."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

from fpld import __version__
from fpld.federation.status import BEAT
from fpld.protocol.wire import VERSION
from fpld.report.status import run_state
from fpld.storage.files import read_utf8

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

Row = dict[str, Any]
STATES = ("preparing", "running", "stalled", "stopped", "failed", "done")


def standing(folder: Path) -> Row:
    """Return a run's row: state, round, last sign of life, bytes both ways, versions."""
    state, lines = run_state(folder), _lines(folder / "fpld/trace.jsonl")
    progress = _json(folder / "fpld/progress.json")
    known = [node for node in progress.get("nodes", []) if isinstance(node, dict)]
    return {
        "run": folder.name,
        "state": state.name,
        "why": state.why or None,
        "round": progress.get("round", len(lines)),
        "rounds": progress.get("rounds"),
        "phase": progress.get("phase"),
        "answered": sum(node.get("state") == "accepted" for node in known) if known else None,
        "nodes": len(known) or None,
        "last_contact": _age(folder / BEAT),
        "up_bytes": sum(_number(line, "payload_bytes") + _number(line, "overhead_bytes") for line in lines),
        "down_bytes": sum(_number(line, "downlink_bytes") for line in lines),
        "heldout_loss": next((line["heldout_loss"] for line in reversed(lines) if line.get("heldout_loss")), None),
        "version": __version__,
        "wire": VERSION,
    }


def metrics(rows: Sequence[Row]) -> str:
    """Return rows of runs as Prometheus text.

    >>> print(metrics([{"run": "one", "state": "done", "round": 2}]).splitlines()[-1])
    fpld_run_round{run="one"} 2
    """
    said = []
    for name, help_, values in (
        ("round", "The round that goes on, or was closed last.", "round"),
        ("rounds", "All rounds of the run.", "rounds"),
        ("answered_nodes", "Nodes whose frames of this round were accepted.", "answered"),
        ("nodes", "All nodes of the run.", "nodes"),
        ("last_contact_seconds", "Seconds since the run's last sign of life.", "last_contact"),
        ("up_bytes_total", "Bytes of frames that nodes have sent.", "up_bytes"),
        ("down_bytes_total", "Bytes of messages that nodes were sent.", "down_bytes"),
        ("heldout_loss_nats", "The last student's loss on held-out text, nats per token.", "heldout_loss"),
    ):
        found = [(row["run"], row.get(values)) for row in rows]
        said += _family(f"fpld_run_{name}", help_, [({"run": run}, value) for run, value in found if value is not None])
    state = [({"run": row["run"], "state": name}, int(row["state"] == name)) for row in rows for name in STATES]
    return "".join([*_family("fpld_run_state", "1 for the state that the run is in.", state), *said])


def _family(name: str, help_: str, samples: Sequence[tuple[Mapping[str, str], float]]) -> list[str]:
    kind = "counter" if name.endswith("_total") else "gauge"
    lines = [f"# HELP {name} {help_}\n", f"# TYPE {name} {kind}\n"]
    for labels, value in samples:
        shown = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
        lines.append(f"{name}{{{shown}}} {value}\n")
    return lines if samples else []


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _number(line: Row, name: str) -> int:
    value = line.get(name)
    return value if type(value) is int else 0


def _lines(path: Path) -> list[Row]:
    try:
        found = [json.loads(line) for line in read_utf8(path).splitlines()]
    except (ValueError, RecursionError):
        return []
    return [line for line in found if isinstance(line, dict)]


def _json(path: Path) -> Row:
    try:
        found = json.loads(read_utf8(path))
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _age(path: Path) -> float | None:
    try:
        return round(time.time() - path.stat().st_mtime, 1)
    except OSError:
        return None
