"""Kill runs at random moments, or damage their files, resume them, and compare what comes of it bit for bit.

    python -m benchmarks.kill_and_resume [CONFIG.toml] [--kills 200] [--workers] [--jobs 2] [--seed 0]
    python -m benchmarks.kill_and_resume [CONFIG.toml] --damage 50

A run is killed with SIGKILL, together with its worker processes, up to four times on its way: each time at a moment
that is uniform over the time that an undisturbed run works. With --workers only one of its worker processes is killed:
the run must then end by itself, and say in a line why. With --damage one file of a run that was stopped in its
last round is changed: some bits, its end cut off, all of it, or the file of a run with another seed in its place. Then
it is resumed to its end. Students, table and trace must be those of an undisturbed run, or, of a damaged one, the
resumed run must say in a line what is wrong. Without CONFIG.toml it is a federation of three nodes with n-gram
students, two worker processes and three rounds. The exit code is 1 if anything else happens.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from tests.federation.conftest import CONFIG, write_texts

EACH = 4  # kills of a run at most
LOST_SECONDS = 60.0  # in which a run that has lost a worker must end
SHORT = ("workers = 0", "workers = 2"), ("contexts = 480", "contexts = 96"), ("steps = 60", "steps = 20")
LAST = "fpld/trace.jsonl"
SHOWN = {"lock", "heartbeat", "README.txt"}  # files without content that a run would read


def command(config: Path, out: Path) -> list[str]:
    """Return the command that starts a run in `out`, or resumes it."""
    more = ["--resume"] if (out / "config.toml").exists() else []
    return [sys.executable, "-m", "fpld", "run", str(config), "--out", str(out), "--json", *more]


def finish(config: Path, out: Path) -> dict[str, object]:
    """Run or resume to the end; return the result: students, table, and the trace but for its times."""
    done = subprocess.run(command(config, out), capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return result(out)


def result(out: Path) -> dict[str, object]:
    """Return what a run came to."""
    files = ("student.safetensors", "student-best.safetensors", "result.json", "own.json")
    found: dict[str, object] = {name: (out / name).read_bytes() for name in files}
    lines = [json.loads(line) for line in (out / LAST).read_text().splitlines()]
    return found | {LAST: [{**line, "seconds": None} for line in lines]}


class Undisturbed(NamedTuple):
    """How many seconds an undisturbed run has worked, and what it came to."""

    span: float
    result: dict[str, object]


def undisturbed(config: Path, folder: Path) -> Undisturbed:
    """Run to the end without trouble."""
    started = begin(config, folder / "undisturbed")
    begun = time.monotonic()
    if started.wait():
        raise RuntimeError(f"an undisturbed run of {config} fails")
    return Undisturbed(time.monotonic() - begun, result(folder / "undisturbed"))


def begin(config: Path, out: Path) -> subprocess.Popen[bytes]:
    """Start or resume in a process group of its own, and wait until it works."""
    since = time.time()
    with errors_of(out).open("w") as errors:
        victim = subprocess.Popen(
            command(config, out), stdout=subprocess.DEVNULL, stderr=errors, start_new_session=True
        )
    status = out / "status.json"
    while victim.poll() is None and not (status.exists() and status.stat().st_mtime >= since):
        time.sleep(0.005)
    return victim


def errors_of(out: Path) -> Path:
    """Return the file with what a run has last written on standard error."""
    return out.with_suffix(".stderr")


def workers_of(process: int) -> list[int]:
    """Return the worker processes of a run: its children, but for Python's tracker of resources."""
    children = Path(f"/proc/{process}/task/{process}/children")
    with contextlib.suppress(OSError):
        numbers = map(int, children.read_text().split())
        return [each for each in numbers if b"spawn_main" in Path(f"/proc/{each}/cmdline").read_bytes()]
    return []


def lose_worker(victim: subprocess.Popen[bytes], rng: random.Random) -> bool:
    """Kill one of a run's worker processes, and wait for the run's end; return whether there was one.

    Raises
    ------
    RuntimeError
        If the run goes on for longer than `LOST_SECONDS`.
    """
    workers = workers_of(victim.pid)
    if not workers:
        kill(victim)
        return False
    with contextlib.suppress(ProcessLookupError):
        os.kill(rng.choice(workers), signal.SIGKILL)
    try:
        victim.wait(LOST_SECONDS)
    except subprocess.TimeoutExpired:
        kill(victim)
        raise RuntimeError(f"a run that lost a worker did not end in {LOST_SECONDS:g} s") from None
    return True


def kill(victim: subprocess.Popen[bytes]) -> bool:
    """Kill the whole process group; return whether there was anything left to kill."""
    alive = victim.poll() is None
    if alive:
        os.killpg(victim.pid, signal.SIGKILL)
    victim.wait()
    return alive


class Kills:
    """Runs that are killed and resumed, until there were as many kills as wanted."""

    def __init__(self, config: Path, folder: Path, expected: Undisturbed, seed: int, *, workers: bool = False) -> None:
        self.config = config
        self.workers = workers
        self.folder = folder
        self.seed = seed
        self.span, self.expected = expected
        self.kills = 0
        self.differing = list[int]()
        self._runs = 0
        self._lock = threading.Lock()

    def run(self, wanted: int) -> None:
        """Kill runs one after the other until there were so many kills, in this thread and others together."""
        while True:
            with self._lock:
                if self.kills >= wanted:
                    return
                self._runs += 1
                number = self._runs
            self._one(number)

    def _one(self, number: int) -> None:
        out = self.folder / f"run-{number}"
        moments = random.Random(f"{self.seed}/{number}")  # noqa: S311
        times: list[str] = []
        for _ in range(EACH):
            victim = begin(self.config, out)
            begun = time.monotonic()
            seconds = moments.random() * self.span
            with contextlib.suppress(subprocess.TimeoutExpired):
                victim.wait(seconds)
            if victim.poll() is not None:  # it was quicker than the undisturbed one: so are the next
                self.span = min(self.span, time.monotonic() - begun)
                break
            if not self.workers:
                kill(victim)
            elif not lose_worker(victim, moments):
                continue
            elif victim.returncode:
                self._check_lost(victim.returncode, out)
            times.append(f"{seconds:.1f}")
        same = finish(self.config, out) == self.expected
        with self._lock:
            self.kills += len(times)
            said = f"run {number}: killed after {', '.join(times) or 'its end'} of {self.span:.1f} s"
            sys.stderr.write(f"{said}: {'same' if same else 'DIFFERS'} ({self.kills} kills)\n")
            if not same:
                self.differing.append(number)
        if same:
            shutil.rmtree(out)

    @staticmethod
    def _check_lost(code: int, out: Path) -> None:
        """Check how a run has ended that lost a worker: with a line that says so, and no traceback."""
        errors = errors_of(out).read_text()
        if code != 2 or "worker process" not in errors or "Traceback" in errors:
            raise RuntimeError(f"a run that lost a worker ended with {code}: {errors[-2000:]}")


def differing(
    config: Path, folder: Path, expected: Undisturbed, *, kills: int, seed: int, jobs: int = 1, workers: bool = False
) -> tuple[int, list[int]]:
    """Return how many kills there were, and the runs whose result differs from that of an undisturbed one.

    With `workers` only a worker process of a run is killed at a time.
    """
    found = Kills(config, folder, expected, seed, workers=workers)
    with ThreadPoolExecutor(jobs) as pool:
        for future in [pool.submit(found.run, kills) for _ in range(jobs)]:
            future.result()
    return found.kills, found.differing


def stopped(config: Path, out: Path) -> Path:
    """Make a run that was killed when its last round was closing: every kind of file is there."""
    rounds = int(config.read_text().split("rounds = ")[1].split()[0])
    victim = begin(config, out)
    while victim.poll() is None:
        if (out / LAST).exists() and len((out / LAST).read_text().splitlines()) >= rounds - 1:
            break
        time.sleep(0.005)
    time.sleep(0.2)
    if not kill(victim):
        raise RuntimeError("the run ended before it could be stopped")
    return out


DAMAGES = ("flipped", "cut", "emptied", "of another run")


def damage(path: Path, how: str, other: Path, rng: random.Random) -> bool:
    """Damage a file; return whether it has changed."""
    good = path.read_bytes()
    data = bytearray(good)
    if how == "flipped":
        for _ in range(rng.randrange(1, 4)):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif how == "cut":
        del data[rng.randrange(len(data)) :]
    elif how == "emptied":
        data.clear()
    else:
        data = bytearray(other.read_bytes()) if other.exists() else data
    path.write_bytes(bytes(data))
    return bytes(data) != good


def judge(config: Path, out: Path, expected: dict[str, object]) -> str:
    """Resume a damaged run; return what happened in a word."""
    done = subprocess.run(command(config, out), capture_output=True, text=True)
    if "Traceback" in done.stderr:
        return "TRACEBACK"
    if done.returncode == 2 and done.stderr.strip():
        return "refused"
    if done.returncode or result(out) != expected:
        return "DIFFERS"
    return "identical, and said" if "going on from the one before it" in done.stderr else "identical"


def damaged(config: Path, folder: Path, expected: Undisturbed, *, cases: int, seed: int) -> list[tuple[str, str, str]]:
    """Damage runs, resume them; return file, damage and outcome of each."""
    other = config.with_name("other.toml")
    other.write_text(config.read_text().replace("seed = 5", "seed = 6"))
    source = stopped(config, folder / "stopped")
    foreign = stopped(other, folder / "other")
    names = [str(path.relative_to(source)) for path in sorted(source.rglob("*")) if path.is_file()]
    chosen = [name for name in names if Path(name).name not in SHOWN and "/nodes/1/" not in name]
    pairs = [(name, how) for name in chosen for how in DAMAGES if (source / name).stat().st_size]
    rng = random.Random(seed)  # noqa: S311
    rows = list[tuple[str, str, str]]()
    rng.shuffle(pairs)
    pairs.sort(key=lambda pair: "checkpoint." not in pair[0] and "state." not in pair[0])  # the newest states first
    for name, how in pairs:
        out = folder / "damaged"
        shutil.copytree(source, out)
        if len(rows) < cases and damage(out / name, how, foreign / name, rng):
            rows.append((name, how, judge(config, out, expected.result)))
            sys.stderr.write(f"{len(rows)}: {name} {how}: {rows[-1][2]}\n")
        shutil.rmtree(out)
    return rows


def main() -> int:
    """Read the arguments, and say how many results are right."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kill_and_resume", description=__doc__)
    parser.add_argument("config", type=Path, nargs="?")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--workers", action="store_true", help="kill one worker process at a time, not the run")
    parser.add_argument("--damage", type=int, metavar="CASES", help="damage files instead")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time that are killed")
    parser.add_argument("--seed", type=int, default=0)
    a = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = folder / "config.toml"
        if a.config is None:
            write_texts(folder)
            text = CONFIG.format(folder=folder) + '\n[baselines]\nmethods = ["fedavg"]\n'
            for old, new in SHORT:
                text = text.replace(old, new)
            config.write_text(text)
        else:
            shutil.copy(a.config, config)
        expected = undisturbed(config, folder)
        if a.damage is not None:
            rows = damaged(config, folder, expected, cases=a.damage, seed=a.seed)
            counts = Counter(outcome for _, _, outcome in rows)
            said = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))
            sys.stdout.write(f"{len(rows)} damaged files of {len({row[0] for row in rows})} kinds: {said}\n")
            return int(bool(counts["DIFFERS"] + counts["TRACEBACK"]))
        kills, bad = differing(config, folder, expected, kills=a.kills, seed=a.seed, jobs=a.jobs, workers=a.workers)
        what = "kills of workers" if a.workers else "kills"
        sys.stdout.write(f"{kills} {what}, {len(bad)} results differ from the undisturbed run's\n")
        return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
