"""`fpld`, killed with SIGKILL in the middle of a sequence that a model writes in the second round.

    python -m tests.federation.killed_writer {run,worker} DRAWS OUT ARGUMENTS...

Kills the whole run, or the process that writes alone, at draw number DRAWS after the first round was closed in the
folder OUT. A worker process imports this module as its main module, so it is disturbed like the run.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from fpld.cli import main
from fpld.students import generate

if TYPE_CHECKING:
    import numpy as np

_draw_each = generate._draw_each
_drawn = 0


def _killed(logits: np.ndarray, rng: np.random.Generator, temperature: float) -> np.ndarray:
    global _drawn
    whom, draws, out = sys.argv[1:4]
    trace = Path(out) / "fpld/trace.jsonl"
    if trace.exists() and len(trace.read_text().splitlines()) == 1:
        _drawn += 1
        if int(draws) == _drawn:
            os.kill(0 if whom == "run" else os.getpid(), signal.SIGKILL)
    return _draw_each(logits, rng, temperature)


if __name__ in ("__main__", "__mp_main__"):
    generate._draw_each = _killed

if __name__ == "__main__":
    sys.exit(main(sys.argv[4:]))
