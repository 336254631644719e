"""The same configuration gives the same trace and the same student over Flower as on one machine, bit for bit."""

from __future__ import annotations

import json
import os
import signal
import sys
from functools import partial
from typing import TYPE_CHECKING

import pytest

from fpld.engines.flower.client import client_app, run_forked
from fpld.engines.local import run_local
from fpld.errors import QuorumError
from fpld.federation.state import asked_nodes
from fpld.protocol.written import encode_text
from fpld.seeds import derive_key
from fpld.storage.run_folder import RunFolder
from tests.engines.flower.conftest import NAMES, WRITTEN, Deployment

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any

VARIANTS = {
    "weights": [],
    "logits and own models": [
        (
            'name = "south"',
            'name = "south"\nstudent = {kind = "ngram", order = 1, buckets = 512}',
        ),
        ("[baselines]", '[combine]\nbroadcast = "logits"\n\n[baselines]'),
        ("rounds = 3", "rounds = 2"),
    ],
    "refinement": [
        ("bits = 1.5", "bits = 4.0"),
        ("[baselines]", '[codec]\nname = "uniform"\nagainst = "own"\n\n[baselines]'),
    ],
    "weights of 16 bits": [("[baselines]", "[combine]\nweight_bits = 16\n\n[baselines]")],
    "labels over strings, a tokenizer of its own": [
        ("[tokenizer]", '[labels]\nover = "strings"\nsymbols = 300\n\n[tokenizer]'),
        ('name = "south"', 'name = "south"\ntokenizer = {kind = "bpe", vocab = 262}'),
        (
            'kind = "ngram"\norder = 2\nbuckets = 256\nbatch = 128',
            'kind = "transformer"\nlayers = 1\nwidth = 16\nheads = 2\nlength = 48\nbatch = 8',
        ),
        ("rounds = 3", "rounds = 2"),
    ],
    "predictive, adaptive": [
        (
            "[baselines]",
            '[codec]\nname = "predictive"\n\n[budget]\ntotal = 3.0\nestimator = "distortion"\n\n[baselines]',
        ),
        ("rounds = 3", "rounds = 2"),
    ],
    "written text": [*WRITTEN, ("rounds = 3", "rounds = 2")],
    "updates, rebuilt models write": [
        ("[baselines]", "[send]\nupdates = 2.0\n\n[written]\ncontexts = 160\n\n[baselines]"),
        ("order = 2\nbuckets = 256", "order = 1\nbuckets = 64"),
        ("rounds = 3", "rounds = 2"),
    ],
}


@pytest.mark.parametrize(
    "variant", [pytest.param(name, marks=[pytest.mark.slow] * (name != "refinement")) for name in VARIANTS]
)
def test_local_and_flower_give_the_same_trace_and_student(variant: str, tmp_path: Path) -> None:
    deployment = Deployment(tmp_path, VARIANTS[variant])
    deployment.allow(["labels", "text", "updates"])
    own = variant in ("logits and own models", "labels over strings, a tokenizer of its own")
    local = run_local(deployment.config, deployment.text, tmp_path / "local", resume=False)
    # A deployment draws its key at random: here it is the one of the local run, since dither depends on it.
    fixed = {"session": "ab" * 32, "key": derive_key(deployment.config.run.seed).hex()}
    RunFolder(tmp_path / "flower").write_json("session.json", fixed)
    grid = deployment.grid()
    flower = deployment.serve(grid)
    assert deployment.trace("flower") == deployment.trace("local")
    assert (tmp_path / "flower/student.safetensors").read_bytes() == (
        tmp_path / "local/student.safetensors"
    ).read_bytes()
    # What is sent down differs: over a network the student travels once, and signed messages and files besides.
    for row in (*flower, *local):
        assert row.pop("downlink_bytes") >= 0
        row["behind"] = row["behind_se"] = None  # the losses of single windows stay at the sites
    # The base model is evaluated with the first task: its row is that of one machine too.
    assert flower == [row for row in local if row["method"] in ("base", "fpld")]
    assert len(flower) == 2
    # One message for each node and round, one to join, and one to evaluate the last student.
    rounds = deployment.config.run.rounds
    for kind, count in (("query.join", 1), ("train", rounds), ("evaluate", 1)):
        assert sum(found == kind for _, found, _ in grid.sent) == 3 * count
    assert json.loads((tmp_path / "flower/status.json").read_text())["state"] == "done"
    # A model of the node's own kind learns from the last student at the site, as it does on one machine.
    adopted = [folder / "adopted.safetensors" for folder in sorted((tmp_path / "local/fpld/nodes").iterdir())]
    sites = [tmp_path / "nodes" / name / "runs" / ("ab" * 8) / "adopted.safetensors" for name in NAMES]
    assert [path.exists() for path in adopted] == [path.exists() for path in sites] == [False, False, own]
    assert not own or adopted[2].read_bytes() == sites[2].read_bytes()
    # The public files travel once, and so does each student, packed; the last line has the one that is evaluated last.
    lines = [json.loads(line) for line in (tmp_path / "flower/fpld/trace.jsonl").read_text().splitlines()]
    sizes = [line["student_bytes"] for line in lines]
    files = sum((tmp_path / "flower" / name).stat().st_size for name in ("base-0.safetensors", "probe.json"))
    assert [line["downlink"]["weights"] for line in lines] == [3 * size for size in [0, *sizes[:-2], sum(sizes[-2:])]]
    assert lines[0]["downlink"]["files"] >= 3 * files
    assert [line["downlink"]["files"] for line in lines[1:]] == [0] * (rounds - 1)
    # What is counted by kind is what the messages have; Flower's own head of a message is not in it.
    messages = [size for _, kind, size in grid.sent if kind != "query.join"]
    counted = sum(line["downlink_bytes"] for line in lines)
    assert 0 < sum(messages) - counted < 700 * len(messages)
    assert counted == sum(sum(line["downlink"].values()) for line in lines)
    for line in lines:
        assert sum(line["uplink"].get(kind, 0) for kind in ("labels", "text", "updates")) == line["payload_bytes"]
        assert {kind for kind in ("labels", "text", "updates") if line["uplink"].get(kind)} == (
            {"labels", "text"} if variant == "written text" else {"updates" if "updates" in variant else "labels"}
        )
        assert line["uplink"]["overhead"] == line["overhead_bytes"]


def test_a_part_of_the_nodes_is_asked_in_each_round_here_as_there(tmp_path: Path) -> None:
    """Two of three nodes, drawn by the seed; who is not asked is not absent, and evaluates the last student alone."""
    deployment = Deployment(tmp_path, [("rounds = 3", "rounds = 3\nfraction = 0.6")])
    local = run_local(deployment.config, deployment.text, tmp_path / "local", resume=False)
    fixed = {"session": "ab" * 32, "key": derive_key(deployment.config.run.seed).hex()}
    RunFolder(tmp_path / "flower").write_json("session.json", fixed)
    grid = deployment.grid()
    flower = deployment.serve(grid)
    trace = deployment.trace("flower")
    assert trace == deployment.trace("local")
    one, two = ((tmp_path / out / "student.safetensors").read_bytes() for out in ("local", "flower"))
    assert one == two
    asked = [[NAMES[node] for node in asked_nodes(deployment.config.run, 3, round)] for round in (1, 2, 3)]
    assert asked == [["east", "south"], ["north", "east"], ["north", "south"]]
    assert [line["asked"] for line in trace] == asked
    assert [line["nodes"] for line in trace] == asked
    assert [line["absent"] for line in trace] == [[], [], []]
    # The student of a round is evaluated by those that the next one asks, the last one by all.
    assert [line["heldout_sites"] for line in trace] == [*asked[1:], list(NAMES)]
    assert [row["method"] for row in flower] == ["fpld"]  # the base model has another sample of sites
    assert flower[0]["heldout_loss"] == local[-1]["heldout_loss"]
    sent = [name for name, kind, _ in grid.sent if kind == "train"]
    assert sent == [name for names in asked for name in names]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="forks")
def test_nodes_that_are_killed_while_they_write_send_what_they_would_have_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every node's work is killed once, with its text written and not yet sent."""
    deployment = Deployment(tmp_path, [*WRITTEN, ("rounds = 3", "rounds = 1")])
    deployment.allow(["labels", "text"])
    run_local(deployment.config, deployment.text, tmp_path / "local", resume=False)
    fixed = {"session": "ab" * 32, "key": derive_key(deployment.config.run.seed).hex()}
    RunFolder(tmp_path / "flower").write_json("session.json", fixed)

    def die_once(*arguments: Any) -> bytes:
        killed = len(list(tmp_path.glob("killed-*")))
        if killed < len(NAMES):
            (tmp_path / f"killed-{killed}").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return encode_text(*arguments)

    with monkeypatch.context() as patches:
        patches.setattr("fpld.node.writing.encode_text", die_once)
        patches.setattr("tests.engines.flower.conftest.client_app", partial(client_app, runner=run_forked))
        with pytest.raises(QuorumError, match="resources: the node ran out"):
            deployment.serve(deployment.grid())
        assert len(list(tmp_path.glob("killed-*"))) == len(NAMES)
        ledgers = [file.parent / "ledger.jsonl" for file in deployment.node_files]
        assert not any(ledger.exists() for ledger in ledgers)
        deployment.serve(deployment.grid())
    assert deployment.trace("flower") == deployment.trace("local")
    one, two = ((tmp_path / out / "student.safetensors").read_bytes() for out in ("local", "flower"))
    assert one == two
