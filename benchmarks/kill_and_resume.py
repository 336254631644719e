"""Kill a run with SIGKILL at random moments, resume it, and compare the students bit for bit.

    python benchmarks/kill_and_resume.py CONFIG.toml [--trials 20] [--kills 2] [--seed 0]

Every trial is killed `kills` times, together with its worker processes, at moments that are uniform over the time
that an undisturbed run takes; then it is resumed to its end. The exit code is 1 if any student differs.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def command(config: Path, out: Path) -> list[str]:
    """Return the command that starts a run in `out`, or resumes it."""
    more = ["--resume"] if (out / "config.toml").exists() else []
    return [sys.executable, "-m", "fpld", "run", str(config), "--out", str(out), "--json", *more]


def finish(config: Path, out: Path) -> bytes:
    """Run or resume to the end; return the student's bytes."""
    done = subprocess.run(command(config, out), capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return (out / "student.safetensors").read_bytes()


def kill_after(config: Path, out: Path, seconds: float) -> None:
    """Start or resume, and kill the whole process group after some seconds."""
    quiet = subprocess.DEVNULL
    victim = subprocess.Popen(command(config, out), stdout=quiet, stderr=quiet, start_new_session=True)
    time.sleep(seconds)
    os.killpg(victim.pid, signal.SIGKILL)
    victim.wait()


def differing(config: Path, folder: Path, *, trials: int, kills: int, seed: int) -> list[int]:
    """Return the trials whose student differs from that of an undisturbed run."""
    started = time.monotonic()
    expected = finish(config, folder / "undisturbed")
    whole = time.monotonic() - started
    moments = random.Random(seed)  # noqa: S311
    found = []
    for trial in range(trials):
        out = folder / f"trial-{trial}"
        times = [moments.random() * whole for _ in range(kills)]
        for seconds in times:
            kill_after(config, out, seconds)
        same = finish(config, out) == expected
        killed = ", ".join(f"{seconds:.1f}" for seconds in times)
        sys.stderr.write(f"trial {trial}: killed after {killed} of {whole:.1f} s: {'same' if same else 'DIFFERS'}\n")
        if not same:
            found.append(trial)
    return found


def main() -> int:
    """Read the arguments and say how many students are identical."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("config", type=Path)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--kills", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    a = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        bad = differing(a.config, Path(folder), trials=a.trials, kills=a.kills, seed=a.seed)
    sys.stdout.write(f"{a.trials - len(bad)} of {a.trials} students identical\n")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
