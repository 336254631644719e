"""The end of a run: the student, the trace and the table, the same for every engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fpld import students
from fpld.federation.heldout import difference
from fpld.federation.keep import BEST, read_of_run
from fpld.federation.state import TRACE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fpld.federation.federation import Federation

Row = dict[str, Any]
WINDOWS = "windows.json"
"""The loss of the last student on each window of held-out text, where the engine sees them."""
_MOST = 700.0  # nats: the exponential of more is no number any more


def finish_run(federation: Federation, others: Sequence[Row] = ()) -> list[Row]:
    """Write what a federation has come to into the run's folder; return the table, with the others' rows first."""
    setup = federation.setup
    table = [*compare(others, federation), federation_row("fpld", federation)]
    students.write_state(setup.run.path / "student.safetensors", federation.state.student, like=setup.base)
    if federation.store.has(BEST):
        best = read_of_run(federation.store.path / BEST, federation.identity)
        students.write_state(setup.run.path / "student-best.safetensors", best, like=setup.base)
    setup.run.write(TRACE, (federation.store.path / TRACE).read_bytes())
    setup.run.write_json("result.json", table)
    return table


def compare(rows: Sequence[Row], federation: Federation) -> list[Row]:
    """Return rows that say how far each is behind the federation, with windows of held-out text as units."""
    ours = federation.store.read_json(WINDOWS) if federation.store.has(WINDOWS) else None
    found = []
    for row in rows:
        theirs = row.get("windows")
        behind = None if ours is None or theirs is None else difference(theirs, ours)
        kept = {key: value for key, value in row.items() if key != "windows"}
        found.append(kept if behind is None else kept | {"behind": behind.mean, "behind_se": behind.error})
    return found


def federation_row(method: str, federation: Federation) -> Row:
    """Return a federation's row of the table: its last held-out loss, and all bytes that nodes sent."""
    last = federation.trace[-1]
    sent = sum(line["payload_bytes"] + line["overhead_bytes"] for line in federation.trace)
    down = sum(line["downlink_bytes"] for line in federation.trace)
    return table_row(method, last["heldout_loss"], last["heldout_bits_per_byte"], sent, down)


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
        "perplexity": None if loss is None or loss > _MOST else float(np.exp(loss)),
        "uplink_bytes": int(uplink_bytes),
        "downlink_bytes": int(downlink_bytes),
        "behind": None,
        "behind_se": None,
    }
