"""Attack a real deployment over Flower: `python -m benchmarks.deployment_attacks` says for each attack what happened.

A SuperLink with TLS and node authentication, an aggregator and two honest nodes run on loopback, as docs/deploy.md
starts them; a third, registered node misbehaves in a new way in every round (`benchmarks.hostile_node`). Besides,
nodes without a registered key and without TLS try to join, an app that is not ours is submitted, and the aggregator is
stopped, its checkpoint damaged, and resumed. An attack has failed if the honest nodes' rounds go on, the trace has the
reason in a short printable line, and none of the attacker's code ran. The exit code is 1 if any attack succeeded.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.hostile_node import EVALUATE, HUGE, JOIN, TRAIN, environment
from fpld.engines.flower.launch.processes import LaunchError
from fpld.engines.flower.patches.runner import ControlClient
from fpld.engines.flower.site.config import Invitation, init_node
from tests.engines.flower.machines import Machines, rounds

HONEST = ["north", "east"]
EXPECTED = {  # the least that the trace must say of each
    "a flipped bit in the frame": "checksum does not match",
    "the frame of an earlier round": "round must be 2, got 1",
    "a frame of another run, with a right tag": "run id must be",
    "a frame coded against another plan or prior, with a right tag": "plan digest must be",
    "a frame in another node's name, with a right tag": "node must be 2, got 0",
    "a right frame under another key": "checksum does not match",
    "an empty frame": "frame must be at least",
    "random symbols, with a right tag": "payload's",
    "two frames in one reply": "a reply must hold one frame",
    "requests for the prior again and again": "may be asked for once a round",
    "a frame 100 kB over its budget": "under this plan's budget",
    "a pickle in the place of a frame": "bytes of type fpld.frame/1 must come here",
    "an error text of 1.5 MB with escape sequences": "its reply is too long",
    "a reply of 64 MiB": "its reply is too long",
    "a chunk named 30,000 times (3 GB from 100 kB)": "its reply holds 3",
    "a reply that is announced and never whole": "no answer within",
}
EVIL_CLIENT = """\
from pathlib import Path

Path({mark!r}).touch()

from flwr.clientapp import ClientApp

app = ClientApp()
"""
EVIL_SERVER = """\
from pathlib import Path

Path({mark!r}).touch()

from flwr.serverapp import ServerApp

app = ServerApp()
"""
PROJECT = """\
[project]
name = "evil"
version = "1.0.0"
description = ""
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "evil"

[tool.flwr.app.components]
serverapp = "evil_server:app"
clientapp = "evil_client:app"
"""


class Row(NamedTuple):
    """An attack, what happened, and whether it failed as it should."""

    attack: str
    happened: str
    held: bool


class Rows(list[Row]):
    """Rows that are printed as they come."""

    def append(self, row: Row) -> None:
        """Add and print a row."""
        super().append(row)
        sys.stdout.write(f"{'held' if row.held else 'FAILED'} | {row.attack} | {row.happened}\n")
        sys.stdout.flush()


class Attacks:
    """A deployment under attack."""

    def __init__(self, folder: Path, deadline: float) -> None:
        length = f"rounds = {len(TRAIN) + 1}\nquorum = 2\ndeadline = {deadline}"
        self.machines = Machines(folder, ("rounds = 3", length))
        self.folder = folder
        self.rows = Rows()
        self.peaks = dict[int, int]()

    def wait(self, round: int, seconds: float = 900.0) -> None:
        """Wait until a round is closed."""
        end = time.monotonic() + seconds
        while len(rounds(self.machines)) < round:
            running = self.machines.running["aggregator"].poll() is None
            if not running or time.monotonic() > end:
                raise RuntimeError(f"round {round} did not close: {self.machines.said('aggregator')[-2000:]}")
            self._measure()
            time.sleep(0.2)

    def _measure(self) -> None:
        """Note the most memory that the aggregator's own process has had by now."""
        for identity in self.machines.processes(holding="launch.runner"):
            with contextlib.suppress(OSError, IndexError):
                status = Path(f"/proc/{identity}/status").read_text()
                peak = int(status.split("VmHWM:")[1].split()[0]) >> 10
                self.peaks[len(rounds(self.machines))] = peak

    def start(self) -> None:
        """Start everyone: honest ones, the hostile one, one whose key is not registered, one without TLS."""
        some = self.machines
        nodes = self.folder / "nodes"
        some.aggregator()
        some.wait_for(lambda: "admitted" in some.said("aggregator"), 180)
        for name in HONEST:
            some.node(name)
        some.start("south", "--hostile", nodes / "south/node.toml", module="benchmarks.deployment_attacks")
        invitation = Invitation.read(self.folder / "certs/federation.toml")
        for name, flags in (("stranger", ()), ("plaintext", ("--insecure",))):
            init_node(nodes / name, name, invitation, f'data = "{self.folder}/texts/north"')
            some.start(name, "node", nodes / name / "node.toml", *flags)

    def admission(self) -> None:
        """Judge who was turned away at the door."""
        for name, what in (("stranger", "a node whose key is not registered"), ("plaintext", "a node without TLS")):
            log = self.folder / f"nodes/{name}/flower/supernode.log"
            self.machines.end(name)
            said = re.sub(r"\x1b\[[0-9;]*m", "", log.read_text())
            reason = [line.strip() for line in said.splitlines() if "rror" in line or "ailed" in line]
            held = "SuperNode ID" not in said and name not in self.machines.said("aggregator")
            self.rows.append(Row(what, f"turned away: {reason[-1][:100] if reason else 'no word'}", held))

    def foreign_app(self) -> None:
        """Submit an app that is not ours through the Control API, while the run goes on."""
        ran = {part: self.folder / f"evil-{part}-ran" for part in ("client", "server")}
        files = {
            "evil_client.py": EVIL_CLIENT.format(mark=str(ran["client"])),
            "evil_server.py": EVIL_SERVER.format(mark=str(ran["server"])),
            "pyproject.toml": PROJECT,
        }
        before = len(rounds(self.machines))
        try:
            with ControlClient(self.machines.address, self.folder / "certs/ca.pem") as control:
                control.start_run({name: text.encode() for name, text in files.items()})
            happened = "its code was imported at no end"
        except LaunchError as error:
            happened = f"not taken: {error}"[:100]
        self.wait(before + 2)
        held = not any(mark.exists() for mark in ran.values())
        self.rows.append(Row("an app from the SuperLink that is not the installed one", happened, held))

    def damaged_checkpoint(self) -> None:
        """Stop the aggregator, flip bits of its newest checkpoint, and resume."""
        self.machines.end("aggregator")
        path = self.folder / "flower/fpld/checkpoint.safetensors"
        data = bytearray(path.read_bytes())
        data[-100] ^= 8
        path.write_bytes(bytes(data))
        before = len(rounds(self.machines))
        offset = len(self.machines.said("aggregator"))
        self.machines.aggregator("--resume")
        self.wait(before + 1)
        held = "going on from the one before it" in self.machines.said("aggregator")[offset:]
        what = "said, and gone on from the checkpoint before" if held else "used in silence"
        self.rows.append(Row("a checkpoint damaged by hand before --resume", what, held))

    def judge(self) -> None:
        """Judge the hostile node's attacks by the trace, and what the aggregator printed."""
        lines = rounds(self.machines)
        for number, name in enumerate(TRAIN):
            self._judge(name, lines[number], EXPECTED[name], trained=False)
        for number, name in enumerate(EVALUATE):
            self._judge(name, lines[number], "did not evaluate the student: ", trained=True)
        huge = list(TRAIN).index("a reply of 64 MiB")
        before = self.peaks.get(huge)
        after = self.peaks.get(huge + 2)
        held = before is not None and after is not None and after - before < HUGE >> 22
        peaks = f"its peak was {before} MiB before the reply of 64 MiB and {after} MiB after those of the next round"
        self.rows.append(Row("memory of the aggregator's process", peaks, held))
        said = self.machines.said("aggregator")
        named = "a node was turned away: '[2J ]0;owned south' is not a node of this federation" in said
        self.rows.append(Row(JOIN, "turned away; no escape sequence was printed", named and "\x1b" not in said))
        opened = (self.folder / "nodes/south/pickle-ran").exists()
        self.rows.append(Row("code in the pickle", "ran" if opened else "never ran", not opened))
        last = lines[-1]["nodes"] == [*HONEST, "south"]
        self.rows.append(Row("all attacks together", f"the last round has {', '.join(lines[-1]['nodes'])}", last))

    def _judge(self, name: str, line: dict[str, Any], expected: str, *, trained: bool) -> None:
        records = [record for record in (*line["refused"], *line["absent"]) if record["node"] == "south"]
        found = [record for record in records if record["reason"].startswith("did not evaluate") == trained]
        told = "; ".join(f"{record['state']}: {record['reason']}" for record in found)
        held = expected in told and set(HONEST) <= set(line["nodes"]) and (trained or "south" not in line["nodes"])
        short = all(len(record["reason"]) <= 256 and record["reason"].isprintable() for record in records)
        self.rows.append(Row(name, told[:160] or "no word of it in the trace", held and short))


def mount(folder: Path, deadline: float) -> list[Row]:
    """Mount all attacks; return what happened."""
    attacks = Attacks(folder, deadline)
    try:
        attacks.start()
        attacks.wait(2)
        attacks.admission()
        attacks.foreign_app()
        attacks.damaged_checkpoint()
        attacks.wait(len(TRAIN) + 1)
        code = attacks.machines.running.pop("aggregator").wait(300)
        attacks.rows.append(Row("the run", f"ended with exit code {code}", code == 0))
        attacks.judge()
    finally:
        for process in attacks.machines.running.values():
            process.terminate()
        time.sleep(5)
        for identity in attacks.machines.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(identity, signal.SIGKILL)
    return attacks.rows


def misbehave(node: Path) -> None:
    """Run a SuperNode whose app is the hostile one."""
    from fpld.engines.flower.launch import node as supernode

    setattr(supernode, "supernode_environment", environment)  # noqa: B010 - a name that is not exported
    supernode.run_node(node, insecure=False, started=lambda _row: None)


def main() -> int:
    """Mount the attacks, or be the hostile node."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.deployment_attacks", description=__doc__)
    parser.add_argument("--deadline", type=float, default=90.0, help="of a round, in seconds (default: 90)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there too")
    parser.add_argument("--hostile", type=Path, metavar="NODE.toml", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.hostile is not None:
        misbehave(arguments.hostile)
        return 0
    with tempfile.TemporaryDirectory() as name:
        rows = mount(Path(name), arguments.deadline)
    held = sum(row.held for row in rows)
    sys.stdout.write(f"{held} of {len(rows)} held\n")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([row._asdict() for row in rows], indent=1) + "\n")
    return int(held < len(rows))


if __name__ == "__main__":
    sys.exit(main())
