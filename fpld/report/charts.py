"""The figures of a run, and of runs side by side."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from fpld.report.chart import Axis, Chart, Series
from fpld.units import show_size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fpld.report.runs import Run

ROUND = Axis("round", "band")
LOSS = "held-out loss (nats per token)"
_MANY = 60  # bars in a figure before it is drawn as lines


def run_charts(run: Run) -> list[Chart]:
    """Return the figures of one run: of its trainings, and once a round is closed of its rounds."""
    if not run.trace:
        return training_charts(run)
    known = loss_by_bytes([run]), distillation_by_round(run), bandwidth_by_round(run), bits_by_node(run)
    charts = [chart for chart in known if chart is not None]
    if any(line.node_weights for line in run.trace):
        charts.append(weights_by_round(run))
    charts += [loss_by_node(run), seconds_by_phase(run)]
    if any(line.answers for line in run.trace):
        charts.append(seconds_by_node(run))
    return charts + training_charts(run)


def training_charts(run: Run) -> list[Chart]:
    """Return the curves of trainings: base and local ones, and the student's distillation."""
    drawn = (
        ("training", "Training loss: base and nodes", "loss on the text trained on (nats per token)"),
        ("distillation", "Training loss: distillation", "loss to the target (nats)"),
    )
    charts = (_training_chart(run, *each) for each in drawn)
    return [chart for chart in charts if chart is not None]


def _training_chart(run: Run, what: str, title: str, label: str) -> Chart | None:
    series = []
    for (method, model, kind), points in run.curves.items():
        if kind == what and method in ("", "fpld"):
            length = {point.round: 0 for point in points}
            for point in points:
                length[point.round] = max(length[point.round], point.step)
            before = {number: sum(length[each] for each in length if each < number) for number in length}
            steps = [before[point.round] + point.step for point in points]
            series.append(Series(model, "line", steps, [point.loss for point in points]))
    if not series:
        return None
    ends = ", ".join(f"{item.name} {item.y[0]:.3f} to {item.y[-1]:.3f}" for item in series)
    return Chart(
        name=f"{what}-by-step",
        title=title,
        alt=f"Lines of the loss by step, over all rounds one after the other: {ends}.",
        x=Axis("step, over all rounds"),
        y=Axis(label),
        series=series,
        caption="A point is the mean since the last one. Each round starts from the student, so lines jump there."
        + (
            " Below zero: nearer to the target than the last student."
            if any(min(item.y) < 0 for item in series)
            else ""
        ),
    )


def comparison_charts(runs: Sequence[Run]) -> list[Chart]:
    """Return the figures that hold several runs."""
    with_rounds = [run for run in runs if run.trace]
    return [loss_by_bytes(with_rounds), loss_by_round(with_rounds)] if with_rounds else []


def loss_by_bytes(runs: Sequence[Run]) -> Chart:
    """Draw held-out loss against the bytes sent so far, with the baselines of a single run."""
    series = [
        Series(
            "fpld" if len(runs) == 1 else run.name,
            "line",
            list(run.uplink),
            [_number(line.heldout_loss) for line in run.trace],
        )
        for run in runs
    ]
    if len(runs) == 1:
        series += _baselines(runs[0])
    ends = "; ".join(
        f"{item.name} ends at {_number(run.trace[-1].heldout_loss):.3f} nats after {show_size(run.uplink[-1])}"
        for item, run in zip(series, runs, strict=False)
    )
    others = ", ".join(f"{item.name} {item.y[0]:.3f}" for item in series if item.kind != "line")
    return Chart(
        name="loss-by-bytes",
        title="Held-out loss against uplink",
        alt=f"Lines of held-out loss over bytes sent, one point a round: {ends}."
        + (f" Baselines: {others}." if others else ""),
        x=Axis("sent by all nodes so far (bytes)", "log", "B"),
        y=Axis(LOSS),
        series=series,
        caption="Lower and further left is better." + (" Horizontal lines sent nothing." if others else ""),
    )


def loss_by_round(runs: Sequence[Run]) -> Chart:
    """Draw held-out loss by round."""
    ends = "; ".join(
        f"{run.name} {_number(run.trace[0].heldout_loss):.3f} to {_number(run.trace[-1].heldout_loss):.3f}"
        for run in runs
    )
    return Chart(
        name="loss-by-round",
        title="Held-out loss by round",
        alt=f"Lines of held-out loss by round: {ends}.",
        x=ROUND,
        y=Axis(LOSS),
        series=[
            Series(run.name, "line", _rounds(run), [_number(line.heldout_loss) for line in run.trace]) for run in runs
        ],
    )


def distillation_by_round(run: Run) -> Chart:
    """Draw how far the student is from its target: its KL, or how much nearer it has come than the last student."""
    gained = run.trace[-1].kl is None
    values = [_number(line.gain if gained else line.kl) for line in run.trace]
    what = "nearer to its target than the last student" if gained else "KL of the student to the combined logits"
    return Chart(
        name="distillation-by-round",
        title="What distillation gained" if gained else "What distillation left",
        alt=f"{what}: from {values[0]:.3g} to {values[-1]:.3g} nats.",
        x=ROUND,
        y=Axis("cross entropy (nats)" if gained else "KL (nats)", "linear" if gained else "log"),
        series=[Series(what, "line", _rounds(run), values)],
        caption=(
            "Sampled labels are right on average and not one by one, so there is no KL to them: what counts is by how "
            "much the student's cross entropy to them fell. The paper's bounds are not about such labels: there is no "
            "bracket."
            if gained
            else "Measured on the probe set, so it holds without conditions; the bits' own cost is not in it."
        ),
    )


def bandwidth_by_round(run: Run) -> Chart | None:
    """Draw the bracket of the bandwidth loss; None where the round's channel has none, as with sampled labels."""
    upper = [_number(line.bandwidth_upper) for line in run.trace]
    lower = [_number(line.bandwidth_lower) for line in run.trace]
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
            f"more closely what the bits cost. {_held(run)}"
        ),
    )


def _held(run: Run) -> str:
    """Say in which rounds the conditions of the bounds hold."""
    said = []
    for names, which in ((("SE",), "upper"), (("SE'", "ND"), "lower")):
        known = [line for line in run.trace if line.conditions is not None]
        failed = [line.round for line in known if not all((line.conditions or {}).get(name, False) for name in names)]
        conditions = " and ".join(f"({name})" for name in names)
        if known and not failed:
            said.append(f"{conditions} held in every round: the {which} bound is one.")
        elif known:
            rounds = "every round" if len(failed) == len(known) else f"rounds {', '.join(map(str, failed))}"
            said.append(f"{conditions} failed in {rounds}: there the {which} line is an estimate and no bound.")
    codec = run.settings.get("codec")
    if len(run.nodes) > 1 and not (isinstance(codec, dict) and codec.get("dither") == "independent"):
        said.append("With stratified dither nodes that agree go below the band.")
    return " ".join(said)


def bits_by_node(run: Run) -> Chart:
    """Draw what each node sent in each round."""
    kind = "line" if len(run.nodes) * len(run.trace) > _MANY else "bars"
    series = [
        Series(
            name,
            kind,  # type: ignore[arg-type]
            _rounds(run),
            [_at(line.bits_sent, i) for line in run.trace],
            limit=[_at(line.bits_allotted, i) for line in run.trace],
        )
        for i, name in enumerate(run.nodes)
    ]
    ends = ", ".join(f"{item.name} {item.y[-1]:.3g} of {item.limit[-1]:.3g}" for item in series)
    return Chart(
        name="bits-by-node",
        title="Bits by node and round: sent, of what was allowed",
        alt=f"Bits per coordinate that each node sent in each round, of what it was allotted; in the last: {ends}.",
        x=ROUND,
        y=Axis("bits per coordinate"),
        series=series,
        caption="Nothing stands where a node did not answer."
        + (" The line across a bar is what the node was allotted." if kind == "bars" else ""),
    )


def weights_by_round(run: Run) -> Chart:
    """Draw the weights that the allocator had learnt after each round."""
    lines = [line for line in run.trace if line.node_weights]
    series = [
        Series(name, "line", [line.round for line in lines], [_at(line.node_weights or [], i) for line in lines])
        for i, name in enumerate(run.nodes)
    ]
    ends = ", ".join(f"{item.name} {item.y[-1]:.3g}" for item in series)
    return Chart(
        name="weights-by-round",
        title="Estimated weights",
        alt=f"Weight of each node by round, as estimated; in the last: {ends}.",
        x=ROUND,
        y=Axis("weight", "log"),
        series=series,
        caption="A node of greater weight is noisier at the same bits, and is allotted more.",
    )


def loss_by_node(run: Run) -> Chart:
    """Draw the student's loss on each node's held-out text."""
    series = [
        Series(name, "line", _rounds(run), [_at(line.heldout_by_node, i) for line in run.trace])
        for i, name in enumerate(run.nodes)
    ]
    ends = ", ".join(f"{item.name} {item.y[-1]:.3f}" for item in series)
    return Chart(
        name="loss-by-node",
        title="The student on each node's held-out text",
        alt=f"Held-out loss on the text of each node by round; in the last: {ends}.",
        x=ROUND,
        y=Axis(LOSS),
        series=series,
    )


def seconds_by_phase(run: Run) -> Chart:
    """Draw where the time of each round went."""
    phases = list(dict.fromkeys(name for line in run.trace for name in line.phases))
    shown = {"local": "nodes: queue, training, sending"}
    series = [
        Series(shown.get(p, p), "stack", _rounds(run), [line.phases.get(p, 0.0) for line in run.trace]) for p in phases
    ]
    total = {item.name: sum(item.y) for item in series}
    spent = ", ".join(f"{name} {value:.3g} s" for name, value in total.items())
    return Chart(
        name="seconds-by-phase",
        title="Time spent where",
        alt=f"Seconds of each phase in each round, stacked; in all: {spent}.",
        x=ROUND,
        y=Axis("seconds", unit="s"),
        series=series,
        caption="nodes: until the last one answered, with the wait for a free worker; the others are the aggregator's.",
    )


def seconds_by_node(run: Run) -> Chart:
    """Draw how long each node was at work, or where only the node knows, how long it took to answer."""
    kind = "line" if len(run.nodes) * len(run.trace) > _MANY else "bars"
    lines = [line for line in run.trace if line.answers]
    known = all(line.work for line in lines)
    series = [
        Series(
            name,
            kind,  # type: ignore[arg-type]
            [line.round for line in lines],
            [_at(line.work if known else line.answers, i) for line in lines],
        )
        for i, name in enumerate(run.nodes)
    ]
    slowest = max(series, key=lambda item: _largest(item.y))
    what = "for which each node was at work" if known else "after which each node answered"
    return Chart(
        name="seconds-by-node",
        title="Time at work" if known else "Time to answer",
        alt=f"Seconds {what} in each round; the most has {slowest.name}, {_largest(slowest.y):.3g} s.",
        x=ROUND,
        y=Axis("seconds", unit="s"),
        series=series,
        caption=(
            "From when a worker of this machine took the node's task: the wait for one is not in it."
            if known
            else "From when the round was opened, with the way there and back."
        ),
    )


def _baselines(run: Run) -> list[Series]:
    """Return other methods as points at their uplink, or as levels if they sent nothing; of nodes alone, the best."""
    known = [row for row in run.results if row.heldout_loss is not None]
    alone = [row for row in known if row.method.startswith("alone")]
    best = min(alone, key=lambda row: _number(row.heldout_loss), default=None)
    found = []
    for row in known:
        if row.method == "fpld" or (row in alone and row is not best):
            continue
        name = "best node alone" if row is best else row.method
        kind = "dots" if row.uplink_bytes else "rule"
        found.append(Series(name, kind, [row.uplink_bytes], [_number(row.heldout_loss)]))  # type: ignore[arg-type]
    return found


def _rounds(run: Run) -> list[int]:
    return [line.round for line in run.trace]


def _at(values: Sequence[float | None], index: int) -> float:
    return _number(values[index] if index < len(values) else None)


def _number(value: float | None) -> float:
    """Return NaN for values that are not known: they are not drawn."""
    return math.nan if value is None else value


def _largest(values: Sequence[float]) -> float:
    return max((value for value in values if math.isfinite(value)), default=0.0)
