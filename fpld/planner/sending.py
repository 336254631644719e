"""Compare what nodes could send in the bytes of a plan: labels, text with labels, or updates of weights.

Each way needs the nodes' word (`may_send` in a node's file), and some configurations exclude one. `rank_ways` forecasts
the student of every way, best first; `recommend` says which one to take for what may leave the nodes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fpld.codecs.updates import affordable_bits, update_bytes
from fpld.planner.expected import LEAST_UPDATE_BITS, Expectation, expect
from fpld.protocol.wire import OVERHEAD_BYTES
from fpld.units import show_size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fpld.planner.forecast import Forecast
    from fpld.planner.inputs import PlanInputs
    from fpld.types import Floats

Row = dict[str, Any]
NEEDS = {"labels": ("labels",), "text": ("labels", "text"), "updates": ("updates",)}
"""What must be in `may_send` for each way."""
_NOT_FORECAST = "no held-out loss is forecast: kept runs tell nothing of so small a budget"
_LEAST_WRITTEN_BITS = 16.0  # of a context: a token takes six to seven of them, and its label the rest
_WRITTEN_SHARE = 7 / 8  # of the contexts, where nodes write
_MAX_UPDATE_BITS = 4.0  # of a weight: more hardly change the teachers


class Way(NamedTuple):
    """What nodes could send, and what is expected of it.

    Parameters
    ----------
    sends
        `labels`, `text` or `updates`.
    planned
        Whether it is what the plan sends.
    setting
        The keys that make it so.
    round_bytes
        What all nodes send in a round; None if the way cannot be.
    expected
        The forecast; None if the way cannot be, or too few bits are there for it.
    barred
        Why it cannot be; empty if it can.
    """

    sends: str
    planned: bool
    setting: str
    round_bytes: int | None
    expected: Expectation | None
    barred: str = ""

    @property
    def short_of_bits(self) -> bool:
        """Return whether it would need more bytes than the plan has."""
        return self.sends == "updates" and self.expected is None and self.round_bytes is not None

    def __str__(self) -> str:
        if self.short_of_bits and self.round_bytes is not None:
            return f"{self.setting} takes {show_size(self.round_bytes)} a round, more than is planned"
        return self.setting if self.expected is None else f"{self.setting} in the same bytes: {self.expected.short}"

    def allowed(self, may_send: Sequence[str]) -> bool:
        """Return whether nodes that may send these things can go this way."""
        return set(NEEDS[self.sends]) <= set(may_send)


def planned_way(plan: Forecast) -> str:
    """Return what the plan sends."""
    if plan.inputs.updates is not None:
        return "updates"
    return "text" if plan.inputs.written else "labels"


def rank_ways(plan: Forecast) -> list[Way]:
    """Return what nodes could send in the bytes of the plan: by expected share, then what cannot be forecast.

    There are none without a forecast of the plan itself: of other codecs than `samples`, or with privacy.
    """
    inputs = plan.inputs
    if not _can_forecast(inputs):
        return []
    ways = [_label_way(plan, "labels"), _label_way(plan, "text"), _update_way(plan)]
    return sorted(ways, key=lambda way: -1.0 if way.expected is None else way.expected.share.value, reverse=True)


def planned_expectation(plan: Forecast) -> Expectation | None:
    """Return the forecast of the plan itself, if there is one."""
    inputs = plan.inputs
    if not _can_forecast(inputs):
        return None
    if inputs.updates is not None:
        return _expected(plan, "updates", np.array(inputs.weight_bits(plan.bits)))
    return _expected(plan, planned_way(plan), plan.bits)


def megabyte_shares(plan: Forecast) -> list[float | None]:
    """Return by how much one more megabyte a round at each site would raise the expected share, whatever its link."""
    now = planned_expectation(plan)
    gains: list[float | None] = []
    for more in plan.with_megabyte():
        then = planned_expectation(more)
        gains.append(None if now is None or then is None else max(then.share.value - now.share.value, 0.0))
    return gains


def allowed_disclosures(plan: Forecast) -> tuple[str, ...]:
    """Return what may leave the nodes: as the plan's inputs say, else what the plan itself sends."""
    return plan.inputs.may_send or NEEDS[planned_way(plan)]


def recommend(ways: Sequence[Way], may_send: Sequence[str]) -> Way | None:
    """Return the way of the best forecast among those that nodes allow; None if there is no forecast."""
    return next((way for way in ways if way.expected is not None and way.allowed(may_send)), None)


def sending_advice(plan: Forecast) -> list[str]:
    """Return the forecast, the recommendation, and what would be better if more may leave the nodes."""
    ways = rank_ways(plan)
    if not ways:
        return []
    may_send = allowed_disclosures(plan)
    planned = planned_expectation(plan)
    lines = [_NOT_FORECAST if planned is None else f"expected held-out loss: {planned}"]
    best = recommend(ways, may_send)
    where = f"recommended where {', '.join(may_send)} may leave the nodes"
    if best is not None and best.expected is not None:
        lines.append(f"{where}: what is planned" if best.planned else f"{where}: {best}")
    least = 0.0 if best is None or best.expected is None else best.expected.share.value
    for way in ways:
        more = [name for name in NEEDS[way.sends] if name not in may_send]
        better = way.expected is not None and way.expected.share.value > least
        if more and not way.barred and (better or way.short_of_bits):
            lines.append(f"if {' and '.join(more)} may leave the nodes: {way}")
    return lines


def missing_runs(plan: Forecast) -> list[str]:
    """Return sentences on what of the plan no kept run has."""
    learning = plan.inputs.learning
    if not _can_forecast(plan.inputs) or learning is None:
        return []
    planned = planned_expectation(plan)
    return [*(() if planned is None else planned.doubts), *learning.caveats]


def expected_rows(plan: Forecast) -> list[Row]:
    """Return a row for each way that can be: what it needs and sends, and the forecast, best first."""
    ways = rank_ways(plan)
    may_send = allowed_disclosures(plan)
    best = recommend(ways, may_send)
    return [
        {
            "sends": way.sends,
            "may_send": ", ".join(NEEDS[way.sends]),
            "allowed": way.allowed(may_send),
            "planned": way.planned,
            "recommended": way is best,
            "setting": way.setting,
            "round_bytes": way.round_bytes,
            **_numbers(way.expected),
        }
        for way in ways
        if not way.barred
    ]


def _numbers(expected: Expectation | None) -> Row:
    ranges = {"share": None, "gain": None, "loss": None} if expected is None else expected._asdict()
    row: Row = {}
    for name in ("share", "gain", "loss"):
        value = ranges[name]
        row |= {
            name: None if value is None else value.value,
            f"{name}_low": None if value is None else value.low,
            f"{name}_high": None if value is None else value.high,
        }
    return row


def shown_expected(rows: list[Row]) -> list[Row]:
    """Return rows of ways as a person reads them: ranges, and nats where they are known."""
    known = [name for name in ("loss", "gain") if any(row[name] is not None for row in rows)]
    unit = known[0] if known else None
    shown = []
    for row in rows:
        line = {
            "sends": row["sends"],
            "allowed": "yes" if row["allowed"] else "no",
            "round_bytes": row["round_bytes"],
            "of the way": _span(row, "share", "{:.0%}"),
        }
        if unit is not None:
            line["held-out loss" if unit == "loss" else "below base"] = _span(row, unit, "{:.2f}")
        notes = [name for name in ("planned", "recommended") if row[name]]
        shown.append({**line, "note": ", ".join(notes) or None})
    return shown


def _span(row: Row, name: str, form: str) -> str | None:
    low = row[f"{name}_low"]
    return None if low is None else f"{form.format(low)} .. {form.format(row[f'{name}_high'])}"


def _can_forecast(inputs: PlanInputs) -> bool:
    """Return whether kept runs are about what is sent: not of other codecs, of the paper's channel, or with privacy."""
    return inputs.learning is not None and inputs.channel == "wire" and (inputs.sparse or inputs.updates is not None)


def _barred(plan: Forecast, sends: str) -> str:
    return dict(plan.inputs.barred).get(sends, "")


def _label_way(plan: Forecast, sends: str) -> Way:
    """Return labels on public text, or text with labels on it, in the bytes of the plan."""
    inputs = plan.inputs
    planned = planned_way(plan) == sends
    contexts = inputs.all_contexts
    if sends == "text":
        written = inputs.written or round(_WRITTEN_SHARE * contexts)
        setting = f"[written] contexts = {written} beside probe.contexts = {contexts - written}"
    else:
        setting = f"probe.contexts = {contexts} without [written]" if inputs.written else f"probe.contexts = {contexts}"
    barred = _barred(plan, sends)
    if barred:
        return Way(sends, planned, setting, None, None, barred)
    bits = _payload_bits(plan) / contexts
    sent = sum(plan.bytes_sent)
    if sends == "text" and not planned and float(bits.min()) < _LEAST_WRITTEN_BITS:
        return Way(sends, planned, setting, sent, None)
    return Way(sends, planned, setting, sent, _expected(plan, sends, bits))


def _update_way(plan: Forecast) -> Way:
    """Return updates in the bits per weight that the bytes of the plan give."""
    inputs = plan.inputs
    planned = inputs.updates is not None
    weights = inputs.updates.weights if inputs.updates is not None else inputs.model_weights
    barred = _barred(plan, "updates")
    if barred or weights is None:
        return Way("updates", planned, "", None, None, barred or "how many weights the student has is not known")
    most = _MAX_UPDATE_BITS if inputs.updates is None else inputs.updates.bits
    bits = np.array([affordable_bits(weights, int(payload // 8), most) for payload in _payload_bits(plan)])
    if float(bits.min()) < LEAST_UPDATE_BITS:
        least = len(bits) * (update_bytes(weights, LEAST_UPDATE_BITS) + OVERHEAD_BYTES)
        return Way("updates", planned, f"[send] updates = {LEAST_UPDATE_BITS:g}", least, None)
    sent = sum(plan.bytes_sent) if planned else sum(update_bytes(weights, b) + OVERHEAD_BYTES for b in bits.tolist())
    return Way("updates", planned, f"[send] updates = {bits.max():.1f}", sent, _expected(plan, "updates", bits))


def _payload_bits(plan: Forecast) -> Floats:
    """Return the bits of each node's payload in a round."""
    if plan.inputs.updates is None:
        return plan.bits * plan.inputs.all_contexts
    return 8.0 * (np.array(plan.bytes_sent) - plan.inputs.uplinks.overhead)


def _expected(plan: Forecast, sends: str, bits: Floats) -> Expectation | None:
    inputs = plan.inputs
    if inputs.learning is None:
        return None
    known = all(site.weight is not None for site in inputs.sites)
    weights = inputs.weights if known else None
    return expect(sends, contexts=inputs.all_contexts, bits=bits, learning=inputs.learning, weights=weights)
