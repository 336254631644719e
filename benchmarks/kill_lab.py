"""Kill nodes, SuperLink and aggregator of a real deployment at random moments, and measure how soon it goes on.

    python -m benchmarks.kill_lab [--kills 20] [--seed 0] [--json FILE] [--minutes 5]

Three nodes with n-gram students on loopback, TLS and node authentication. SIGKILL takes, at a random moment of a round:

- a node: all its processes at once, as a power cut does; the lab starts `fpld node` again;
- the SuperLink: the aggregator starts it again;
- the aggregator: `fpld aggregator`; the lab starts it again with --resume.

The lab starts again at once, and once more whatever ends with an error, as systemd does. It has healed when the node
that was killed, or else every node, has got a message of the run again, by the node's own log. Seconds count from the
restart, and for the SuperLink from the kill itself. Every federation goes on to its end: its trace and student must be
those of an undisturbed run, bit for bit. With --json kills are kept in a file, and those that are there already count:
the same command goes on. The exit code is 1 if any kill took longer than 15 s to heal, or any result differs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from tests.engines.flower.conftest import NAMES
from tests.engines.flower.machines import Machines, rounds

if TYPE_CHECKING:
    from collections.abc import Callable

KINDS = ("node", "superlink", "aggregator")
ROUNDS = 24  # of a federation
LIMIT = 15.0  # seconds in which a kill must have healed
PATIENCE = 120.0  # seconds after which the lab gives a kill up
SPAN = 3.0  # seconds, about a round: the moment of a kill is uniform over them
LAST = 3  # rounds before the end in which nothing is killed any more: there would be no message to wait for

Row = dict[str, Any]


class Lab:
    """A deployment whose parts are killed."""

    def __init__(
        self,
        folder: Path,
        rng: random.Random,
        *changes: tuple[str, str],
        rounds: int = ROUNDS,
        prepare: Callable[[Machines], None] = lambda _machines: None,
    ) -> None:
        """Start a deployment; `prepare` may change its files before anything has started."""
        self.machines = Machines(folder, ("rounds = 3", f"rounds = {rounds}"), *changes)
        prepare(self.machines)
        self._rng = rng
        self._rounds = rounds
        self._starts = 0
        self.machines.undisturbed()
        self.machines.start_all()
        self._wait(NAMES, 0.0)

    def open(self) -> bool:
        """Return whether enough rounds are left for one more kill."""
        return len(rounds(self.machines)) < self._rounds - LAST

    def strike(self, kind: str, span: float = SPAN) -> Row:
        """Kill at a random moment of so many seconds; return how soon it has healed."""
        time.sleep(self._rng.uniform(0.0, span))
        victim = self._rng.choice(NAMES) if kind == "node" else kind
        self._starts = 1
        number = len(rounds(self.machines)) + 1
        begun, since = getattr(self, f"_{kind}")(victim)
        healed = self._wait((victim,) if kind == "node" else NAMES, since)
        seconds = None if healed is None else round(healed - begun, 2)
        return {"kind": kind, "victim": victim, "round": number, "seconds": seconds, "starts": self._starts}

    def _node(self, name: str) -> tuple[float, float]:
        self.machines.kill(name)
        self.machines.node(name)
        return (now := time.time()), now

    def _aggregator(self, name: str) -> tuple[float, float]:
        self.machines.kill(name)
        self._listening(now=False)
        self.machines.aggregator("--resume")
        return time.time(), self._listening(now=True)

    def _superlink(self, _name: str) -> tuple[float, float]:
        (identity,) = self.machines.processes(holding="--database")  # no other program has this option
        begun = time.time()
        os.kill(identity, signal.SIGKILL)
        self._listening(now=False)
        return begun, self._listening(now=True)

    def _listening(self, *, now: bool) -> float:
        """Wait until a SuperLink listens, or none does any more: a message from before is not one of the new one."""
        # other than wanted, so that it is looked at least once
        end = time.time() + PATIENCE
        found = not now
        host, port = self.machines.address.split(":")
        while found != now and time.time() < end:
            try:
                socket.create_connection((host, int(port)), 1.0).close()
                found = True
            except OSError:
                found = False
            self._start_again()
            time.sleep(0.05)
        return time.time()

    def _wait(self, names: tuple[str, ...], since: float) -> float | None:
        """Wait until all these nodes have got a message; return when the last of them had it."""
        end = time.time() + PATIENCE
        while time.time() < end:
            heard = [moment for name in names if (moment := self._heard(name, since)) is not None]
            if len(heard) == len(names):
                return max(heard)
            self._start_again()
            time.sleep(0.1)
        return None

    def _heard(self, name: str, since: float) -> float | None:
        """Return when a node has got its first message after a moment."""
        log = self.machines.folder / "nodes" / name / "log.txt"
        for line in map(json.loads, log.read_text().splitlines() if log.exists() else []):
            if line["time"] > since and (" is connected" in line["text"] or ": training" in line["text"]):
                return float(line["time"])
        return None

    def _start_again(self) -> None:
        """Start again what has ended with an error."""
        for name in [name for name, process in self.machines.running.items() if process.poll()]:
            self._starts += 1
            if name == "aggregator":
                self.machines.aggregator("--resume")
            else:
                self.machines.node(name)

    def finish(self) -> bool:
        """Let the federation come to its end; return whether its result is that of the undisturbed run."""
        code = self.machines.running.pop("aggregator").wait(600)
        self.machines.clean_up()
        return code == 0 and self.machines.same()

    def abandon(self) -> None:
        """Leave no process behind."""
        for identity in self.machines.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(identity, signal.SIGKILL)


def federation(folder: Path, kinds: list[str], rng: random.Random, end: float) -> Row:
    """Run a federation and kill by turns what is in the list, as long as there are rounds and time; return its row."""
    lab = Lab(folder, rng)
    kills = list[Row]()
    try:
        while kinds and lab.open() and time.time() < end:
            kills.append(lab.strike(kinds.pop()))
            sys.stderr.write(f"{kills[-1]}\n")
            if kills[-1]["seconds"] is None:
                raise RuntimeError({name: lab.machines.said(name)[-3000:] for name in lab.machines.running})
        return {"kills": kills, "same": lab.finish()}
    finally:
        lab.abandon()


def left(kept: list[Row], kills: int, rng: random.Random) -> list[str]:
    """Return what is still to be killed, in random order."""
    done = [kill["kind"] for row in kept for kill in row["kills"]]
    found = [kind for kind in KINDS for _ in range(kills - done.count(kind))]
    rng.shuffle(found)
    return found


def table(kept: list[Row]) -> list[Row]:
    """Return a row by kind: kills, how many have healed in time, median and worst seconds, and starts besides.

    A start besides is one of a process that had ended with an error of its own.
    """
    rows = []
    for kind in KINDS:
        found = [kill for row in kept for kill in row["kills"] if kill["kind"] == kind]
        seconds = sorted(PATIENCE if kill["seconds"] is None else kill["seconds"] for kill in found)
        if seconds:
            timely = sum(each <= LIMIT for each in seconds)
            rows.append(
                {"killed": kind, "kills": len(seconds), "healed within 15 s": timely}
                | {"median": round(median(seconds), 1), "worst": round(seconds[-1], 1)}
                | {"starts besides": sum(kill["starts"] - 1 for kill in found)}
            )
    return rows


def main() -> int:
    """Read the arguments, kill, and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kill_lab", description=__doc__)
    parser.add_argument("--kills", type=int, default=20, help="of each kind (default: 20)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep the kills there, and go on with those there")
    parser.add_argument("--minutes", type=float, default=600.0, help="begin no kill after so many")
    a = parser.parse_args()
    kept: list[Row] = json.loads(a.json.read_text()) if a.json is not None and a.json.exists() else []
    end = time.time() + 60 * a.minutes
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no deployment is left behind
    while time.time() < end:
        rng = random.Random(f"{a.seed}/{len(kept)}")  # noqa: S311 - moments, no secrets
        kinds = left(kept, a.kills, rng)
        if not kinds:
            break
        with tempfile.TemporaryDirectory() as name:
            kept.append(federation(Path(name), kinds, rng, end))
        if a.json is not None:
            a.json.write_text(json.dumps(kept, indent=1) + "\n")
    for row in table(kept):
        print(", ".join(f"{name}: {value}" for name, value in row.items()))
    same = sum(row["same"] for row in kept)
    print(f"{same} of {len(kept)} federations came to the undisturbed run's trace and student")
    healed = all(row["kills"] == row["healed within 15 s"] for row in table(kept))
    return int(not healed or same < len(kept))


if __name__ == "__main__":
    sys.exit(main())
