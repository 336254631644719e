"""Install the package with each extra alone into an empty environment, and try what the extra is for.

    python docs/try_extras.py                 all extras, and none (several minutes)
    python docs/try_extras.py text report     these

`make extras` runs it. Nothing of the environment that runs it is used but Python.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).parent.parent
LIGHT = "allocate --weights 1,1,16,16 --total 2048 --vocab 256"
# What is tried: arguments of `fpld`, or code of Python.
TRIED = {
    "": [LIGHT, "plan --links 2Mbit/s,1Mbit/s --clips 4,8 --deadline 60 --contexts 64 --vocab 64 --total 6"],
    "dashboard": ["import fpld.web, starlette, uvicorn"],
    "export": ["import pyarrow, tensorboardX"],
    "fast": ["import numba, fpld.codecs.uniform.kernels"],
    "figures": ["import matplotlib, fpld.report.draw"],
    "flower": ["import fpld.engines.flower", "certs --address 127.0.0.1:8000"],
    "huggingface": ["import fpld.students.huggingface"],
    "mlflow": ["from fpld.federation.tracking import tracker_class; tracker_class('mlflow')"],
    "privacy": ["from fpld.privacy import noise_for; print(noise_for(3, 1e-5, rate=0.3, steps=60))"],
    "quantized": ["import bitsandbytes, fpld.students.huggingface"],
    "report": ["import fpld.report.page"],
    "simulation": ["import fpld.engines.flower.simulation, ray"],
    "text": ["check adaptive"],
    "wandb": ["from fpld.federation.tracking import tracker_class; tracker_class('wandb')"],
    "torch": ["import fpld.students.transformer"],
}
DEVELOPMENT = {"dev", "docs"}


def extras() -> list[str]:
    """Return the names of the extras for users."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return sorted(set(project["optional-dependencies"]) - DEVELOPMENT)


def attempt(extra: str) -> list[str]:
    """Return what failed for an extra."""
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = str(Path(folder, "Scripts" if sys.platform == "win32" else "bin", "python"))
        target = f"{ROOT}[{extra}]" if extra else str(ROOT)
        pins = ["-c", str(ROOT / "constraints.txt")]
        commands = [[python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *pins, target]]
        for tried in ["--version", *TRIED[extra]]:
            code = tried.startswith(("import ", "from "))
            commands.append([python, "-c", tried] if code else [python, "-m", "fpld", *tried.split()])
        for command in commands:
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
            if done.returncode:
                return [f"{' '.join(command[1:])}: {done.stderr.strip()[-1500:]}"]
    return []


def main() -> int:
    """Try the extras."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("extras", nargs="*", help="(default: none of them, then each alone)")
    failed = False
    for extra in parser.parse_args().extras or ["", *extras()]:
        start = time.monotonic()
        found = attempt(extra)
        print(f"{extra or '(none)'}: {'; '.join(found) or 'works'} ({time.monotonic() - start:.0f} s)", flush=True)
        failed |= bool(found)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
