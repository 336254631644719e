"""A real deployment that runs out of disk, file handles or memory, at either end; what was freed lets it go on.

Each time the run must end with a sentence that says what to free, without a process left behind, and --resume must come
to the result of an undisturbed run, bit for bit.
"""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.flower.machines import Machines, rounds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = [
    pytest.mark.slow,
    pytest.mark.waits,
    pytest.mark.skipif(sys.platform != "linux", reason="tmpfs, prlimit and /proc"),
]
SIZE = 64 << 20  # bytes of a small disk


@pytest.fixture
def some(tmp_path: Path) -> Iterator[Machines]:
    machines = Machines(tmp_path, ("rounds = 3", "rounds = 12"))
    yield machines
    for identity in machines.processes():
        with contextlib.suppress(ProcessLookupError):
            os.kill(identity, signal.SIGKILL)
    for folder in (tmp_path / "flower", tmp_path / "nodes/east"):
        subprocess.run(["/bin/umount", "-l", folder], capture_output=True)


def mount(folder: Path) -> None:
    """Put a folder, with what is in it, on a small disk of its own."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a file system")
    folder.mkdir(exist_ok=True)
    aside = folder.with_name(folder.name + "-before")
    shutil.copytree(folder, aside)
    done = subprocess.run(["/bin/mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", folder], capture_output=True)
    if done.returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr.decode()}")
    shutil.copytree(aside, folder, dirs_exist_ok=True)


def fill(folder: Path) -> Path:
    """Take all that is left of a disk."""
    file = folder / "filler"
    with contextlib.suppress(OSError), file.open("wb", buffering=0) as filler:
        while True:
            filler.write(bytes(1 << 12))
    return file


def stops(some: Machines, *, saying: str) -> None:
    """Wait for the aggregator to end; it must say what to free, and leave nothing behind."""
    process = some.running.pop("aggregator")
    assert process.wait(120) == 1, some.said("aggregator")[-3000:]
    assert saying in some.said("aggregator"), some.said("aggregator")[-3000:]
    assert "Traceback" not in some.said("aggregator")
    some.wait_for(lambda: not some.processes(holding=str(some.folder / "flower")), 15)


def goes_on(some: Machines) -> None:
    """Resume; the result must be that of the undisturbed run."""
    assert len(rounds(some)) < 12
    some.aggregator("--resume")
    assert some.running.pop("aggregator").wait(180) == 0, some.said("aggregator")[-3000:]
    assert some.same()
    some.clean_up()


def begin(some: Machines) -> None:
    some.undisturbed()
    some.start_all()
    some.wait_for(lambda: len(rounds(some)) >= 2, 120)


def test_the_aggregators_disk_is_full(some: Machines) -> None:
    mount(some.folder / "flower")
    begin(some)
    filler = fill(some.folder / "flower")
    stops(some, saying="free some space")
    filler.unlink()
    goes_on(some)


def test_a_nodes_disk_is_full(some: Machines) -> None:
    mount(some.folder / "nodes/east")
    begin(some)
    filler = fill(some.folder / "nodes/east")
    stops(some, saying="disk: the site cannot write to its disk")
    filler.unlink()
    goes_on(some)


def handles(identity: int) -> tuple[int, int]:
    """Return the limit that leaves a process no file handle."""
    return resource.RLIMIT_NOFILE, len(os.listdir(f"/proc/{identity}/fd"))


def memory(identity: int) -> tuple[int, int]:
    """Return the limit that leaves a process no memory."""
    with open(f"/proc/{identity}/statm") as file:
        return resource.RLIMIT_AS, int(file.read().split()[0]) * resource.getpagesize()


@contextlib.contextmanager
def limited(identity: int, what: Callable[[int], tuple[int, int]]) -> Iterator[None]:
    """Limit a process to what it has now."""
    kind, now = what(identity)
    before = resource.prlimit(identity, kind)
    resource.prlimit(identity, kind, (now, before[1]))
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(identity, kind, before)


@pytest.mark.parametrize(("what", "saying"), [(handles, "no file handles are left"), (memory, "memory")])
def test_the_run_has_no_file_handles_or_memory_left(
    some: Machines, what: Callable[[int], tuple[int, int]], saying: str
) -> None:
    begin(some)
    (runner,) = some.processes(holding="flower.runner")
    with limited(runner, what):
        stops(some, saying=saying)
    goes_on(some)


@pytest.mark.parametrize("what", [handles, memory])
def test_a_node_has_no_file_handles_or_memory_left(some: Machines, what: Callable[[int], tuple[int, int]]) -> None:
    begin(some)
    spawner = min(some.processes(holding="nodes/east/"), key=lambda identity: "spawner" not in _command(identity))
    assert "spawner" in _command(spawner)
    with limited(spawner, what):
        stops(some, saying="resources: the site ran out of memory, time or file handles")
    goes_on(some)


def _command(identity: int) -> str:
    with open(f"/proc/{identity}/cmdline") as file:
        return file.read()
