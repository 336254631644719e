"""A short slice of every fuzzer, with fixed seeds, and every example that once failed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.fuzz import files, wires
from tests.fuzz.target import run

if TYPE_CHECKING:
    from pathlib import Path

TARGETS = {target.name: target for target in (*wires.TARGETS, *files.TARGETS)}
EXAMPLES = {"frames": 4000, "headers": 2000, "payloads": 1000, "events": 60, "tasks": 500, "readers": 60}
EXAMPLES |= {"arrays": 1000, "folders": 300, "configs": 200, "commands": 60, "requests": 150}


@pytest.mark.parametrize("name", TARGETS)
def test_a_slice(name: str, tmp_path: Path) -> None:
    assert run(TARGETS[name], tmp_path, seed=14, examples=EXAMPLES[name]) >= EXAMPLES[name]
