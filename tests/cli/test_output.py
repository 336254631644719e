"""What a command shows of what is logged: lines, a bar on a terminal, nothing beside JSON."""

from __future__ import annotations

import io
import logging

import pytest
from rich.console import Console
from rich.progress import Progress

from fpld.cli.output import Output
from fpld.console import LogBar
from fpld.engines.pool import Counting, Inline
from fpld.federation.telemetry import LOGGER, RESULT, listen

log = logging.getLogger("fpld.federation.test")


def say() -> None:
    log.debug("a detail")
    log.info("round %d: begins", 1)
    log.info("round %d: held-out loss", 1, extra=RESULT)
    log.warning("a node was turned away")


def test_lines_with_the_time_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with Output(json=False).status():
        say()
    log.info("nobody listens any more")
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert [line.split(" s  ")[1] for line in lines] == [
        "round 1: begins", "round 1: held-out loss", "a node was turned away",
    ]  # fmt: skip
    assert all(line.strip()[0].isdigit() for line in lines)


def test_nothing_beside_json(capsys: pytest.CaptureFixture[str]) -> None:
    with Output(json=True).status():
        say()
    out, err = capsys.readouterr()
    assert out == ""
    assert [line.split(" s  ")[1] for line in err.splitlines()] == ["a node was turned away"]  # warnings alone


def test_on_a_terminal_the_bar_counts_jobs_and_results_stay() -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=100)
    with Progress(console=console, auto_refresh=False) as bar, listen(LogBar(console, bar)):
        say()
        pool = Counting(Inline(), 3)
        for job in range(2):
            pool.submit(str, job)
        (task,) = bar.tasks
        assert (task.completed, task.total) == (2, 3)
        assert task.description == "a node was turned away"  # the last line, and not a count of jobs
        for job in range(2):
            pool.submit(str, job)
        assert task.completed == 3  # a resumed run does less than all, never more
    shown = screen.getvalue()
    assert "held-out loss" in shown
    assert "begins" not in shown
    assert "jobs" not in shown


def test_listening_leaves_the_logger_as_it_was() -> None:
    logger = logging.getLogger(LOGGER)
    before = logger.level, list(logger.handlers)
    with pytest.raises(KeyError), listen(logging.NullHandler()):
        raise KeyError
    assert (logger.level, logger.handlers) == before
