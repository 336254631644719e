"""The status of a run as one row, for `fpld aggregator status` and the dashboard's `/metrics`."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from fpld import __version__
from fpld.data import ProbeSet
from fpld.data.places import load_probe
from fpld.errors import FpldError
from fpld.protocol.wire import VERSION
from fpld.report.run import RUN_STATES, age_seconds, read_progress, read_trace, run_state
from fpld.storage.run_folder import HEARTBEAT, PROBE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from fpld.federation.record import RoundRecord
    from fpld.report.run import RoundProgress

Row = dict[str, Any]
_METRICS = (
    ("round", "The round that is under way, or was closed last.", "round"),
    ("rounds", "All rounds of the run.", "rounds"),
    ("answered_nodes", "Nodes whose frames of this round were accepted.", "answered"),
    ("nodes", "All nodes of the run.", "nodes"),
    ("last_contact_seconds", "Seconds since the run's last heartbeat.", "last_contact"),
    ("up_bytes_total", "Bytes of frames that nodes have sent.", "up_bytes"),
    ("down_bytes_total", "Bytes of messages that nodes were sent.", "down_bytes"),
    ("heldout_loss_nats", "The last student's loss on held-out text, nats per token.", "heldout_loss"),
)


def run_status_row(folder: Path) -> Row:
    """Return a run's state, round, last heartbeat, bytes both ways and versions.

    Monitoring must go on while a run is being prepared or a file is damaged: such a file counts as empty.
    """
    state = run_state(folder)
    trace: list[RoundRecord] = []
    progress: RoundProgress | None = None
    with suppress(FpldError, OSError):
        trace = read_trace(folder)
    with suppress(FpldError, OSError):
        progress = read_progress(folder)
    nodes = progress.nodes if progress else []
    heartbeat = age_seconds(folder / HEARTBEAT)
    return {
        "run": folder.name,
        "state": state.name,
        "why": state.why or None,
        "round": progress.round if progress else len(trace),
        "rounds": progress.rounds if progress else None,
        "phase": progress.phase if progress else None,
        "answered": sum(node.state == "accepted" for node in nodes) if nodes else None,
        "nodes": len(nodes) or None,
        "last_contact": None if heartbeat is None else round(heartbeat, 1),
        "up_bytes": sum(record.sent for record in trace),
        "down_bytes": sum(record.downlink_bytes for record in trace),
        "heldout_loss": next((record.heldout_loss for record in reversed(trace) if record.heldout_loss), None),
        "version": __version__,
        "wire": VERSION,
    }


def public_digests(folder: Path) -> Row:
    """Return the digests of a run's probe set and tokenizer, which sites may insist on; None before they are made.

    A probe set of labels over strings belongs to no tokenizer.
    """
    try:
        probe = load_probe(folder / PROBE)
    except (FpldError, OSError):
        return {"probe": None, "tokenizer": None}
    return {"probe": probe.digest, "tokenizer": probe.tokenizer if isinstance(probe, ProbeSet) else None}


def metrics(rows: Sequence[Row]) -> str:
    """Return rows of runs as Prometheus text.

    >>> print(metrics([{"run": "one", "state": "done", "round": 2}]).splitlines()[-1])
    fpld_run_round{run="one"} 2
    """
    states = [({"run": row["run"], "state": name}, int(row["state"] == name)) for row in rows for name in RUN_STATES]
    lines = _metric_family("fpld_run_state", "1 for the state that the run is in.", states)
    for name, description, column in _METRICS:
        samples = [({"run": row["run"]}, row[column]) for row in rows if row.get(column) is not None]
        lines += _metric_family(f"fpld_run_{name}", description, samples)
    return "".join(lines)


def _metric_family(name: str, description: str, samples: Sequence[tuple[Mapping[str, str], float]]) -> list[str]:
    if not samples:
        return []
    kind = "counter" if name.endswith("_total") else "gauge"
    lines = [f"# HELP {name} {description}\n", f"# TYPE {name} {kind}\n"]
    for labels, value in samples:
        shown = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
        lines.append(f"{name}{{{shown}}} {value}\n")
    return lines


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
