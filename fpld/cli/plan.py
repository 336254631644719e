"""`fpld plan`: links, a deadline and clip levels to bits, bytes, seconds and the bracket of the loss; and back."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fpld import api, validation
from fpld.cli.arguments import Command, numbers, one_or_each, rates, sizes, words
from fpld.errors import InputError
from fpld.planner import PlanInputs, Sender, shortest_deadline
from fpld.planner.contexts import label_rows
from fpld.planner.render import advice, policy_rows, shown_rows, site_rows
from fpld.registry import allocators, codecs
from fpld.storage.files import write_shared

if TYPE_CHECKING:
    import argparse

    from fpld.cli.arguments import Size
    from fpld.cli.output import Output
    from fpld.planner import Forecast
    from fpld.planner.inputs import PlanSource

_EPILOG = """\
CONFIG is a TOML file, a preset, or the folder of a (warm-up) run, whose measured noise the plan then uses. Options
replace what CONFIG has. Lists have commas, and one entry for each node or one for all. Limits are bits per context
(60bits) or sizes of all that is sent in a round (20MB). A bare number is bits per coordinate, as in the paper. The
columns lower and upper are bounds of the loss that quantization adds (KL in nats). Seconds are those of uplinks, side
by side, without training. Examples:

  fpld plan --links 2Mbit/s,2Mbit/s,384kbit/s,256kbit/s --clips 4,4,8,8 --deadline 300 --contexts 16384 --vocab 1024
  fpld plan --links 10Mbit/s,1Mbit/s --clips 1 --deadline 600 --contexts 16384 --vocab 1024 --target 0.001
  fpld plan hospitals --total 2MB --write planned.toml
  fpld plan runs/warmup --deadline 120 --out plan.html
  fpld plan --model smollm2-1.7b --nodes 10,100,1000
  fpld plan --epsilon 8,3,1 --units 300,1000,5000 --numbers 32768 --nodes 5
  fpld plan --codec samples --caps 660kB,660kB,660kB,660kB,660kB --contexts 92160 --vocab 1024 --student 4.3MB
"""


_BYTES_PER_WEIGHT = 4


def _configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("config", nargs="?", metavar="CONFIG", help="a TOML file, a preset or a run's folder")
    add("--links", type=rates, metavar="RATE,...", help="uplink of each node, such as 256kbit/s or 2Mbit/s")
    add("--names", type=words, metavar="NAME,...", help="names of the nodes")
    add(
        "--caps",
        type=sizes,
        metavar="CAP,...",
        help="most that a node may send in a round, such as 60bits (per context) or 20MB (in all)",
    )
    add("--weights", type=numbers, metavar="W,...", help="weight of each node for the allocator")
    add("--clips", type=numbers, metavar="L,...", help="clip level of each node")
    add("--deadline", type=float, metavar="SECONDS", help="time for a round's uplinks")
    add("--rounds", type=int, metavar="T", help="rounds of the federation (default: 1)")
    add("--contexts", type=int, metavar="m", help="probe contexts")
    add("--vocab", type=int, metavar="V", help="vocabulary size")
    add(
        "--samples",
        type=float,
        metavar="n",
        help="training samples per node, for the data term (default: no data term)",
    )
    add("--peak", type=float, metavar="P", help="largest probability of a token (default: 1/V, or as measured)")
    add(
        "--total",
        type=sizes,
        metavar="TOTAL",
        help="all nodes together in a round, such as 240bits or 80MB (default: caps)",
    )
    usual = "by measured loss curves, or square-root for sampled labels, optimal for uniform, else uniform"
    add("--policy", metavar="NAME", help=f"one of curves, {', '.join(allocators.names())} (default: {usual})")
    add("--codec", metavar="NAME", help=f"one of {', '.join(codecs.names())} (default: CONFIG's, or uniform)")
    add("--student", type=sizes, metavar="SIZE", help="the student's weights, such as 4.3MB, which go down every round")
    add("--target", type=float, metavar="KL", help="the least total and the shortest deadline for a KL of at most this")
    add("--channel", choices=["wire", "paper"], default="wire", help="honest bytes, or the paper's channel")
    add(
        "--model", metavar="MODEL", help="a pretrained model by name or folder: what a federation of it sends and holds"
    )
    add(
        "--nodes",
        type=numbers,
        default=[10.0],
        metavar="K,...",
        help="with --model or --epsilon: numbers of nodes (default: 10)",
    )
    add("--context-bits", type=float, metavar="B", help="with --model: bits of a label (default: 60)")
    add("--lora", type=int, metavar="r", help="with --model: rank of the adapters (default: 8)")
    add("--lora-layers", type=int, metavar="n", help="with --model: layers that have adapters, the last (default: all)")
    add("--epsilon", type=numbers, metavar="E,...", help="what guarantees of privacy cost, instead of a plan of bits")
    add(
        "--units",
        type=numbers,
        default=[300.0, 1000.0, 5000.0],
        metavar="N,...",
        help="with --epsilon: units at a node",
    )
    add(
        "--numbers", type=numbers, default=[1000.0, 32768.0], metavar="d,...", help="with --epsilon: trained parameters"
    )
    add("--steps", type=int, default=2, help="with --epsilon: private steps in all rounds (default: 2)")
    add("--delta", type=float, default=1e-5, help="with --epsilon (default: 1e-5)")
    add("--out", type=Path, metavar="FILE.html", help="write the plan as a page")
    add("--write", type=Path, metavar="CONFIG.toml", help="write CONFIG with the plan's bits, for fpld run")


def _run(arguments: argparse.Namespace, output: Output) -> int:
    """Plan, print, write."""
    if arguments.epsilon is not None:
        return _promises(arguments, output)
    if arguments.model is not None:
        return _scale(arguments, output)
    source = _source(arguments)
    if arguments.write is not None and source is None:
        raise InputError("--write needs CONFIG (a TOML file, a preset or a run's folder) for texts and models")
    inputs = _inputs(arguments, source)
    plans = _answers(arguments, inputs, source)
    tables = [(name, site_rows(plan), policy_rows(plan), label_rows(plan)) for name, plan in plans.items()]
    if output.json:
        rows = [{"table": kind, "answer": name, **row} for name, *parts in tables
                for kind, part in zip(("sites", "policies", "labels"), parts, strict=True) for row in part]  # fmt: skip
        output.result("plan", rows)
    for (name, sites, policies, labels), plan in zip(tables, plans.values(), strict=True):
        output.table(shown_rows(sites, plan), title=f"{name}: bits per {plan.inputs.bit_unit} of each node")
        output.table(
            shown_rows(policies, plan),
            title=f"{name}: what {plan.policy} and other policies send and cost at the same total",
        )
        if labels:
            output.table(labels, title=f"{name}: contexts and bits for each, as planned and as would be best")
        for line in [*advice(plan), *([source.note] if source and source.note else [])]:
            output.note(line)
    chosen = next(iter(plans.values()))
    if arguments.out is not None:
        from fpld.planner.render import plan_page

        write_shared(arguments.out, plan_page(plans, source.note if source else ""))
        output.note(f"page: {arguments.out}")
    if arguments.write is not None and source is not None:
        from fpld.planner.inputs import planned_configuration

        write_shared(arguments.write, planned_configuration(source, chosen))
        output.note(f"configuration: {arguments.write} (fpld run {arguments.write})")
    return 0


def _promises(arguments: argparse.Namespace, output: Output) -> int:
    """Say how loud the noise of promises is beside what there is to learn."""
    from fpld.privacy import forecast_noise

    rows = []
    for epsilon in arguments.epsilon:
        for units in arguments.units:
            for count in arguments.numbers:
                for sites in arguments.nodes:
                    case = {"units": int(units), "numbers": int(count), "sites": int(sites)}
                    forecast = forecast_noise(epsilon, arguments.delta, steps=arguments.steps, **case)
                    rows.append({
                        "epsilon": epsilon,
                        **case,
                        "noise": forecast.noise,
                        "noise_norm": forecast.norm,
                        "noise_over_signal": forecast.ratio,
                        "over_sites": forecast.site_ratio,
                        "units_needed": forecast.units,
                    })  # fmt: skip
    title = f"Noise beside the gradient, all units in each of {arguments.steps} steps, delta {arguments.delta:g}"
    output.result("plan", rows, title=title)
    return 0


def _scale(arguments: argparse.Namespace, output: Output) -> int:
    """Say what a federation of a pretrained model sends and holds, beside its rivals."""
    from fpld.planner.scale import ScaleSettings, scale_rows
    from fpld.students.shapes import MODELS, read_shape

    place = Path(arguments.model)
    if arguments.model not in MODELS and not place.is_dir():
        raise InputError(f"--model must be a model's folder or one of {', '.join(MODELS)}, got {arguments.model!r}")
    shape = MODELS[arguments.model] if arguments.model in MODELS else read_shape(place)
    settings = {
        "contexts": arguments.contexts,
        "rounds": arguments.rounds,
        "bits": arguments.context_bits,
        "rank": arguments.lora,
        "layers": arguments.lora_layers,
    }
    effort = ScaleSettings(**{name: value for name, value in settings.items() if value is not None})
    rows = scale_rows(shape, [int(count) for count in arguments.nodes], effort)
    title = f"{arguments.model}: {shape.parameters:,} weights, V = {shape.vocab:,}; bytes of a node in all rounds"
    output.result("plan", rows, title=title)
    return 0


def _source(arguments: argparse.Namespace) -> PlanSource | None:
    if arguments.config is None:
        return None
    from fpld.planner.inputs import read_plan_source

    student = _student_bytes(arguments)
    weights = None if student is None else round(student / _BYTES_PER_WEIGHT)
    sizes = {"contexts": arguments.contexts, "vocab": arguments.vocab, "weights": weights}
    return read_plan_source(arguments.config, **sizes)


def _student_bytes(arguments: argparse.Namespace) -> float | None:
    if arguments.student is None:
        return None
    if len(arguments.student) != 1 or not arguments.student[0].in_bytes:
        raise InputError("--student must be one size in bytes, such as 4.3MB")
    return float(arguments.student[0].value)


def _inputs(arguments: argparse.Namespace, source: PlanSource | None) -> PlanInputs:
    """Return the inputs of the source, with the arguments in their place."""
    changes: dict[str, Any] = {
        name: getattr(arguments, name) for name in ("deadline", "rounds", "samples", "contexts", "vocab", "codec")
    }
    changes = {name: value for name, value in changes.items() if value is not None} | {"channel": arguments.channel}
    if arguments.student is not None:
        changes["student"] = _student_bytes(arguments)
    if source is None:
        for name in ("contexts", "vocab"):
            if name not in changes:
                raise InputError(f"--{name} must be given, or CONFIG")
        count = _count(arguments)
        inputs = PlanInputs(tuple(Sender(f"node-{i + 1}") for i in range(count)), **changes)
    else:
        if arguments.names is not None:
            raise InputError("--names is for a plan without CONFIG, which names its nodes itself")
        inputs = replace(source.inputs, **changes)
    if arguments.peak is not None:
        if not 1 / inputs.vocab <= arguments.peak <= 1:
            raise InputError(f"--peak must be from 1/V = {1 / inputs.vocab:g} to 1, got {arguments.peak:g}")
        inputs = replace(inputs, c_p=1 - arguments.peak)
    return replace(inputs, sites=_sites(arguments, inputs))


def _count(arguments: argparse.Namespace) -> int:
    lists = [getattr(arguments, name) for name in ("links", "names", "caps", "weights", "clips")]
    counts = [len(values) for values in lists if values is not None]
    if not counts:
        raise InputError("--links must be given (one uplink for each node), or --caps, or CONFIG")
    return max(counts)


def _sites(arguments: argparse.Namespace, inputs: PlanInputs) -> tuple[Sender, ...]:
    """Apply the lists of the command line to the sites, and check that each has an entry for every site."""
    count = len(inputs.sites)
    sites = list(inputs.sites)

    def each(name: str) -> list[object] | None:
        values = one_or_each(getattr(arguments, name), count)
        if values is not None and len(values) != count:
            raise InputError(
                f"--{name} must have one entry for each of {count} nodes, or one for all, got {len(values)}"
            )
        return values

    if arguments.names is not None and len(arguments.names) != count:
        raise InputError(f"--names must have one entry for each of {count} nodes, got {len(arguments.names)}")
    for name, field in (("names", "name"), ("links", "rate"), ("weights", "weight"), ("clips", "clip")):
        values = each(name)
        for i, value in enumerate(values or []):
            changes: dict[str, Any] = {field: value}
            if name == "links":
                changes["cap"] = math.inf  # the link takes the place of the bits that a configuration allows
            if name == "clips":
                changes["ranged"] = False
            sites[i] = replace(sites[i], **changes)
    caps: list[Size] | None = each("caps")  # type: ignore[assignment]
    for i, cap in enumerate(caps or []):
        sites[i] = replace(sites[i], cap=cap.per_context(inputs.all_contexts, inputs.vocab, inputs.uplinks.overhead))
    return tuple(sites)


def _answers(arguments: argparse.Namespace, inputs: PlanInputs, source: PlanSource | None) -> dict[str, Forecast]:
    """Return the plan asked for; with a target, the least total and the shortest deadline."""
    if arguments.target is not None:
        target = validation.real("--target", arguments.target, above=0.0)
        plans = {"least total": api.plan(inputs, target=target)}
        if all(site.rate is not None for site in inputs.sites):
            best = shortest_deadline(inputs, target)
            plans[f"shortest deadline ({best.inputs.deadline:.4g} s)"] = best
        return plans
    total = source.total if source is not None else None
    if arguments.total is not None:
        if len(arguments.total) != 1:
            raise InputError(f"--total must be one number or size, got {len(arguments.total)}")
        overhead = len(inputs.sites) * inputs.uplinks.overhead
        total = arguments.total[0].per_context(inputs.all_contexts, inputs.vocab, overhead)
        total *= inputs.all_contexts / inputs.units  # where nodes send updates, bits are per weight
    return {"plan": api.plan(inputs, policy=arguments.policy, total=total)}


COMMAND = Command(_EPILOG, _configure, _run)
