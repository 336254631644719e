"""Show on standard error what is logged: a bar on a terminal or in a notebook, lines with the time elsewhere."""

from __future__ import annotations

import logging
import time
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from fpld.federation.telemetry import listen
from fpld.validation import visible

if TYPE_CHECKING:
    from collections.abc import Iterator

_NOTEBOOK_WIDTH = 110  # characters


class LogLines(logging.Handler):
    """Print each line that is logged, with the time since the start."""

    def __init__(self, console: Console, level: int = logging.INFO) -> None:
        super().__init__(level)
        self._console = console
        self._started = time.monotonic()

    def emit(self, record: logging.LogRecord) -> None:
        """Print a line."""
        line = f"{time.monotonic() - self._started:6.1f} s  {visible(record.getMessage())}"
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


class LogBar(LogLines):
    """Show the last line beside a bar that counts jobs; only results and warnings stay on the screen."""

    def __init__(self, console: Console, bar: Progress) -> None:
        super().__init__(console, logging.DEBUG)
        self._bar = bar
        self._task = bar.add_task("starting", total=None, state="")

    def emit(self, record: logging.LogRecord) -> None:
        """Move the bar, or show a line."""
        fields = vars(record)
        if "done" in fields:
            state = visible(fields.get("state", ""))
            self._bar.update(self._task, completed=fields["done"], total=fields["total"], state=state)
        if record.levelno >= logging.INFO:
            self._bar.update(self._task, description=visible(record.getMessage()))
            if "result" in fields or record.levelno >= logging.WARNING:
                super().emit(record)


@contextmanager
def show_log(progress: bool | None = None) -> Iterator[None]:
    """Show what is logged below `fpld` while the context lasts.

    Parameters
    ----------
    progress
        True: a bar where lines can be overwritten (a terminal, a notebook), else lines. False: nothing. None: a bar
        where lines can be overwritten, else nothing.
    """
    console = Console(stderr=True)
    notebook = console.is_jupyter
    if notebook:
        # A notebook lets a carriage return overwrite a line, as a terminal does: a bar of one line needs no widgets.
        # It knows no moves to the line above, so the bar stays when it has ended.
        console = Console(stderr=True, force_jupyter=False, force_terminal=True, width=_NOTEBOOK_WIDTH)
    with ExitStack() as stack:
        if console.is_terminal and progress is not False:
            columns = (
                BarColumn(20),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.fields[state]}", markup=False),
                TextColumn("{task.description}", markup=False),
            )
            bar = stack.enter_context(Progress(*columns, console=console, transient=not notebook))
            stack.enter_context(listen(LogBar(console, bar)))
        elif progress:
            stack.enter_context(listen(LogLines(console)))
        yield
