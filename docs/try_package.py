"""Build wheel and source distribution, check them, and install the wheel into an empty environment.

    python docs/try_package.py                build into dist/, check, install (some minutes of downloads)
    python docs/try_package.py --no-install   build and check alone

`make package` runs it. What is checked: `twine check`; that both have the version of `fpld.__version__`, and that this
version has a section in the changelog; that the wheel made from the source distribution is the wheel made here, file by
file; and that `fpld --version` and a small plan run from the installed wheel.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
PLAN = "allocate --weights 1,1,16,16 --total 2048 --vocab 256"


class Distributions(NamedTuple):
    """The files that an index gets."""

    wheel: Path
    source: Path


def run(*command: str, cwd: Path = ROOT) -> str:
    """Run a command; return what it prints."""
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout


def version() -> str:
    """Return the version, which stands in one place."""
    return re.findall(r'^__version__ = "([^"]+)"$', (ROOT / "fpld/__init__.py").read_text(), re.MULTILINE)[0]


def build(folder: Path, root: Path = ROOT) -> Distributions:
    """Build both from a folder of sources."""
    run(sys.executable, "-m", "hatchling", "build", "-d", str(folder), cwd=root)
    (wheel,) = folder.glob(f"fpld-{version()}-*.whl")
    return Distributions(wheel, folder / f"fpld-{version()}.tar.gz")


def members(wheel: Path) -> dict[str, int]:
    """Return the files of a wheel with their checksums, but for the list of them."""
    with zipfile.ZipFile(wheel) as archive:
        return {each.filename: each.CRC for each in archive.infolist() if not each.filename.endswith("/RECORD")}


def check(made: Distributions) -> None:
    """Check names, metadata and that the source distribution gives the same wheel."""
    run(sys.executable, "-m", "twine", "check", "--strict", str(made.wheel), str(made.source))
    if f"## {version()}\n" not in (ROOT / "CHANGELOG.md").read_text():
        raise SystemExit(f"CHANGELOG.md has no section {version()}")
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(made.source) as archive:
            archive.extractall(folder, filter="data")
        again = build(Path(folder, "dist"), Path(folder, f"fpld-{version()}"))
        if members(again.wheel) != members(made.wheel):
            different = set(members(again.wheel).items()) ^ set(members(made.wheel).items())
            raise SystemExit(f"the source distribution gives another wheel: {sorted(different)[:5]}")


def install(made: Distributions) -> None:
    """Install the wheel into an empty environment, and use it there."""
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = str(Path(folder, "Scripts" if sys.platform == "win32" else "bin", "python"))
        pins = ["-c", str(ROOT / "constraints.txt")]
        run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *pins, str(made.wheel))
        shown = run(python, "-I", "-m", "fpld", "--version", cwd=Path(folder))
        if version() not in shown:
            raise SystemExit(f"fpld --version says {shown!r}, not {version()}")
        run(python, "-I", "-m", "fpld", *PLAN.split(), cwd=Path(folder))


def main() -> int:
    """Build, check, install."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder for both (default: dist)")
    parser.add_argument("--no-install", action="store_true", help="build and check alone")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    made = build(arguments.out)
    check(made)
    if not arguments.no_install:
        install(made)
    for file in made:
        print(f"{file} ({file.stat().st_size / 1e6:.1f} MB)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
