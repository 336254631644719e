"""Baselines: methods that a federation is compared with, each with the cost of doing it.

A baseline returns rows of the results table from a `fpld.baselines.context.BaselineContext`. A local run does its
baselines beside the federation, in the same pool of workers. Before it begins, it adds up the jobs that they submit
(for the progress bar) and the work that they take (for `fpld check`). So each `Baseline` states both for a
configuration. A baseline from outside may be a plain function: its cost then counts as 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fpld import registry
from fpld.federation.cost import Work

if TYPE_CHECKING:
    from collections.abc import Callable

    from fpld.baselines.context import BaselineContext
    from fpld.config import Config
    from fpld.federation.evaluation import Row


@dataclass(frozen=True, slots=True)
class Baseline:
    """A method that the student is compared with, and what it costs.

    Parameters
    ----------
    run
        Return the rows of the results table.
    jobs
        Count the jobs that it submits: a training and an evaluation are one each.
    work
        Count its steps, and the contexts that models predict, write and label for it.
    """

    run: Callable[[BaselineContext], list[Row]]
    jobs: Callable[[Config], int]
    work: Callable[[Config], Work]

    def __call__(self, context: BaselineContext) -> list[Row]:
        """Return the rows of the results table."""
        return self.run(context)


def baseline_jobs(config: Config) -> int:
    """Count the jobs of all baselines of a run."""
    return sum(baseline.jobs(config) for baseline in _costed(config))


def baseline_work(config: Config) -> Work:
    """Count the work of all baselines of a run, each as if it were the only one."""
    return sum((baseline.work(config) for baseline in _costed(config)), Work())


def _costed(config: Config) -> list[Baseline]:
    methods = (registry.baselines.get(name) for name in config.baselines.methods)
    return [method for method in methods if isinstance(method, Baseline)]
