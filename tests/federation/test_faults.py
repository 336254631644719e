"""Nodes that fail or are late: named, left out, picked up again; never a silent average below the quorum."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from fpld import config as configuration
from fpld.cli import main
from fpld.engines.local import LocalEngine
from fpld.engines.pool import Inline
from fpld.errors import QuorumError
from fpld.federation import workers
from fpld.federation.prepare import prepare
from fpld.federation.record import Incident
from fpld.federation.rounds import Federation
from fpld.storage.run_folder import RunFolder

if TYPE_CHECKING:
    from concurrent.futures import Executor
    from pathlib import Path

    from fpld.node.round import NodePaths
    from fpld.node.spec import NodeSpec


pytestmark = pytest.mark.slow


def federation(
    config_file: Path, *changes: tuple[str, str], pool: Executor | None = None
) -> tuple[Federation, LocalEngine]:
    text = config_file.read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    config = configuration.parse_config(text, "test")
    store = RunFolder(config_file.parent / "run")
    prepared = prepare(config, store)
    run = Federation(config, store, prepared, "fpld", pool=pool or Inline())
    return run, LocalEngine(run, prepared.bytes_per_token)


def test_a_failing_node_is_named_and_the_others_go_on(config_file: Path) -> None:
    run, engine = federation(config_file, ("rounds = 3", "rounds = 3\nquorum = 2"))
    text = config_file.parent / "run/private/text/1.safetensors"
    good = text.read_bytes()
    text.write_bytes(good[:100])
    first = run.advance(engine)
    assert first.nodes == ["north", "south"]
    (incident,) = first.absent
    assert (incident.node, incident.state) == ("east", "failed")
    assert "text/1.safetensors" in incident.reason
    text.write_bytes(good)
    assert run.advance(engine).nodes == ["north", "east", "south"]


def test_below_the_quorum_the_run_stops_with_names_and_reasons(
    config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, engine = federation(config_file)
    (config_file.parent / "run/private/text/0.safetensors").unlink()
    with pytest.raises(QuorumError, match=r"2 of 3 nodes answered, the quorum is 3; missing: north; north: failed: "):
        run.advance(engine)
    assert not (config_file.parent / "run/fpld/checkpoint.safetensors").exists()
    assert main(["run", str(config_file), "--out", str(tmp_path / "other")]) == 0
    capsys.readouterr()


def test_a_late_node_is_refused_then_takes_part_again(config_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The slow node hangs on an event, not on the clock, so that the order of things is certain."""
    released = threading.Event()
    real = workers.node_round

    def slow(spec: NodeSpec, paths: NodePaths, task: bytes) -> bytes:
        if spec.name == "north" and not released.is_set():
            released.wait(60)
        return real(spec, paths, task)

    monkeypatch.setattr(workers, "node_round", slow)
    with ThreadPoolExecutor(4) as pool:
        run, engine = federation(config_file, ("rounds = 3", "rounds = 3\nquorum = 2\ndeadline = 3.0"), pool=pool)
        first = run.advance(engine)
        assert first.nodes == ["east", "south"]
        assert first.absent == [Incident("north", "late", "no answer within 3 s")]
        second = run.advance(engine)
        assert second.absent == [Incident("north", "busy", "with an earlier round")]
        released.set()
        while engine.busy:
            threading.Event().wait(0.02)
        assert run.aggregator is not None
        refused = [receipt for receipt in run.aggregator.receipts if receipt.verdict == "refused"]
        assert [receipt.node for receipt in refused] == [0]
        assert "late" in refused[0].reason
        assert run.advance(engine).nodes == ["north", "east", "south"]
