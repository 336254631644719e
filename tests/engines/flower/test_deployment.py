"""A real deployment on loopback: SuperLink with TLS and node authentication, SuperNodes in processes of their own."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import TYPE_CHECKING

import pytest

from tests.engines.flower.conftest import NAMES
from tests.engines.flower.machines import Machines, rounds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36

pytestmark = [
    pytest.mark.slow,
    pytest.mark.waits,
    pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc"),
]


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Callable[..., Machines]]:
    made: list[Machines] = []

    def make(*changes: tuple[str, str]) -> Machines:
        made.append(Machines(tmp_path, *changes))
        return made[-1]

    yield make
    for each in made:
        each.kill_all()  # only if a test has failed


def test_a_node_that_dies_is_named_and_comes_back(machines: Callable[..., Machines]) -> None:
    """Two rounds with all; then a node is killed while it trains; the others go on, and it returns a round later."""
    some = machines(
        ("rounds = 3", "rounds = 7\nquorum = 2\ndeadline = 90.0"), ("[local]\nsteps = 25", "[local]\nsteps = 2500")
    )
    some.start_all()
    log = some.folder / "nodes/south/log.txt"
    some.wait_for(lambda: log.exists() and "round 3: training" in log.read_text(), 150)
    some.kill("south")
    assert "round 3: sending" not in log.read_text()
    some.wait_for(lambda: len(rounds(some)) >= 3, 150)
    some.node("south")
    assert some.running["aggregator"].wait(240) == 0, some.said("aggregator")
    lines = rounds(some)
    assert [line["round"] for line in lines] == list(range(1, 8))
    assert [line["nodes"] for line in lines[:3]] == [list(NAMES), list(NAMES), ["north", "east"]]
    assert lines[2]["absent"] == [{"node": "south", "state": "lost", "reason": "its SuperNode stopped or died"}]
    assert lines[6]["nodes"] == list(NAMES), lines
    some.running.pop("aggregator")
    os.killpg(some.running["south"].pid, signal.SIGKILL)
    some.running.pop("south").wait()
    some.wait_for(lambda: not some.processes(holding="nodes/south"), 20)  # what it had started has gone with it
    assert [some.end(name) for name in NAMES if name != "south"] == [0, 0]
    some.clean_up()
    assert list((some.folder / "home").iterdir()) == []
    assert list((some.folder / "temporary").iterdir()) == []


def test_a_stop_is_clean(machines: Callable[..., Machines]) -> None:
    """An aggregator that is told to stop ends all that it started."""
    some = machines()
    some.aggregator()
    some.wait_for(lambda: "admitted" in some.said("aggregator"), 120)
    assert some.end("aggregator") == 128 + signal.SIGTERM
    assert some.said("aggregator").endswith("stopped; --resume continues from the last closed round\n")
    some.wait_for(lambda: not some.processes(), 20)


@pytest.fixture
def nobody_reaps() -> Iterator[None]:
    """Adopt orphans and reap none of them, as the first process of a container may."""
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    yield
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 0)


@pytest.mark.long
@pytest.mark.usefixtures("nobody_reaps")
def test_stock_flower_gives_the_same_after_a_kill(machines: Callable[..., Machines]) -> None:
    """With `patches = "none"` at both ends: Flower's own programs, no name replaced, TLS and keys as ever.

    The node `east` alone has all patches, at a SuperLink without any: either end may have them without the other.

    The SuperLink is killed in the first round, while nodes train, and in the second the aggregator with all that it has
    started. Trace and student are those of the undisturbed run, bit for bit: so are those of the patched deployment
    (`test_kills`), where nodes are killed too. Here a killed node is let in after a minute, and may miss the round.
    """
    some = machines(
        ("[engine]", '[engine]\npatches = "none"'),
        ("rounds = 3", "rounds = 3\ndeadline = 300.0"),
        ("[local]\nsteps = 25", "[local]\nsteps = 1200"),
    )
    for name in ("north", "south"):
        file = some.folder / "nodes" / name / "node.toml"
        file.write_text(f'patches = "none"\n{file.read_text()}')
    some.undisturbed()
    some.start_all()
    logs = [some.folder / "nodes" / name / "log.txt" for name in NAMES]
    some.wait_for(lambda: all(log.exists() and "round 1: training" in log.read_text() for log in logs), 600)
    for mark in ("FPLD_PINNED", "fpld.engines.flower.patches"):
        east = set(some.processes(holding="nodes/east/"))  # and again afterwards: processes begin and end meanwhile
        patched = set(some.processes(holding=mark))
        assert patched
        assert patched <= east | set(some.processes(holding="nodes/east/"))
    (superlink,) = some.processes(holding="--database")
    os.kill(superlink, signal.SIGKILL)
    some.wait_for(lambda: "round 2: local training" in some.said("aggregator"), 600)
    assert "flower-superlink stopped" in some.said("aggregator")
    some.kill("aggregator")
    some.wait_for(lambda: not some.processes(holding=str(some.folder / "flower/flower")), 60)
    some.aggregator("--resume")
    assert some.running["aggregator"].wait(600) == 0, some.said("aggregator")
    assert some.same(), rounds(some)
    assert "the code of each run is executed at this node" in some.said("north")
    some.running.pop("aggregator")
    assert [some.end(name) for name in NAMES] == [0, 0, 0]
    some.clean_up()
