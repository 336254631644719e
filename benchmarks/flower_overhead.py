"""What a round costs beyond payload, weights and work: bytes on the wire of each node, and seconds.

    python -m benchmarks.flower_overhead [CONFIG.toml] [--rounds 10] [--weight-bits 16] [--json FILE]

Real processes on loopback, TLS and node authentication, each node behind a relay that counts the bytes of its
connections (TLS included, TCP/IP not). Rounds are those of `examples/flower/federation.toml`, or of a configuration
that is given: `benchmarks/wire.toml` has the demonstration's sizes. Medians over nodes and rounds, the first round left
out: it carries files, and processes are new.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import socket
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from fpld.config import read_config
from fpld.engines.flower.launch.processes import free_port

EXAMPLE = Path(__file__).parent.parent / "examples/flower/federation.toml"


class Turns:
    """Which way the last bytes of a connection went, and whether its handshake is over."""

    def __init__(self) -> None:
        self._last = "up"
        self._handshake = True

    def is_request(self, way: str) -> bool:
        """Note that bytes go a way; return whether a request begins with them."""
        begins = way == "up" and self._last == "down"
        self._last = way
        if begins and self._handshake:
            self._handshake = False
            return False
        return begins


class Relay:
    """Pass connections on, and count what goes up (to the aggregator) and down, in bytes and in requests.

    A request is bytes that go up after bytes that came down: over TLS nothing else can be told apart. The first turn of
    a connection is its handshake's.
    """

    def __init__(self, target: int) -> None:
        self.target = target
        self.port = free_port()
        self.bytes = Counter[str]()
        self._listener = socket.create_server(("127.0.0.1", self.port))
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            inside, _ = self._listener.accept()
            try:
                outside = socket.create_connection(("127.0.0.1", self.target))
            except OSError:
                inside.close()
                continue
            turns = Turns()
            for way, source, sink in (("up", inside, outside), ("down", outside, inside)):
                threading.Thread(target=self._pump, args=(way, source, sink, turns), daemon=True).start()

    def _pump(self, way: str, source: socket.socket, sink: socket.socket, turns: Turns) -> None:
        try:
            while data := source.recv(1 << 16):
                self.bytes[way] += len(data)
                self.bytes["requests"] += turns.is_request(way)
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            # Not closed: another thread reads from them, and would never hear of that.
            for end in (source, sink):
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)


def fpld(*arguments: object) -> list[str]:
    """Return the command line of a command."""
    return [sys.executable, "-m", "fpld", *map(str, arguments)]


class Rounds:
    """What the relays had counted whenever a round was closed."""

    def __init__(self, out: Path, relays: dict[str, Relay]) -> None:
        self._trace = out / "fpld/trace.jsonl"
        self._relays = relays
        self.seen: list[dict[str, Counter[str]]] = []
        self._over = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while not self._over.wait(0.05):
            closed = len(self._trace.read_bytes().splitlines()) if self._trace.exists() else 0
            while len(self.seen) < closed:
                self.seen.append({name: Counter(relay.bytes) for name, relay in self._relays.items()})

    def stop(self) -> None:
        """Look no more."""
        self._over.set()

    def of(self, name: str, way: str) -> list[int]:
        """Return a node's bytes, or requests, in each round after the first."""
        counts = [seen[name][way] for seen in self.seen]
        return [later - earlier for earlier, later in pairwise(counts)]


def worked(folder: Path) -> dict[int, float]:
    """Return the seconds between a round's message and its answer at a node, by its own log."""
    begun: dict[int, float] = {}
    found: dict[int, float] = {}
    for line in map(json.loads, (folder / "log.txt").read_text().splitlines()):
        if said := re.match(r"round (\d+): (training|sending)", line["text"]):
            number = int(said[1])
            if said[2] == "training":
                begun.setdefault(number, line["time"])
            else:
                found.setdefault(number, line["time"] - begun[number])
    return found


def measure(folder: Path, rounds: Rounds, lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what a round took: a row for each node, and the seconds beyond the slowest node's work."""
    names = list(rounds.seen[0])
    values = lines[0]["bits_sent"]
    unit = lines[0]["payload_bytes"] / sum(values)  # bytes of a bit per coordinate
    weights = (folder / "out/student.safetensors").stat().st_size
    rows = []
    for index, name in enumerate(names):
        payload = [round(line["bits_sent"][index] * unit) for line in lines[1:]]
        up = rounds.of(name, "up")
        down = rounds.of(name, "down")
        beyond = median(u - p for u, p in zip(up, payload, strict=False))
        row = {"node": name, "payload": median(payload), "up": median(up), "beyond": beyond, "down": median(down)}
        rows.append({key: value if key == "node" else round(value) for key, value in row.items()})
        rows[-1]["of the weights"] = round(median(down) / weights, 3)
    work = [worked(folder / name) for name in names]
    fixed = [line["seconds"]["local"] - max(each.get(line["round"], 0.0) for each in work) for line in lines[1:]]
    return {"weights": weights, "rows": rows, "seconds": [round(value, 2) for value in fixed]}


def report(found: dict[str, Any]) -> None:
    """Print the tables."""
    print(f"{len(found['seconds']) + 1} rounds; a student has {found['weights']:,} bytes")
    print("node, payload, up in all, beyond the payload, down in all, of the weights")
    for row in found["rows"]:
        print(", ".join(map(str, row.values())))
    print(f"seconds of a round beyond the slowest node's work: {', '.join(map(str, found['seconds']))}")
    print(f"median: {median(found['seconds']):.1f} s")


def main() -> None:
    """Run the deployment and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", nargs="?", type=Path, default=EXAMPLE)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--weight-bits", type=int, choices=[16, 32], default=32, help="of the student (default: 32)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was measured there too")
    arguments = parser.parse_args()
    config, text = read_config(arguments.config)
    port = free_port()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "keys").mkdir()
        flower = f'\n[flower]\naddress = "127.0.0.1:{port}"\ncerts = "{folder}/certs"\nkeys = "{folder}/keys"\n'
        text = re.sub(r"^rounds = \d+$", f"rounds = {arguments.rounds}", text, flags=re.MULTILINE)
        bits = f"[combine]\nweight_bits = {arguments.weight_bits}\n"
        text = text.replace("[combine]\n", bits) if "[combine]\n" in text else f"{text}\n{bits}"
        (folder / "run.toml").write_text(f"{text}{flower}wait = 600.0\n")
        relays = {}
        nodes = []
        for node in config.nodes:
            relay = relays[node.name] = Relay(port)
            subprocess.run(fpld("certs", "--address", f"127.0.0.1:{relay.port}", "--out", folder / "certs"), check=True)
            source = ["--corpus", config.data.corpus, "--label", node.label or node.name]
            join = ["--join", folder / "certs/federation.toml", "--out", folder / node.name]
            subprocess.run(fpld("init-node", node.name, *join, *source), check=True)
            (folder / node.name / f"{node.name}.pub").rename(folder / "keys" / f"{node.name}.pub")
        running = subprocess.Popen(fpld("aggregator", folder / "run.toml", "--out", folder / "out"))
        rounds = Rounds(folder / "out", relays)
        try:
            nodes = [subprocess.Popen(fpld("node", folder / name / "node.toml")) for name in relays]
            failed = running.wait()
        finally:
            running.terminate()
            for process in nodes:
                process.terminate()
            for process in nodes:
                process.wait()
        if failed:
            raise SystemExit(failed)
        lines = [json.loads(line) for line in (folder / "out/trace.jsonl").read_text().splitlines()]
        found = measure(folder, rounds, lines)
    report(found)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
