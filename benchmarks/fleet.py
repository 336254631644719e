"""What a round costs by the number of nodes, with a real aggregator and SuperLink: seconds, processor time, memory.

    python -m benchmarks.fleet --real 2,4,8,16 --simulated 10,100,1000 --out out

Real nodes are `fpld node` processes on loopback, with TLS and node authentication. Simulated ones are
`benchmarks.fleet_nodes`, without TLS: the SuperLink has `--insecure`; frames and letters are authenticated as ever. All
have n-gram students on presidents' messages. Medians over rounds, the first left out if there are more: it carries the
files. A deployment that is given up has the rounds that were closed by then. Memory is the peak of a process (VmHWM);
that of real nodes is the sum of what their processes hold (PSS).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from fpld import data
from fpld.engines.flower.credentials import make_certificates
from fpld.engines.flower.launch.processes import free_port
from fpld.engines.flower.site.config import Invitation, init_node

if TYPE_CHECKING:
    from collections.abc import Sequence

Row = dict[str, Any]
CONFIG = """\
[run]
rounds = {rounds}
seed = 0

[data]
corpus = "sotu"
heldout_tokens = 2048

[probe]
source = "1940-1969"
contexts = 2048
length = 32
limit = 400_000

[tokenizer]
kind = "bytes"

[student]
kind = "ngram"
order = 2
buckets = 1024
batch = 256

[base]
steps = 100

[local]
steps = 100

[distill]
steps = 100

[baselines]
methods = []

[flower]
address = "{address}"
certs = "{folder}/certs"
keys = "{folder}/keys"
wait = 600.0
"""
NODE = '\n[[nodes]]\nname = "{name}"\ncontext_bits = 60.0\ndata = "{folder}/texts/{name}"\n'
PROBE = "1940-1969"
PARTS = {"serverapp": b"fpld.engines.flower.launch.runner", "superlink": b"flower.patches.superlink"}
_TICKS = os.sysconf("SC_CLK_TCK")


class Watch:
    """Peak memory and processor time of the aggregator's processes, and when each round was closed."""

    def __init__(self, folder: Path) -> None:
        self.peak = dict.fromkeys(PARTS, 0.0)
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.held = 0.0
        self.rounds = list[dict[str, float]]()
        self._folder = folder
        self._trace = folder / "out/fpld/trace.jsonl"
        self._seen: dict[int, float] = {}
        self._over = threading.Event()
        threading.Thread(target=self._look, daemon=True).start()

    def stop(self) -> None:
        """Look no more."""
        self._over.set()

    def _look(self) -> None:
        beats = 0
        while not self._over.wait(0.25):
            for process, words in processes(self._folder):
                for name, word in PARTS.items():
                    if word in words:
                        self._take(name, process)
            if beats % 20 == 0:
                self.held = max(self.held, sum(pss(process) for process, _ in processes(self._folder / "nodes")))
            closed = len(self._trace.read_bytes().splitlines()) if self._trace.exists() else 0
            while len(self.rounds) < closed:
                self.rounds.append({**self.seconds, "time": time.monotonic()})
            beats += 1

    def _take(self, name: str, process: int) -> None:
        with contextlib.suppress(OSError, ValueError, IndexError):
            status = Path(f"/proc/{process}/status").read_text()
            self.peak[name] = max(self.peak[name], int(status.split("VmHWM:")[1].split()[0]) / 1000)
            fields = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()
            now = (int(fields[11]) + int(fields[12])) / _TICKS
            before = self._seen.get(process, 0.0)
            self._seen[process] = now
            self.seconds[name] += now - before


def processes(folder: Path) -> list[tuple[int, bytes]]:
    """Find the processes of Flower's whose home is in a folder, with their command lines."""
    mark = f"FLWR_HOME={folder}/".encode()
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            identity = int(entry.name)
            if mark in (entry / "environ").read_bytes():
                found.append((identity, (entry / "cmdline").read_bytes()))
    return found


def pss(process: int) -> float:
    """Return the megabytes that a process holds, what it shares with others in parts."""
    with contextlib.suppress(OSError, IndexError, ValueError):
        return int(Path(f"/proc/{process}/smaps_rollup").read_text().split("Pss:")[1].split()[0]) / 1000
    return 0.0


def prepare(folder: Path, count: int, rounds: int) -> list[Path]:
    """Make configuration, certificates, texts and nodes; return the nodes' files."""
    address = f"127.0.0.1:{free_port()}"
    names = [f"site-{number:04d}" for number in range(count)]
    nodes = "".join(NODE.format(name=name, folder=folder) for name in names)
    (folder / "run.toml").write_text(CONFIG.format(rounds=rounds, address=address, folder=folder) + nodes)
    make_certificates(folder / "certs", address, ["127.0.0.1"], days=2)
    invitation = Invitation.read(folder / "certs/federation.toml")
    texts = [document.text for document in data.corpus("sotu") if document.label != PROBE]
    (folder / "keys").mkdir()
    files = []
    for number, name in enumerate(names):
        home = folder / "nodes" / name
        public = init_node(home, name, invitation, f'data = "{folder}/texts/{name}"')
        public.rename(folder / "keys" / public.name)
        files.append(home / "node.toml")
        own = folder / "texts" / name
        own.mkdir(parents=True)
        for part in range(3):
            (own / f"{part}.txt").write_text(texts[(3 * number + part) % len(texts)])
    return files


def measure(count: int, rounds: int, patience: float, *, simulated: bool) -> Row:
    """Run a deployment; return its row."""
    kind = "simulated" if simulated else "real"
    with tempfile.TemporaryDirectory(prefix="fpld-fleet-") as name:
        folder = Path(name)
        running = list[subprocess.Popen[bytes]]()
        watch = None
        files = prepare(folder, count, rounds)
        insecure = ["--insecure"] if simulated else []
        words = ["aggregator", folder / "run.toml", "--out", folder / "out", *insecure]
        try:
            running.append(start(folder / "aggregator.log", "fpld", *words))
            until = "INSECURE" if simulated else "admitted"
            wait(lambda: until in said(folder / "aggregator.log"), patience, running[0])
            wait(lambda: any(PARTS["superlink"] in words for _, words in processes(folder / "out")), patience)
            if simulated:
                time.sleep(8)
                running.append(start(folder / "nodes.log", "benchmarks.fleet_nodes", folder))
            else:
                running += [start(folder / "nodes.log", "fpld", "node", file) for file in files]
            watch = Watch(folder)
            ended = running[0].wait(patience)
        except subprocess.TimeoutExpired:
            ended = 1
        finally:
            for process in running:
                stop(process)
            if watch is not None:
                watch.stop()
        row = {"kind": kind, "nodes": count, "ended": not ended}
        if ended:
            tail = said(folder / "aggregator.log")[-1500:] + said(folder / "nodes.log")[-1500:]
            sys.stderr.write(f"{kind}, {count} nodes: did not end within {patience:g} s\n{tail}\n")
        trace = said(folder / "out/fpld/trace.jsonl").splitlines()
        return row | summary([json.loads(line) for line in trace], watch) if trace and watch is not None else row


def summary(lines: Sequence[Row], watch: Watch) -> Row:
    """Return medians over the rounds after the first, and peaks."""
    later = lines[1:] or lines
    seconds = [line["seconds"] for line in later]
    nodes = [sorted(value for value in each["nodes"] if value is not None) for each in seconds]
    spent = [[now[name] - before[name] for name in PARTS] for before, now in pairwise(watch.rounds)]
    row = {
        "rounds": len(lines),
        "answered": min(len(line["nodes"]) for line in lines),
        "first_seconds": lines[0]["seconds"]["local"],
        "collect_seconds": median(each["local"] for each in seconds),
        "spread_seconds": median(each[-1] - each[0] for each in nodes),
        "combine_seconds": median(each["combine"] for each in seconds),
        "distill_seconds": median(each["distill"] for each in seconds),
        "frames_mb": max(line["payload_bytes"] + line["overhead_bytes"] for line in lines) / 1e6,
    }
    for number, name in enumerate(PARTS):
        row[f"{name}_cpu"] = median(each[number] for each in spent) if spent else None
        row[f"{name}_mb"] = watch.peak[name]
    row["nodes_mb"] = watch.held
    return {name: round(value, 3) if isinstance(value, float) else value for name, value in row.items()}


def start(log: Path, module: str, *arguments: object) -> subprocess.Popen[bytes]:
    """Start a module's program; what it says goes to a file."""
    with log.open("ab") as output:
        command = [sys.executable, "-m", module, *map(str, arguments)]
        return subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a program, and what is left of it."""
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(30)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def said(log: Path) -> str:
    """Return what a program has said."""
    return log.read_text(errors="replace") if log.exists() else ""


def wait(what: Any, seconds: float, process: subprocess.Popen[bytes] | None = None) -> None:
    """Wait until something is so."""
    end = time.monotonic() + seconds
    while not what():
        if time.monotonic() > end or (process is not None and process.poll() is not None):
            raise subprocess.TimeoutExpired("fleet", seconds)
        time.sleep(0.2)


def main() -> None:
    """Measure all sizes; print the rows, and keep them in a folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--real", default="", help="numbers of real nodes, as 2,4,8,16")
    parser.add_argument("--simulated", default="", help="numbers of simulated nodes, as 10,100,1000")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--patience", type=float, default=900.0, help="seconds after which a deployment is given up")
    parser.add_argument("--out", type=Path, help="a folder for fleet.json")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what was started is ended
    asked = [(int(word), False) for word in given.real.split(",") if word]
    asked += [(int(word), True) for word in given.simulated.split(",") if word]
    for count, simulated in asked:
        row = measure(count, given.rounds, given.patience, simulated=simulated)
        sys.stdout.write(json.dumps(row) + "\n")
        sys.stdout.flush()
        if given.out is not None and "rounds" in row:
            keep(given.out / "fleet.json", row)


def keep(path: Path, row: Row) -> None:
    """Add a row to those that were kept before, in the place of one of the same size."""
    path.parent.mkdir(parents=True, exist_ok=True)
    before = json.loads(path.read_text())["rows"] if path.exists() else []
    rows = [each for each in before if (each["kind"], each["nodes"]) != (row["kind"], row["nodes"])]
    rows = sorted([*rows, row], key=lambda each: (each["kind"], each["nodes"]))
    sizes = {kind: ",".join(str(r["nodes"]) for r in rows if r["kind"] == kind) for kind in ("real", "simulated")}
    options = " ".join(f"--{kind} {said}" for kind, said in sizes.items() if said)
    kept = {"command": f"python -m benchmarks.fleet {options}", "seeds": [0], "rows": rows}
    path.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
