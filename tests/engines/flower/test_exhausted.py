"""A real deployment that runs out of disk, file handles or memory, at either end; what was freed lets it go on.

Each time the run must end with a sentence that says what to free, without a process left behind, and --resume must come
to the result of an undisturbed run, bit for bit.
"""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.engines.flower.machines import Machines, rounds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = [
    pytest.mark.slow,
    pytest.mark.waits,
    pytest.mark.skipif(sys.platform != "linux", reason="tmpfs, prlimit and /proc"),
]
SIZE = 64 << 20  # bytes of a small disk


@pytest.fixture
def some(tmp_path: Path) -> Iterator[Machines]:
    machines = Machines(tmp_path, ("rounds = 3", "rounds = 14"))
    yield machines
    machines.kill_all()
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
    assert some.running.pop("aggregator").wait(150) == 2, some.said("aggregator")[-3000:]
    log = some.folder / "flower/flower/runner.log"
    assert saying in some.said("aggregator"), some.said("aggregator")[-3000:] + log.read_text()[-5000:]
    assert "Traceback" not in some.said("aggregator")
    some.wait_for(lambda: not some.processes(holding=str(some.folder / "flower")), 15)


def one_more_round(some: Machines) -> None:
    number = len(rounds(some)) + 1
    some.wait_for(lambda: len(rounds(some)) >= number, 120)


def handles(identity: int) -> tuple[int, int]:
    """Return the limit that leaves a process no file handle: the lowest number that is free."""
    taken = set(map(int, os.listdir(f"/proc/{identity}/fd")))
    return resource.RLIMIT_NOFILE, min(set(range(len(taken) + 1)) - taken)


def memory(identity: int) -> tuple[int, int]:
    """Return the limit that leaves a process no memory."""
    pages = int(Path(f"/proc/{identity}/statm").read_text().split()[0])
    return resource.RLIMIT_AS, pages * resource.getpagesize()


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


def process(some: Machines, program: str, *, of: str) -> int:
    """Find the one process of a deployment that runs a program."""
    found = [each for each in some.processes(holding=of) if program in Path(f"/proc/{each}/cmdline").read_text()]
    return min(found)  # forks of it are younger


def test_either_end_runs_out_of_disk_file_handles_and_memory(some: Machines) -> None:
    """Without file handles a SuperNode begins anew, without memory its worker: then the run goes on by itself."""
    aggregator = some.folder / "flower"
    node = some.folder / "nodes/east"
    mount(aggregator)
    mount(node)
    some.undisturbed()
    some.start_all()
    for folder, saying in ((aggregator, "free some space"), (node, "disk: the node cannot write to its disk")):
        one_more_round(some)
        filler = fill(folder)
        stops(some, saying=saying)
        filler.unlink()
        some.aggregator("--resume")
    for what, saying in ((handles, "no file handles are left"), (memory, "free some memory")):
        one_more_round(some)
        with limited(process(some, "launch.runner", of=str(aggregator)), what):
            stops(some, saying=saying)
        some.aggregator("--resume")
    one_more_round(some)
    with limited(process(some, "flower-supernode", of="nodes/east/"), handles):
        some.wait_for(lambda: "no file handles are left" in some.said("east"), 60)
        one_more_round(some)
    with limited(process(some, "patches.prefork", of="nodes/east/"), memory):
        log = node / "log.txt"
        said = "a message failed: memory ran out: free some memory"
        some.wait_for(lambda: said in log.read_text(), 60)
        one_more_round(some)
    assert some.running.pop("aggregator").wait(180) == 0, some.said("aggregator")[-3000:]
    assert some.same()
    some.clean_up()
