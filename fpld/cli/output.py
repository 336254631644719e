"""What a command prints: one table for a person, or one JSON object for a program; the rows are the same."""

from __future__ import annotations

import json
import logging
import math
import os
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from fpld.console import LogLines, show_log
from fpld.federation.telemetry import listen
from fpld.units import show_duration
from fpld.validation import shortened_list, visible

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from fpld.federation.record import RoundRecord

Row = dict[str, Any]
_PLAIN_WIDTH = 80  # characters, where the output is no terminal and COLUMNS is not set
_MAX_RECORDS = 3  # rows that stand beside each other, as keys and values, if they do not fit below each other


@dataclass(frozen=True, slots=True)
class Output:
    """Print for a person (`json` false) or for a program; progress and notes never mix with JSON."""

    json: bool

    def result(
        self, command: str, rows: Sequence[Row], *, title: str | None = None, shown: Sequence[Row] | None = None
    ) -> None:
        """Print the rows of a command; a person gets `shown` in their place, if it is given."""
        if self.json:
            text = json.dumps({"command": command, "rows": [_finite(row) for row in rows]}, indent=1, allow_nan=False)
            sys.stdout.write(text + "\n")
        else:
            self.table(rows if shown is None else shown, title=title)

    def table(self, rows: Sequence[Row], *, title: str | None = None) -> None:
        """Print rows as a table, for a person only."""
        if self.json or not rows:
            return
        console = _console()
        if title is not None:  # A title is not broken to the width of a narrow table.
            console.print(Text(visible(title), style="bold"), soft_wrap=True)
        parts = _parts(rows, console.width)
        if len(parts) > 1 and len(rows) <= _MAX_RECORDS:
            console.print(_records(rows))
            return
        for columns in parts:
            table = Table()
            for name in columns:
                numbers = all(row[name] is None or isinstance(row[name], (int, float)) for row in rows)
                table.add_column(name, justify="right" if numbers else "left", overflow="fold")
            for row in rows:
                table.add_row(*(Text(_cell(row[name])) for name in columns))
            console.print(table)

    def note(self, text: str) -> None:
        """Print a line, for a person only; it is broken nowhere, so that paths can be copied."""
        if not self.json:
            _console().print(visible(text), markup=False, highlight=False, soft_wrap=True)

    @contextmanager
    def progress(self, what: str, steps: int) -> Iterator[Callable[[], None]]:
        """Show progress on standard error while it is a terminal; return the function that advances it."""
        console = Console(stderr=True)
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
        with Progress(*columns, console=console, transient=True, disable=self.json or not console.is_terminal) as bar:
            task = bar.add_task(what, total=steps)
            yield lambda: bar.advance(task)

    @contextmanager
    def status(self) -> Iterator[None]:
        """Show what is logged: a bar and the last line on a terminal, plain lines with the time elsewhere.

        With --json only warnings, such as of a damaged file that was passed over: nothing is done in silence.
        """
        if self.json:
            with listen(LogLines(Console(stderr=True), logging.WARNING)):
                yield
        else:
            with show_log(progress=True):
                yield


def table_title(trace: Sequence[RoundRecord], folder: Path) -> str:
    """Return the title of a run's table: on whose text its losses are, and who was absent."""
    sites = (trace[-1].heldout_sites if trace else None) or []
    everyone = bool(sites) and len(sites) == len(trace[-1].heldout_by_node)
    whose = "all nodes" if everyone else shortened_list(sites) or "no node"
    return f"Held-out text of {whose}, and what was sent{_without(trace)} ({folder})"


def last_line(trace: Sequence[RoundRecord], folder: Path, seconds: float) -> str:
    """Return the last line of a run: where its results are, how long it took, and who was absent."""
    return f"student, trace and checkpoints: {folder}; {show_duration(seconds)}{_without(trace)}"


def _without(trace: Sequence[RoundRecord]) -> str:
    from fpld.federation.record import describe_absences

    absent = describe_absences(trace)
    return f"; without {absent}" if absent else ""


def _console() -> Console:
    console = Console()
    if console.is_terminal:
        return console
    columns = os.environ.get("COLUMNS", "")
    return Console(width=int(columns) if columns.isdecimal() and int(columns) else _PLAIN_WIDTH)


def _records(rows: Sequence[Row]) -> Table:
    """Return few rows as keys and values: a line for each column, and the rows beside each other."""
    first, *others = rows[0]
    table = Table(first)
    for row in rows:
        table.add_column(Text(_cell(row[first])), justify="left" if len(rows) == 1 else "right", overflow="fold")
    for name in others:
        table.add_row(name, *(Text(_cell(row[name])) for row in rows))
    return table


def _parts(rows: Sequence[Row], width: int) -> list[list[str]]:
    """Cut a table that is too wide into parts that fit, each beginning with the first column."""
    first, *others = rows[0]
    room = {name: max(len(name), *(len(_cell(row[name])) for row in rows)) + 3 for name in rows[0]}
    parts = [[first]]
    for name in others:
        if len(parts[-1]) > 1 and sum(room[each] for each in parts[-1]) + room[name] + 1 > width:
            parts.append([first])
        parts[-1].append(name)
    return parts


def _cell(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None:
        return "–"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4g}" if isinstance(value, float) else visible(value)


def _finite(row: Row) -> Row:
    """Return the value for JSON, which has no infinity: null instead."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
