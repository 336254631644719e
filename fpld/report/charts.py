"""The figures of a run, and of several runs together, as data.

A `Chart` is independent of what draws it: the page's scripts, or `fpld.report.draw` as PNG and SVG.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from itertools import cycle
from typing import TYPE_CHECKING, Any, Literal

from fpld.units import BITS_PER_BYTE, NATS_PER_TOKEN, show_size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fpld.report.run import RunData

SeriesKind = Literal["line", "dots", "rule", "band", "bars", "stack"]
Scale = Literal["linear", "log", "band"]
Unit = Literal["", "B", "s"]
COLOURS = (
    "#4269d0", "#c27a00", "#e8563f", "#2f9447", "#a463f2", "#23918a", "#e0558f", "#a87350", "#8b8b00", "#80858f",
)  # fmt: skip
"""The palette of every drawing: a contrast of at least 3:1 to the light and to the dark page."""
_POLICY_COLOURS = {"optimal": 0, "square-root": 0, "curves": 0, "uniform": 1, "inverse": 3, "this plan": 2}
_MODEL_COLOURS = {"fpld": COLOURS[0], "student": COLOURS[0], "base": COLOURS[-1], "base-0": COLOURS[-1]}
_NODE_COLOURS = COLOURS[1:-1]  # those of the student and of the base are no node's


def colours(names: Sequence[str], nodes: Sequence[str] = ()) -> list[str]:
    """Return a colour for each series: policies, nodes, the student and the base always have the same ones.

    Parameters
    ----------
    names
        The names of the series. Those without a colour of their own take the free ones in order.
    nodes
        The nodes of the run in the order of its configuration, so that other series have other colours.

    >>> colours(["inverse", "uniform"]) == [COLOURS[3], COLOURS[1]]
    True
    >>> colours(["base-0", "north", "south"], ["north", "south"])[1:] == colours(["north", "south"], ["north", "south"])
    True
    """
    if any(name in _POLICY_COLOURS for name in names):
        return [COLOURS[_POLICY_COLOURS.get(name, 4 + i) % len(COLOURS)] for i, name in enumerate(names)]
    of_nodes = {name: _NODE_COLOURS[i % len(_NODE_COLOURS)] for i, name in enumerate(nodes)}
    fixed = _MODEL_COLOURS | of_nodes
    here = {fixed[name] for name in names if name in fixed}
    free = [colour for colour in COLOURS if colour not in here]
    # Colours of nodes come last, for runs of many.
    others = cycle(sorted(free, key=lambda colour: colour in of_nodes.values()) or COLOURS)
    return [fixed[name] if name in fixed else next(others) for name in names]


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis: its label with the unit spelled out, its scale, and how its numbers are written."""

    label: str
    scale: Scale = "linear"
    unit: Unit = ""


@dataclass(frozen=True, slots=True)
class Series:
    """Points of one kind: `band` fills from `low` to `y`, `rule` is a level for all x, `bars` stand in groups.

    `limit` is a mark at each bar: the most that it could have been.
    """

    name: str
    kind: SeriesKind
    x: list[Any]
    y: list[float]
    low: list[float] = field(default_factory=list)
    limit: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Chart:
    """A figure; `name` is that of its files, and `alt` describes it in words for screen readers.

    `nodes` are the run's nodes: each has the same colour in all figures, and what is no node has another.
    """

    name: str
    title: str
    alt: str
    x: Axis
    y: Axis
    series: list[Series]
    caption: str = ""
    nodes: tuple[str, ...] = ()

    @property
    def colours(self) -> list[str]:
        """Return the colour of each series."""
        return colours([series.name for series in self.series], self.nodes)

    def data(self) -> dict[str, Any]:
        """Return the chart as JSON for a page, with the colours of its series."""
        drawn = [asdict(series) for series in self.shown()]
        return {**asdict(self), "series": drawn, "colours": self.colours}

    def shown(self) -> list[Series]:
        """Return the series without the points that the axes cannot show: NaN, or 0 on a logarithmic axis.

        A line of a single point is a dot.
        """
        return [self._shown(series) for series in self.series]

    def _shown(self, series: Series) -> Series:
        keep = [
            i
            for i, (x, y) in enumerate(zip(series.x, series.y, strict=True))
            if _fits(y, self.y.scale) and (series.kind == "rule" or self.x.scale == "band" or _fits(x, self.x.scale))
        ]
        low, limit = ([values[i] for i in keep] if values else [] for values in (series.low, series.limit))
        limit = limit if all(map(math.isfinite, limit)) else []
        kind = "dots" if series.kind == "line" and len(keep) == 1 else series.kind
        return Series(series.name, kind, [series.x[i] for i in keep], [series.y[i] for i in keep], low, limit)


def _fits(value: float, scale: Scale) -> bool:
    return math.isfinite(value) and (scale != "log" or value > 0)


ROUND = Axis("round", "band")
_MAX_BARS = 60  # a figure with more of them is drawn as lines


def run_charts(run: RunData) -> list[Chart]:
    """Return the figures of one run: of its trainings, and once a round is closed of its rounds."""
    trainings = training_charts(run)
    if not run.trace:
        return trainings
    by_round = (
        bandwidth_by_round(run),
        bits_by_node(run),
        weights_by_round(run),
        loss_by_node(run),
        seconds_by_phase(run),
        seconds_by_node(run),
    )
    rounds = [chart for chart in by_round if chart is not None]
    if len(run.trace) == 1 and trainings:  # What changes within the only round says more than a point for it.
        return [loss_by_bytes([run]), *trainings, *rounds]
    return [loss_by_bytes([run]), distillation_by_round(run), *rounds, *trainings]


def training_charts(run: RunData) -> list[Chart]:
    """Return the curves of trainings: base and local ones, and the student's distillation."""
    charts = (
        _training_chart(run, "training", "base and nodes", "loss on the text trained on (nats per token)"),
        _training_chart(run, "distillation", "distillation", "loss to the target (nats)"),
    )
    return [chart for chart in charts if chart is not None]


def _training_chart(run: RunData, what: str, title: str, label: str) -> Chart | None:
    """Return the curves of one kind of training; the steps of a round follow those of the rounds before."""
    series = []
    rounds = max(len(run.trace), run.progress.round if run.progress else 0)
    for (method, model, kind), points in run.curves.items():
        if kind == what and method in ("", "fpld"):
            last_step = {point.round: point.step for point in points}  # Points are sorted by round and step.
            before = {number: sum(last_step[each] for each in last_step if each < number) for number in last_step}
            steps = [before[point.round] + point.step for point in points]
            series.append(Series(model, "line", steps, [point.loss for point in points]))
    if not series:
        return None
    ends = ", ".join(f"{item.name} {item.y[0]:.3f} to {item.y[-1]:.3f}" for item in series)
    return Chart(
        name=f"{what}-by-step",
        title=f"Training loss: {title}",
        alt=f"Lines of the loss by step, over all rounds one after the other: {ends}.",
        x=Axis("step, over all rounds" if rounds > 1 else "step"),
        y=Axis(label),
        series=series,
        caption="A point is the mean since the last one."
        + (" Each round starts from the student, so lines jump there." if rounds > 1 else "")
        + (
            " Below zero: nearer to the target than the last student."
            if any(min(item.y) < 0 for item in series)
            else ""
        ),
        nodes=tuple(run.nodes),
    )


def comparison_charts(runs: Sequence[RunData]) -> list[Chart]:
    """Return the figures that hold several runs."""
    with_rounds = [run for run in runs if run.trace]
    if not with_rounds:
        return []
    several = any(len(run.trace) > 1 for run in with_rounds)
    return [loss_by_bytes(with_rounds), *([loss_by_round(with_rounds)] if several else [])]


def _loss_axis(unit: str) -> Axis:
    return Axis(f"held-out loss ({unit})")


def _unit(runs: Sequence[RunData]) -> str:
    """Return the unit of losses of several runs: bits per byte where models with own tokenizers are among them."""
    return BITS_PER_BYTE if any(run.loss_unit == BITS_PER_BYTE for run in runs) else NATS_PER_TOKEN


def loss_by_bytes(runs: Sequence[RunData]) -> Chart:
    """Return held-out loss against the bytes sent so far; of a single run, with its baselines."""
    unit = _unit(runs)
    series = [
        Series(
            "fpld" if len(runs) == 1 else run.name,
            "line",
            list(run.uplink_bytes),
            [run.loss_in(unit, record.heldout_loss) for record in run.trace],
        )
        for run in runs
    ]
    if len(runs) == 1:
        series += _baselines(runs[0])
    ends = "; ".join(
        f"{item.name} ends at {item.y[-1]:.3f} {unit} after {show_size(run.uplink_bytes[-1])}"
        for item, run in zip(series, runs, strict=False)
    )
    others = ", ".join(f"{item.name} {item.y[0]:.3f}" for item in series if item.kind != "line")
    return Chart(
        name="loss-by-bytes",
        title="Held-out loss against uplink",
        alt=f"Lines of held-out loss over bytes sent, one point a round: {ends}."
        + (f" Baselines: {others}." if others else ""),
        x=Axis("sent by all nodes so far (bytes)", "log", "B"),
        y=_loss_axis(unit),
        series=series,
        caption="Lower and further left is better." + (" Horizontal lines sent nothing." if others else ""),
        nodes=tuple(runs[0].nodes) if len(runs) == 1 else (),
    )


def loss_by_round(runs: Sequence[RunData]) -> Chart:
    """Return held-out loss by round."""
    unit = _unit(runs)
    series = [
        Series(run.name, "line", _rounds(run), [run.loss_in(unit, record.heldout_loss) for record in run.trace])
        for run in runs
    ]
    ends = "; ".join(f"{item.name} {item.y[0]:.3f} to {item.y[-1]:.3f}" for item in series)
    return Chart(
        name="loss-by-round",
        title="Held-out loss by round",
        alt=f"Lines of held-out loss by round: {ends}.",
        x=ROUND,
        y=_loss_axis(unit),
        series=series,
    )


def distillation_by_round(run: RunData) -> Chart:
    """Return the student's KL to its target; with sampled labels, how much nearer it has come than the last student."""
    sampled = run.trace[-1].kl is None
    if sampled:
        title = "What distillation gained"
        what = "nearer to its target than the last student"
        axis = Axis("cross entropy (nats)")
        caption = (
            "Sampled labels are right on average and not one by one, so there is no KL to them: what counts is by how "
            "much the student's cross entropy to them fell. The paper's bounds are not about such labels: there are "
            "none."
        )
    else:
        title = "What distillation left"
        what = "KL of the student to the combined logits"
        axis = Axis("KL (nats)", "log")
        caption = "Measured on the probe set, so it holds without conditions; the bits' own cost is not in it."
    values = [_number(record.gain if sampled else record.kl) for record in run.trace]
    return Chart(
        name="distillation-by-round",
        title=title,
        alt=f"{what}: from {values[0]:.3g} to {values[-1]:.3g} nats.",
        x=ROUND,
        y=axis,
        series=[Series(what, "line", _rounds(run), values)],
        caption=caption,
    )


def bandwidth_by_round(run: RunData) -> Chart | None:
    """Return the bracket of the bandwidth loss; None if there is none, as with sampled labels."""
    upper = [_number(record.bandwidth_upper) for record in run.trace]
    lower = [_number(record.bandwidth_lower) for record in run.trace]
    if not any(map(math.isfinite, upper)):
        return None
    return Chart(
        name="bandwidth-by-round",
        title="What the bits cost: between two bounds",
        alt=(
            f"The bounds of what quantization adds go from {lower[0]:.3g} and {upper[0]:.3g} to "
            f"{lower[-1]:.3g} and {upper[-1]:.3g} nats."
        ),
        x=ROUND,
        y=Axis("KL (nats)", "log"),
        series=[Series("what quantization adds: between the bounds", "band", _rounds(run), upper, lower)],
        caption=(
            "By Theorems 2 and 4 at the noise that was decoded; exact logits never leave the nodes, so no one knows "
            f"more closely what the bits cost. {_conditions(run)}"
        ),
    )


def _conditions(run: RunData) -> str:
    """Return sentences on the rounds in which the conditions of the bounds hold."""
    sentences = []
    checked = {record.round: record.conditions for record in run.trace if record.conditions is not None}
    for names, which in ((("SE",), "upper"), (("SE'", "ND"), "lower")):
        failed = [number for number, holds in checked.items() if not all(holds.get(name, False) for name in names)]
        conditions = " and ".join(f"({name})" for name in names)
        if checked and not failed:
            sentences.append(f"{conditions} held in every round: the {which} bound is one.")
        elif checked:
            rounds = "every round" if len(failed) == len(checked) else f"rounds {', '.join(map(str, failed))}"
            sentences.append(f"{conditions} failed in {rounds}: there the {which} line is an estimate and no bound.")
    if len(run.nodes) > 1 and run.section("codec").get("dither") != "independent":
        sentences.append("With stratified dither nodes that agree go below the band.")
    return " ".join(sentences)


def bits_by_node(run: RunData) -> Chart:
    """Return what each node sent in each round, and what it was allotted."""
    kind = _bars_or_lines(run)
    series = [
        Series(
            name,
            kind,
            _rounds(run),
            [run.in_bits_unit(_at(record.bits_sent, i)) for record in run.trace],
            limit=[run.in_bits_unit(_at(record.bits_allotted, i)) for record in run.trace],
        )
        for i, name in enumerate(run.nodes)
    ]
    ends = ", ".join(f"{item.name} {item.y[-1]:.3g} of {item.limit[-1]:.3g}" for item in series)
    return Chart(
        name="bits-by-node",
        title="Bits by node and round: sent, of what was allowed",
        alt=f"{run.bits_unit.capitalize()} that each node sent in each round, of what it was allotted; in the last: "
        f"{ends}.",
        x=ROUND,
        y=Axis(run.bits_unit),
        series=series,
        caption="Nothing stands where a node did not answer."
        + (" The line across a bar is what the node was allotted." if kind == "bars" else ""),
        nodes=tuple(run.nodes),
    )


def weights_by_round(run: RunData) -> Chart | None:
    """Return the weights that were estimated after each round; None if there are none."""
    records = [record for record in run.trace if record.node_weights]
    if not records:
        return None
    series = _node_series(
        run.nodes,
        [record.round for record in records],
        [[_at(record.node_weights or [], i) for record in records] for i in range(len(run.nodes))],
    )
    ends = ", ".join(f"{item.name} {item.y[-1]:.3g}" for item in series)
    return Chart(
        name="weights-by-round",
        title="Estimated weights",
        alt=f"Weight of each node by round, as estimated; in the last: {ends}.",
        x=_node_axis(len(records)),
        y=Axis("weight", "log"),
        series=series,
        caption="A node of greater weight is noisier at the same bits, and is allotted more.",
        nodes=tuple(run.nodes),
    )


def loss_by_node(run: RunData) -> Chart:
    """Return the student's loss on each node's held-out text."""
    unit = run.loss_unit
    losses = [
        [run.loss_in(unit, _at(record.heldout_by_node, i)) for record in run.trace] for i in range(len(run.nodes))
    ]
    series = _node_series(run.nodes, _rounds(run), losses)
    ends = ", ".join(f"{item.name} {item.y[-1]:.3f}" for item in series)
    return Chart(
        name="loss-by-node",
        title="The student on each node's held-out text",
        alt=f"Held-out loss on the text of each node by round; in the last: {ends}.",
        x=_node_axis(len(run.trace)),
        y=_loss_axis(unit),
        series=series,
        nodes=tuple(run.nodes),
    )


def seconds_by_phase(run: RunData) -> Chart:
    """Return the seconds of each phase of each round."""
    phases = list(dict.fromkeys(name for record in run.trace for name in record.phases))
    shown = {"local": "nodes: queue, training, sending"}
    series = [
        Series(shown.get(p, p), "stack", _rounds(run), [record.phases.get(p, 0.0) for record in run.trace])
        for p in phases
    ]
    spent = ", ".join(f"{item.name} {sum(item.y):.3g} s" for item in series)
    return Chart(
        name="seconds-by-phase",
        title="Time spent where",
        alt=f"Seconds of each phase in each round, stacked; in all: {spent}.",
        x=ROUND,
        y=Axis("seconds", unit="s"),
        series=series,
        caption="nodes: until the last one answered, with the wait for a free worker; the others are the aggregator's.",
        nodes=tuple(run.nodes),
    )


def seconds_by_node(run: RunData) -> Chart | None:
    """Return how long each node worked, or where that is not recorded, how long it took to answer."""
    records = [record for record in run.trace if record.answers]
    if not records:
        return None
    kind = _bars_or_lines(run)
    rounds = [record.round for record in records]
    has_work = all(record.work for record in records)
    series = [
        Series(name, kind, rounds, [_at(record.work if has_work else record.answers, i) for record in records])
        for i, name in enumerate(run.nodes)
    ]
    slowest = max(series, key=lambda item: _largest(item.y))
    what = "for which each node was at work" if has_work else "after which each node answered"
    return Chart(
        name="seconds-by-node",
        title="Time at work" if has_work else "Time to answer",
        alt=f"Seconds {what} in each round; the most has {slowest.name}, {_largest(slowest.y):.3g} s.",
        x=ROUND,
        y=Axis("seconds", unit="s"),
        series=series,
        caption=(
            "From when a worker of this machine took the node's task: the wait for one is not in it."
            if has_work
            else "From when the round was opened, with the way there and back."
        ),
        nodes=tuple(run.nodes),
    )


def _baselines(run: RunData) -> list[Series]:
    """Return other methods as points at their uplink, or as levels if they sent nothing; of nodes alone, the best."""
    evaluated = [row for row in run.results if row.heldout_loss is not None]
    alone = [row for row in evaluated if row.method.startswith("alone")]
    best = min(alone, key=lambda row: _number(row.heldout_loss), default=None)
    series = []
    for row in evaluated:
        if row.method == "fpld" or (row in alone and row is not best):
            continue
        name = "best node alone" if row is best else row.method
        kind: SeriesKind = "dots" if row.uplink_bytes else "rule"
        series.append(Series(name, kind, [row.uplink_bytes], [run.loss_in(run.loss_unit, row.heldout_loss)]))
    return series


def _node_series(names: Sequence[str], rounds: list[int], values: Sequence[list[float]]) -> list[Series]:
    """Return the lines of nodes by round; of a single round a dot for each, beside each other."""
    if len(rounds) == 1:
        return [Series(name, "dots", [name], own) for name, own in zip(names, values, strict=True)]
    return [Series(name, "line", rounds, own) for name, own in zip(names, values, strict=True)]


def _node_axis(rounds: int) -> Axis:
    return Axis("node", "band") if rounds == 1 else ROUND


def _bars_or_lines(run: RunData) -> SeriesKind:
    return "line" if len(run.nodes) * len(run.trace) > _MAX_BARS else "bars"


def _rounds(run: RunData) -> list[int]:
    return [record.round for record in run.trace]


def _at(values: Sequence[float | None], index: int) -> float:
    return _number(values[index] if index < len(values) else None)


def _number(value: float | None) -> float:
    """Return NaN for a missing value: it is not drawn."""
    return math.nan if value is None else value


def _largest(values: Sequence[float]) -> float:
    return max((value for value in values if math.isfinite(value)), default=0.0)
