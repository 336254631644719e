"""The end of a run: the last and the best student, the trace, and the table of methods, the same for every engine.

A row of the table is a method with its held-out loss in nats per token and the bytes that it sent in both directions.
Where the losses of single windows are there, a row has the difference of its loss to the student's, with a standard
error that has windows of held-out text as units.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fpld import students
from fpld.federation.prepare import read_use
from fpld.node.training import read_kept_model
from fpld.storage.run_folder import BASE_LOSSES, BEST_STUDENT, OWN_LOSSES, RESULT, STUDENT, STUDENT_BEST, TRACE, WINDOWS
from fpld.students.heldout import loss_difference

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fpld.federation.rounds import Federation
    from fpld.federation.workers import OwnModel
    from fpld.storage.run_folder import RunFolder

Row = dict[str, Any]
_MAX_EXPONENT = 700.0  # nats: the exponential of more is no float any more


def finish_run(federation: Federation, others: Sequence[Row] = ()) -> list[Row]:
    """Write what a federation has come to into the run's folder; return the table, with the others' rows first."""
    setup = federation.setup
    rows = [*others, *base_rows(federation)]
    table = [*compare(rows, federation), federation_row("fpld", federation)]
    students.write_state(setup.run.path / STUDENT, federation.state.student, like=setup.base)
    if federation.store.has(BEST_STUDENT):
        best = read_kept_model(federation.store.path / BEST_STUDENT, federation.identity)
        students.write_state(setup.run.path / STUDENT_BEST, best, like=setup.base)
    setup.run.write(TRACE, (federation.store.path / TRACE).read_bytes())
    left_out = "; ".join(use.left_out for use in read_use(setup.run) if use.left_out)
    if left_out:
        table = [row | {"left_out": left_out} for row in table]
    setup.run.write_json(RESULT, table)
    return table


def compare(rows: Sequence[Row], federation: Federation) -> list[Row]:
    """Return rows with the difference of each to the student, with windows of held-out text as units."""
    ours = federation.store.read_json(WINDOWS) if federation.store.has(WINDOWS) else None
    compared = []
    for row in rows:
        theirs = row.get("windows")
        behind = None if ours is None or theirs is None else loss_difference(theirs, ours)
        kept = {key: value for key, value in row.items() if key != "windows"}
        compared.append(kept if behind is None else kept | {"behind": behind.mean, "behind_se": behind.error})
    return compared


def federation_row(method: str, federation: Federation) -> Row:
    """Return a federation's row of the table: its last held-out loss, and all bytes that nodes sent."""
    last = federation.trace[-1]
    sent = sum(record.sent for record in federation.trace)
    down = sum(record.downlink_bytes for record in federation.trace)
    return table_row(method, last.heldout_loss, last.heldout_bits_per_byte, sent, down)


def base_rows(federation: Federation) -> list[Row]:
    """Return a row with the loss of the base model, if the nodes have evaluated it with their first task.

    It is the mean over the sites that evaluated every round, as the federation's own is.
    """
    if not federation.store.has(BASE_LOSSES):
        return []
    base = federation.store.read_json(BASE_LOSSES)
    sites = set(federation.trace[-1].heldout_sites or [])
    losses = [loss for name, loss in zip(federation.names, base["losses"], strict=True) if name in sites]
    if not losses or None in losses:
        return []
    return [measured_row("base", losses, base["bytes_per_token"], 0, 0)]


def measured_row(
    method: str, losses: Sequence[float], bytes_per_token: float, uplink_bytes: int, downlink_bytes: int
) -> Row:
    """Return a row of the table: held-out loss averaged over the nodes' texts, and bytes in both directions."""
    loss = float(np.mean(losses))
    return table_row(method, loss, loss / float(np.log(2)) / bytes_per_token, uplink_bytes, downlink_bytes)


def table_row(
    method: str, loss: float | None, bits_per_byte: float | None, uplink_bytes: int, downlink_bytes: int
) -> Row:
    """Return a row of the table that a run ends with; what nobody measured is None."""
    return {
        "method": method,
        "heldout_loss": loss,
        "bits_per_byte": bits_per_byte,
        "perplexity": None if loss is None or loss > _MAX_EXPONENT else float(np.exp(loss)),
        "uplink_bytes": int(uplink_bytes),
        "downlink_bytes": int(downlink_bytes),
        "behind": None,
        "behind_se": None,
    }


def write_own(run: RunFolder, names: Sequence[str], losses: Sequence[Mapping[str, float | None]]) -> None:
    """Write a row for each node."""
    rows = [{"node": name, **loss} for name, loss in zip(names, losses, strict=True)]
    run.write_json(OWN_LOSSES, rows)


def own_losses(names: Sequence[str], models: Sequence[OwnModel], rows: Sequence[Row]) -> list[dict[str, float | None]]:
    """Return the losses of the nodes' own models, and how far they are ahead of those that trained alone for as long.

    `ahead` and its standard error `ahead_se` are over the windows of all held-out texts. They need the rows "alone
    longer" of the baseline `alone`.
    """
    by_method = {row["method"]: row.get("windows") for row in rows}
    table = []
    for name, model in zip(names, models, strict=True):
        longer = by_method.get(f"alone longer: {name}")
        ahead = None if longer is None or model.windows is None else loss_difference(longer, model.windows)
        table.append(model.losses if ahead is None else model.losses | {"ahead": ahead.mean, "ahead_se": ahead.error})
    return table


def own_rows(names: Sequence[str], models: Sequence[OwnModel], bytes_per_token: float) -> list[Row]:
    """Return a row of the table for each node's own model after the federation, where it was evaluated on all texts."""
    rows = []
    for name, model in zip(names, models, strict=True):
        mean = model.losses.get("own_all")
        if mean is not None:
            row = measured_row(f"own: {name}", [mean], bytes_per_token, 0, 0)
            rows.append(row | {"windows": model.windows})
    return rows
