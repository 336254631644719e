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
from fpld.planner.sending import expected_rows, shown_expected
from fpld.registry import allocators, codecs
from fpld.report.tables import drop_empty_columns
from fpld.storage.files import write_shared

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from fpld.cli.arguments import Size
    from fpld.cli.output import Output
    from fpld.planner import Forecast
    from fpld.planner.inputs import PlanSource
    from fpld.planner.privacy import PrivateTraining

_EPILOG = """\
CONFIG is a TOML file, a preset, or the folder of a (warm-up) run, whose measured noise the plan then uses. Options
replace what CONFIG has. Lists have commas, and one entry for each node or one for all. Limits are bits per context
(60bits) or sizes of all that is sent in a round (20MB). A bare number is bits per coordinate, as in the paper. The
held-out loss is expected from kept runs; give the losses of base and mixture, if you know them, to have it in nats. The
columns lower and upper are bounds of the loss that quantization adds (KL in nats). Seconds are those of uplinks, side
by side, without training. Examples:

  fpld plan --links 2Mbit/s,2Mbit/s,384kbit/s,256kbit/s --clips 4,4,8,8 --deadline 300 --contexts 16384 --vocab 1024
  fpld plan --links 10Mbit/s,1Mbit/s --clips 1 --deadline 600 --contexts 16384 --vocab 1024 --target 0.001
  fpld plan hospitals --total 2MB --write planned.toml
  fpld plan hospitals --may-send labels,text,updates --base 3.89 --mixture 3.35
  fpld plan runs/warmup --deadline 120 --out plan.html
  fpld plan --model smollm2-1.7b --nodes 10,100,1000
  fpld plan --epsilon 8,3,1 --units 300,1000,5000 --numbers 32768 --nodes 5
  fpld plan private-hospitals --epsilon 8,3 --units 700
  fpld plan --codec samples --caps 660kB,660kB,660kB,660kB,660kB --contexts 92160 --vocab 1024 --student 4.3MB
"""


_BYTES_PER_WEIGHT = 4
_UNITS = (300, 1000, 5000)
_NUMBERS = (1000, 32768)
_NODES = 10
_STEPS = 2
_DELTA = 1e-5
_LIMITS = ("links", "names", "caps", "weights", "clips", "deadline", "total", "policy", "target", "codec", "channel")
_LOSSES = ("base", "mixture")
# What each question uses, besides the option that asks it; anything else is refused.
_BITS = ("config", *_LIMITS, *_LOSSES, "rounds", "contexts", "vocab", "samples", "peak", "student", "may_send", "time",
         "out", "write")  # fmt: skip
_SCALE = ("model", "nodes", "contexts", "rounds", "context_bits", "lora", "lora_layers")
_PRIVACY = ("config", "epsilon", "units", "numbers", "nodes", "steps", "batch", "delta", *_LOSSES)


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
    add("--channel", choices=["wire", "paper"], help="honest bytes, or the paper's channel (default: wire)")
    add(
        "--may-send",
        type=words,
        metavar="WHAT,...",
        help="what may leave the nodes, of labels, text and updates (default: what CONFIG sends)",
    )
    add("--base", type=float, metavar="LOSS", help="held-out loss of the base model (default: that of a finished run)")
    add(
        "--mixture",
        type=float,
        metavar="LOSS",
        help="held-out loss of the mixture of the nodes' models (default: same)",
    )
    add("--time", action="store_true", help="estimate the time of the planned run by timing a few steps here")
    add(
        "--model", metavar="MODEL", help="a pretrained model by name or folder: what a federation of it sends and holds"
    )
    add(
        "--nodes",
        type=numbers,
        metavar="K,...",
        help="with --model or --epsilon: numbers of nodes (default: CONFIG's, or 10)",
    )
    add("--context-bits", type=float, metavar="B", help="with --model: bits of a label (default: 60)")
    add("--lora", type=int, metavar="r", help="with --model: rank of the adapters (default: 8)")
    add("--lora-layers", type=int, metavar="n", help="with --model: layers that have adapters, the last (default: all)")
    add("--epsilon", type=numbers, metavar="E,...", help="what guarantees of privacy cost, instead of a plan of bits")
    add(
        "--units",
        type=numbers,
        metavar="N,...",
        help="with --epsilon: units at a node (default: CONFIG's documents, or 300,1000,5000)",
    )
    add(
        "--numbers",
        type=numbers,
        metavar="d,...",
        help="with --epsilon: trained parameters (default: CONFIG's, or 1000,32768)",
    )
    add("--steps", type=int, help="with --epsilon: private steps in all rounds (default: CONFIG's, or 2)")
    add(
        "--batch", type=int, metavar="n", help="with --epsilon: units in a step, on average (default: CONFIG's, or all)"
    )
    add("--delta", type=float, help="with --epsilon (default: CONFIG's, or 1e-5)")
    add("--out", type=Path, metavar="FILE.html", help="write the plan as a page")
    add("--write", type=Path, metavar="CONFIG.toml", help="write CONFIG with the plan's bits, for fpld run")


def _run(arguments: argparse.Namespace, output: Output) -> int:
    """Plan, print, write."""
    if arguments.epsilon is not None:
        _refuse_unused(arguments, "--epsilon", _PRIVACY)
        return _promises(arguments, output)
    if arguments.model is not None:
        _refuse_unused(arguments, "--model", _SCALE)
        return _scale(arguments, output)
    _refuse_unused(arguments, "a plan of bits", _BITS)
    source = _source(arguments)
    if arguments.write is not None and source is None:
        raise InputError("--write needs CONFIG (a TOML file, a preset or a run's folder) for texts and models")
    inputs = _inputs(arguments, source)
    plans = _answers(arguments, inputs, source)
    tables = [
        (name, expected_rows(plan), site_rows(plan), policy_rows(plan), label_rows(plan))
        for name, plan in plans.items()
    ]
    chosen = next(iter(plans.values()))
    time = _time(arguments, source, chosen)
    if output.json:
        kinds = ("expected", "sites", "policies", "labels")
        rows = [{"table": kind, "answer": name, **row} for name, *parts in tables
                for kind, part in zip(kinds, parts, strict=True) for row in part]  # fmt: skip
        output.result("plan", rows + ([{"table": "time", "answer": next(iter(plans)), "says": time}] if time else []))
    for (name, ways, sites, policies, labels), plan in zip(tables, plans.values(), strict=True):
        output.table(
            shown_expected(ways), title=f"{name}: what nodes could send in the same bytes, and what is expected of it"
        )
        output.table(shown_rows(sites, plan), title=f"{name}: bits per {plan.inputs.bit_unit} of each node")
        output.table(
            shown_rows(policies, plan),
            title=f"{name}: what {plan.policy} and other policies send and cost at the same total",
        )
        if labels:
            output.table(labels, title=f"{name}: contexts and bits for each, as planned and as would be best")
        for line in [*advice(plan), *([source.note] if source and source.note else []), *_bare_numbers(arguments)]:
            output.note(line)
    if source is not None:
        output.note(time or f"time: `fpld plan {arguments.config} --time` and `fpld check` estimate it")
    if arguments.out is not None:
        from fpld.planner.render import plan_page

        write_shared(arguments.out, plan_page(plans, source.note if source else ""))
        output.note(f"page: {arguments.out}")
    if arguments.write is not None and source is not None:
        from fpld.planner.inputs import planned_configuration

        write_shared(arguments.write, planned_configuration(source, chosen))
        output.note(f"configuration: {arguments.write} (fpld run {arguments.write})")
    return 0


def _refuse_unused(arguments: argparse.Namespace, question: str, used: tuple[str, ...]) -> None:
    """Refuse an option that would be ignored."""
    for name in dict.fromkeys((*_BITS, *_SCALE, *_PRIVACY)):
        value = getattr(arguments, name)
        if value is not None and value is not False and name not in used:
            shown = "CONFIG" if name == "config" else f"--{name.replace('_', '-')}"
            raise InputError(f"{shown} must be left out: it is not for {question}")


def _bare_numbers(arguments: argparse.Namespace) -> list[str]:
    """Return a line for each limit without a unit: what was understood, and how to write it in bits per context."""
    bare = {
        f"--{name} {size.value:g} is taken as bits per coordinate; {size.value:g}bits would be per context": None
        for name in ("caps", "total")
        for size in getattr(arguments, name) or []
        if not (size.in_bytes or size.of_context)
    }
    return list(bare)


def _time(arguments: argparse.Namespace, source: PlanSource | None, plan: Forecast) -> str:
    """Return the time of the planned run, if it is asked for; what `fpld check` says of that configuration."""
    if not arguments.time:
        return ""
    if source is None:
        raise InputError(
            "--time needs CONFIG (a TOML file, a preset or a run's folder): it times the steps of its model"
        )
    from fpld import config as configuration
    from fpld.baselines import baseline_work
    from fpld.federation.cost import expected_cost
    from fpld.planner.inputs import planned_configuration

    config = configuration.parse_config(planned_configuration(source, plan), "the planned configuration")
    findings = {finding.key: finding.says for finding in expected_cost(config, baselines=baseline_work(config))}
    return findings.get("run.rounds", f"time: not estimated; {findings.get('engine.workers')}")


def _promises(arguments: argparse.Namespace, output: Output) -> int:
    """Say how loud the noise of promises is beside what there is to learn, and what that leaves of the gain."""
    from fpld.planner.privacy import privacy_rows

    rows = []
    for training, gain in _trainings(arguments, output):
        rows += privacy_rows(training, arguments.epsilon, gain)
    if not any(row["gain"] is not None for row in rows):
        rows = [{name: value for name, value in row.items() if name != "gain"} for row in rows]
    for row in rows:  # names of earlier versions, which go on working
        row["sites"] = row["nodes"]
        row["over_sites"] = row["over_nodes"]
    shown = drop_empty_columns(
        [{name: value for name, value in row.items() if name not in ("sites", "over_sites")} for row in rows]
    )
    title = "Noise beside the gradient, and the share of the gain without privacy that it leaves"
    output.result("plan", rows, title=title, shown=shown)
    return 0


def _trainings(arguments: argparse.Namespace, output: Output) -> Iterator[tuple[PrivateTraining, float | None]]:
    """Yield the trainings that are asked for, and the gain of each without privacy, if that is known."""
    from fpld.planner.inputs import read_learning
    from fpld.planner.privacy import PrivateTraining, expected_gain, private_training

    if (arguments.base is None) != (arguments.mixture is None):
        raise InputError("--base and --mixture must be given together for --epsilon: their difference is the gain")
    gain = None
    units = _counts(arguments, "units")
    numbers = _counts(arguments, "numbers")
    nodes = _counts(arguments, "nodes")
    steps = arguments.steps
    if steps is not None:
        validation.integer("--steps", steps, least=1)
    found = None
    if arguments.config is not None:
        source = _source(arguments)
        if source is None or source.inputs.model_weights is None:
            raise InputError("--epsilon needs CONFIG with a model whose weights are known, or no CONFIG")
        for name in ("nodes", "units"):
            if len(getattr(arguments, name) or [0]) > 1:
                raise InputError(f"--{name} must be one number with CONFIG")
        one = None if units is None else units[0]
        with output.progress("counting the nodes' documents", 1):
            found = private_training(source.config, source.inputs.model_weights, units=one)
        if arguments.base is not None:
            known = replace(read_learning(source.config), base=arguments.base, mixture=arguments.mixture)
            plan = api.plan(source.inputs, total=source.total)
            gain = expected_gain(known, contexts=source.inputs.all_contexts, bits=plan.bits.tolist())
    elif arguments.base is not None:
        raise InputError("--base and --mixture need CONFIG with --epsilon: contexts and bits give the gain")
    if found is not None:
        changes = {"steps": steps, "batch": arguments.batch, "delta": arguments.delta}
        found = replace(found, **{name: value for name, value in changes.items() if value is not None})
        if nodes is not None:
            average = round(sum(found.units.values()) / len(found.units))
            found = replace(found, units=_alike(nodes[0], average))
        for count in numbers or [found.numbers]:
            yield replace(found, numbers=count), gain
        return
    terms = (
        _STEPS if steps is None else steps,
        arguments.batch,
        _DELTA if arguments.delta is None else arguments.delta,
    )
    for many in units or _UNITS:
        for count in numbers or _NUMBERS:
            for of_all in nodes or [_NODES]:
                yield PrivateTraining(_alike(of_all, many), count, *terms), gain


def _counts(arguments: argparse.Namespace, name: str) -> list[int] | None:
    """Return the numbers of an option, which are whole and at least 1; None if it is not given."""
    values = getattr(arguments, name)
    for value in values or []:
        if not (value >= 1 and value.is_integer()):
            raise InputError(f"--{name} must have whole numbers of at least 1, got {value:g}")
    return None if values is None else [int(value) for value in values]


def _alike(nodes: int, units: int) -> dict[str, int]:
    """Return nodes with equal numbers of units."""
    return {f"node-{index + 1}": units for index in range(nodes)}


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
    rows = scale_rows(shape, _counts(arguments, "nodes") or [_NODES], effort)
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
    student = float(arguments.student[0].value)
    if student < _BYTES_PER_WEIGHT:
        raise InputError(f"--student must be at least {_BYTES_PER_WEIGHT} bytes, those of a weight, got {student:g}")
    return student


def _inputs(arguments: argparse.Namespace, source: PlanSource | None) -> PlanInputs:
    """Return the inputs of the source, with the arguments in their place."""
    changes: dict[str, Any] = {
        name: getattr(arguments, name) for name in ("deadline", "rounds", "samples", "contexts", "vocab", "codec")
    }
    changes = {name: value for name, value in changes.items() if value is not None} | {
        "channel": arguments.channel or "wire"
    }
    if arguments.may_send is not None:
        changes["may_send"] = tuple(arguments.may_send)
    if arguments.student is not None:
        student = _student_bytes(arguments)
        changes |= {"student": student, "model_weights": round((student or 0.0) / _BYTES_PER_WEIGHT)}
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
    known = {name: value for name in _LOSSES if (value := getattr(arguments, name)) is not None}
    if known and inputs.learning is None:
        raise InputError("--base and --mixture must be left out: no loss is forecast for what CONFIG sends")
    if known and inputs.learning is not None:
        inputs = replace(inputs, learning=replace(inputs.learning, **known))
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
