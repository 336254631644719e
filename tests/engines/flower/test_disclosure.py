"""What may leave a site is the site's word: a task that asks for more is refused before any training."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from fpld.cli import main
from fpld.codecs.text import decode_tokens
from fpld.config import PrivacySection
from fpld.data import ProbeSet
from fpld.data.token_stream import open_text
from fpld.engines.flower.messages import FRAME, read_field
from fpld.engines.flower.simulation import simulated_terms
from fpld.engines.flower.site.config import NodeFile, Terms, open_site
from fpld.engines.flower.site.disclosure import WrittenCounts, check_may_send, public_reason, with_site_check
from fpld.errors import DisclosureError, InputError
from fpld.node.spec import NodeSpec, make_node_spec
from fpld.node.writing import PrivateRuns, write_checked, write_reply
from fpld.protocol import Task
from fpld.protocol.wire import OVERHEAD_BYTES, payload_of
from fpld.protocol.written import HEADER, beginnings
from fpld.students import NGram, NGramConfig, devices
from fpld.students.configs import Compute
from fpld.types import Plan
from tests.engines.flower.conftest import WRITTEN, Deployment
from tests.helpers import make_plan

if TYPE_CHECKING:
    from pathlib import Path

    from flwr.app import Message

    from fpld.types import Tokens

QUORUM = ("rounds = 3", "rounds = 2\nquorum = 2")


@pytest.mark.parametrize(
    ("codec", "written", "may_send", "allowed"),
    [
        ("samples", 0, ["labels"], True),
        ("samples", 64, ["labels"], False),
        ("samples", 64, ["text"], False),
        ("samples", 64, ["labels", "text"], True),
        ("updates", 0, ["labels", "text"], False),
        ("updates", 0, ["updates"], True),
        ("updates", 64, ["labels", "updates"], False),
        ("updates", 64, ["text", "updates"], True),
        ("uniform", 0, ["text", "updates"], False),
    ],
)
def test_a_task_may_ask_for_no_more_than_the_site_allows(
    codec: str, written: int, may_send: list[Any], allowed: bool
) -> None:
    task = Task(replace(make_plan(), written=written), codec)
    if allowed:
        check_may_send(may_send, task)
        return
    with pytest.raises(DisclosureError, match="may_send: the task asks for") as raised:
        check_may_send(may_send, task)
    reason = public_reason(raised.value)
    asked, allows = reason.split("allows")
    assert [name for name in ("labels", "text", "updates") if name in allows] == may_send
    assert ("updates" in asked, "text" in asked) == (codec == "updates", written > 0)


def test_terms_are_checked_and_default_to_labels_alone() -> None:
    assert (Terms(name="north").may_send, Terms(name="north").private_run) == (["labels"], 8)
    cases: list[dict[str, Any]] = [{"may_send": []}, {"may_send": ["weights"]}, {"private_run": -1}]
    for wrong in cases:
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Terms(name="north", **wrong)


def spec_of(deployment: Deployment, **changes: Any) -> NodeSpec:
    return make_node_spec(deployment.config, 0).model_copy(update=changes)


def test_the_stricter_limit_counts_and_private_training_has_no_check(tmp_path: Path) -> None:
    deployment = Deployment(tmp_path, [*WRITTEN, ("contexts = 320", "contexts = 320\nprivate_run = 6")])
    spec = spec_of(deployment)

    def limit(spec: NodeSpec, site: int) -> int | None:
        written = with_site_check(spec, site).written
        return None if written is None else written.private_run

    assert [limit(spec, site) for site in (0, 5, 6, 8)] == [0, 5, 6, 6]
    assert limit(spec_of(deployment, written=None), 5) is None
    private = spec.model_copy(update={"privacy": PrivacySection(epsilon=4.0)})
    assert [limit(private, site) for site in (0, 5, 8)] == [0, spec.length + 1, spec.length + 1]
    terms = simulated_terms(deployment.config, 0)
    assert (set(terms.may_send), terms.private_run) == ({"labels", "text", "updates"}, 6)


def test_with_privacy_text_follows_from_the_private_model_and_public_tokens_alone(tmp_path: Path) -> None:
    """The payload is the same whatever the private text is; without privacy the check makes it depend on that text."""
    deployment = Deployment(tmp_path, WRITTEN)
    model, shared = (NGram(NGramConfig(vocab=32, order=2, buckets=64)) for _ in range(2))
    rng = np.random.default_rng(0)
    model.load_state(
        {name: 3 * rng.normal(size=value.shape).astype(value.dtype) for name, value in model.state().items()}
    )
    probe = rng.integers(32, size=(30, 16)).astype(np.int32)
    plan = Plan(run_key=bytes(16), round=1, node=0, probe=bytes(32), contexts=480, vocab=32, bits=40.0, written=320)
    task = Task(plan, "samples", broadcast="weights")
    off = PrivateRuns(np.empty(0, np.int32), probe, 17)
    unchecked = write_checked(model, probe, beginnings(plan, probe), off, seed=3, temperature=1.0).sequences

    def payload(spec: NodeSpec, private: Tokens) -> bytes:
        options = with_site_check(spec, 8).written
        assert options is not None
        answer, _ = write_reply(
            model, shared, task, probe, private, options, b"", margin=2e-5, seed=3, scratch=tmp_path / "prior"
        )
        return answer

    spec = spec_of(deployment)
    private = spec.model_copy(update={"privacy": PrivacySection(epsilon=4.0)})
    texts = [unchecked.ravel(), rng.integers(32, size=500).astype(np.int32)]
    assert payload(private, texts[0]) == payload(private, texts[1])
    assert payload(spec, texts[0]) != payload(spec, texts[1]) == payload(private, texts[1])


def test_counts_say_whether_text_was_checked() -> None:
    checked = WrittenCounts(20, 26, 6, 1, 8, 400)
    assert (
        "26 were written, 6 had a run of 8 private tokens and were written again, 1 became public" in checked.describe()
    )
    unchecked = replace(checked, private_run=None)
    assert "not compared with the private text" in unchecked.describe()


@pytest.mark.slow
def test_sites_write_only_where_text_may_leave_and_say_what_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    deployment = Deployment(tmp_path, [*WRITTEN, QUORUM])
    deployment.allow(["labels", "text"], "north", more="private_run = 3")
    deployment.allow(["labels", "text"], "south")
    frames: dict[tuple[str, int], bytes] = {}

    def keep(file: Path, reply: Message) -> Message:
        if reply.has_content() and reply.metadata.message_type == "train":
            home = file.parent.name
            frames[home, sum(name == home for name, _ in frames) + 1] = read_field(reply.content, "frame", FRAME)
        return reply

    grid = deployment.grid()
    grid.tamper = keep
    deployment.serve(grid)
    trace = deployment.trace()
    assert [line["nodes"] for line in trace] == [["north", "south"]] * 2
    for line in trace:
        ((node, state, reason),) = [(a["node"], a["state"], a["reason"]) for a in line["absent"]]
        assert (node, state) == ("east", "failed")
        assert reason == "may_send: the task asks for labels, text, this node's node.toml allows labels"
    # The site that refused has not trained, and has sent no frame; only the last student's loss is no matter of text.
    east = deployment.node_files[1].parent
    assert [json.loads(line)["kind"] for line in (east / "ledger.jsonl").read_text().splitlines()] == ["loss"]
    assert not list(east.glob("runs/*/own.safetensors"))
    assert "may_send" in (east / "log.txt").read_text()
    for index, private_run in ((0, 3), (2, 8)):
        home = deployment.node_files[index].parent
        entries = [json.loads(line) for line in (home / "ledger.jsonl").read_text().splitlines()]
        written = [entry["written"] for entry in entries if entry["kind"] == "frame"]
        assert [row["private_run"] for row in written] == [private_run] * 2
        for number, row in enumerate(written, 1):
            frame = frames[home.name, number]
            assert row["text_bytes"] == HEADER.unpack_from(payload_of(memoryview(frame)))[2] > 0
            assert row["written"] >= row["sequences"] > 0
            assert row["copied"] >= row["replaced"]
            assert index or row["copied"] > 0
            assert (
                f"{row['sequences']:,} written sequences sent in {row['text_bytes']:,} bytes"
                in (home / "log.txt").read_text()
            )
        sent = sum(len(frame) for (name, _), frame in frames.items() if name == home.name)
        assert sum(entry["bytes"] for entry in entries if entry["kind"] == "frame") == sent
        assert main(["node", "status", str(home / "node.toml"), "--json"]) == 0
        (status,) = json.loads(capsys.readouterr().out)["rows"]
        assert status["text_bytes"] == sum(row["text_bytes"] for row in written)
        assert status["may_send"] == f"labels, text; text: no run of {private_run} private tokens (private_run)"
    _no_private_run(deployment, frames)


def _no_private_run(deployment: Deployment, frames: dict[tuple[str, int], bytes]) -> None:
    """Decode what left the strict site, and look for runs of three of its tokens that are not public."""
    home = deployment.node_files[0].parent
    (folder,) = (home / "runs").iterdir()
    private = np.asarray(open_text(folder / "text.safetensors").tokens)
    sequences = ProbeSet.load(deployment.folder / "flower/probe.json").sequences
    runs = PrivateRuns(private, sequences, 3)
    key = json.loads((deployment.folder / "flower/session.json").read_text())["key"]
    for (name, round), frame in frames.items():
        if name != "north":
            continue
        payload = payload_of(memoryview(frame))
        labels, count, size, _, _ = HEADER.unpack_from(payload)
        plan = replace(make_plan(round=round, node=0), run_key=bytes.fromhex(key), written=320)
        first = sequences.ravel()[beginnings(plan, sequences)[:count]]
        start = HEADER.size + labels
        text = decode_tokens(payload[start : start + size], first, sequences.shape[1], 256)
        assert len(frame) > OVERHEAD_BYTES + start + size
        assert not runs.stand_in(text).any()


def test_a_new_site_sends_labels_alone_and_check_says_so(
    deployment: Deployment, capsys: pytest.CaptureFixture[str]
) -> None:
    file = deployment.node_files[0]
    assert NodeFile.read(file).may_send == ["labels"]
    assert main(["check", str(file)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "may_send" in said
    file.write_text(file.read_text().replace('may_send = ["labels"]', 'may_send = ["label"]'))
    with pytest.raises(InputError, match="may_send"):
        NodeFile.read(file)


def test_a_site_decides_how_much_of_its_text_is_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The smaller of the site's limit and the run's counts; what is left out is said at the site."""
    deployment = Deployment(
        tmp_path, [("rounds = 3", "rounds = 1"), ("heldout = 0.25", "heldout = 0.25\nlimit = 5000")]
    )
    for file, line in zip(deployment.node_files, ("limit = 3000\n", "limit = 9000\n", ""), strict=True):
        file.write_text(line + file.read_text())
    deployment.serve(deployment.grid())
    keys = ("limit in node.toml", "data.limit", "data.limit")
    for file, most, key in zip(deployment.node_files, (3000, 5000, 5000), keys, strict=True):
        (text,) = file.parent.glob("runs/*/text.safetensors")
        assert 0.5 * most < len(open_text(text).tokens) < most
        logged = (file.parent / "log.txt").read_text()
        assert f"kB used ({key})" in logged
        assert "of the tokens are held out" in logged
    assert main(["check", str(deployment.node_files[0])]) == 0
    assert "kB used (limit in node.toml)" in " ".join(capsys.readouterr().out.replace("│", " ").split())


def test_a_site_says_what_it_computes_with(
    deployment: Deployment, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = deployment.node_files[0]
    assert open_site(file).terms.compute == Compute("auto", threads=1)
    monkeypatch.setattr(devices, "available_devices", lambda: ["cpu"])
    assert main(["check", str(file)]) == 0
    assert "models are computed on cpu, with 1 thread " in " ".join(capsys.readouterr().out.split())
    text = file.read_text()
    file.write_text(f'device = "cuda"\nthreads = 3\n{text}')
    assert open_site(file).terms.compute == Compute("cuda", threads=3)
    assert main(["check", str(file)]) == 2
    file.write_text(f'device = "tpu"\n{text}')
    with pytest.raises(InputError, match="device"):
        NodeFile.read(file)
