"""`fpld export`: a run's trace for other tools."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fpld.errors import InputError
from fpld.report.export import FORMATS
from fpld.report.runs import read_run

if TYPE_CHECKING:
    import argparse

    from fpld.cli.output import Output

HELP = "a run's trace as CSV, Parquet or TensorBoard files"
EPILOG = """\
CSV and Parquet: rounds (one row a round), nodes (one row a node and round) and results (one row a method).
TensorBoard: the same numbers as scalars by round. Examples:

  fpld export runs/demo
  fpld export runs/demo --to parquet tensorboard --out exported
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a run")
    parser.add_argument(
        "--to",
        nargs="+",
        choices=FORMATS,
        default=["csv"],
        metavar="FORMAT",
        help=f"of {', '.join(FORMATS)} (default: csv)",
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for the files (default: RUN/export)")


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Write, and print what was written."""
    source = read_run(arguments.run)
    out = arguments.out if arguments.out is not None else arguments.run / "export"
    rows = []
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name in dict.fromkeys(arguments.to):
            rows += [
                {"format": name, "file": str(file), "bytes": file.stat().st_size}
                for file in FORMATS[name](source, out)
            ]  # fmt: skip
    except OSError as error:
        raise InputError(f"--out: cannot write to {out}: {error.strerror or error}") from None
    output.result("export", rows, title=f"Trace of {source.name}: {len(source.trace)} rounds")
    return 0
