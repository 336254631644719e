"""What a site's answers have told about each unit of its text, over all runs: epsilon, from its ledger.

An answer of private training is post-processing of steps of DP-SGD, whose noise, sampling rate and number are in the
ledger. The same answer once more spends nothing. An answer of training that was not private has no epsilon at all.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from fpld.errors import BudgetError
from fpld.privacy import Spent, epsilon

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from fpld.engines.flower.home import Terms
    from fpld.engines.flower.ledger import Question

    Entry = Mapping[str, Any]


def spent_so_far(entries: Iterable[Entry], terms: Terms) -> list[Spent] | None:
    """Return what the frames in a ledger have spent; None: more than can be said."""
    frames = {entry["answer"]: entry for entry in entries if entry["kind"] == "frame"}
    if any(entry.get("spent") is None or entry.get("unit") != terms.unit for entry in frames.values()):
        return None
    return [Spent(*entry["spent"]) for entry in frames.values()]


def epsilon_so_far(entries: Iterable[Entry], terms: Terms) -> float:
    """Return the epsilon of all answers so far, for the site's unit and delta."""
    return _epsilon(spent_so_far(entries, terms), [], terms.delta)


def allow_spending(entries: Iterable[Entry], terms: Terms, question: Question, rounds: int) -> None:
    """Refuse a task after which, with all rounds of its run that are left, the site's epsilon would be too large."""
    answered = {(entry["kind"], entry["session"], entry["asked"]) for entry in entries}
    if terms.most_epsilon is None or question.key in answered:
        return  # what was answered before is answered again, with the same bytes
    limit = f"this node's file allows an epsilon of {terms.most_epsilon:g} for each {terms.unit} (most_epsilon)"
    if question.spent is None:
        raise BudgetError(f"the task asks for training without differential privacy, {limit}")
    if question.unit != terms.unit:
        raise BudgetError(f"the task's unit of privacy is a {question.unit}, {limit}")
    left = max(rounds - question.round + 1, 1)
    to_come = question.spent._replace(steps=left * question.spent.steps)
    found = _epsilon(spent_so_far(entries, terms), [to_come], terms.delta)
    if found > terms.most_epsilon:
        raise BudgetError(f"the run would make it an epsilon of {found:.3g} over all runs, {limit}")


def _epsilon(before: list[Spent] | None, to_come: list[Spent], delta: float) -> float:
    return math.inf if before is None else epsilon([*before, *to_come], delta)
