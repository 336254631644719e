"""What a node does with each kind of message: say who it is, do a round, evaluate the student. No Flower in here.

The process is new for every message: all that must survive is in the node's folder.

    files/SHA-256     what the aggregator sent once: probe set, tokenizer, base models
    runs/SESSION/     one run: text and held-out tokens, site.json, the machine's state with its last frame
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from fpld import students
from fpld.config import DataSection
from fpld.data import ProbeSet, load_tokenizer
from fpld.engines.flower.assignment import Assignment
from fpld.engines.flower.identity import Letter, write_letter
from fpld.errors import BudgetError, ProtocolError
from fpld.federation import jobs
from fpld.federation.prepare import hold_out_seed, site_text
from fpld.federation.site import Site, work
from fpld.protocol.messages import digest
from fpld.storage.arrays import dump_arrays, parse_arrays
from fpld.storage.files import write_atomic
from fpld.storage.folder import RunFolder

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from fpld.engines.flower.home import Home
    from fpld.protocol import Task
    from fpld.storage.folder import Arrays

HELDOUT, TEXT, STUDENT = "heldout.safetensors", "text.safetensors", "student.safetensors"


@dataclass(frozen=True, slots=True)
class Order:
    """A letter from this run's aggregator, checked."""

    key: bytes
    session: bytes
    body: dict[str, Any]
    assignment: Assignment


def join(home: Home, data: bytes) -> bytes:
    """Answer who this is: a letter with the challenge, and which of the run's files are not here yet."""
    body = Letter.parse(data).body
    known = body.get("files")
    if body.get("kind") != "join" or not isinstance(known, list):
        raise ProtocolError("a letter of kind 'join' with a list of files must come here")
    missing = [name for name in known if not _is_digest(name) or not (home.folder / "files" / name).exists()]
    key = home.secret(_session(body))
    answer = {"kind": "joined", "name": home.name, "challenge": body.get("challenge"), "missing": missing}
    return write_letter(key, answer)


def train(home: Home, data: bytes, task: Task, files: Mapping[str, bytes]) -> bytes:
    """Do a round: fine-tune, probe, code; return the frame."""
    order = _order(home, data, "train")
    if task.broadcast == "weights" and not task.arrays:
        task = replace(task, arrays=_kept_student(home, order))
    serial = task.to_bytes()
    if digest(serial) != order.body.get("task"):
        raise ProtocolError("the task is not the one that the aggregator's letter names")
    if home.most_bytes is not None and task.plan.budget_bytes > home.most_bytes:
        raise BudgetError(
            f"the task allows a frame of {task.plan.budget_bytes} bytes, this node sends at most {home.most_bytes} "
            "(most_bytes in its file)"
        )
    folder = settle(home, order, files)
    with RunFolder(folder).lock():
        return work(folder, serial, key=order.key)


def evaluate(home: Home, data: bytes, student: Arrays, files: Mapping[str, bytes]) -> bytes:
    """Evaluate the student on the held-out text; return a letter with the loss and the text's size."""
    order = _order(home, data, "evaluate")
    serial = dump_arrays(student, {})
    if digest(serial) != order.body.get("student"):
        raise ProtocolError("the student is not the one that the aggregator's letter names")
    folder, assignment = settle(home, order, files), order.assignment
    write_atomic(folder / STUDENT, serial)  # the next round begins with it, and need not send it again
    base = str(home.folder / "files" / assignment.files.student)
    loss = jobs.evaluate(base, assignment.student_kind, student, str(folder / HELDOUT), assignment.length)[0]
    arrays, meta = RunFolder(folder).read_arrays(HELDOUT)
    answer = {"kind": "evaluated", "round": order.body.get("round"), "loss": loss}
    return write_letter(order.key, {**answer, "tokens": len(arrays["0"]), "bytes": meta["bytes"]})


def settle(home: Home, order: Order, files: Mapping[str, bytes]) -> Path:
    """Make the folder of this run, once: files as sent, the node's text as its assignment says."""
    assignment = order.assignment
    store = RunFolder(home.folder / "files")
    for name, content in files.items():
        if name not in assignment.files.digests() or hashlib.sha256(content).hexdigest() != name:
            raise ProtocolError(f"a file was sent whose content is not {name}")
        store.write(name, content)
    folder = RunFolder(_folder(home, order))
    if folder.has("site.json"):
        return folder.path
    probe = ProbeSet.load(store.path / assignment.files.probe)
    tokenizer = load_tokenizer(store.path / assignment.files.tokenizer)
    vocab = students.load(store.path / assignment.files.base).vocab
    _insist("probe set", probe.digest, home.probe)
    _insist("tokenizer", tokenizer.digest, home.tokenizer)
    _insist("tokenizer", tokenizer.digest, probe.tokenizer, of="the probe set's")
    for what, found in (("tokenizer's vocabulary", tokenizer.vocab), ("model's vocabulary", vocab)):
        _insist(what, str(found), str(probe.vocab), of="the probe set's")
    text = site_text(
        home.documents(),
        tokenizer,
        DataSection(heldout=assignment.heldout, heldout_tokens=assignment.heldout_tokens, limit=assignment.limit),
        name=home.name,
        length=assignment.length,
        seed=hold_out_seed(assignment.seed, assignment.index),
    )
    folder.write_arrays(TEXT, {"tokens": text.train})
    folder.write_arrays(HELDOUT, {"0": text.heldout}, {"bytes": text.heldout_bytes})
    Site(
        name=home.name,
        index=assignment.index,
        seed=assignment.seed,
        rounds=assignment.rounds,
        text=TEXT,
        base=f"../../files/{assignment.files.base}",
        probe=f"../../files/{assignment.files.probe}",
        kind=assignment.kind,
        local=assignment.local.model_dump(),
        distill=assignment.distill.model_dump(),
    ).save(folder.path)
    return folder.path


def _kept_student(home: Home, order: Order) -> Arrays:
    """Return the student that this node evaluated last, if it is the one that is meant."""
    path = _folder(home, order) / STUDENT
    content = path.read_bytes() if path.exists() else b""
    if digest(content) != order.body.get("student"):
        raise ProtocolError("the student of the last round is not here: send it along")
    return parse_arrays(content, str(path))[0]


def _folder(home: Home, order: Order) -> Path:
    return home.folder / "runs" / order.session.hex()[:16]


def _order(home: Home, data: bytes, kind: str) -> Order:
    letter = Letter.parse(data)
    session = _session(letter.body)
    key = home.secret(session)
    body = letter.check(key, kind)
    assignment = Assignment.parse(body.get("assignment"))
    if assignment.name != home.name:
        raise ProtocolError(f"the assignment is for {assignment.name!r}, this is {home.name!r}")
    return Order(key, session, body, assignment)


def _session(body: Mapping[str, Any]) -> bytes:
    session = body.get("session")
    if not _is_digest(session):
        raise ProtocolError("a letter must name its run's session in 64 hexadecimal digits")
    return bytes.fromhex(str(session))


def _is_digest(text: object) -> bool:
    return isinstance(text, str) and len(text) == 64 and set(text) <= set("0123456789abcdef")


def _insist(what: str, found: str, wanted: str | None, *, of: str = "this node's") -> None:
    if wanted is not None and found != wanted:
        raise ProtocolError(f"the run's {what} is {found}, {of} is {wanted}: fetch the same one")
