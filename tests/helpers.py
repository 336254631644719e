"""What several tests share."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from fpld import Plan
from fpld.cli import main

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

    from fpld.types import Array


ADVERSARIAL: dict[str, Callable[[np.random.Generator, tuple[int, int]], Array]] = {
    "random": lambda rng, shape: rng.normal(0, 3, shape),
    "constant": lambda rng, shape: np.full(shape, rng.normal()),
    "huge": lambda rng, shape: rng.choice([-1.6e4, 1.6e4], shape),
    "one-hot": lambda rng, shape: np.eye(*shape) * 50.0,
    "ties": lambda rng, shape: rng.integers(0, 3, shape).astype(float),
    "tiny": lambda rng, shape: rng.normal(0, 1e-30, shape),
}
"""Logits that a codec might stumble over, by name."""


def make_plan(**changes: Any) -> Plan:
    """A small plan, with changes."""
    fields: dict[str, Any] = {
        "run_key": b"a key of a test!",
        "round": 3,
        "node": 1,
        "probe": bytes(range(32)),
        "contexts": 6,
        "vocab": 50,
        "bits": 118.5,
        "clip": 3.0,
    }
    return Plan(**{**fields, **changes})


def check_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A command ends with code 2, a message that says why, and nothing on standard output."""
    try:
        code = main(arguments)
    except SystemExit as stop:
        code = int(str(stop.code))
    captured = capsys.readouterr()
    assert code == 2
    assert message in captured.err
    assert captured.out == ""


def without_numba(module: str, function: str) -> list[str]:
    """The words that a function returns in a process without numba: kernels are plain Python there."""
    script = (
        "import sys; sys.modules['numba'] = None\n"
        "from fpld import kernels; assert not kernels.numba_available()\n"
        f"from {module} import {function}\n"
        f"print(' '.join({function}()))\n"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)
    return run.stdout.split()
