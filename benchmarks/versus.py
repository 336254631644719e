"""Compare the speed of the codecs of this tree with that of another commit, in one run.

    python -m benchmarks.versus 48982a5 --codec uniform predictive --bits 0.1,2,4

Each tree has a process of its own. They time the operations of `fpld bench speed` in turn, a few seconds each, so that
a slow minute of the machine meets both. What is printed is the median over turns of this tree's time over the other's,
with its standard error (from the median absolute deviation).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from contextlib import ExitStack, contextmanager
from io import BytesIO
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ROOT = Path(__file__).parent.parent
# Runs in either tree, so it uses only what both have.
TIMER = """\
import json, sys
import numpy as np
from fpld.bench import speed
from fpld.errors import InputError
sizes = speed.Sizes(contexts={contexts}, repeat=3)
logits, prior = speed._scene(sizes, np.random.default_rng(0))
contenders = {{each.name: each for each in speed.contenders(sizes.nodes)}}
for line in sys.stdin:
    name, bits = json.loads(line)
    try:
        rows = speed._time(contenders[name], bits, logits, prior, sizes, 0)
    except InputError:  # a budget that the codec does not meet
        rows = []
    print(json.dumps({{row["operation"]: row["nanoseconds"] for row in rows}}), flush=True)
"""
Times = dict[str, float]


class Timer:
    """A process that times one tree's codecs when it is asked to."""

    def __init__(self, tree: Path, contexts: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", TIMER.format(contexts=contexts)],
            cwd=tree,
            env={**os.environ, "PYTHONPATH": str(tree)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def time(self, codec: str, bits: float) -> Times:
        """Return the nanoseconds for a coordinate, by operation."""
        if self._process.stdin is None or self._process.stdout is None:
            raise RuntimeError("a timer has pipes")
        print(json.dumps([codec, bits]), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit(f"{codec} at {bits:g} bits cannot be timed in one of the trees: see above")
        found: Times = json.loads(answer)
        return found

    def end(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()


@contextmanager
def checkout(commit: str) -> Iterator[Path]:
    """Lay a commit's tree into a folder for a while."""
    with tempfile.TemporaryDirectory(prefix="fpld-versus-") as name:
        git = shutil.which("git") or "git"
        archive = subprocess.run([git, "archive", commit], cwd=ROOT, check=True, capture_output=True).stdout
        with tarfile.open(fileobj=BytesIO(archive)) as packed:
            packed.extractall(name, filter="data")
        yield Path(name)


def compare(new: Timer, old: Timer, codec: str, bits: float, turns: int) -> dict[str, list[float]]:
    """Time both in turn, each as often first as second; return this tree's times over the other's, by operation."""
    new.time(codec, bits)  # compiles
    old.time(codec, bits)
    ratios: dict[str, list[float]] = {}
    for turn in range(turns):
        pair = {timer: timer.time(codec, bits) for timer in ((new, old) if turn % 2 else (old, new))}
        for name in pair[new].keys() & pair[old].keys():
            ratios.setdefault(name, []).append(pair[new][name] / pair[old][name])
    return ratios


def summary(ratios: Sequence[float]) -> tuple[float, float]:
    """Return the median and its standard error, with the spread estimated robustly."""
    middle = median(ratios)
    spread = 1.4826 * median(abs(ratio - middle) for ratio in ratios)
    return middle, 1.2533 * spread / len(ratios) ** 0.5


def main() -> None:
    """Compare and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("commit", help="the other commit")
    parser.add_argument("--codec", nargs="+", default=["uniform", "predictive"])
    parser.add_argument("--bits", default="0.1,2,4", help="per coordinate; those that a codec cannot meet are left out")
    parser.add_argument("--contexts", type=int, default=128)
    parser.add_argument("--turns", type=int, default=16)
    given = parser.parse_args()
    with ExitStack() as stack:
        trees = ROOT, stack.enter_context(checkout(given.commit))
        new, old = (Timer(tree, given.contexts) for tree in trees)
        for timer in (new, old):
            stack.callback(timer.end)
        for codec in given.codec:
            for bits in map(float, given.bits.split(",")):
                for name, ratios in sorted(compare(new, old, codec, bits, given.turns).items()):
                    print("{:12s} {:5g} bits  {:13s} {:.3f} ± {:.3f}".format(codec, bits, name, *summary(ratios)))
                sys.stdout.flush()


if __name__ == "__main__":
    main()
