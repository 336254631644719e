"""`fpld run`, the main job, and `fpld check`, which says what is wrong before anything is trained."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from fpld import api
from fpld.cli.arguments import Command, override
from fpld.cli.output import last_line, table_title
from fpld.config import read_config_text
from fpld.federation.telemetry import mark_stopped
from fpld.progress import report_elapsed
from fpld.storage.run_folder import CONFIG, RESULT, RunFolder
from fpld.units import show_count

if TYPE_CHECKING:
    import argparse

    from fpld.cli.output import Output, Row

_EPILOG = """\
CONFIG is a TOML file, or the name of a preset. The run's folder holds the configuration as used, one line of trace
for each round, checkpoints and the student. --resume continues after a stop or a crash, with the same result. Examples:

  fpld run                                  the demonstration: presidents' messages, five eras, two slow uplinks
  fpld run hospitals --out runs/hospitals
  fpld run my.toml --out runs/mine --resume
  fpld run demo --set local.steps=300       with another value of a key
  fpld run rivals --seeds 0,1,2             the demonstration three times, beside FedAvg in one to four rounds
"""


def _add_overrides(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set",
        action="append",
        dest="overrides",
        type=override,
        default=[],
        metavar="KEY=VALUE",
        help="another value of a key of CONFIG, such as local.steps=300 or nodes[0].bits=2.0; may be repeated",
    )


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "config", nargs="?", default="demo", metavar="CONFIG", help="a TOML file or a preset (default: demo)"
    )
    _add_overrides(parser)
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="the run's folder (default: run.out, numbered if taken)",
    )
    parser.add_argument("--resume", action="store_true", help="continue the run in DIR")
    seeds = parser.add_mutually_exclusive_group()
    seeds.add_argument("--seed", type=int, help="seed of every draw, in place of run.seed")
    seeds.add_argument(
        "--seeds",
        type=_seeds,
        metavar="N,N,...",
        help="a run with each of these seeds, and a table of means, standard errors and paired differences",
    )


def _run(arguments: argparse.Namespace, output: Output) -> int:
    """Run, and print the table."""
    from fpld.report.run import read_trace
    from fpld.report.tables import gap_closed

    _exit_on_signals()
    if arguments.seeds is not None:
        return _run_seeds(arguments, output)
    started = time.monotonic()
    with output.status():
        run = api.run(
            arguments.config,
            out=arguments.out,
            seed=arguments.seed,
            overrides=dict(arguments.overrides),
            resume=arguments.resume,
            progress=False,
        )
    rows = _rows(run.folder)
    left_out = rows[0].get("left_out")
    shown = rows if output.json else [{key: row[key] for key in row if key != "left_out"} for row in rows]
    trace = read_trace(run.folder)
    output.result("run", shown, title=table_title(trace, run.folder))
    if left_out:
        output.note(f"not all text was used: {left_out}")
    closed = gap_closed(rows)
    if closed is not None:
        output.note(f"gap between the base model and pooled training that fpld closes: {closed:.0%}")
    output.note(last_line(trace, run.folder, time.monotonic() - started))
    return 0


def _run_seeds(arguments: argparse.Namespace, output: Output) -> int:
    """Run with each seed in a folder of its own, and print their summary; --resume makes what is missing."""
    from fpld.report.draw import save_figure
    from fpld.report.seeds import draw_summary, summarize_seeds

    out = arguments.out
    overrides = dict(arguments.overrides)
    if out is None:
        default = Path(api.load_config(arguments.config, overrides=overrides).run.out)
        out = default if arguments.resume else api.free_folder(default)
    results = []
    for seed in arguments.seeds:
        folder = RunFolder(out / f"seed-{seed}")
        if not (arguments.resume and folder.has(RESULT)):
            begun = arguments.resume and folder.has(CONFIG)
            with output.status():
                api.run(
                    arguments.config,
                    out=folder.path,
                    seed=seed,
                    overrides=overrides,
                    resume=begun,
                    progress=False,
                )
        results.append(_rows(folder.path))
    config = api.load_config(arguments.config, overrides=overrides)
    rows = summarize_seeds(results, by_byte=any(node.tokenizer is not None for node in config.nodes))
    listed = ", ".join(map(str, arguments.seeds))
    output.result("run", rows, title=f"Held-out text of all nodes: means over seeds {listed} ({out})")
    summary = {"seeds": arguments.seeds, "rows": rows}
    if overrides:
        summary["overrides"] = overrides
    RunFolder(out).write_json("seeds.json", summary)
    files = save_figure(partial(draw_summary, rows), out / "loss-by-bytes", (8.0, 4.2))
    output.note(f"written: {out / 'seeds.json'}, {', '.join(map(str, files))}; a run's folder for each seed beside")
    return 0


def _rows(folder: Path) -> list[Row]:
    """Return the table of a finished run."""
    rows: list[Row] = RunFolder(folder).read_json(RESULT)
    return rows


def _seeds(text: str) -> list[int]:
    """Parse a list of different seeds."""
    seeds = [int(part) for part in text.split(",")]
    if len(set(seeds)) != len(seeds) or min(seeds) < 0:
        raise ValueError(text)
    return seeds


def _exit_on_signals() -> None:
    """End at once on Ctrl-C and SIGTERM: what is on disk is whole at any moment, so there is nothing to wait for."""

    def stop(number: int, _frame: object) -> None:
        for child in multiprocessing.active_children():
            child.kill()
        mark_stopped()
        sys.stderr.write("stopped; --resume continues from the last closed round\n")
        sys.stderr.flush()
        os._exit(128 + number)

    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)


COMMAND = Command(_EPILOG, _configure, _run)


_CHECK_EPILOG = """\
Reads the texts, tokenizers and limits that CONFIG names; trains, fetches and writes nothing. With a section [flower]
the nodes' texts are elsewhere, and keys and certificates are looked for. The exit code is 2 if anything is wrong.
`fpld run`, `fpld aggregator` and `fpld node` do the same first. Examples:

  fpld check demo
  fpld check my.toml
  fpld check north/node.toml --connect
"""


def _configure_check(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG", help="a TOML file, a preset, or a node's file")
    _add_overrides(parser)
    parser.add_argument(
        "--connect", action="store_true", help="a node's file: connect to the aggregator too, and say what is wrong"
    )


def _run_check(arguments: argparse.Namespace, output: Output) -> int:
    """Check, and print the findings."""
    _, source = read_config_text(arguments.config)
    with output.status(), report_elapsed(f"checking {source}"):
        findings = api.check(arguments.config, overrides=dict(arguments.overrides), connect=arguments.connect)
    wrong = sum(finding.wrong for finding in findings)
    rows = [{"key": f.key, "state": "wrong" if f.wrong else "known", "says": f.says} for f in findings]
    output.result("check", rows, title=f"{source}: {show_count(wrong, 'problem') if wrong else 'no problems found'}")
    return 2 if wrong else 0


CHECK = Command(_CHECK_EPILOG, _configure_check, _run_check)
