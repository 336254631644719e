"""What nodes say in answers and errors: one node's nonsense is that node's refusal, and never the end of the run."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from flwr.app import Error, Message

from fpld.cli import main
from fpld.engines.flower.answer_schema import Evaluated
from fpld.engines.flower.credentials import SignedMessage, sign_message
from fpld.engines.flower.log import append_log, follow_log, relay_log
from fpld.engines.flower.messages import SIGNED_MESSAGE, add_field, field_names, read_field
from fpld.engines.flower.site.config import open_site
from fpld.errors import ProtocolError
from fpld.federation.record import Incident
from fpld.report.run import read_run_data
from fpld.web.state import RunIndex
from tests.engines.flower.conftest import Deployment, _in_a_run

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["_in_a_run"]

GOOD = {"kind": "evaluated", "round": 2, "loss": 3.5, "tokens": 100, "bytes": 250}
ESCAPES = "\x1b[2J\x1b]0;owned\x07\r\n\x00‮"


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": True},
        {"tokens": "12"},
        {"tokens": 0},
        {"bytes": 2**50},
        {"bytes": 1.5},
        {"loss": 4000.0},
        {"loss": -1.0},
        {"loss": float("nan")},
        {"loss": float("inf")},
        {"loss": True},
        {"loss": "3.5"},
        {"loss": None},
        {"round": 1},
        {"round": True},
        {"kind": "joined"},
        {"more": "x" * 1000},
    ],
)
def test_an_evaluation_is_checked_strictly(change: dict[str, Any]) -> None:
    assert Evaluated.parse(dict(GOOD), round=2).loss == 3.5
    with pytest.raises(ProtocolError, match="its answer") as caught:
        Evaluated.parse({**GOOD, **change}, round=2)
    assert len(str(caught.value)) < 300


def test_a_reason_is_one_short_printable_line() -> None:
    reason = Incident("north", "failed", ESCAPES + "x" * 1_500_000).reason
    assert len(reason) == 256
    assert reason.isprintable()
    assert reason.startswith("[2J ]0;owned x")


def tamper(deployment: Deployment, changes: dict[tuple[str, int], Any]) -> Any:
    """Return what changes a node's evaluations: `changes` by (node, round); a text is an error with that text."""

    def changed(file: Path, reply: Message) -> Message:
        if reply.has_error() or "letter" not in field_names(reply.content):
            return reply
        body = SignedMessage.parse(read_field(reply.content, "letter", SIGNED_MESSAGE)).body
        change = changes.get((file.parent.name, body.get("round", 0)))
        if isinstance(change, str):
            failed = Message(Error(2, change), reply_to=reply)
            failed.metadata.__dict__["_reply_to_message_id"] = reply.metadata.reply_to_message_id
            return failed
        if change is not None:
            session = json.loads((deployment.folder / "flower/session.json").read_text())["session"]
            key = open_site(file).secret(bytes.fromhex(session))
            add_field(reply.content, "letter", sign_message(key, {**body, **change}), SIGNED_MESSAGE)
        return reply

    return changed


@pytest.mark.slow
def test_wrong_evaluations_are_refusals_and_the_result_can_be_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    deployment = Deployment(tmp_path, [("rounds = 3", "rounds = 2")])
    grid = deployment.grid()
    lies: dict[tuple[str, int], Any] = {
        ("east", 1): {"tokens": True},
        ("south", 1): {"loss": 4000.0},
        ("north", 2): ESCAPES + "y" * 1_500_000,
        ("east", 2): {"loss": 1e308},
        ("south", 2): {"round": 1},
    }
    grid.tamper = tamper(deployment, lies)
    rows = deployment.serve(grid)
    first, last = deployment.trace()
    assert {record["node"] for record in first["refused"]} == {"east", "south"}
    assert {record["node"] for record in last["refused"]} == {"north", "east", "south"}
    assert all(record["reason"].startswith("did not evaluate the student: ") for record in last["refused"])
    assert all(len(record["reason"]) <= 256 and record["reason"].isprintable() for record in last["refused"])
    assert first["heldout_loss"] == first["heldout_by_node"][0]
    assert [row["method"] for row in rows] == ["base", "fpld"]
    assert rows[-1]["heldout_loss"] is None  # nobody evaluated the last round
    assert (tmp_path / "flower/log.txt").stat().st_size < 20_000
    assert read_run_data(tmp_path / "flower").finished
    assert main(["report", str(tmp_path / "flower"), "--out", str(tmp_path / "page.html")]) == 0
    capsys.readouterr()
    assert "not evaluated" in RunIndex(tmp_path).run("flower")["body"]


def test_torn_and_foreign_lines_of_a_log_are_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lines = follow_log(tmp_path)
    next(lines)
    append_log(tmp_path, "one" + ESCAPES)
    with (tmp_path / "log.txt").open("ab") as file:
        file.write(b'{"time": 1, "te\n\xff\xfe\n[1]\n{"text": 5}\n' + b"[" * 100_000 + b"\nnull\n")
    append_log(tmp_path, "two")
    with caplog.at_level("INFO"):
        relay_log(lines)
    assert [record.getMessage() for record in caplog.records] == ["one [2J ]0;owned", "two"]
