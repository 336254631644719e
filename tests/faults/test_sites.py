"""What a site keeps to itself and what it allows: errors without details, a ledger with limits, its own app."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Barrier
from typing import TYPE_CHECKING, Any

import pytest
from flwr.app import Context, Message, RecordDict

from fpld.engines.flower.client import redact_errors
from fpld.engines.flower.messages import FRAME, pack_fields
from fpld.engines.flower.patches.bootstrap import supernode_environment
from fpld.engines.flower.site.config import Terms, open_site
from fpld.engines.flower.site.disclosure import SiteError
from fpld.engines.flower.site.ledger import MAX_LOSS_MESSAGE_BYTES, RESERVED, Ledger, Query, spent_epsilon
from fpld.errors import BudgetError, InputError
from fpld.privacy import DpSteps, epsilon
from fpld.protocol import Task
from tests.engines.flower.conftest import Deployment, _in_a_run
from tests.helpers import make_plan

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["_in_a_run"]

SESSION = "ab" * 32


def frame(round: int = 1, bits: float = 100.0, codec: str = "uniform", session: str = SESSION) -> Query:
    return Query.frame(session, Task(make_plan(round=round, bits=bits), codec))


def test_the_ledger_counts_what_left_and_keeps_the_limits(tmp_path: Path) -> None:
    terms = Terms(name="north", most_bytes=336, most_total_bytes=536, most_rounds=4, codecs=["uniform"])
    ledger = Ledger(tmp_path)
    for round in (1, 2, 3):
        ledger.check_limits(terms, frame(round))
        ledger.record(frame(round), bytes([round]) * 110)
    again = Ledger(tmp_path)
    assert [entry["bytes"] for entry in again.entries] == [110] * 3
    assert {entry["codec"] for entry in again.entries} == {"uniform"}
    assert {entry["probe"] for entry in again.entries} == {bytes(range(32)).hex()}
    again.check_limits(terms, frame(2))  # the same task once more, and the same frame
    again.record(frame(2), bytes([2]) * 110)
    assert sum(entry["bytes"] for entry in Ledger(tmp_path).entries) == 330
    for changes, given, message in (
        ({}, frame(4), "most_total_bytes"),
        ({}, frame(2, bits=101.0), "most_total_bytes"),  # another task in a round that was answered
        ({"most_total_bytes": None}, frame(4, bits=300.0), "most_bytes"),
        ({"most_total_bytes": None, "most_rounds": 3}, frame(4), "most_rounds"),
        ({"most_total_bytes": None, "most_rounds": 3}, frame(1, session="cd" * 32), "most_rounds"),
        ({"most_total_bytes": None}, frame(4, codec="float32"), "codec is float32"),
    ):
        with pytest.raises(BudgetError, match=message):
            again.check_limits(terms.model_copy(update=changes), given)


def test_evaluations_and_probe_sets_are_in_the_ledger_and_have_limits(tmp_path: Path) -> None:
    terms = Terms(name="north", most_evaluations=2, most_probe_sets=2)
    ledger = Ledger(tmp_path)
    for number, student in enumerate(("aa", "bb", "aa")):
        question = Query.loss(SESSION, 1, student)
        ledger.check_limits(terms, question)
        ledger.record(question, b"the loss of " + student.encode())
        assert [entry["kind"] for entry in Ledger(tmp_path).entries] == ["loss"] * (number + 1)
    assert [entry["bytes"] for entry in ledger.entries] == [14, 14, 0]
    with pytest.raises(BudgetError, match=r"make it 4, this node's file allows 2 \(most_evaluations\)"):
        ledger.check_limits(terms, Query.loss(SESSION, 1, "cc"))  # another student in the same round
    with pytest.raises(BudgetError, match="most_total_bytes"):
        ledger.check_limits(
            Terms(name="north", most_total_bytes=MAX_LOSS_MESSAGE_BYTES + 27), Query.loss(SESSION, 1, "cc")
        )
    for number in range(3):
        given = Query.frame(SESSION, Task(make_plan(probe=bytes([number]) * 32), "uniform"))
        if number < 2:
            ledger.check_limits(terms, given)
            ledger.record(given, bytes([number]))
    with pytest.raises(BudgetError, match="most_probe_sets"):
        ledger.check_limits(terms, given)


@pytest.mark.parametrize(
    ("limits", "allowed"),
    [({"most_rounds": 2}, 2), ({"most_total_bytes": 2 * frame().max_bytes}, 2), ({"most_epsilon": 2.0}, 1)],
)
def test_limits_hold_for_queries_side_by_side(limits: dict[str, Any], allowed: int, tmp_path: Path) -> None:
    """All ask at the same moment, and none answers before all were let in or refused."""
    terms = Terms(name="north", **limits)
    together = Barrier(4)

    def answer(round: int) -> bool:
        ledger = Ledger(tmp_path)
        query = replace(frame(round), spent=DpSteps(8.0, 0.5, 60), unit="document")
        together.wait()
        try:
            with ledger.reserve(terms, query) as reservation:
                reservation.begin_training()
                together.wait()
                ledger.record(query, bytes([round]) * query.max_bytes)
        except BudgetError:
            together.wait()
            return False
        return True

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(answer, range(1, 5))) == allowed
    entries = Ledger(tmp_path).entries
    assert [entry["kind"] for entry in entries].count("frame") == allowed
    assert spent_epsilon(entries, terms) == pytest.approx(epsilon([DpSteps(8.0, 0.5, 60 * allowed)], terms.delta))
    assert not list((tmp_path / RESERVED).iterdir())


def test_private_training_that_was_killed_is_spent(tmp_path: Path) -> None:
    """Whatever it had found: by SIGKILL, so nothing of the process runs after."""
    terms = Terms(name="north", most_epsilon=2.0)
    query = replace(frame(), spent=DpSteps(8.0, 0.5, 60), unit="document")
    reader, writer = os.pipe()
    process = os.fork()
    if process == 0:
        with Ledger(tmp_path).reserve(terms, query) as reservation:
            reservation.begin_training()
            os.write(writer, b"!")
            time.sleep(60)
        os._exit(1)
    os.read(reader, 1)
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    entries = Ledger(tmp_path).entries
    assert [entry["kind"] for entry in entries] == ["training"]
    assert spent_epsilon(entries, terms) == pytest.approx(epsilon([DpSteps(8.0, 0.5, 60)], terms.delta))
    again = replace(query, round=2)
    with pytest.raises(BudgetError, match="most_epsilon"), Ledger(tmp_path).reserve(terms, again):
        pass


def test_what_a_killed_process_had_reserved_is_free_again(tmp_path: Path) -> None:
    terms = Terms(name="north", most_rounds=1)
    reader, writer = os.pipe()
    process = os.fork()
    if process == 0:
        with Ledger(tmp_path).reserve(terms, frame(1)):
            os.write(writer, b"!")
            time.sleep(60)
        os._exit(1)
    os.read(reader, 1)
    with pytest.raises(BudgetError, match="most_rounds"), Ledger(tmp_path).reserve(terms, frame(2)):
        pass
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    with Ledger(tmp_path).reserve(terms, frame(2)):
        assert len(list((tmp_path / RESERVED).glob("*.json"))) == 1


def test_a_torn_last_line_of_the_ledger_is_cut_and_a_damaged_one_stops_the_site(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    ledger.record(frame(1), bytes(10))
    whole = ledger.path.read_bytes()
    ledger.path.write_bytes(whole + whole[:30])
    assert len(Ledger(tmp_path).entries) == 1
    ledger.record(frame(2), bytes(20))
    assert ledger.path.read_bytes().startswith(whole + b'{"time"')
    assert len(Ledger(tmp_path).entries) == 2
    ledger.path.write_bytes(whole)
    for damaged in (b"{}", whole.replace(b"frame", b"other"), whole.replace(b'"bytes": 10', b'"bytes": true')):
        ledger.path.write_bytes(damaged.strip() + b"\n" + whole)
        with pytest.raises(InputError, match=r"ledger\.jsonl, line 1 is damaged"):
            Ledger(tmp_path)


@pytest.mark.slow
def test_a_site_refuses_what_its_ledger_does_not_allow_and_logs_it(tmp_path: Path) -> None:
    deployment = Deployment(tmp_path, [("rounds = 3", "rounds = 2\nquorum = 2")])
    file = deployment.node_files[1]
    file.write_text(file.read_text() + "\nmost_rounds = 1\n")
    deployment.serve(deployment.grid())
    first, second = deployment.trace()
    assert first["absent"] == []
    sentence = "limit: the request goes beyond what this node allows"
    assert second["absent"] == [{"node": "east", "state": "failed", "reason": sentence}]
    assert "(most_rounds)" in (file.parent / "log.txt").read_text()
    entries = [json.loads(line) for line in (file.parent / "ledger.jsonl").read_text().splitlines()]
    # The loss of the first student would have come with the second frame; the last student has a message of its own.
    assert [(entry["kind"], entry["round"]) for entry in entries] == [("frame", 1), ("loss", 0), ("loss", 2)]
    assert all(0 < entry["bytes"] <= MAX_LOSS_MESSAGE_BYTES for entry in entries if entry["kind"] == "loss")
    # The ledger is the site's, not the run's: the next run finds it.
    deployment.serve(deployment.grid(), "another")
    assert deployment.trace("another")[0]["absent"][0]["node"] == "east"
    assert open_site(file).terms.most_rounds == 1


def test_no_detail_of_an_error_leaves_a_site(tmp_path: Path) -> None:
    context = Context(1, 1, {"node": str(tmp_path / "node.toml")}, RecordDict(), {})
    message = Message(pack_fields(frame=(b"x", FRAME)), 1, "train")

    def fail(*_arguments: Any) -> Message:
        raise KeyError("patients.csv: field 'diagnosis' of /srv/private/ward-3")

    with pytest.raises(SiteError) as caught:
        redact_errors(message, context, fail)
    assert str(caught.value) == "program: the node's program failed"
    assert caught.value.__cause__ is None
    assert "ward-3" in (tmp_path / "log.txt").read_text()


@pytest.mark.slow
def test_the_nodes_app_is_the_installed_one_whatever_is_served(tmp_path: Path) -> None:
    """As Flower's process at a site loads an app, in an app folder whose code would leave a trace."""
    (tmp_path / "evil.py").write_text("open('ran', 'w')\nfrom flwr.clientapp import ClientApp\napp = ClientApp()\n")
    code = (
        "from flwr.supernode.runtime import run_clientapp as run\n"
        "app = run.get_load_client_app_fn('evil:app', '.', True)('evil/app', '1.0', 'ab')\n"
        "print(app._mods[0].__name__)\n"
    )
    environment = {**os.environ, **supernode_environment(tmp_path / "pinned")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.stdout == "redact_errors\n", done.stderr
    assert not (tmp_path / "ran").exists()
    broken = {**environment, "PYTHONPATH": str(tmp_path / "pinned"), "FPLD_NOTHING": ""}
    (tmp_path / "pinned/fpld.py").write_text("raise ImportError('not here')")
    done = subprocess.run([sys.executable, "-c", "print('on')"], capture_output=True, text=True, env=broken)
    assert (done.returncode, done.stdout) == (70, "")


@pytest.mark.slow
def test_a_site_tells_only_so_many_losses(tmp_path: Path) -> None:
    """A student of an aggregator's choice is a question about the text: its loss is an answer, and counted."""
    deployment = Deployment(tmp_path, [("rounds = 3", "rounds = 2\nquorum = 2")])
    file = deployment.node_files[1]
    file.write_text(file.read_text() + "\nmost_evaluations = 2\n")  # the base model, and the first student
    deployment.serve(deployment.grid())
    first, second = deployment.trace()
    assert first["refused"] == []
    ((node, reason),) = [(record["node"], record["reason"]) for record in second["refused"]]
    assert (node, reason) == (
        "east",
        "did not evaluate the student: limit: the request goes beyond what this node allows",
    )
    assert second["nodes"] == ["north", "east", "south"]
    assert "(most_evaluations)" in (file.parent / "log.txt").read_text()
