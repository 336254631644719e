"""The data of the live page, read from the folder at each request; unchanged files are not read again."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from fpld.errors import FpldError, InputError
from fpld.planner import Known, Sender, forecast
from fpld.planner.forecast import MEGABYTE
from fpld.planner.page import plan_section
from fpld.planner.sources import read
from fpld.report.page import environment, run_section
from fpld.report.runs import find_runs, read_run
from fpld.report.status import run_state

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from fpld.report.runs import Run

_FILES = (
    "config.toml",
    "trace.jsonl",
    "fpld/trace.jsonl",
    "fpld/progress.json",
    "result.json",
    "versions.json",
    "status.json",
    "now.json",
)
EXAMPLE = Known(
    tuple(
        Sender(name, rate, clip=clip)
        for name, rate, clip in (("city", 2e6, 4.0), ("town", 1e6, 4.0), ("valley", 384e3, 8.0), ("island", 256e3, 8.0))
    ),
    contexts=16384,
    vocab=1024,
    deadline=180.0,
    rounds=3,
)
"""What the planner shows before there is a run to plan from."""


@dataclass
class Runs:
    """The runs of a folder. A run is looked up by its name among those listed: no name becomes a path."""

    folder: Path
    _seen: dict[str, tuple[str, Run | str]] = field(default_factory=dict)

    def runs(self) -> list[dict[str, Any]]:
        """List the runs, the one that changed last first."""
        rows = [self._row(name, path) for name, path in find_runs(self.folder).items()]
        return sorted(rows, key=lambda row: -row["changed"])

    def run(self, name: str) -> dict[str, Any]:
        """Return a run as parts of a page, and a stamp that changes when it does."""
        path = self._path(name)
        stamp, found = self._read(name, path)
        if isinstance(found, str):
            message = environment().get_template("message.html.j2").render(name=name, message=found)
            return {"stamp": stamp, "live": "", "body": message}
        live = environment().get_template("live.html.j2").render(run=found, progress=found.progress)
        return {"stamp": stamp, "live": live, "body": run_section(found, "run")}

    def stamp(self, name: str) -> str:
        """Return the stamp of a run."""
        return _stamp(self._path(name))

    def planner(self, name: str | None) -> dict[str, Any]:
        """Return where the planner's sliders begin: what a run knows, or an example."""
        known, total = self._known(name)
        deadline = known.deadline or 180.0
        return {
            "sites": [
                {"name": site.name, "limit": limit, "unit": "B" if site.rate is None else "bit/s"}
                for site, limit in zip(known.sites, _slider_limits(known), strict=True)
            ],
            "deadline": deadline,
            "share": 1.0 if total is None else min(total / float(known.caps().sum()), 1.0),
        }

    def plan(self, name: str | None, limits: Sequence[float], deadline: float, share: float) -> str:
        """Plan for the sites' limits, a deadline and a share of what all can send; return a part of a page.

        The limit of a site that has a link is the link's rate in bit/s, that of another its bytes in a round.
        """
        try:
            known, _ = self._known(name)
            if len(limits) != len(known.sites):
                raise InputError(f"links must be {len(known.sites)} numbers, got {len(limits)}")
            if not 0 <= share <= 1:
                raise InputError(f"total must be a share from 0 to 1 of what the links carry, got {share:g}")
            sites = tuple(_limited(known, site, limit) for site, limit in zip(known.sites, limits, strict=True))
            known = replace(known, sites=sites, deadline=deadline)
            least, most = float(known.floors().sum()), float(known.caps().sum())
            return plan_section("plan", forecast(known, None, least + share * (most - least)), "planner")
        except FpldError as error:
            return environment().get_template("message.html.j2").render(name="No such plan", message=str(error))

    def _known(self, name: str | None) -> tuple[Known, float | None]:
        if name is None:
            return EXAMPLE, None
        source = read(str(self._path(name)))
        return source.known, source.total

    def _path(self, name: str) -> Path:
        found = find_runs(self.folder)
        if name not in found:
            raise InputError(f"no run is called {name!r} here")
        return found[name]

    def _read(self, name: str, path: Path) -> tuple[str, Run | str]:
        """Return a run or its error message, from memory if no file changed."""
        stamp = _stamp(path)
        if name not in self._seen or self._seen[name][0] != stamp:
            try:
                found: Run | str = read_run(path, name)
            except (FpldError, OSError, ValueError, RecursionError) as error:
                found = str(error)
            self._seen[name] = stamp, found
        return self._seen[name]

    def _row(self, name: str, path: Path) -> dict[str, Any]:
        _, run = self._read(name, path)
        changed = max((_time(path / file) for file in _FILES), default=0.0)
        if isinstance(run, str):
            return {"name": name, "state": "unreadable", "changed": changed}
        if run.state.name != "running" or run.progress is None:
            state = run.state.name
        else:
            state = f"round {run.progress.round} of {run.progress.rounds}: {run.progress.phase}"
        loss = run.trace[-1].heldout_loss if run.trace else None
        return {"name": name, "state": state, "changed": changed, "loss": loss}


def _slider_limits(known: Known) -> list[float]:
    """Return the rate of each site's link, or the bytes of a round where it has none."""
    caps = known.caps()
    most = [MEGABYTE if math.isinf(cap) else cap * known.contexts / 8 + known.uplinks.overhead for cap in caps]
    return [cap if site.rate is None else site.rate for site, cap in zip(known.sites, most, strict=True)]


def _limited(known: Known, site: Sender, limit: float) -> Sender:
    if site.rate is not None:
        return replace(site, rate=limit, cap=math.inf)
    return replace(site, cap=max(8 * (limit - known.uplinks.overhead) / known.contexts, 1e-9))


def _time(path: Path) -> float:
    return path.stat().st_mtime if path.is_file() else 0.0


def _stamp(path: Path) -> str:
    hashed = hashlib.sha256()
    for name in _FILES:
        file = path / name
        if file.is_file():
            status = file.stat()
            hashed.update(f"{name} {status.st_mtime_ns} {status.st_size}\n".encode())
    hashed.update(run_state(path).name.encode())  # it changes by itself when a run no longer gives a sign of life
    return hashed.hexdigest()[:16]
