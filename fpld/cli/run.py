"""`fpld run`: the main job; without a configuration, the demonstration."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import sys
import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from fpld.errors import FpldError
from fpld.federation.status import mark_stopped

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from fpld.cli.output import Output, Row
    from fpld.config import Config

HELP = "train one model from text at many nodes; without CONFIG, the demonstration"
EPILOG = """\
CONFIG is a TOML file, or the name of a preset. The run's folder holds the configuration as used, one line of trace
for each round, checkpoints and the student; --resume goes on after a stop or a crash, with the same result. Examples:

  fpld run                                  the demonstration: presidents' messages, five eras, two thin uplinks
  fpld run hospitals --out runs/hospitals
  fpld run my.toml --out runs/mine --resume
  fpld run rivals --seeds 0,1,2             the demonstration three times, beside FedAvg in one to four rounds
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "config", nargs="?", default="demo", metavar="CONFIG", help="a TOML file or a preset (default: demo)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="the run's folder (default: run.out, numbered if taken)",
    )
    parser.add_argument("--resume", action="store_true", help="go on with the run in DIR")
    seeds = parser.add_mutually_exclusive_group()
    seeds.add_argument("--seed", type=int, help="seed of every draw, in place of run.seed")
    seeds.add_argument(
        "--seeds",
        type=_seeds,
        metavar="N,N,...",
        help="a run with each of these seeds, and a table of means, standard errors and paired differences",
    )


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Run, and print the table."""
    from fpld import config as configuration
    from fpld.report.tables import gap_closed

    _stop_at_signals()
    if arguments.seeds is not None:
        return _run_seeds(arguments, output)
    config, text = configuration.load(arguments.config, seed=arguments.seed)
    out = _folder(arguments, config.run.out)
    started = time.monotonic()
    rows = _run(config, text, out, arguments.resume, arguments.config, output)
    output.result("run", rows, title=f"Held-out text of all nodes, and what was sent ({out})")
    closed = gap_closed(rows)
    if closed is not None:
        output.note(f"gap between the best node alone and pooled training that fpld closes: {closed:.0%}")
    output.note(f"student, trace and checkpoints: {out}; {time.monotonic() - started:.0f} s")
    return 0


def _run(config: Config, text: str, out: Path, resume: bool, name: str, output: Output) -> list[Row]:
    """Check a configuration and run it."""
    from fpld.engines.local.run import run as run_federation
    from fpld.federation.check import refuse

    with output.status(), _no_trace(out):
        if not resume:
            refuse(config, name, local=True)
        return run_federation(config, text, out, resume=resume)


def _run_seeds(arguments: argparse.Namespace, output: Output) -> int:
    """Run with each seed in a folder of its own, and print what they have in common; --resume makes what is missing."""
    from fpld import config as configuration
    from fpld.report.figures import save_figure
    from fpld.report.seeds import draw, summarize
    from fpld.storage.folder import RunFolder

    loaded = [configuration.load(arguments.config, seed=seed) for seed in arguments.seeds]
    out = _folder(arguments, loaded[0][0].run.out)
    results = []
    for seed, (config, text) in zip(arguments.seeds, loaded, strict=True):
        folder = RunFolder(out / f"seed-{seed}")
        if arguments.resume and folder.has("result.json"):
            results.append(folder.read_json("result.json"))
            continue
        begun = arguments.resume and folder.has("config.toml")
        results.append(_run(config, text, folder.path, begun, arguments.config, output))
    rows = summarize(results)
    listed = ", ".join(map(str, arguments.seeds))
    output.result("run", rows, title=f"Held-out text of all nodes: means over seeds {listed} ({out})")
    RunFolder(out).write_json("seeds.json", {"seeds": arguments.seeds, "rows": rows})
    files = save_figure(partial(draw, rows), out / "loss-by-bytes", (8.0, 4.2))
    output.note(f"written: {out / 'seeds.json'}, {', '.join(map(str, files))}; a run's folder for each seed beside")
    return 0


def _seeds(text: str) -> list[int]:
    """Parse a list of different seeds."""
    found = [int(part) for part in text.split(",")]
    if len(set(found)) != len(found) or min(found) < 0:
        raise ValueError(text)
    return found


def _folder(arguments: argparse.Namespace, default: str) -> Path:
    """Return the run's folder: as asked for, or that of the configuration, numbered if it is taken."""
    if arguments.out is not None:
        return Path(arguments.out)
    return Path(default) if arguments.resume else _free(Path(default))


@contextmanager
def _no_trace(out: Path) -> Iterator[None]:
    """Remove the folder that a start has made if it fails before there is anything to resume."""
    new = not out.exists()
    try:
        yield
    except FpldError:
        if new and out.exists() and not (out / "prepared.json").exists():
            shutil.rmtree(out)
        raise


def _free(out: Path) -> Path:
    """Return the folder, or the first of folder-2, folder-3, ... that holds no run yet."""
    number = 1
    while (candidate := out if number == 1 else out.with_name(f"{out.name}-{number}")).exists():
        number += 1
    return candidate


def _stop_at_signals() -> None:
    """End at once on Ctrl-C and SIGTERM: what is on disk is whole at any moment, so there is nothing to wait for."""

    def stop(number: int, _frame: object) -> None:
        for child in multiprocessing.active_children():
            child.kill()
        mark_stopped()
        sys.stderr.write("stopped; --resume goes on from the last closed round\n")
        sys.stderr.flush()
        os._exit(128 + number)

    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)
