"""Run the fuzzers for as long as wanted, and print what was tried: `python -m tests.fuzz --minutes 30`."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path


def main() -> int:
    """Run all fuzzers, each for its share of the time; return how many found something."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0, help="for all together (default: 30)")
    parser.add_argument("--seed", type=int, help="of the first examples (default: the clock)")
    parser.add_argument("--only", nargs="*", metavar="TARGET", help="these fuzzers alone")
    parser.add_argument("--examples", type=int, help="of each fuzzer, instead of minutes")
    parser.add_argument("--bounds", action="store_true", help="kernels check every index (compiling takes minutes)")
    arguments = parser.parse_args()
    if arguments.bounds:  # before numba is imported, and in a cache of their own
        cache = Path(tempfile.gettempdir()) / "fpld-fuzz-kernels"
        os.environ.update(NUMBA_BOUNDSCHECK="1", NUMBA_CACHE_DIR=str(cache))
    from tests.fuzz import files, sent, strings, wires
    from tests.fuzz.target import FoundError, run

    logging.disable(logging.CRITICAL)
    every = (*wires.TARGETS, *sent.TARGETS, *files.TARGETS, *strings.TARGETS)
    targets = [target for target in every if not arguments.only or target.name in arguments.only]
    seed = int(time.time()) if arguments.seed is None else arguments.seed
    counts: Counter[str] = Counter()
    found = 0
    for target in targets:
        begun = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            try:
                seconds = 60 * arguments.minutes * target.weight / sum(each.weight for each in targets)
                limit = {"seconds": seconds} if arguments.examples is None else {"examples": arguments.examples}
                tried = run(target, Path(folder), seed=seed, **limit)
            except FoundError as error:
                found += 1
                sys.stdout.write(f"FOUND {error}\n")
                continue
        counts[target.counts] += tried
        sys.stdout.write(f"{target.name:<10} {tried:>10} {target.counts} in {time.monotonic() - begun:.0f} s\n")
        sys.stdout.flush()
    total = ", ".join(f"{count} {name}" for name, count in counts.items())
    sys.stdout.write(f"seed {seed}: {total}; {found} failures\n")
    return min(found, 1)


if __name__ == "__main__":
    sys.exit(main())
