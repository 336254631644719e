"""A short slice of every fuzzer, with fixed seeds, and every example that once failed."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tracemalloc
from typing import TYPE_CHECKING

import pytest

from fpld.errors import InputError
from tests.fuzz import files, sent, strings, wires
from tests.fuzz.target import limited_memory, run

if TYPE_CHECKING:
    from pathlib import Path

TARGETS = {target.name: target for target in (*wires.TARGETS, *sent.TARGETS, *files.TARGETS, *strings.TARGETS)}
EXAMPLES = {"frames": 4000, "headers": 2000, "payloads": 1000, "events": 60, "tasks": 500, "readers": 60}
EXAMPLES |= {
    "messages": 200,
    "replies": 300,
    "texts": 2000,
    "written": 1000,
    "updates": 1000,
    "resumed": 60,
    "arrays": 1000,
    "folders": 300,
    "configs": 200,
    "commands": 60,
    "requests": 150,
    "places": 300,
    "alphabets": 500,
    "maps": 500,
    "tokenizers": 500,
    "spaces": 1000,
}


@pytest.mark.parametrize("name", TARGETS)
def test_a_slice(name: str, tmp_path: Path) -> None:
    assert run(TARGETS[name], tmp_path, seed=14, examples=EXAMPLES[name]) >= EXAMPLES[name]


@pytest.mark.parametrize("refused", [False, True])
def test_memory_is_watched_in_what_is_refused_too(refused: bool) -> None:
    def allocate(size: int) -> None:
        with contextlib.suppress(InputError), limited_memory(1 << 16):
            bytearray(size)
            if refused:
                raise InputError("no")

    try:
        allocate(1 << 10)
        with pytest.raises(AssertionError, match="bytes were allocated"):
            allocate(1 << 17)
    finally:
        tracemalloc.stop()


@pytest.mark.slow
@pytest.mark.long
def test_payloads_with_every_index_of_the_kernels_checked() -> None:
    """In a process of its own: numba reads NUMBA_BOUNDSCHECK once. Compiling takes half a minute, the first time."""
    command = [
        sys.executable,
        "-m",
        "tests.fuzz",
        "--bounds",
        "--only",
        "payloads",
        "--examples",
        "1500",
        "--seed",
        "14",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1500 payloads; 0 failures" in done.stdout
