"""What a site keeps to itself and what it allows: errors without details, a ledger with limits, its own app."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from flwr.app import Context, Message, RecordDict

from fpld.engines.flower.exchange import exchange
from fpld.engines.flower.home import Terms, open_home
from fpld.engines.flower.ledger import Ledger
from fpld.engines.flower.mods import SiteError, discreet
from fpld.engines.flower.payload import FRAME, pack
from fpld.engines.flower.pinned import pinned_environment
from fpld.errors import BudgetError, InputError
from fpld.protocol import Task
from tests.flower.conftest import Deployment, _in_a_run
from tests.helpers import make_plan

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

__all__ = ["_in_a_run"]

SESSION = "ab" * 32


def task(round: int = 1, bits: float = 100.0, codec: str = "uniform") -> Task:
    return Task(make_plan(round=round, bits=bits), codec)


def test_the_ledger_counts_what_left_and_keeps_the_limits(tmp_path: Path) -> None:
    terms = Terms(name="north", most_bytes=200, most_total_bytes=400, most_rounds=4, codecs=["uniform"])
    ledger = Ledger(tmp_path)
    for round in (1, 2, 3):
        ledger.allow(terms, SESSION, task(round))
        ledger.enter(SESSION, task(round), 110)
    again = Ledger(tmp_path)
    assert [entry["bytes"] for entry in again.entries] == [110] * 3
    assert {entry["codec"] for entry in again.entries} == {"uniform"}
    assert {entry["probe"] for entry in again.entries} == {bytes(range(32)).hex()}
    again.allow(terms, SESSION, task(2))  # the same frame once more
    again.enter(SESSION, task(2), 110)
    assert sum(entry["bytes"] for entry in Ledger(tmp_path).entries) == 330
    for changes, given, message in (
        ({}, task(4), "most_total_bytes"),
        ({"most_total_bytes": None}, task(4, bits=300.0), "most_bytes"),
        ({"most_total_bytes": None, "most_rounds": 3}, task(4), "most_rounds"),
        ({"most_total_bytes": None}, task(4, codec="float32"), "codec is float32"),
    ):
        with pytest.raises(BudgetError, match=message):
            again.allow(terms.model_copy(update=changes), "cd" * 32, given)


def test_a_torn_last_line_of_the_ledger_is_cut_and_a_damaged_one_stops_the_site(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    ledger.enter(SESSION, task(1), 10)
    whole = ledger.path.read_bytes()
    ledger.path.write_bytes(whole + whole[:30])
    assert len(Ledger(tmp_path).entries) == 1
    assert ledger.path.read_bytes() == whole
    ledger.path.write_bytes(b"{}\n" + whole)
    with pytest.raises(InputError, match=r"ledger\.jsonl, line 1 is damaged"):
        Ledger(tmp_path)


def test_a_site_refuses_what_its_ledger_does_not_allow_and_logs_it(tmp_path: Path) -> None:
    deployment = Deployment(tmp_path, [("rounds = 3", "rounds = 2\nquorum = 2")])
    file = deployment.node_files[1]
    file.write_text(file.read_text() + "\nmost_rounds = 1\n")
    deployment.serve(deployment.grid())
    first, second = deployment.trace()
    assert first["absent"] == []
    sentence = "limit: the request goes beyond what this site allows"
    assert second["absent"] == [{"node": "east", "state": "failed", "reason": sentence}]
    assert "(most_rounds)" in (file.parent / "log.txt").read_text()
    lines = (file.parent / "ledger.jsonl").read_text().splitlines()
    assert [json.loads(line)["round"] for line in lines] == [1]
    # The ledger is the site's, not the run's: the next run finds it.
    deployment.serve(deployment.grid(), "another")
    assert deployment.trace("another")[0]["absent"][0]["node"] == "east"
    assert open_home(file).terms.most_rounds == 1


def test_no_detail_of_an_error_leaves_a_site(tmp_path: Path) -> None:
    context = Context(1, 1, {"node": str(tmp_path / "node.toml")}, RecordDict(), {})
    message = Message(pack(frame=(b"x", FRAME)), 1, "train")

    def fail(*_arguments: Any) -> Message:
        raise KeyError("patients.csv: field 'diagnosis' of /srv/private/ward-3")

    with pytest.raises(SiteError) as caught:
        discreet(message, context, fail)
    assert str(caught.value) == "program: the site's program failed"
    assert caught.value.__cause__ is None
    assert "ward-3" in (tmp_path / "log.txt").read_text()


def test_the_nodes_app_is_the_installed_one_whatever_is_served(tmp_path: Path) -> None:
    """As Flower's process at a site loads an app, in an app folder whose code would leave a trace."""
    (tmp_path / "evil.py").write_text("open('ran', 'w')\nfrom flwr.clientapp import ClientApp\napp = ClientApp()\n")
    code = (
        "from flwr.supernode.runtime import run_clientapp as run\n"
        "app = run.get_load_client_app_fn('evil:app', '.', True)('evil/app', '1.0', 'ab')\n"
        "print(app._mods[0].__name__)\n"
    )
    environment = {**os.environ, **pinned_environment(tmp_path / "pinned")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.stdout == "discreet\n", done.stderr
    assert not (tmp_path / "ran").exists()
    broken = {**environment, "PYTHONPATH": str(tmp_path / "pinned"), "FPLD_NOTHING": ""}
    (tmp_path / "pinned/fpld.py").write_text("raise ImportError('not here')")
    done = subprocess.run([sys.executable, "-c", "print('on')"], capture_output=True, text=True, env=broken)
    assert (done.returncode, done.stdout) == (70, "")


class SlowGrid:
    """A Grid on which one reply never ends."""

    def push_messages(self, messages: Iterable[Any]) -> list[str]:
        return [str(number) for number, _ in enumerate(messages)]

    def pull_messages(self, identities: Iterable[str]) -> list[str]:
        (identity,) = identities
        if identity == "1":
            threading.Event().wait(30)
        return [f"reply {identity}"]


def test_a_reply_that_comes_slowly_holds_up_no_other_and_not_the_deadline() -> None:
    begun = time.monotonic()
    found: Any = list(exchange(SlowGrid(), [None] * 4, 1.5))  # type: ignore[arg-type, list-item]
    assert sorted(found) == ["reply 0", "reply 2", "reply 3"]
    assert 1.4 < time.monotonic() - begun < 10
