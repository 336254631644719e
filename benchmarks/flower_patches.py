"""What each patch of Flower buys: a deployment with none, with each alone, and with all, killed and measured.

    python -m benchmarks.flower_patches [--kills 20] [--rounds 4] [--choices none,retry,auto] [--out out/bench]

Each choice of `patches` has a deployment of its own, one after the other: that of `benchmarks.kill_lab`, three nodes on
loopback with TLS and node authentication, each behind a relay of `benchmarks.flower_overhead`. First it makes rounds in
peace:

- seconds of a round beyond the slowest node's work; bytes and requests of a node in a round, TLS included. Medians over
  nodes and rounds, the first round left out;
- processor seconds of a round, of a node's processes (the mean over nodes) and of the aggregator's;
- the most memory that these processes have held, what they share counted in parts.

Then SIGKILL takes a node, the SuperLink and the aggregator by turns, at random moments of a round, and the seconds
count until a message of the run comes again. At last the trace is compared with that of an undisturbed run, as far as
it has come.

Rows are kept in the folder, and the kills that are there already count: the same command, or one with more kills, goes
on. With `--kills 0` nothing is killed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import TYPE_CHECKING, Any

from benchmarks.fleet import processes, pss
from benchmarks.flower_overhead import Relay, Rounds, worked
from benchmarks.kill_lab import KINDS, LAST, PATIENCE, Lab
from fpld.engines.flower.patches import ALL, NONE, PATCHES
from tests.engines.flower.conftest import NAMES
from tests.engines.flower.machines import rounds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.engines.flower.machines import Machines

CHOICES = (NONE, *(patch.name for patch in PATCHES), ALL)
ROUNDS_PER_KILL = 3  # which a federation has for each kill
PEACE_SECONDS = 900.0  # in which the rounds before the first kill must be done
LOOK_SECONDS = 0.5  # between two looks at processes
TICKS = os.sysconf("SC_CLK_TCK")

Row = dict[str, Any]


class Usage:
    """Memory and processor time of the processes of each node and of the aggregator.

    A process is looked at as long as it lives: what it does after the last look is not counted.
    """

    def __init__(self, folder: Path) -> None:
        self.peak = dict.fromkeys((*NAMES, "aggregator"), 0.0)
        self._folders = {name: folder / "nodes" / name for name in NAMES} | {"aggregator": folder / "flower"}
        self._seconds: dict[str, dict[int, float]] = {name: {} for name in self._folders}
        self._over = threading.Event()
        threading.Thread(target=self._look, daemon=True).start()

    def seconds(self) -> dict[str, float]:
        """Return the processor seconds of each so far."""
        return {name: sum(list(each.values())) for name, each in self._seconds.items()}

    def _look(self) -> None:
        while not self._over.wait(LOOK_SECONDS):
            for name, folder in self._folders.items():
                identities = [identity for identity, _ in processes(folder)]
                self.peak[name] = max(self.peak[name], sum(map(pss, identities)))
                for identity in identities:
                    with suppress(OSError):
                        fields = Path(f"/proc/{identity}/stat").read_text().rsplit(")", 1)[1].split()
                        self._seconds[name][identity] = (int(fields[11]) + int(fields[12])) / TICKS

    def stop(self) -> None:
        """Look no more."""
        self._over.set()


def chosen(choice: str) -> str:
    """Return a choice as the value of the key `patches`."""
    return json.dumps(choice if choice in (ALL, NONE) else [choice])


def prepare(machines: Machines, choice: str, relays: dict[str, Relay]) -> None:
    """Let each node use these patches, and reach the aggregator through a relay."""
    port = int(machines.address.rsplit(":", 1)[1])
    for name in NAMES:
        relays[name] = Relay(port)
        file = machines.folder / "nodes" / name / "node.toml"
        text = file.read_text().replace(machines.address, f"127.0.0.1:{relays[name].port}")
        file.write_text(f"patches = {chosen(choice)}\n{text}")


def costs(lab: Lab, seen: Rounds, count: int) -> Row:
    """Wait for the first rounds; return what each but the first has cost."""
    machines = lab.machines
    usage = Usage(machines.folder)
    machines.wait_for(lambda: seen.seen, PEACE_SECONDS)
    before = usage.seconds()
    machines.wait_for(lambda: len(seen.seen) >= count, PEACE_SECONDS)
    after = usage.seconds()
    usage.stop()
    seen.stop()
    lines = rounds(machines)[1:count]
    work = [worked(machines.folder / "nodes" / name) for name in NAMES]
    fixed = [line["seconds"]["local"] - max(each[line["round"]] for each in work) for line in lines]
    moved = {way: round(median(v for name in NAMES for v in seen.of(name, way))) for way in ("up", "down", "requests")}
    processor = {name: (after[name] - before[name]) / len(lines) for name in after}
    return {
        "rounds": len(lines),
        "fixed_seconds": round(median(fixed), 2),
        "up_bytes": moved["up"],
        "down_bytes": moved["down"],
        "requests": moved["requests"],
        "node_cpu": round(mean(processor[name] for name in NAMES), 2),
        "aggregator_cpu": round(processor["aggregator"], 2),
        "node_mb": round(mean(usage.peak[name] for name in NAMES)),
        "aggregator_mb": round(usage.peak["aggregator"]),
    }


def healing(lab: Lab, kills: int) -> Row:
    """Kill by turns; return the seconds of each kill, None for one that has not healed."""
    lines = rounds(lab.machines)
    span = median(line["seconds"]["local"] for line in lines)
    found: dict[str, list[float | None]] = {kind: [] for kind in KINDS}
    for kind in KINDS * kills:
        if not lab.open():
            break
        killed = lab.strike(kind, span)
        sys.stderr.write(f"  {killed}\n")
        found[kind].append(killed["seconds"])
        if killed["seconds"] is None:
            sys.stderr.write("".join(f"{name}: {lab.machines.said(name)[-1500:]}\n" for name in lab.machines.running))
            break
    return {f"{kind}_kills": seconds for kind, seconds in found.items()}


def measure(choice: str, kills: int, count: int, rng: random.Random) -> Row:
    """Return the row of a choice of patches."""
    relays: dict[str, Relay] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        total = count + LAST + len(KINDS) * ROUNDS_PER_KILL * kills
        seen = Rounds(folder / "flower", relays)
        lab = None
        try:
            lab = Lab(
                folder,
                rng,
                ("[engine]", f"[engine]\npatches = {chosen(choice)}"),
                rounds=total,
                prepare=partial(prepare, choice=choice, relays=relays),
            )
            row = {"patches": choice, **costs(lab, seen, count), **healing(lab, kills)}
            done = lab.machines.deployment.trace()[:-1]  # the last round has no loss yet
            same = done == lab.machines.deployment.trace("local")[: len(done)]
            return {**row, "compared": len(done), "same": same}
        finally:
            seen.stop()
            if lab is not None:
                lab.abandon()
                for process in lab.machines.running.values():
                    process.wait()


def add_kills(row: Row, found: Row) -> None:
    """Add the kills of one more deployment to the row of a choice."""
    for kind in KINDS:
        row[f"{kind}_kills"] += found[f"{kind}_kills"]
    row["compared"] += found["compared"]
    row["same"] = row["same"] and found["same"]


def worst(seconds: Sequence[float | None]) -> str:
    """Return how many kills there were, and the median and longest seconds to heal."""
    values = sorted(PATIENCE if value is None else value for value in seconds)
    return f"{median(values):.1f} (at most {values[-1]:.1f}, {len(values)} kills)" if values else "none"


def report(rows: Sequence[Row]) -> None:
    """Print a line for each choice."""
    for row in rows:
        cost = {key: value for key, value in row.items() if not isinstance(value, list)}
        healed = {kind: worst(row[f"{kind}_kills"]) for kind in KINDS}
        print(", ".join(f"{name}: {value}" for name, value in (cost | healed).items()))


def main() -> int:
    """Read the arguments, measure, and keep what was found."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.flower_patches", description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20, help="of each kind (default: 20)")
    parser.add_argument("--rounds", type=int, default=4, help="before the first kill (default: 4)")
    parser.add_argument("--choices", default=",".join(CHOICES), help="none, auto, names of patches")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out/bench"), help="where the rows go")
    a = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no deployment is left behind
    file = a.out / "flower-patches.json"
    a.out.mkdir(parents=True, exist_ok=True)
    command = f"python -m benchmarks.flower_patches --kills {a.kills} --rounds {a.rounds}"
    kept: Row = {"command": command, "seeds": [a.seed], "rows": []}
    if file.exists():
        kept = json.loads(file.read_text())
    for choice in a.choices.split(","):
        row = next((row for row in kept["rows"] if row["patches"] == choice), None)
        left = a.kills if row is None else a.kills - min(len(row[f"{kind}_kills"]) for kind in KINDS)
        if row is not None and left <= 0:
            continue
        begun = time.monotonic()
        found = measure(choice, left, a.rounds, random.Random(f"{a.seed}/{choice}/{left}"))  # noqa: S311
        sys.stderr.write(f"{found} ({time.monotonic() - begun:.0f} s)\n")
        if row is None:
            kept["rows"].append(found)
        else:
            add_kills(row, found)
        kept["command"] = command
        file.write_text(json.dumps(kept, indent=1) + "\n")
    report(kept["rows"])
    return int(not all(row["same"] for row in kept["rows"]))


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        sys.exit(main())
