"""What a node does with each kind of message: say who it is, do a round, evaluate the student. No Flower in here.

A student comes as a packed difference to the one that the node has, or to the base model. It is evaluated with the
task of the next round; only the last one has a message of its own.

The process is new for every message: all that must survive is in the node's folder.

    files/SHA-256     what the aggregator sent once: probe set, tokenizer, base models
    runs/SESSION/     one run: text and held-out tokens, the machine's state with its last frame
    ledger.jsonl      every frame and every loss that ever left this site
"""

from __future__ import annotations

import hashlib
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from fpld import students
from fpld._check import printable
from fpld.data import ProbeSet, load_tokenizer
from fpld.engines.flower.adoption import adopt_here
from fpld.engines.flower.discretion import conceal
from fpld.engines.flower.identity import Letter, write_letter
from fpld.engines.flower.journal import Journal, note
from fpld.engines.flower.ledger import Ledger, Question
from fpld.engines.flower.polling import note_crowd
from fpld.engines.flower.presence import presence
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
from fpld.protocol.weights import packed_for, unpack_weights, weights_digest
from fpld.protocol.wire import VERSION
from fpld.storage.arrays import dump_arrays, parse_arrays, read_arrays
from fpld.storage.files import write_atomic
from fpld.storage.folder import RunFolder

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from fpld.engines.flower.home import Home
    from fpld.protocol import Task
    from fpld.storage.folder import Arrays

HELDOUT, TEXT, STUDENT, PART = "heldout.safetensors", "text.safetensors", "student.safetensors", "part.json"


class Answer(NamedTuple):
    """What leaves a node after a round: the frame, and a letter with what the last student is worth, if asked for."""

    frame: bytes
    letter: bytes | None = None


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
    if body.get("wire") != VERSION:
        spoken = printable(body.get("wire"), 20)
        raise ProtocolError(
            f"this node speaks version {VERSION} of the wire, the aggregator {spoken}: install the same"
        )
    session = _session(body)
    answer = {"kind": "joined", "name": home.terms.name, "challenge": body.get("challenge"), "missing": missing}
    note_crowd(home.folder / "flower", body.get("nodes"))
    who = presence(home.folder)
    more = {"wire": VERSION, "student": _held(_folder(home, session)), "instance": who["instance"] if who else ""}
    return write_letter(home.secret(session), answer | more)


def train(home: Home, data: bytes, task: Task, files: Mapping[str, bytes], packed: bytes = b"") -> Answer:
    """Run a round: fine-tune, probe, code; then evaluate the student that came, if the letter asks for it."""
    order = _order(home, data, "train")
    _store(order, files)
    student = _student(order, packed)
    if task.broadcast == "weights" and not task.arrays:
        task = replace(task, arrays=student)
    serial = task.to_bytes()
    if digest(serial) != order.body.get("task"):
        raise ProtocolError("the task is not the one that the aggregator's letter names")
    ledger, question = Ledger(home.folder), Question.frame(str(order.body["session"]), task)
    ledger.allow(home.terms, question)
    settle(home, order)
    _keep(order, student)
    question = _promising(order, question)
    allow_spending(ledger.entries, home.terms, question, order.part.rounds)
    with RunFolder(order.place.folder).lock(), _told(home, task.plan.round):
        frame = work(order.part, order.place, serial, key=order.key, secret=True)
    if not is_ask(frame):  # which blocks of the prior it needs says nothing about its text
        ledger.enter(question, frame)
        if question.spent is not None:
            note(home.folder, _spending(home, ledger))
    if is_ask(frame) or "evaluate" not in order.body:
        return Answer(frame)
    return Answer(frame, _evaluated(home, order, student))


def _evaluated(home: Home, order: Order, student: Arrays) -> bytes:
    """Return the letter about the student that came with a task; why there is no loss must not cost the frame."""
    try:
        return _judge(home, order, student, order.body["evaluate"])
    except Exception as error:  # whatever it is, the details are the site's
        said = conceal("evaluate", error, home.folder)
        return write_letter(order.key, {"kind": "evaluated", "round": order.body["evaluate"], "failed": str(said)})


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


def evaluate(home: Home, data: bytes, files: Mapping[str, bytes], packed: bytes = b"") -> bytes:
    """Evaluate the last student on the held-out text; return a letter with the loss and the text's size."""
    order = _order(home, data, "evaluate")
    _store(order, files)
    student = _student(order, packed)
    settle(home, order)
    _keep(order, student)
    if order.part.differs and order.body.get("round") == order.part.rounds:
        with _told(home, 0):
            adopt_here(home, order.part, order.place, student, order.place.folder / HELDOUT)
    return _judge(home, order, student, order.body.get("round"))


def _judge(home: Home, order: Order, student: Arrays, round: object) -> bytes:
    """Evaluate the student of a round; return the letter.

    The held-out text is private too: where privacy is promised, or the site has a limit on it, neither is told.
    """
    if type(round) is not int or round < 0:
        raise ProtocolError("a letter that asks for an evaluation must name its round")
    ledger = Ledger(home.folder)
    question = Question.loss(str(order.body["session"]), round, str(order.body["student"]))
    told = order.part.privacy is None and home.terms.most_epsilon is None
    if told:
        ledger.allow(home.terms, question)
    part, place = order.part, order.place
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


def _store(order: Order, files: Mapping[str, bytes]) -> None:
    """Keep files as they were sent."""
    for name, content in files.items():
        if name not in order.part.files.names() or hashlib.sha256(content).hexdigest() != name:
            raise ProtocolError(f"a file was sent whose content is not {name}")
        RunFolder(order.place.files).write(name, content)


def settle(home: Home, order: Order) -> None:
    """Make the folder of this run, once, with the node's text as its part says."""
    part, store, folder = order.part, RunFolder(order.place.files), RunFolder(order.place.folder)
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


def _student(order: Order, packed: bytes) -> Arrays:
    """Return the student that the letter names: out of what came, and what this node has."""
    needed, made = packed_for(packed) if packed else (str(order.body.get("student")),) * 2
    if made != order.body.get("student"):
        raise ProtocolError("the student is not the one that the aggregator's letter names")
    found = None
    if _held(order.place.folder) == needed:
        found = parse_arrays((order.place.folder / STUDENT).read_bytes(), STUDENT)[0]
    elif (path := order.place.files / order.part.files.student).exists():
        base = students.read_state(path)
        found = base if weights_digest(base) == needed else None
    if found is None:
        raise ProtocolError("the student of the last round is not here: send it along")
    return unpack_weights(packed, found) if packed else found


def _keep(order: Order, student: Arrays) -> None:
    """Keep the student: the next one comes as a difference to it."""
    if _held(order.place.folder) != order.body["student"]:
        write_atomic(order.place.folder / STUDENT, dump_arrays(student, {}))


def _held(folder: Path) -> str | None:
    """Return the digest of the student that is kept for a run, if there is one."""
    path = folder / STUDENT
    return digest(path.read_bytes()) if path.exists() else None


def _order(home: Home, data: bytes, kind: str) -> Order:
    letter = Letter.parse(data)
    session = _session(letter.body)
    key = home.secret(session)
    body = letter.check(key, kind)
    part = Part.parse(body.get("part"))
    if part.name != home.terms.name:
        raise ProtocolError(f"the letter's part is for {part.name!r}, this is {home.terms.name!r}")
    folder = _folder(home, session)
    return Order(part, body, key, Place(folder, home.folder / "files", folder / TEXT))


def _folder(home: Home, session: bytes) -> Path:
    return home.folder / "runs" / session.hex()[:16]


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
