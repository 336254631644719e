"""Privacy over Flower: what a site tells, what it spends over all runs, and what it refuses."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from fpld.cli import main
from fpld.engines.flower.credentials import sign_message
from fpld.engines.flower.site import handlers
from fpld.engines.flower.site.config import Terms, open_site
from fpld.engines.flower.site.ledger import RESERVED, Ledger, Query, check_epsilon, spent_epsilon
from fpld.errors import BudgetError, InputError
from fpld.privacy import DpSteps, epsilon
from fpld.protocol import Task
from fpld.protocol.messages import digest
from tests.audit.test_audit import SMALL
from tests.engines.flower.conftest import Deployment
from tests.engines.flower.test_orders import needed, order
from tests.helpers import make_plan

if TYPE_CHECKING:
    from pathlib import Path

SPENT = DpSteps(8.0, 0.5, 20)
TERMS = Terms(name="north", most_epsilon=2.0)


def question(round: int, spent: DpSteps | None = SPENT, session: str = "ab" * 32, unit: str = "document") -> Query:
    plain = Query.frame(session, Task(make_plan(round=round), "uniform"))
    return Query(plain.kind, session, round, plain.asked, plain.max_bytes, plain.codec, plain.probe, spent, unit)


def test_the_ledger_composes_what_was_spent_over_runs_and_counts_an_answer_once(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    for number, (round, session) in enumerate(((1, "ab" * 32), (2, "ab" * 32), (2, "ab" * 32), (1, "cd" * 32))):
        ledger.record(question(round, session=session), b"answer" + bytes([number if number < 2 else number - 1]))
    read = Ledger(tmp_path).entries
    assert len(read) == 4
    expected = epsilon([SPENT._replace(steps=60)], TERMS.delta)
    assert spent_epsilon(read, TERMS) == pytest.approx(expected)
    assert spent_epsilon(read, Terms(name="north", unit="window")) == math.inf
    damaged = ledger.path.read_text().replace("[8.0, 0.5, 20]", "[8.0, 1.5, 20]")
    ledger.path.write_text(damaged)
    with pytest.raises(InputError, match="line 1 is damaged"):
        Ledger(tmp_path)


def test_a_run_that_would_spend_too_much_is_refused_at_its_first_round(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    one = epsilon([SPENT], 1e-5)
    five = epsilon([SPENT._replace(steps=100)], 1e-5)
    assert one < 2.0 < five
    check_epsilon(ledger.entries, TERMS, question(1), 1)
    with pytest.raises(BudgetError, match=rf"an epsilon of {five:.3g} over all runs.*most_epsilon"):
        check_epsilon(ledger.entries, TERMS, question(1), 5)
    with pytest.raises(BudgetError, match="without differential privacy"):
        check_epsilon(ledger.entries, TERMS, question(1, None), 1)
    with pytest.raises(BudgetError, match="unit of privacy is a window"):
        check_epsilon(ledger.entries, TERMS, question(1, unit="window"), 1)
    for number in range(4):
        ledger.record(question(number + 1), bytes([number]))
    with pytest.raises(BudgetError, match="most_epsilon"):
        check_epsilon(ledger.entries, TERMS, question(1, session="cd" * 32), 1)
    check_epsilon(ledger.entries, TERMS, question(2), 5)  # it was answered before
    other = Ledger(tmp_path / "other")
    other.path.parent.mkdir()
    other.record(question(1, None), b"not private")
    with pytest.raises(BudgetError, match="an epsilon of inf over all runs"):
        check_epsilon(other.entries, TERMS, question(1, session="cd" * 32), 1)


def test_private_training_that_ends_in_an_error_is_in_the_ledger(tmp_path: Path) -> None:
    """A codec that no one knows is missed only after training: what was spent by then stays spent."""
    ngram = 'kind = "ngram"\norder = 2\nbuckets = 256\nbatch = 128'
    section = "\n[privacy]\nepsilon = 4.0\nbatch = 2\n\n[flower]"
    deployment = Deployment(tmp_path, [(ngram, SMALL), ("steps = 25", "steps = 2"), ("\n[flower]", section)])
    site = open_site(deployment.node_files[0])
    body, task, files, key = order(deployment)
    task = replace(task, codec="nonesuch")
    body["task"] = digest(task.to_bytes())
    for failures in (1, 2):
        with pytest.raises(InputError, match="nonesuch"):
            handlers.handle_train(site, sign_message(key, body), task, needed(body, files))
        entries = Ledger(site.folder).entries
        assert [entry["kind"] for entry in entries] == ["training"] * failures
        spent = [DpSteps(*entry["spent"]) for entry in entries]
        assert spent_epsilon(entries, site.terms) == pytest.approx(epsilon(spent, site.terms.delta)) != 0.0
    assert not list((site.folder / RESERVED).iterdir())


@pytest.mark.slow
def test_sites_train_privately_tell_no_losses_and_keep_their_own_limits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ngram = 'kind = "ngram"\norder = 2\nbuckets = 256\nbatch = 128'
    changes = [(ngram, SMALL), ("rounds = 3", "rounds = 2\nquorum = 2"), ("steps = 25", "steps = 4")]
    section = "\n[privacy]\nepsilon = 4.0\nbatch = 2\n\n[flower]"
    deployment = Deployment(tmp_path, [*changes, ("\n[flower]", section)])
    strict = deployment.node_files[1]
    strict.write_text(strict.read_text() + "\nmost_epsilon = 1.0\n")
    deployment.serve(deployment.grid())
    trace = deployment.trace()
    assert [line["nodes"] for line in trace] == [["north", "south"]] * 2
    assert all(line["heldout_by_node"] == [None] * 3 and line["heldout_loss"] is None for line in trace)
    assert "(most_epsilon)" in (strict.parent / "log.txt").read_text()
    free = deployment.node_files[0].parent
    entries = [json.loads(line) for line in (free / "ledger.jsonl").read_text().splitlines()]
    assert [(entry["kind"], entry["unit"]) for entry in entries] == [
        ("training", "document"),
        ("frame", "document"),
    ] * 2
    spent = [DpSteps(*entry["spent"]) for entry in entries if entry["kind"] == "training"]
    assert {each.steps for each in spent} == {4}
    assert epsilon(spent, 1e-5) <= 4.0
    assert f"epsilon {epsilon(spent, 1e-5):.3g}" in (free / "log.txt").read_text()
    assert main(["check", str(strict)]) == 0
    assert "an epsilon of 0 of 1 is spent" in " ".join(capsys.readouterr().out.split())
