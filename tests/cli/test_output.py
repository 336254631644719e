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
    log.warning("a node was refused")


def test_lines_with_the_time_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with Output(json=False).status():
        say()
    log.info("nobody listens any more")
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert [line.split(" s  ")[1] for line in lines] == [
        "round 1: begins", "round 1: held-out loss", "a node was refused",
    ]  # fmt: skip
    assert all(line.strip()[0].isdigit() for line in lines)


def test_nothing_beside_json(capsys: pytest.CaptureFixture[str]) -> None:
    with Output(json=True).status():
        say()
    out, err = capsys.readouterr()
    assert out == ""
    assert [line.split(" s  ")[1] for line in err.splitlines()] == ["a node was refused"]  # warnings alone


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
        assert task.description == "a node was refused"  # the last line, and not a count of jobs
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


WIDE = {"node": "north", **{f"column_{i}": 1000 * i for i in range(9)}}


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_a_table_fits_eighty_columns(
    count: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    title = "a title that is longer than the table is wide: " + "/folder" * 10
    Output(json=False).result("check", [WIDE | {"node": f"node-{i}"} for i in range(count)], title=title)
    first, *lines = capsys.readouterr().out.splitlines()
    assert first == title
    assert max(map(len, lines)) <= 80
    shown = "\n".join(lines)
    assert all(name in shown for name in WIDE)
    # Few rows are keys and values, a line for each column; more are a table in parts.
    beside = [line for line in lines if "column_8" in line and "8,000" in line]
    assert [line.count("8,000") for line in beside] == ([count] if count <= 3 else [])
    monkeypatch.setenv("COLUMNS", "200")
    Output(json=False).result("check", [WIDE])
    assert sum("column_" in line for line in capsys.readouterr().out.splitlines()) == 1


def test_a_note_is_broken_nowhere(capsys: pytest.CaptureFixture[str]) -> None:
    path = "/folder" * 30
    Output(json=False).note(f"page: {path}")
    assert capsys.readouterr().out == f"page: {path}\n"


def test_a_person_sees_other_values_than_json(capsys: pytest.CaptureFixture[str]) -> None:
    for json in (False, True):
        Output(json=json).result("check", [{"seen": 12.5}], shown=[{"seen": "2026-01-01 10:00 UTC"}])
        out = capsys.readouterr().out
        assert ("12.5" in out, "10:00" in out) == (json, not json)
