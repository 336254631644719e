"""`fpld bench`: codecs side by side, and the speed of training."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from fpld import validation
from fpld.bench import (
    SCENES,
    SYNTHETIC,
    compare_codecs,
    draw_comparison,
    no_peers,
    read_peers,
    read_scene,
    scene_contenders,
    speed,
)
from fpld.cli.arguments import Command, numbers
from fpld.config import read_config
from fpld.errors import InputError, MissingExtraError
from fpld.report.draw import save_figure
from fpld.storage.files import write_csv
from fpld.storage.run_folder import CONFIG, RunFolder

if TYPE_CHECKING:
    import argparse

    from fpld.bench import LogitScene, SkippedBudget
    from fpld.bench.accuracy import Peers
    from fpld.cli.output import Output, Row

_EPILOG = """\
Each codec sends the same logits of K nodes within the same bits, headers included. The column kl is the divergence of
the decoded mean logits from the nodes' mean logits, after the softmax. Speeds are relative to numpy's acc += x. Codecs
that cannot meet a budget are left out of it. --peers adds codecs to compare with: in a checkout, benchmarks.peers has
those of others. Writes bench-codecs.csv, .png and .svg into the output folder.

The command `speed` times one thread at V = 32000 and m = 512, by medians of processor time. It times encoding, decoding
with the sum over nodes, and a whole round at the aggregator, each in turn with acc += x. Slow codecs are timed on fewer
contexts. Writes bench-speed.csv.

The command `training` times the student of a configuration: fine-tuning, labelling and distillation, each in turn with
a bare PyTorch loop of the same model, batch and threads. The ratio is of processor times. With the folder of a finished
run, models and text are those of the run: labels of random models cost more. Writes bench-training.csv. Examples:

  fpld bench codecs --scene gaussian zipf --bits 0.1,1.25,2,4
  fpld bench codecs --peers benchmarks.peers
  fpld bench speed --codec uniform float32 --bits 1,2.37,4,32
  fpld bench training --config demo
  fpld bench training --config runs/demo
"""
NAME = "bench-codecs"
BITS = {"codecs": [0.1, 1.0, 1.25, 2.0, 4.0], "speed": [0.1, 1.0, 1.5, 2.0, 2.37, 3.0, 4.0, 5.5, 8.0, 32.0]}
CONTEXT_BITS = {"codecs": [10.0, 30.0, 100.0], "speed": [30.0]}  # what a sampled label takes, whatever the vocabulary


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=["codecs", "speed", "training"], help="what to compare")
    parser.add_argument(
        "--logits", type=Path, metavar="FILE", help="safetensors with logits [K, m, V] and perhaps prior [m, V]"
    )
    parser.add_argument(
        "--scene",
        nargs="+",
        choices=SCENES,
        metavar="NAME",
        help=f"of {', '.join(SCENES)} (default: the synthetic ones, or FILE)",
    )
    for name, unit, listed in (("bits", "coordinate", BITS), ("context-bits", "context", CONTEXT_BITS)):
        usual = "; ".join(f"for {what}: {','.join(f'{bits:g}' for bits in some)}" for what, some in listed.items())
        text = f"bits per {unit}; default, if no budgets are given, {usual}"
        parser.add_argument(f"--{name}", type=numbers, metavar="B,B,...", help=text)
    parser.add_argument("--codec", nargs="+", metavar="NAME", help="speed: codecs to measure (default: all)")
    parser.add_argument("--peers", metavar="MODULE", help="a module with a function peers(nodes): more codecs by name")
    for name, default, what in (
        ("contexts", 512, "speed: probe contexts"),
        ("vocab", 32_000, "speed: vocabulary size"),
        ("nodes", 8, "speed: number of nodes"),
        ("repeat", 5, "speed, training: repetitions, of which the median counts"),
        ("steps", 50, "training: steps of a job"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=f"{what} (default: {default})")
    parser.add_argument(
        "--config",
        default="demo",
        metavar="CONFIG",
        help="training: a TOML file, a preset or a run's folder (default: demo)",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("out"), metavar="DIR", help="folder for table and figure (default: out)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of every draw (default: 0)")


def _run(arguments: argparse.Namespace, output: Output) -> int:
    """Measure, print, draw."""
    if not 0 <= arguments.seed < 2**32:
        raise InputError(f"--seed must be from 0 to {2**32 - 1}, got {arguments.seed}")
    if arguments.what == "training":
        return _training(arguments, output)
    return (_codecs if arguments.what == "codecs" else _speed)(arguments, _asked(arguments), output)


class _Asked(NamedTuple):
    """The budgets that are asked for, per coordinate and per context."""

    bits: list[float]
    context_bits: list[float]

    def budgets(self, vocab: int) -> list[float]:
        """Return all in bits per coordinate."""
        return sorted({*self.bits, *(bits / vocab for bits in self.context_bits)})

    def __str__(self) -> str:
        each = (self.bits, "per coordinate"), (self.context_bits, "per context")
        return " and ".join(f"{', '.join(f'{bits:g}' for bits in some)} {unit}" for some, unit in each if some)


def _asked(arguments: argparse.Namespace) -> _Asked:
    listed = arguments.bits, arguments.context_bits
    if listed == (None, None):
        listed = BITS[arguments.what], CONTEXT_BITS[arguments.what]
    names = "--bits", "--context-bits"
    return _Asked(
        *([validation.real(n, bits, above=0.0) for bits in some or []] for n, some in zip(names, listed, strict=True))
    )


def _speed(arguments: argparse.Namespace, asked: _Asked, output: Output) -> int:
    sizes = speed.Sizes(
        *(
            validation.integer(f"--{name}", getattr(arguments, name), least=1)
            for name in ("contexts", "vocab", "nodes", "repeat")
        )
    )
    listed = speed.contenders(sizes.nodes, _peers(arguments))
    names = [item.name for item in listed]
    for name in arguments.codec or []:
        if name not in names:
            raise InputError(f"--codec must be of {', '.join(names)}, got {name!r}")
    chosen = [item for item in listed if item.name in (arguments.codec or names)]
    budgets = asked.budgets(sizes.vocab)
    with output.progress("speed", len(chosen) * len(budgets)) as tick:
        rows = speed.time_codecs(chosen, budgets, sizes, arguments.seed, tick)
    if not rows:
        raise InputError(f"--bits: no codec meets a budget of {asked}")
    output.result("bench speed", rows, title="Coordinates per second over those of acc += x (one thread)")
    return _keep(rows, "bench-speed.csv", arguments, output)


def _training(arguments: argparse.Namespace, output: Output) -> int:
    from fpld.bench.training import JOBS, random_scene, run_scene, time_training  # brings the parts of a run along

    steps, repeat = (validation.integer(f"--{name}", getattr(arguments, name), least=1) for name in ("steps", "repeat"))
    store = RunFolder(Path(arguments.config))
    with output.status():
        if store.has(CONFIG):
            config, _ = read_config(str(store.path / CONFIG))
            scene = run_scene(config, store, steps=steps)
        else:
            config, _ = read_config(arguments.config)
            scene = random_scene(config, steps=steps, seed=arguments.seed)
    with output.progress("training", len(JOBS)) as tick:
        rows = time_training(scene, steps=steps, repeat=repeat, seed=arguments.seed, tick=tick)
    output.result("bench training", rows, title=f"Tokens per second of {arguments.config}'s student, and a bare loop's")
    return _keep(rows, "bench-training.csv", arguments, output)


def _keep(rows: list[Row], name: str, arguments: argparse.Namespace, output: Output) -> int:
    """Write a table into the output folder."""
    try:
        arguments.out.mkdir(parents=True, exist_ok=True)
        write_csv(arguments.out / name, rows)
    except OSError as error:
        raise InputError(f"--out: cannot write to {arguments.out}: {error.strerror or error}") from None
    output.note(f"written: {arguments.out / name}")
    return 0


def _codecs(arguments: argparse.Namespace, asked: _Asked, output: Output) -> int:
    scenes = [partial(read_scene, arguments.logits)] if arguments.logits else []
    chosen = arguments.scene or ([] if arguments.logits else list(SYNTHETIC))
    scenes += [partial(SCENES[name], arguments.seed) for name in dict.fromkeys(chosen)]
    try:
        arguments.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--out: cannot write to {arguments.out}: {error.strerror or error}") from None
    rows: list[Row] = []
    left: list[SkippedBudget] = []
    for make in scenes:
        measured, skipped = _one(make(), asked, arguments, output)
        rows += measured
        left += skipped
    if not rows:
        raise InputError(f"--bits: no codec meets a budget of {asked}")
    output.result("bench codecs", rows, title="KL, error and speed of codecs (bits per coordinate)")
    for name, reasons in _reasons(left).items():
        output.note(f"left out: {name}: {reasons}")
    output.note(f"written: {', '.join(_write(rows, arguments.out))}")
    return 0


def _peers(arguments: argparse.Namespace) -> Peers:
    return read_peers(arguments.peers) if arguments.peers else no_peers


def _one(
    scene: LogitScene, asked: _Asked, arguments: argparse.Namespace, output: Output
) -> tuple[list[Row], list[SkippedBudget]]:
    listed = scene_contenders(scene, _peers(arguments))
    budgets = asked.budgets(scene.shape[1])
    with output.progress(f"codecs on {scene.name}", len(listed) * len(budgets)) as tick:
        return compare_codecs(scene, listed, budgets, arguments.seed, tick)


def _reasons(left: list[SkippedBudget]) -> dict[str, str]:
    """Return for each scene and codec the budgets that it does not meet, and the reason for the largest of them."""
    by_codec: dict[str, list[SkippedBudget]] = {}
    for item in left:
        by_codec.setdefault(f"{item.codec} on {item.scene}", []).append(item)
    return {
        name: f"{', '.join(f'{item.bits:g}' for item in items)} ({items[-1].reason})"
        for name, items in by_codec.items()
    }


def _write(rows: list[Row], out: Path) -> list[str]:
    """Write table and figure; without the extra for figures, the table only."""
    try:
        write_csv(out / f"{NAME}.csv", rows)
        scenes = len({row["scene"] for row in rows})
        files = save_figure(partial(draw_comparison, rows), out / NAME, (4.2 * scenes + 1.8, 8.0))
    except MissingExtraError as error:
        return [str(out / f"{NAME}.csv"), f"no figure ({error})"]
    except OSError as error:
        raise InputError(f"--out: cannot write to {out}: {error.strerror or error}") from None
    return [str(out / f"{NAME}.csv"), *map(str, files)]


COMMAND = Command(_EPILOG, _configure, _run)
