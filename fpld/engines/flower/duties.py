"""What a node does with each kind of message: say who it is, do a round, evaluate the student. No Flower in here.

The process is new for every message: all that must survive is in the node's folder.

    files/SHA-256     what the aggregator sent once: probe set, tokenizer, base models
    runs/SESSION/     one run: text and held-out tokens, the machine's state with its last frame
    ledger.jsonl      every frame and every loss that ever left this site
"""

from __future__ import annotations

import hashlib
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from fpld import students
from fpld.data import ProbeSet, load_tokenizer
from fpld.engines.flower.identity import Letter, write_letter
from fpld.engines.flower.journal import Journal, note
from fpld.engines.flower.ledger import Ledger, Question
from fpld.engines.flower.spending import allow_spending, epsilon_so_far
from fpld.errors import ProtocolError
from fpld.federation import jobs
from fpld.federation.heldout import losses
from fpld.federation.log import listen
from fpld.federation.own import own_losses
from fpld.federation.part import Part
from fpld.federation.private import private_training
from fpld.federation.texts import node_text
from fpld.federation.training import open_student
from fpld.federation.work import Place, work
from fpld.pace import Subject, working_on
from fpld.protocol.asking import is_ask
from fpld.protocol.messages import digest
from fpld.storage.arrays import dump_arrays, parse_arrays, read_arrays
from fpld.storage.files import write_atomic
from fpld.storage.folder import RunFolder

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from fpld.engines.flower.home import Home
    from fpld.protocol import Task
    from fpld.storage.folder import Arrays

HELDOUT, TEXT, STUDENT, PART = "heldout.safetensors", "text.safetensors", "student.safetensors", "part.json"


@dataclass(frozen=True, slots=True)
class Order:
    """What a letter from this run's aggregator asks for, checked: the node's part, and the rest of the letter."""

    part: Part
    body: dict[str, Any]
    key: bytes
    place: Place


def join(home: Home, data: bytes) -> bytes:
    """Answer who this is: a letter with the challenge, and which of the run's files are not here yet."""
    body = Letter.parse(data).body
    known = body.get("files")
    if body.get("kind") != "join" or not isinstance(known, list):
        raise ProtocolError("a letter of kind 'join' with a list of files must come here")
    missing = [name for name in known if not _is_digest(name) or not (home.folder / "files" / name).exists()]
    key = home.secret(_session(body))
    answer = {"kind": "joined", "name": home.terms.name, "challenge": body.get("challenge"), "missing": missing}
    return write_letter(key, answer)


def train(home: Home, data: bytes, task: Task, files: Mapping[str, bytes]) -> bytes:
    """Run a round: fine-tune, probe, code; return the frame."""
    order = _order(home, data, "train")
    if task.broadcast == "weights" and not task.arrays:
        task = replace(task, arrays=_kept_student(order))
    serial = task.to_bytes()
    if digest(serial) != order.body.get("task"):
        raise ProtocolError("the task is not the one that the aggregator's letter names")
    ledger, question = Ledger(home.folder), Question.frame(str(order.body["session"]), task)
    ledger.allow(home.terms, question)
    settle(home, order, files)
    question = _promising(order, question)
    allow_spending(ledger.entries, home.terms, question, order.part.rounds)
    with RunFolder(order.place.folder).lock(), _told(home, task.plan.round):
        frame = work(order.part, order.place, serial, key=order.key, secret=True)
    if not is_ask(frame):  # which blocks of the prior it needs says nothing about its text
        ledger.enter(question, frame)
        if question.spent is not None:
            note(home.folder, _spending(home, ledger))
    return frame


def _promising(order: Order, question: Question) -> Question:
    """Return the question with what its answer will spend, if training is private."""
    part, place = order.part, order.place
    if part.promise is None:
        return question
    student = open_student(place.files / part.files.base)
    _, mechanism = private_training(student, [place.text], part.promise)
    return replace(question, spent=mechanism.spent(part.local.steps), unit=part.promise.terms.unit)


def _spending(home: Home, ledger: Ledger) -> str:
    """Say what all answers so far have spent."""
    terms, found = home.terms, epsilon_so_far(ledger.entries, home.terms)
    limit = "" if terms.most_epsilon is None else f" of at most {terms.most_epsilon:g}"
    return f"privacy spent over all runs, for each {terms.unit}: epsilon {found:.3g}{limit} at delta {terms.delta:g}"


def evaluate(home: Home, data: bytes, student: Arrays, files: Mapping[str, bytes]) -> bytes:
    """Evaluate the student on the held-out text; return a letter with the loss and the text's size.

    The held-out text is private too: where privacy is promised, or the site has a limit on it, neither is told.
    """
    order = _order(home, data, "evaluate")
    serial = dump_arrays(student, {})
    if digest(serial) != order.body.get("student"):
        raise ProtocolError("the student is not the one that the aggregator's letter names")
    if type(order.body.get("round")) is not int or order.body["round"] < 0:
        raise ProtocolError("a letter that asks for an evaluation must name its round")
    ledger = Ledger(home.folder)
    question = Question.loss(str(order.body["session"]), order.body["round"], digest(serial))
    told = order.part.privacy is None and home.terms.most_epsilon is None
    if told:
        ledger.allow(home.terms, question)
    settle(home, order, files)
    part, place = order.part, order.place
    write_atomic(place.folder / STUDENT, serial)  # the next round begins with it, and need not send it again
    with _told(home, 0):
        nats = jobs.evaluate(place.files / part.files.student, student, place.folder / HELDOUT, part.length)
        loss = losses(nats)[0]
        own = _compare(home, order, loss)
    arrays, meta = RunFolder(place.folder).read_arrays(HELDOUT)
    answer = {"kind": "evaluated", "round": question.round}
    if not told:
        return write_letter(order.key, answer)
    answer["loss"] = loss
    if home.terms.show_own_loss:
        answer |= own
    letter = write_letter(order.key, {**answer, "tokens": len(arrays["0"]), "bytes": meta["bytes"]})
    ledger.enter(question, letter)
    return letter


@contextmanager
def _told(home: Home, round: int) -> Iterator[None]:
    """Say in the site's log how far its work is, every few seconds."""
    with listen(Journal(home.folder, own=True)), working_on(Subject(round=round, model=home.terms.name)):
        yield


def _compare(home: Home, order: Order, loss: float) -> dict[str, float | None]:
    """Tell the site, in its log, what the student is worth to it beside its own models; return what these have."""
    text, said = read_arrays(order.place.folder / HELDOUT)[0]["0"], [f"the student {loss:.4f}"]
    own = own_losses(order.place.folder, [text], 0, order.part.length)
    for name, what in (("own", "this node's own model of this round"), ("alone", "its model without the federation")):
        if own[name] is not None:
            said.append(f"{what} {own[name]:.4f}")
    note(home.folder, f"nats per token on the held-out text of {home.terms.name}: {', '.join(said)}")
    return own


def settle(home: Home, order: Order, files: Mapping[str, bytes]) -> None:
    """Make the folder of this run, once: files as sent, the node's text as its part says."""
    part, store = order.part, RunFolder(order.place.files)
    for name, content in files.items():
        if name not in part.files.names() or hashlib.sha256(content).hexdigest() != name:
            raise ProtocolError(f"a file was sent whose content is not {name}")
        store.write(name, content)
    folder = RunFolder(order.place.folder)
    if folder.has(HELDOUT):  # it comes last and says that all is there
        return
    probe = ProbeSet.load(store.path / part.files.probe)
    tokenizer = load_tokenizer(store.path / part.files.tokenizer, vocab=probe.vocab)
    model = students.load(store.path / part.files.base)
    _insist("model's vocabulary", str(model.vocab), str(probe.vocab), of="the probe set's")
    model.check_tokenizer(tokenizer)
    _insist("probe set", probe.digest, home.terms.probe)
    _insist("tokenizer", tokenizer.digest, home.terms.tokenizer)
    _insist("tokenizer", tokenizer.digest, probe.tokenizer, of="the probe set's")
    text = node_text(part, home.documents(), tokenizer)
    folder.write_json(PART, part.model_dump(mode="json"))
    folder.write_arrays(TEXT, text.arrays)
    folder.write_arrays(HELDOUT, {"0": text.heldout}, {"bytes": text.heldout_bytes})


def _kept_student(order: Order) -> Arrays:
    """Return the student that this node evaluated last, if it is the one that is meant."""
    path = order.place.folder / STUDENT
    content = path.read_bytes() if path.exists() else b""
    if digest(content) != order.body.get("student"):
        raise ProtocolError("the student of the last round is not here: send it along")
    return parse_arrays(content, str(path))[0]


def _order(home: Home, data: bytes, kind: str) -> Order:
    letter = Letter.parse(data)
    session = _session(letter.body)
    key = home.secret(session)
    body = letter.check(key, kind)
    part = Part.parse(body.get("part"))
    if part.name != home.terms.name:
        raise ProtocolError(f"the letter's part is for {part.name!r}, this is {home.terms.name!r}")
    folder = home.folder / "runs" / session.hex()[:16]
    return Order(part, body, key, Place(folder, home.folder / "files", folder / TEXT))


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
