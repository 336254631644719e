"""Orders, files and secrets that a site checks before it works: what is not whole, or not of its aggregator."""

from __future__ import annotations

import hashlib
import json
import os
import tracemalloc
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Context, Message, RecordDict

from fpld import students
from fpld.codecs.prior import DIGEST_BYTES
from fpld.data import ByteTokenizer, ProbeSet
from fpld.engines.flower.client import client_app
from fpld.engines.flower.credentials import PublicKeys, SignedMessage, run_secret, sign_message
from fpld.engines.flower.messages import (
    SIGNED_MESSAGE,
    TASK,
    add_field,
    pack_fields,
    pack_task,
    read_field,
    record_arrays,
    unpack_task,
)
from fpld.engines.flower.server import publish, serve
from fpld.engines.flower.site import handlers
from fpld.engines.flower.site.config import check_models, open_site
from fpld.engines.flower.site.disclosure import SiteError
from fpld.errors import BudgetError, InputError, ProtocolError
from fpld.federation.prepare import prepare_public
from fpld.node.spec import NodeSpec
from fpld.protocol import Task
from fpld.protocol.messages import digest
from fpld.protocol.weights import weights_digest
from fpld.storage.arrays import dump_arrays
from fpld.storage.run_folder import LOG, RunFolder
from fpld.types import Arrays, Plan

if TYPE_CHECKING:
    from pathlib import Path

    from tests.engines.flower.conftest import Deployment


def order(deployment: Deployment, **changes: Any) -> tuple[dict[str, Any], Task, dict[str, bytes], bytes]:
    """What an aggregator sends to north in round 1: the signed body, the task, the files, and the key."""
    store = RunFolder(deployment.folder / "made")
    public = prepare_public(deployment.config, store)
    given, files = publish(deployment.config, store)
    session = bytes(range(32))
    key = open_site(deployment.node_files[0]).secret(session)
    plan = Plan(
        run_key=bytes(16), round=1, node=0, probe=bytes.fromhex(public.probe.digest),
        contexts=public.probe.contexts, vocab=public.vocab, bits=400.0,
    )  # fmt: skip
    task = Task(plan, "uniform")
    student = weights_digest(students.read_state(store.path / "base-0.safetensors"))
    body = {"kind": "train", "round": 1, "task": digest(task.to_bytes()), "session": session.hex(), "student": student}
    return {**body, "part": given[0].model_dump(), **changes}, task, files, key


def renamed(files: dict[str, bytes], body: dict[str, Any], name: str, content: bytes) -> dict[str, bytes]:
    """Put another file in the place of one, with the digest that it has."""
    body["part"]["files"][name] = hashlib.sha256(content).hexdigest()
    return {**files, hashlib.sha256(content).hexdigest(): content}


def needed(body: dict[str, Any], files: dict[str, bytes]) -> dict[str, bytes]:
    return {name: files[name] for name in set(body["part"]["files"].values()) if name}


def test_another_tokenizer_or_vocabulary_than_the_probe_sets(deployment: Deployment, tmp_path: Path) -> None:
    home = open_site(deployment.node_files[0])
    body, task, files, key = order(deployment)
    ProbeSet(np.zeros((2, 4), np.int32), 256, "cd" * 32).save(tmp_path / "probe")
    wrong = renamed(files, body, "probe", (tmp_path / "probe").read_bytes())
    with pytest.raises(
        ProtocolError, match=f"the run's tokenizer is {ByteTokenizer().digest}, the probe set's is cdcd"
    ):
        handlers.handle_train(home, sign_message(key, body), task, needed(body, wrong))
    ProbeSet(np.zeros((2, 4), np.int32), 999, ByteTokenizer().digest).save(tmp_path / "probe")
    wrong = renamed(files, body, "probe", (tmp_path / "probe").read_bytes())
    with pytest.raises(ProtocolError, match="vocabulary is 256, the probe set's is 999"):
        handlers.handle_train(home, sign_message(key, body), task, needed(body, wrong))
    assert not (home.folder / "runs").exists()


def test_a_task_for_another_probe_set(deployment: Deployment) -> None:
    home = open_site(deployment.node_files[0])
    body, task, files, key = order(deployment)
    other = replace(task, plan=replace(task.plan, probe=bytes(32)))
    body["task"] = digest(other.to_bytes())
    with pytest.raises(ProtocolError, match=f"the task's probe set is {'0' * 64}, this node's is [1-9a-f]"):
        handlers.handle_train(home, sign_message(key, body), other, needed(body, files))


def test_orders_that_are_not_of_this_aggregator_or_not_whole(deployment: Deployment) -> None:
    home = open_site(deployment.node_files[0])
    body, task, files, key = order(deployment)
    cases: list[tuple[bytes, dict[str, Any], Task, str]] = [
        (bytes(32), body, task, "made with another key"),
        (key, {**body, "kind": "evaluate"}, task, "of kind 'train'"),
        (key, body, replace(task, codec="float32"), "not the one that the aggregator's message names"),
        (key, {**body, "student": "ab" * 32}, task, "the student of the last round is not here"),
        (key, {**body, "session": "../../etc"}, task, "64 hexadecimal digits"),
        (key, {**body, "part": {**body["part"], "path": "/etc"}}, task, "not: path"),
        (key, {**body, "part": {**body["part"], "name": "east"}}, task, "for 'east', this is 'north'"),
    ]
    for secret, changed, given, message in cases:
        with pytest.raises((ProtocolError, InputError), match=message):
            handlers.handle_train(home, sign_message(secret, changed), given, needed(body, files))
    bad = {name: content + b" " for name, content in needed(body, files).items()}
    with pytest.raises(ProtocolError, match="a file was sent whose content is not"):
        handlers.handle_train(home, sign_message(key, body), task, bad)
    assert not (home.folder / "runs").exists()


def test_only_models_that_the_site_allows_are_read_from_its_disk(deployment: Deployment, tmp_path: Path) -> None:
    """The base file names a folder of the site's disk: one that its node file does not have is not opened."""
    settings = {"path": str(tmp_path / "models/one"), "parameters": 1, "vocab": 256}
    metadata = {"kind": "huggingface", "version": "1", "config": json.dumps(settings)}
    made = dump_arrays({"a": np.zeros(1, np.float32)}, metadata)
    body, task, files, key = order(deployment)
    files = renamed(files, body, "base", made)
    node_file = deployment.node_files[0]
    text = node_file.read_text()
    for allowed in ("", f'models = ["{tmp_path}/models"]', f'models = ["{tmp_path}/models/one/two"]'):
        node_file.write_text(f"{text}\n{allowed}\n")
        with pytest.raises(BudgetError, match=r"this node's file allows no such folder \(models\)"):
            handlers.handle_train(open_site(node_file), sign_message(key, body), task, needed(body, files))
    relative = os.path.relpath(tmp_path / "models/one", node_file.parent)
    for allowed in (f'models = ["{tmp_path}/models/two", "{tmp_path}/models/one"]', f'models = ["{relative}"]'):
        node_file.write_text(f"{text}\n{allowed}\n")
        check_models(open_site(node_file), [open_site(node_file).folder / "files" / body["part"]["files"]["base"]])


def claimed(bits: float = 1.0) -> dict[str, bytes]:
    """Return tasks of some hundred bytes that claim 2^32 - 1 contexts: with notes on the prior, a block, neither."""
    plan = Plan(
        run_key=bytes(16), round=1, node=0, probe=bytes(32), contexts=2**32 - 1, vocab=2**24, bits=1.0,
    )  # fmt: skip
    metadata = Task(plan, "samples").metadata()
    metadata["task"] = metadata["task"].replace('"bits": 1.0', f'"bits": {bits}')
    notes: Arrays = {
        "notes.counts": np.zeros(1, np.int32),
        "notes.entries": np.zeros(0, np.uint16),
        "notes.digests": np.zeros((1, DIGEST_BYTES), np.uint8),
    }
    arrays: dict[str, Arrays] = {"notes": notes, "a block": {"sent.0": np.zeros((1, 2), np.int16)}, "nothing": {}}
    return {name: dump_arrays(more, metadata) for name, more in arrays.items()}


def test_a_task_that_claims_huge_sizes_moves_no_memory() -> None:
    tracemalloc.start()
    for name in ("notes", "a block"):
        with pytest.raises(InputError, match=r"4294967295 blocks|1 contexts of 16777216 tokens"):
            Task.from_bytes(claimed()[name])
    for task in claimed(10**400).values():
        with pytest.raises(InputError, match="bits must be a number, got an integer of 1329 bits"):
            Task.from_bytes(task)
    assert tracemalloc.get_traced_memory()[1] < 1_000_000
    tracemalloc.stop()


def test_no_task_is_parsed_before_the_tag_is_checked(deployment: Deployment) -> None:
    """With a wrong tag, bytes that are no task at all are not looked at: the refusal is the tag's."""
    body, _task, _files, key = order(deployment)
    home = deployment.node_files[0]
    context = Context(1, 1, {"node": str(home)}, RecordDict(), {})
    log = home.parent / LOG
    for secret, reason in ((bytes(32), "made with another key"), (key, "task: must be a whole")):
        content = pack_fields(task=(b"no task", TASK))
        add_field(content, "letter", sign_message(secret, body), SIGNED_MESSAGE)
        with pytest.raises(SiteError):
            client_app()(Message(content, 1, "train"), context)
        assert reason in log.read_text().splitlines()[-1]


def test_payloads_of_other_types_are_refused(deployment: Deployment) -> None:
    plan = Plan(run_key=bytes(16), round=1, node=0, probe=bytes(32), contexts=4, vocab=4, bits=8.0)
    content = pack_task(Task(plan, "uniform", arrays={"a": np.ones((2, 3), np.float32)}, broadcast="weights"))
    assert (
        unpack_task(content).to_bytes()
        == Task(plan, "uniform", arrays={"a": np.ones((2, 3), np.float32)}, broadcast="weights").to_bytes()
    )
    pickled = RecordDict({"shared": ArrayRecord({"task": Array(np.ones(3))})})
    with pytest.raises(ProtocolError, match=r"bytes of type fpld\.task/1 must come here, got numpy\.ndarray"):
        read_field(pickled, "task", TASK)
    lying = ArrayRecord({"a": Array("float32", (1 << 20, 1 << 20), "fpld.array/1", bytes(8))})
    with pytest.raises(ProtocolError, match="8 bytes do not fit the shape"):
        record_arrays(lying)
    for data in (b"", bytes(32) + b"[]", bytes(32) + b"{", bytes((1 << 20) + 1), bytes(32) + b"[" * 100_000):
        with pytest.raises(ProtocolError, match="a message must"):
            SignedMessage.parse(data)
    with pytest.raises(ProtocolError, match="not: name"):
        NodeSpec.parse({**order(deployment)[0]["part"], "name": "../south"})


def test_both_ends_derive_the_same_secret_and_no_other(deployment: Deployment) -> None:
    session = bytes(32)
    keys = deployment.folder / "keys"
    own = deployment.folder / "certs/aggregator.key"
    north = run_secret(own, PublicKeys.read(keys / "north.pub").mac, session, "north")
    assert north == open_site(deployment.node_files[0]).secret(session)
    others = [
        run_secret(own, PublicKeys.read(keys / "east.pub").mac, session, "north"),
        run_secret(own, PublicKeys.read(keys / "north.pub").mac, session, "east"),
        run_secret(own, PublicKeys.read(keys / "north.pub").mac, bytes(31) + b"1", "north"),
    ]
    assert len({north, *others}) == 4
    (keys / "north.pub").write_text("ssh-rsa AAAA north\n")
    with pytest.raises(InputError, match=r"north\.pub must hold the two lines"):
        serve(deployment.grid(), deployment.config, deployment.text, deployment.folder / "none")
