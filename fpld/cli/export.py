"""`fpld export`: a run's student for other programs, or its trace for other tools."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from fpld.errors import InputError
from fpld.report.export import FORMATS, follow_tensorboard
from fpld.report.runs import read_run
from fpld.report.status import run_state

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from fpld.cli.output import Output
    from fpld.report.runs import Run

HELP = "a run's student for transformers, or its trace as CSV, Parquet or TensorBoard files"
EPILOG = """\
huggingface: a folder that AutoModelForCausalLM and AutoTokenizer load without fpld, with a model card.
CSV and Parquet: rounds (one row a round), nodes (one row a node and round) and results (one row a method).
TensorBoard: the same numbers as scalars by round, and the curves of all trainings; with --follow as the run goes.
Private text is never copied. Examples:

  fpld export runs/demo --to huggingface --out student
  fpld export runs/demo
  fpld export runs/demo --to parquet tensorboard --out exported
  fpld export runs/demo --to tensorboard --follow
"""
MODEL, BOARD = "huggingface", "tensorboard"
PAUSE = 3.0  # seconds between two looks at a run that is followed


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a run")
    parser.add_argument(
        "--to",
        nargs="+",
        choices=(MODEL, *FORMATS),
        default=["csv"],
        metavar="FORMAT",
        help=f"{MODEL}, or of {', '.join(FORMATS)} (default: csv)",
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for the files (default: RUN/export)")
    parser.add_argument("--follow", action="store_true", help="with --to tensorboard: go on until the run has ended")
    model = parser.add_argument_group(f"--to {MODEL}")
    model.add_argument("--best", action="store_true", help="the student of the best round, not of the last")
    model.add_argument("--adapter", action="store_true", help="the LoRA adapters alone, not merged into the model")
    model.add_argument("--licence", metavar="ID", help="licence of the weights, for the card (such as apache-2.0)")


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Write, and print what was written."""
    source = read_run(arguments.run)
    out = arguments.out if arguments.out is not None else arguments.run / "export"
    wanted = list(dict.fromkeys(arguments.to))
    if MODEL in wanted and len(wanted) > 1:
        raise InputError(f"--to: {MODEL} fills a folder of its own: export it by itself")
    if arguments.follow and wanted != [BOARD]:
        raise InputError(f"--follow is for --to {BOARD} alone")
    try:
        rows = [
            {"format": name, "file": str(file), "bytes": file.stat().st_size}
            for name in wanted
            for file in _write(name, source, out, arguments)
        ]
    except OSError as error:
        raise InputError(f"--out: cannot write to {out}: {error.strerror or error}") from None
    what = "Student" if MODEL in wanted else "Trace"
    output.result("export", rows, title=f"{what} of {source.name}: {len(source.trace)} rounds")
    return 0


def _write(name: str, source: Run, out: Path, arguments: argparse.Namespace) -> list[Path]:
    if name != MODEL:
        out.mkdir(parents=True, exist_ok=True)
        if arguments.follow:
            return follow_tensorboard(_stages(source, arguments.run), out)
        return FORMATS[name](source, out)
    from fpld.report.model import to_huggingface

    options = {"best": arguments.best, "adapter": arguments.adapter, "licence": arguments.licence}
    return to_huggingface(arguments.run, source, out, **options)


def _stages(source: Run, folder: Path) -> Iterator[Run]:
    """Yield a run every few seconds, and once more after it has ended."""
    alive = True
    yield source
    while alive:
        alive = run_state(folder).alive
        if alive:
            time.sleep(PAUSE)
        yield read_run(folder)
