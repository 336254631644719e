"""Import what a node's model needs before a message asks for it."""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING

import numpy as np

from fpld.codecs import ArrayPrior
from fpld.errors import FpldError
from fpld.registry import codecs, students
from fpld.storage.arrays import read_arrays
from fpld.types import Plan

if TYPE_CHECKING:
    from pathlib import Path


def kinds(folder: Path) -> set[str]:
    """Return the kinds of models that the node's last run has: its own, and the student."""
    parts = sorted(folder.glob("runs/*/part.json"), key=lambda path: path.stat().st_mtime)
    found: set[str] = set()
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, FpldError):
        files = json.loads(parts[-1].read_bytes())["files"] if parts else {}
        for name in {str(files["base"]), str(files["student"])} if files else set():
            found.add(read_arrays(folder / "files" / name)[1]["kind"])
    return found


def warm() -> None:
    """Code a few numbers with every codec: kernels are read from their cache once, and not for each message."""
    logits = np.zeros((2, 8), np.float32)
    prior = ArrayPrior(np.full((2, 8), -16, np.int16))
    for name in ("uniform", "predictive", "samples"):
        plan = Plan(
            run_key=bytes(16), round=1, node=0, probe=bytes(32), contexts=2, vocab=8, bits=64.0,
            prior=prior if codecs.get(name).traits.prior else None,
        )  # fmt: skip
        with contextlib.suppress(FpldError):
            codecs.get(name).encode(iter([logits]), plan)


def preload(folder: Path | None) -> None:
    """Import the libraries of these models; what cannot be imported is said when a message needs it."""
    for kind in set() if folder is None else kinds(folder):
        with contextlib.suppress(FpldError, ImportError):
            students.get(kind)
