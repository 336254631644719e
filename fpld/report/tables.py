"""The tables of a run as rows, for pages and exports."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fpld.errors import InputError
from fpld.federation.record import entry_of, node_rounds, round_row
from fpld.storage.files import flat_keys, parse_toml_tables
from fpld.units import BITS_PER_BYTE, NATS_PER_TOKEN, show_duration, show_size, show_time

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fpld.report.run import OwnLoss, RunData

Row = dict[str, Any]
PERCENT = ("share", "used")
"""Columns that are shares, shown as percent."""
_HEADINGS = {"behind": "difference to fpld", "behind_se": "its standard error"}
_BITS = ("bits_allotted", "bits_sent")
RISES = "rises"
"""The trend of a node's loss that pages mark."""
SHORT_UNITS = {NATS_PER_TOKEN: "nats", BITS_PER_BYTE: BITS_PER_BYTE}
"""Units of losses on a page's tiles."""
_MIN_TREND_NATS = 0.005  # a smaller change of the loss is noise


def heading(name: str) -> str:
    """Return the heading of a column.

    >>> heading("uplink_bytes"), heading("behind")
    ('uplink bytes', 'difference to fpld')
    """
    return _HEADINGS.get(name, name.replace("_", " "))


def summary_tiles(run: RunData) -> dict[str, str]:
    """Return the summary of a run: label and value."""
    tiles = {"begun": show_time(run.started)} if run.started else {}
    if run.state.alive:
        if run.heartbeat:
            tiles["last heartbeat"] = show_time(run.heartbeat)
    elif run.modified:
        tiles["ended"] = show_time(run.modified)
    tiles["duration"] = show_duration(run.modified - run.started)
    if run.student_bytes:
        tiles["student"] = show_size(run.student_bytes)
    if run.documents:
        tiles["private documents"] = f"{sum(run.documents.values()):,}"
    privacy = run.section("privacy")
    if privacy:
        tiles["guarantee of each node"] = f"epsilon {privacy.get('epsilon')} for a {privacy.get('unit', 'document')}"
    tiles |= {"rounds closed": f"{len(run.trace)} of {run.planned_rounds}", "nodes": str(len(run.nodes))}
    if run.trace:
        loss = run.trace[-1].heldout_loss
        tiles["held-out loss"] = (
            "not evaluated" if loss is None else f"{run.loss_in(run.loss_unit, loss):.4f} {SHORT_UNITS[run.loss_unit]}"
        )
        sites = run.trace[-1].heldout_sites
        if loss is not None and sites is not None and len(sites) < len(run.nodes):
            tiles["held-out loss over"] = ", ".join(sites)
        tiles["sent so far"] = show_size(run.uplink_bytes[-1])
    closed = gap_closed([row.model_dump() for row in run.results])
    if closed is not None:
        tiles["gap to pooled training closed"] = f"{closed:.0%}"
    incidents = len(incident_rows(run))
    tiles["refused or absent"] = str(incidents) if incidents else "none"
    return tiles


def left_out(run: RunData) -> str:
    """Return how much of which texts was not used, as one line; empty if all was."""
    return "; ".join(use.left_out for use in run.texts if use.left_out)


def drop_empty_columns(rows: list[Row]) -> list[Row]:
    """Return rows without the columns that have no value in any row."""
    columns = [name for name in (rows[0] if rows else {}) if any(row[name] is not None for row in rows)]
    return [{name: row[name] for name in columns} for row in rows]


def gap_closed(rows: Sequence[Row]) -> float | None:
    """Return the share of the gap between the base model and pooled training that the federation closes.

    Pooled training is that with as many steps as all nodes make together. None if one of the three is missing, or
    pooled training is not better than the base model.
    """
    loss = {row["method"]: row["heldout_loss"] for row in rows if row["heldout_loss"] is not None}
    if not {"base", "pooled-all", "fpld"} <= loss.keys() or loss["base"] <= loss["pooled-all"]:
        return None
    return (loss["base"] - loss["fpld"]) / (loss["base"] - loss["pooled-all"])  # type: ignore[no-any-return]


def result_rows(runs: Sequence[RunData]) -> list[Row]:
    """Return every method of every run: loss and uplink."""
    return [({"run": run.name} if len(runs) > 1 else {}) | row.model_dump() for run in runs for row in run.results]


def round_rows(run: RunData) -> list[Row]:
    """Return one flat row for each round."""
    return [round_row(record, sent) for record, sent in zip(run.trace, run.uplink_bytes, strict=True)]


def node_rows(run: RunData) -> list[Row]:
    """Return what each node contributed: rounds, bits, bytes and its share of them, weight, loss on its text.

    Bits are in the run's `bits_unit`.
    """
    total = sum(run.uplink_bytes[-1:]) or 1
    own_losses = {row.node: row for row in run.own_losses}
    last = run.trace[-1] if run.trace else None
    weights = (last.node_weights if last else None) or []
    losses = last.heldout_by_node if last else []
    heldout = {use.name: use.heldout_fraction for use in run.texts if use.heldout}
    rows: list[Row] = []
    for i, name in enumerate(run.nodes):
        answered = [record for record in run.trace if name in record.nodes]
        sent = sum(record.node_bytes[i] for record in run.trace if i < len(record.node_bytes))
        bits = [record.bits_sent[i] for record in answered if i < len(record.bits_sent)]
        allotted = [record.bits_allotted[i] for record in answered if i < len(record.bits_allotted)]
        rows.append(
            {
                "node": name,
                **({"documents": run.documents.get(name)} if run.documents else {}),
                **({"held_out": heldout.get(name)} if heldout else {}),
                "rounds_answered": len(answered),
                "bits_mean": _mean([run.in_bits_unit(each) for each in bits]),
                "allotted_mean": _mean([run.in_bits_unit(each) for each in allotted]),
                "used": sum(bits) / sum(allotted) if bits and sum(allotted) else None,
                "bytes": sent,
                "share": sent / total,
                "weight": weights[i] if i < len(weights) else _configured(run, i, "weight"),
                "clip": _configured(run, i, "clip"),
                "heldout_loss": entry_of(losses, i),
                "trend": _trend(run, i),
                **_own_model_columns(own_losses, name),
                "seconds_to_answer": _mean([entry_of(record.answers, i) for record in answered]),
                "seconds_at_work": _mean([entry_of(record.work, i) for record in answered]),
                "refused": sum(each.node == name for record in run.trace for each in record.refused),
                "absent": sum(each.node == name for record in run.trace for each in record.absent),
            }
        )
    return rows


def _own_model_columns(own_losses: Mapping[str, OwnLoss], name: str) -> Row:
    """Return the losses of a node's own models on the same text as the student's; no columns if none are known."""
    if not own_losses:
        return {}
    losses = own_losses.get(name)
    if losses is None:
        return {"own_model_loss": None, "alone_loss": None}
    columns = {"own_model_loss": losses.own, "alone_loss": losses.alone}
    over_all_texts = {"own_model_all": losses.own_all, "alone_all": losses.alone_all}
    return columns | {column: loss for column, loss in over_all_texts.items() if loss is not None}


def _mean(values: Sequence[float | None]) -> float | None:
    present = [value for value in values if value is not None]
    return sum(present) / len(present) if present else None


def allocation_rows(run: RunData) -> list[Row]:
    """Return one flat row for each node and round: bits allotted and sent, bytes, weight, loss, seconds.

    These are the trace's numbers: bits are per coordinate.
    """
    return [row for record in run.trace for row in node_rounds(record, run.nodes)]


def shown_allocation_rows(run: RunData) -> list[Row]:
    """Return the rows of `allocation_rows` with bits in the run's `bits_unit`."""
    return [
        {name: run.in_bits_unit(value) if name in _BITS and value is not None else value for name, value in row.items()}
        for row in allocation_rows(run)
    ]


def continuation_rows(run: RunData) -> list[Row]:
    """Return the sample texts of each round's student, the last round first."""
    return [
        {"round": record.round, "prompt": text.prompt, "the student continues": text.text}
        for record in reversed(run.trace)
        for text in record.continuations
    ]


def incident_rows(run: RunData) -> list[Row]:
    """Return refused frames and absent nodes, with the reasons."""
    return [
        {"round": record.round, "node": each.node, "what": each.state, "why": each.reason}
        for record in run.trace
        for each in (*record.refused, *record.absent)
    ]


def difference_rows(runs: Sequence[RunData]) -> list[Row]:
    """Return the keys of the configurations in which runs differ."""
    flat = [_flatten(run.config_text) for run in runs]
    keys = sorted({key for each in flat for key in each})
    return [
        {"configuration key": key, **{run.name: each.get(key, "") for run, each in zip(runs, flat, strict=True)}}
        for key in keys
        if len({each.get(key, "") for each in flat}) > 1
    ]


def _trend(run: RunData, index: int) -> str | None:
    """Return whether the last loss on a node's text is above the lowest one, below the first one, or level."""
    losses = [loss for record in run.trace if (loss := entry_of(record.heldout_by_node, index)) is not None]
    if len(losses) < 2:
        return None
    if losses[-1] > min(losses) + _MIN_TREND_NATS:
        return RISES
    return "falls" if losses[-1] < losses[0] - _MIN_TREND_NATS else "level"


def _configured(run: RunData, index: int, key: str) -> float | None:
    tables = run.node_settings
    value = tables[index].get(key) if index < len(tables) else None
    return float(value) if isinstance(value, int | float) else None


def _flatten(text: str) -> dict[str, str]:
    """Return the values of a configuration by their dotted keys."""
    try:
        tables = parse_toml_tables(text)
    except InputError:
        return {"": "no TOML"}
    return {key: str(value) for key, value in flat_keys(tables).items()}
