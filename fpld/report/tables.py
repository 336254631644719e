"""The tables of a run as rows, for pages and exports alike."""

from __future__ import annotations

import tomllib
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from fpld.federation.traffic import DOWN, UP
from fpld.units import show_size

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fpld.report.runs import OwnLoss, Run

Row = dict[str, Any]
PERCENT = ("share", "used")
"""Columns that are shares, shown as percent."""
RISES = "rises"
"""The trend of a node's loss that is marked."""
_LEVEL = 0.005  # nats: a change of the loss that says nothing


def tiles(run: Run) -> dict[str, str]:
    """Return the summary of a run: name and value."""
    found = {"begun": f"{datetime.fromtimestamp(run.begun, UTC):%Y-%m-%d %H:%M} UTC"} if run.begun else {}
    found["duration"] = _span(run.changed - run.begun)
    if run.student_bytes:
        found["student"] = show_size(run.student_bytes)
    if run.documents:
        found["private documents"] = f"{sum(run.documents.values()):,}"
    terms = run.settings.get("privacy")
    if isinstance(terms, dict):
        found["promised by each node"] = f"epsilon {terms.get('epsilon')} for a {terms.get('unit', 'document')}"
    found |= {"rounds closed": f"{len(run.trace)} of {run.rounds}", "nodes": str(len(run.nodes))}
    if run.trace:
        loss = run.trace[-1].heldout_loss
        found["held-out loss"] = "not evaluated" if loss is None else f"{loss:.4f} nats"
        sites = run.trace[-1].heldout_sites
        if loss is not None and sites is not None and len(sites) < len(run.nodes):
            found["held-out loss over"] = ", ".join(sites)
        found["sent so far"] = show_size(run.uplink[-1])
    closed = gap_closed([row.model_dump() for row in run.results])
    if closed is not None:
        found["gap to pooled training closed"] = f"{closed:.0%}"
    troubles = len(incident_rows(run))
    found["refused or absent"] = str(troubles) if troubles else "none"
    return found


def _span(seconds: float) -> str:
    for unit, size, most in (("s", 1, 120), ("min", 60, 7200)):
        if seconds < most:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds / 3600:.1f} h"


def filled(rows: list[Row]) -> list[Row]:
    """Return rows without the columns that have no value in any."""
    known = [name for name in (rows[0] if rows else {}) if any(row[name] is not None for row in rows)]
    return [{name: row[name] for name in known} for row in rows]


def gap_closed(rows: Sequence[Row]) -> float | None:
    """Return the share of the gap between the best node alone and pooled training that the federation closes."""
    loss = {row["method"]: row["heldout_loss"] for row in rows if row["heldout_loss"] is not None}
    lone = [value for name, value in loss.items() if name.startswith("alone")]
    if not lone or "pooled" not in loss or "fpld" not in loss or min(lone) <= loss["pooled"]:
        return None
    return (min(lone) - loss["fpld"]) / (min(lone) - loss["pooled"])  # type: ignore[no-any-return]


def result_rows(runs: Sequence[Run]) -> list[Row]:
    """Return every method of every run: loss and uplink."""
    return [
        ({"run": run.name} if len(runs) > 1 else {}) | row.model_dump()
        for run in runs
        for row in run.results
    ]  # fmt: skip


def round_rows(run: Run) -> list[Row]:
    """Return one flat row for each round."""
    return [
        {
            "round": line.round,
            "answered": len(line.nodes),
            "heldout_loss": line.heldout_loss,
            "kl": line.kl,
            "gain": line.gain,
            "bandwidth_lower": line.bandwidth_lower,
            "bandwidth_upper": line.bandwidth_upper,
            "round_bytes": line.sent,
            "all_bytes": sent,
            "downlink_bytes": line.downlink_bytes,
            **_kinds("down", line.downlink),
            **_kinds("up", line.uplink),
            "seconds": round(sum(line.phases.values()), 3),
        }
        for line, sent in zip(run.trace, run.uplink, strict=True)
    ]


def _kinds(way: str, sizes: Mapping[str, int]) -> Row:
    """Return a column for each kind of bytes that messages carry; a kind that no round has gets none."""
    kinds = DOWN if way == "down" else UP
    return {f"{way}_{kind}": sizes.get(kind) or None for kind in kinds}


def node_rows(run: Run) -> list[Row]:
    """Return what each node contributed: rounds, bits, bytes and its share of them, weight, loss on its own text."""
    total = sum(run.uplink[-1:]) or 1
    own = {row.node: row for row in run.own}
    rows: list[Row] = []
    for i, name in enumerate(run.nodes):
        answered = [line for line in run.trace if name in line.nodes]
        sent = sum(line.node_bytes[i] for line in run.trace if i < len(line.node_bytes))
        bits = [line.bits_sent[i] for line in answered if i < len(line.bits_sent)]
        allotted = [line.bits_allotted[i] for line in answered if i < len(line.bits_allotted)]
        seconds, work = (
            [value for times in found if i < len(times) and (value := times[i]) is not None]
            for found in ([line.answers for line in answered], [line.work for line in answered])
        )
        last = run.trace[-1] if run.trace else None
        weights = last.node_weights if last is not None else None
        losses = last.heldout_by_node if last is not None else []
        rows.append(
            {
                "node": name,
                **({"documents": run.documents.get(name)} if run.documents else {}),
                "rounds_answered": len(answered),
                "bits_mean": sum(bits) / len(bits) if bits else None,
                "allotted_mean": sum(allotted) / len(allotted) if allotted else None,
                "used": sum(bits) / sum(allotted) if bits and sum(allotted) else None,
                "bytes": sent,
                "share": sent / total,
                "weight": weights[i] if weights and i < len(weights) else _configured(run, i, "weight"),
                "clip": _configured(run, i, "clip"),
                "heldout_loss": losses[i] if i < len(losses) else None,
                "trend": _trend(run, i),
                **_beside(own, name),
                "seconds_to_answer": sum(seconds) / len(seconds) if seconds else None,
                "seconds_at_work": sum(work) / len(work) if work else None,
                "refused": sum(each.node == name for line in run.trace for each in line.refused),
                "absent": sum(each.node == name for line in run.trace for each in line.absent),
            }
        )
    return rows


def _beside(own: Mapping[str, OwnLoss], name: str) -> Row:
    """Return the losses of a node's own models on the same text as the student's; nothing where no node tells."""
    if not own:
        return {}
    found = own.get(name)
    return {
        "own_model_loss": None if found is None else found.own,
        "alone_loss": None if found is None else found.alone,
        **({} if found is None or found.own_all is None else {"own_model_all": found.own_all}),
        **({} if found is None or found.alone_all is None else {"alone_all": found.alone_all}),
    }


def allocation_rows(run: Run) -> list[Row]:
    """Return one flat row for each node and round: bits allotted and sent, bytes, weight, loss, seconds."""

    def at(values: Sequence[Any] | None, index: int) -> Any:
        return values[index] if values and index < len(values) else None

    return [
        {
            "round": line.round,
            "node": name,
            "answered": name in line.nodes,
            "bits_allotted": at(line.bits_allotted, i),
            "bits_sent": at(line.bits_sent, i),
            "bytes": at(line.node_bytes, i),
            "weight": at(line.node_weights, i),
            "heldout_loss": at(line.heldout_by_node, i),
            "seconds": at(line.answers, i),
        }
        for line in run.trace
        for i, name in enumerate(run.nodes)
    ]


def continuation_rows(run: Run) -> list[Row]:
    """Return what the student of each round has written, the last round first."""
    return [
        {"round": line.round, "prompt": text.prompt, "the student goes on": text.text}
        for line in reversed(run.trace)
        for text in line.continuations
    ]


def incident_rows(run: Run) -> list[Row]:
    """Return refused frames and absent nodes, with the reasons."""
    return [
        {"round": line.round, "node": each.node, "what": each.state, "why": each.reason}
        for line in run.trace
        for each in (*line.refused, *line.absent)
    ]


def difference_rows(runs: Sequence[Run]) -> list[Row]:
    """Return the keys of the configurations in which runs differ."""
    flat = [_flatten(run.text) for run in runs]
    keys = sorted({key for each in flat for key in each})
    return [
        {"configuration key": key, **{run.name: each.get(key, "") for run, each in zip(runs, flat, strict=True)}}
        for key in keys
        if len({each.get(key, "") for each in flat}) > 1
    ]


def _trend(run: Run, index: int) -> str | None:
    """Say how the loss on a node's text has moved from its least to the last round: a rise is worth a look."""
    losses = [line.heldout_by_node[index] for line in run.trace if index < len(line.heldout_by_node)]
    known = [loss for loss in losses if loss is not None]
    if len(known) < 2:
        return None
    return RISES if known[-1] > min(known) + _LEVEL else "falls" if known[-1] < known[0] - _LEVEL else "level"


def _configured(run: Run, index: int, key: str) -> float | None:
    nodes = run.settings.get("nodes")
    found = nodes[index].get(key) if isinstance(nodes, list) and index < len(nodes) else None
    return float(found) if isinstance(found, int | float) else None


def _flatten(text: str) -> dict[str, str]:
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return {"": "no TOML"}
    found: dict[str, str] = {}

    def walk(key: str, value: Any) -> None:
        if isinstance(value, dict):
            for name, inner in value.items():
                walk(f"{key}.{name}" if key else name, inner)
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            for i, inner in enumerate(value):
                walk(f"{key}[{inner.get('name', i)}]", inner)
        else:
            found[key] = str(value)

    walk("", tables)
    return found
