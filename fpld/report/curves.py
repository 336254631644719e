"""The curves of a run's trainings, and the loops that go on at the moment, as its folder has them.

Both files are for whoever looks on, and written as a run goes: what cannot be read of them is left out.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fpld.errors import FpldError
from fpld.federation.watch import CURVES, NOW, OLD
from fpld.pace import show_seconds
from fpld.storage.files import read_utf8

if TYPE_CHECKING:
    from pathlib import Path

_LARGEST = 64_000_000  # bytes of a file that is read here
Short = Annotated[str, Field(max_length=200)]


class _Read(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False)


class Point(_Read):
    """A point of a training's curve: the mean loss of the steps since the last point."""

    method: Short
    round: int
    model: Short
    what: Short
    step: int
    loss: float


class Loop(_Read):
    """A loop that goes on: what it does for which model, how far it is, and how long it will take."""

    method: Short
    round: int
    model: Short
    what: Short
    unit: Short
    done: int
    total: int | None
    left: float | None
    time: float
    loss: float | None = None
    tokens_per_second: float | None = None
    next: Short = ""

    @property
    def show_left(self) -> str:
        """Return the time left as text."""
        return "" if self.left is None else show_seconds(self.left)


def read_curves(folder: Path) -> dict[tuple[str, str, str], list[Point]]:
    """Return the points of each training by method, model and what it is; of a step that was made twice, the last."""
    found: dict[tuple[str, str, str], dict[tuple[int, int], Point]] = {}
    for line in _content(folder / CURVES).splitlines():
        point = _parsed(Point, line)
        if point is not None:
            found.setdefault((point.method, point.model, point.what), {})[point.round, point.step] = point
    return {key: [points[place] for place in sorted(points)] for key, points in found.items()}


def read_loops(folder: Path) -> list[Loop]:
    """Return the loops that have said something in the last seconds."""
    try:
        said = json.loads(_content(folder / NOW) or "{}").get("loops", [])
        loops = [_parsed(Loop, json.dumps(each)) for each in said]
    except (ValueError, RecursionError, AttributeError, TypeError):
        return []
    return [loop for loop in loops if loop is not None and time.time() - loop.time < OLD]


def _content(path: Path) -> str:
    try:
        own = path.is_file() and not path.is_symlink() and path.stat().st_size <= _LARGEST
        return read_utf8(path) if own else ""
    except (OSError, FpldError):
        return ""


Record = TypeVar("Record", bound=_Read)


def _parsed(kind: type[Record], line: str) -> Record | None:
    try:
        return kind.model_validate_json(line)
    except ValidationError:
        return None
