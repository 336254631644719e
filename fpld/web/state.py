"""The data of the live page, read from the folder at each request; unchanged files are not read again."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from fpld.budget.limits import Sender
from fpld.errors import FpldError, InputError
from fpld.federation.record import describe_absences
from fpld.planner.forecast import MEGABYTE, forecast
from fpld.planner.inputs import PlanInputs, read_plan_source
from fpld.planner.render import plan_section
from fpld.report.page import run_section, template_environment
from fpld.report.run import find_runs, fingerprint, last_modified, read_run_data

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from fpld.report.run import RunData

EXAMPLE = PlanInputs(
    tuple(
        Sender(name, rate, clip=clip)
        for name, rate, clip in (("city", 2e6, 4.0), ("town", 1e6, 4.0), ("valley", 384e3, 8.0), ("island", 256e3, 8.0))
    ),
    contexts=16384,
    vocab=1024,
    deadline=180.0,
    rounds=3,
)
"""What the planner shows where there is no run to plan from."""


class _CachedRun(NamedTuple):
    """A run as it was read at a stamp, or the message of the error."""

    stamp: str
    data: RunData | None
    error: str = ""


@dataclass
class RunIndex:
    """The runs of a folder. A run is looked up by its name among those listed: no name becomes a path."""

    folder: Path
    _cache: dict[str, _CachedRun] = field(default_factory=dict)

    def runs(self) -> list[dict[str, Any]]:
        """List the runs, the one that changed last first."""
        rows = [self._row(name, path) for name, path in find_runs(self.folder).items()]
        return sorted(rows, key=lambda row: -row["changed"])

    def run(self, name: str) -> dict[str, Any]:
        """Return a run as parts of a page, and a stamp that changes when it does."""
        cached = self._read(name, self._path(name))
        run = cached.data
        if run is None:
            return {"stamp": cached.stamp, "live": "", "body": _message(name, cached.error)}
        live = (
            template_environment()
            .get_template("live.html.j2")
            .render(run=run, progress=run.progress, absences=describe_absences(run.trace))
        )
        return {"stamp": cached.stamp, "live": live, "body": run_section(run, "run")}

    def stamp(self, name: str) -> str:
        """Return the stamp of a run."""
        return fingerprint(self._path(name))

    def planner(self, name: str | None) -> dict[str, Any]:
        """Return where the planner's sliders begin: at the limits of a run, or of an example."""
        inputs, total = self._inputs(name)
        deadline = inputs.deadline or 180.0
        return {
            "sites": [
                {"name": site.name, "limit": limit, "unit": "B" if site.rate is None else "bit/s"}
                for site, limit in zip(inputs.sites, _slider_limits(inputs), strict=True)
            ],
            "deadline": deadline,
            "share": 1.0 if total is None else min(total / float(inputs.caps().sum()), 1.0),
        }

    def plan(self, name: str | None, limits: Sequence[float], deadline: float, share: float) -> str:
        """Plan for the sites' limits, a deadline and a share of what all can send; return a part of a page.

        The limit of a site that has a link is the link's rate in bit/s, that of another its bytes in a round.
        """
        try:
            inputs, _ = self._inputs(name)
            if len(limits) != len(inputs.sites):
                raise InputError(f"links must be {len(inputs.sites)} numbers, got {len(limits)}")
            if not 0 <= share <= 1:
                raise InputError(f"total must be a share from 0 to 1 of what the links carry, got {share:g}")
            sites = tuple(_with_limit(inputs, site, limit) for site, limit in zip(inputs.sites, limits, strict=True))
            inputs = replace(inputs, sites=sites, deadline=deadline)
            least = float(inputs.floors().sum())
            most = float(inputs.caps().sum())
            return plan_section("plan", forecast(inputs, None, least + share * (most - least)), "planner")
        except FpldError as error:
            return _message("No such plan", str(error))

    def _inputs(self, name: str | None) -> tuple[PlanInputs, float | None]:
        if name is None:
            return EXAMPLE, None
        source = read_plan_source(str(self._path(name)))
        return source.inputs, source.total

    def _path(self, name: str) -> Path:
        paths = find_runs(self.folder)
        if name not in paths:
            raise InputError(f"no run is called {name!r} here")
        return paths[name]

    def _read(self, name: str, path: Path) -> _CachedRun:
        """Return a run or its error message, from memory if no file changed."""
        stamp = fingerprint(path)
        cached = self._cache.get(name)
        if cached is None or cached.stamp != stamp:
            try:
                cached = _CachedRun(stamp, read_run_data(path, name))
            except (FpldError, OSError, ValueError, RecursionError) as error:
                cached = _CachedRun(stamp, None, str(error))
            self._cache[name] = cached
        return cached

    def _row(self, name: str, path: Path) -> dict[str, Any]:
        run = self._read(name, path).data
        modified = last_modified(path)
        if run is None:
            return {"name": name, "state": "unreadable", "changed": modified}
        state = run.state.name
        if state == "running" and run.progress is not None:
            state = f"round {run.progress.round} of {run.progress.rounds}: {run.progress.phase}"
        loss = run.trace[-1].heldout_loss if run.trace else None
        return {"name": name, "state": state, "changed": modified, "loss": loss}


def _message(title: str, message: str) -> str:
    return template_environment().get_template("message.html.j2").render(name=title, message=message)


def _slider_limits(inputs: PlanInputs) -> list[float]:
    """Return the rate of each site's link, or the bytes of a round where it has none."""
    caps = inputs.caps()
    overhead = inputs.uplinks.overhead
    round_bytes = [MEGABYTE if math.isinf(cap) else cap * inputs.units / 8 + overhead for cap in caps]
    return [size if site.rate is None else site.rate for site, size in zip(inputs.sites, round_bytes, strict=True)]


def _with_limit(inputs: PlanInputs, site: Sender, limit: float) -> Sender:
    """Return a site with the limit that its slider shows: see `_slider_limits`."""
    if site.rate is not None:
        return replace(site, rate=limit, cap=math.inf)
    return replace(site, cap=max(8 * (limit - inputs.uplinks.overhead) / inputs.all_contexts, 1e-9))
