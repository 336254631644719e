"""`fpld report`: a run, or several side by side, as one self-contained page and as figures."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fpld.cli.arguments import Command
from fpld.errors import InputError
from fpld.progress import report_elapsed
from fpld.report.run import read_run_data
from fpld.report.tables import result_rows, round_rows
from fpld.storage.files import write_shared

if TYPE_CHECKING:
    import argparse

    from fpld.cli.output import Output
    from fpld.report.run import RunData

_EPILOG = """\
Writes report.html, one file that needs no network, and the same figures as PNG and SVG. A run that is still going is
shown as far as it is. Examples:

  fpld report runs/demo
  fpld report runs/demo runs/uniform --out compared
"""


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="folder for page and figures (default: RUN/report, or report for several)",
    )
    parser.add_argument("--no-figures", action="store_true", help="the page only")


def _run(arguments: argparse.Namespace, output: Output) -> int:
    """Read, write, and print where the runs stand."""
    from fpld.report.charts import comparison_charts, run_charts
    from fpld.report.draw import save_charts
    from fpld.report.page import report_page

    runs = read_runs(arguments.runs)
    out = (
        arguments.out
        if arguments.out is not None
        else arguments.runs[0] / "report"
        if len(runs) == 1
        else Path("report")
    )
    write_shared(out / "report.html", report_page(runs))
    if not arguments.no_figures:
        try:
            with output.status(), report_elapsed("drawing figures"):
                if len(runs) > 1:
                    save_charts(comparison_charts(runs), out)
                for i, each in enumerate(runs, 1):
                    save_charts(run_charts(each), out, "" if len(runs) == 1 else f"{i}-")
        except OSError as error:
            raise InputError(f"--out: cannot write to {out}: {error.strerror or error}") from None
    output.result("report", _rows(runs), title="Runs")
    output.note(f"page: {out / 'report.html'}" + ("" if arguments.no_figures else f"; figures: {out}/*.png *.svg"))
    return 0


def read_runs(folders: list[Path]) -> list[RunData]:
    """Read runs under names that differ: the folders' own, or their paths where two are called the same."""
    names = [folder.resolve().name for folder in folders]
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise InputError("each RUN must be given once")
    return [
        read_run_data(folder, name if names.count(name) == 1 else str(folder))
        for folder, name in zip(folders, names, strict=True)
    ]


def _rows(runs: list[RunData]) -> list[dict[str, object]]:
    """Return where each run stands: its results, or its last round while there are none."""
    rows: list[dict[str, object]] = []
    for each in runs:
        last = round_rows(each)[-1:] or [{"heldout_loss": None, "all_bytes": 0}]
        result = {row["method"]: row for row in result_rows([each])}.get("fpld")
        rows.append(
            {
                "run": each.name,
                "state": each.state.name,
                "rounds": len(each.trace),
                "of": each.planned_rounds,
                "heldout_loss": result["heldout_loss"] if result else last[0]["heldout_loss"],
                "uplink_bytes": result["uplink_bytes"] if result else last[0]["all_bytes"],
            }
        )
    return rows


COMMAND = Command(_EPILOG, _configure, _run)
