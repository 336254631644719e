"""What a site does with each kind of message: join, train, evaluate. No Flower in here.

A message has a signed part: the session of the run, the node's part in it and the digests of task and student, under
the secret that site and aggregator share (`Request`). Everything else in it is checked against these digests.

A student comes as a delta to the one that the site has, or to the base model. It is evaluated with the task of the next
round; only the last one has a message of its own. A site's own model of another kind then learns from that student.

The process is new for every message, so all that must survive is in the site's folder:

    files/SHA-256     what the aggregator sent once: probe set, tokenizer, base models
    texts/            the tokens of the site's text, which all runs share (`fpld node clear` removes them)
    runs/SESSION/     one run: which tokens it trains on, held-out tokens, the node's state with its last frame
    ledger.jsonl      every frame and every loss that ever left this site, and every private training
    reserved/         what answers that are being worked on may take of the site's limits
"""

from __future__ import annotations

import hashlib
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from fpld import students
from fpld.data import ProbeSet, TokenStrings, load_probe, load_tokenizer
from fpld.data.token_stream import has_tokens
from fpld.engines.flower.credentials import SignedMessage, sign_message
from fpld.engines.flower.log import OWN_MODEL_PREFIX, FolderLogHandler, append_log
from fpld.engines.flower.patches.polling import write_fleet_size
from fpld.engines.flower.site.config import SITE_LIMIT_KEY, check_models
from fpld.engines.flower.site.disclosure import check_may_send, redact, with_site_check, written_counts
from fpld.engines.flower.site.folder import HELDOUT, OWN_HELDOUT, TEXT, read_presence
from fpld.engines.flower.site.ledger import Ledger, Query, spent_epsilon
from fpld.errors import MismatchError, ProtocolError
from fpld.federation import workers
from fpld.federation.telemetry import listen
from fpld.node.round import NodePaths, answer_task, learn_from_student
from fpld.node.spec import NodeSpec
from fpld.node.text import LIMIT_KEY, node_text
from fpld.node.training import node_model_losses, open_student, private_training, use_compute
from fpld.progress import ProgressLabel, labelled
from fpld.protocol.messages import digest, is_prior_request
from fpld.protocol.weights import decode_delta, delta_digests, weights_digest
from fpld.protocol.wire import VERSION
from fpld.storage.arrays import dump_arrays, parse_arrays, read_arrays
from fpld.storage.files import write_atomic
from fpld.storage.run_folder import ADOPTED_MODEL, NODE_SPEC, OWN_MODEL, STUDENT, RunFolder
from fpld.students.heldout import HeldoutText, mean_losses, read_heldout
from fpld.validation import printable

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from fpld.engines.flower.site.config import Site
    from fpld.protocol import Task
    from fpld.types import Arrays


class RoundAnswer(NamedTuple):
    """What leaves a site after a round: the frame and, if asked for, a signed message with the last student's loss."""

    frame: bytes
    evaluation: bytes | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """A verified message of this run's aggregator.

    `body` is the signed message, `spec` the node's part in the run, `key` the secret that site and aggregator share.
    """

    site: Site
    spec: NodeSpec
    body: dict[str, Any]
    key: bytes
    paths: NodePaths

    @classmethod
    def parse(cls, site: Site, data: bytes, kind: str) -> Self:
        """Verify a signed message that must be of this kind, and for this site."""
        message = SignedMessage.parse(data)
        session = _session(message.body)
        key = site.secret(session)
        body = message.check(key, kind)
        spec = NodeSpec.parse(body.get("part"))
        if spec.name != site.terms.name:
            raise ProtocolError(f"the message is for {spec.name!r}, this is {site.terms.name!r}")
        folder = _run_folder(site, session)
        return cls(site, spec, body, key, NodePaths(folder, site.folder / "files", folder / TEXT))

    @property
    def session(self) -> str:
        """Return the run's session, in hexadecimal digits."""
        return str(self.body["session"])

    @property
    def heldout(self) -> Path:
        """Return the file with the site's held-out tokens."""
        return self.paths.folder / HELDOUT


def handle_join(site: Site, data: bytes) -> bytes:
    """Answer which node this is: sign the challenge, and name the files of the run that are not here yet."""
    body = SignedMessage.parse(data).body
    files = body.get("files")
    if body.get("kind") != "join" or not isinstance(files, list):
        raise ProtocolError("a message of kind 'join' must have a list of files")
    missing = [name for name in files if not _is_digest(name) or not (site.folder / "files" / name).exists()]
    if body.get("wire") != VERSION:
        spoken = printable(body.get("wire"), 20)
        raise ProtocolError(
            f"this node speaks version {VERSION} of the wire, the aggregator {spoken}: install the same"
        )
    session = _session(body)
    write_fleet_size(site.folder / "flower", body.get("nodes"))
    presence = read_presence(site.folder)
    answer = {
        "kind": "joined",
        "name": site.terms.name,
        "challenge": body.get("challenge"),
        "missing": missing,
        "wire": VERSION,
        "student": _stored_student(_run_folder(site, session)),
        "instance": presence["instance"] if presence else "",
    }
    return sign_message(site.secret(session), answer)


def handle_train(site: Site, data: bytes, task: Task, files: Mapping[str, bytes], packed: bytes = b"") -> RoundAnswer:
    """Run a round: fine-tune, probe and encode; then evaluate the student that came along, if the message asks for it.

    Parameters
    ----------
    data
        The signed message.
    task
        The task that the message names by its digest; without the weights, if these come as `packed`.
    files
        Files of the run that this site lacked, by their digests.
    packed
        The student as a delta; empty if this site has it.

    Raises
    ------
    ProtocolError
        If the task, the student or a file is not the one that the message names.
    BudgetError
        If an answer would exceed the site's terms, or the task asks for what may not leave.
    """
    request = Request.parse(site, data, "train")
    _store_files(request, files)
    student = _unpack_student(request, packed)
    if task.broadcast == "weights" and not task.arrays:
        task = replace(task, arrays=student)
    if digest(task.to_bytes()) != request.body.get("task"):
        raise ProtocolError("the task is not the one that the aggregator's message names")
    check_may_send(site.terms.may_send, task)
    if task.plan.written and request.spec.written is None:
        raise ProtocolError("the task asks for written text, and the message does not say how it is written")
    ledger = Ledger(site.folder)
    query = Query.frame(request.session, task)
    ledger.check_limits(site.terms, query)
    prepare_run(request)
    _store_student(request, student)
    query = _with_privacy_loss(request, query)
    spec = with_site_check(request.spec, site.terms.private_run)
    # The run's lock comes first: the same task in a second process must not begin beside it.
    with (
        RunFolder(request.paths.folder).lock(),
        ledger.reserve(site.terms, query, request.spec.rounds) as reservation,
    ):
        with _logged_progress(site, task.plan.round):
            begin = reservation.begin_training
            frame = answer_task(spec, request.paths, task, key=request.key, secret=True, before_training=begin)
        # A frame that asks for blocks of the prior says nothing about the text: it is not in the ledger.
        if is_prior_request(frame):
            return RoundAnswer(frame)
        if task.plan.written:
            query = replace(query, written=written_counts(spec, request.paths.folder, task.plan.round, frame))
        ledger.record(query, frame)
    if query.written is not None:
        append_log(site.folder, f"round {task.plan.round}: {query.written.describe()}")
    if query.spent is not None:
        append_log(site.folder, _describe_epsilon(site, ledger))
    if "evaluate" not in request.body:
        return RoundAnswer(frame)
    return RoundAnswer(frame, _evaluate_or_explain(request, student))


def handle_evaluate(site: Site, data: bytes, files: Mapping[str, bytes], packed: bytes = b"") -> bytes:
    """Evaluate the last student on the held-out text; return a signed message with the loss and the text's size.

    Parameters and errors are those of `handle_train`.
    """
    request = Request.parse(site, data, "evaluate")
    _store_files(request, files)
    student = _unpack_student(request, packed)
    prepare_run(request)
    _store_student(request, student)
    if request.spec.differs and request.body.get("round") == request.spec.rounds:
        with _logged_progress(site, 0):
            _adopt_student(request, student)
    return _evaluate(request, student, request.body.get("round"))


def prepare_run(request: Request) -> None:
    """Make the folder of this run, once, with the site's text as the run wants it."""
    spec = request.spec
    terms = request.site.terms
    use_compute(terms.compute)
    store = RunFolder(request.paths.files)
    folder = RunFolder(request.paths.folder)
    if folder.has(HELDOUT) and has_tokens(folder.path / TEXT):  # HELDOUT is written last
        return
    probe = load_probe(store.path / spec.files.probe)
    model = students.load(store.path / spec.files.base)
    if isinstance(probe, ProbeSet):
        _check_equal("model's vocabulary", str(model.vocab), str(probe.vocab))
    tokenizer = load_tokenizer(store.path / spec.files.tokenizer, vocab=model.vocab)
    shared = tokenizer
    model.check_tokenizer(tokenizer)
    for what, actual, wanted in (
        ("probe set", probe.digest, terms.probe),
        ("tokenizer", tokenizer.digest, terms.tokenizer),
    ):
        if wanted is not None and actual != wanted:
            raise MismatchError(what, actual, wanted)
    if isinstance(probe, ProbeSet):
        _check_equal("tokenizer", tokenizer.digest, probe.tokenizer)
    elif spec.files.student_tokenizer is not None:
        # The plans have the digest of the maps, and with it that of both tokenizers.
        tokens = students.read_vocab(store.path / spec.files.student)
        shared = load_tokenizer(store.path / spec.files.student_tokenizer, vocab=tokens)
    limited_by = LIMIT_KEY
    if terms.limit is not None and (spec.limit is None or terms.limit < spec.limit):
        spec = spec.model_copy(update={"limit": terms.limit})
        limited_by = SITE_LIMIT_KEY
    cache = request.site.text_cache
    with _logged_progress(request.site, 0):
        text = node_text(spec, request.site.documents(), tokenizer, limited_by, cache, shared=shared)
    append_log(request.site.folder, f"the tokens of the text are in {cache}, for all runs")
    for line in (text.use.left_out, f"{text.use.heldout_share} are held out"):
        if line:
            append_log(request.site.folder, line)
    folder.write_json(NODE_SPEC, spec.model_dump(mode="json"))
    folder.write_arrays(TEXT, text.arrays)
    if shared is not tokenizer:
        respelled = HeldoutText.respelled(text.heldout.tokens, TokenStrings(shared), TokenStrings(tokenizer))
        folder.write_arrays(OWN_HELDOUT, respelled.arrays("0"))
    folder.write_arrays(HELDOUT, text.heldout.arrays("0"), {"bytes": text.heldout_bytes})


def _evaluate_or_explain(request: Request, student: Arrays) -> bytes:
    """Return the signed message about the student that came with a task; a failure must not cost the frame."""
    try:
        return _evaluate(request, student, request.body["evaluate"])
    except Exception as error:  # whatever it is, the details stay at the site
        reason = str(redact("evaluate", error, request.site.folder))
        return sign_message(request.key, {"kind": "evaluated", "round": request.body["evaluate"], "failed": reason})


def _evaluate(request: Request, student: Arrays, round: object) -> bytes:
    """Evaluate the student of a round; return the signed message.

    The held-out text is private too: neither loss nor size leaves a site where training is private, or which has a
    limit on epsilon.
    """
    if type(round) is not int or round < 0:
        raise ProtocolError("a message that asks for an evaluation must name its round")
    site = request.site
    ledger = Ledger(site.folder)
    query = Query.loss(request.session, round, str(request.body["student"]))
    disclosed = request.spec.privacy is None and site.terms.most_epsilon is None
    if not disclosed:
        _evaluated_losses(request, student)
        return sign_message(request.key, {"kind": "evaluated", "round": query.round})
    with ledger.reserve(site.terms, query):
        answer = {"kind": "evaluated", "round": query.round, **_evaluated_losses(request, student)}
        arrays, metadata = RunFolder(request.paths.folder).read_arrays(HELDOUT)
        tokens = len(HeldoutText.of(arrays, "0").counted)
        message = sign_message(request.key, {**answer, "tokens": tokens, "bytes": metadata["bytes"]})
        ledger.record(query, message)
    return message


def _evaluated_losses(request: Request, student: Arrays) -> dict[str, float | None]:
    """Compute and log the student's loss and those of the site's own models; return those that the site tells."""
    with _logged_progress(request.site, 0):
        path = request.paths.files / request.spec.files.student
        nats = workers.evaluate(path, student, request.heldout, request.spec.length)
        loss = mean_losses(nats)[0]
        local_losses = _compare_local_models(request, loss)
    return {"loss": loss, **(local_losses if request.site.terms.show_own_loss else {})}


def _compare_local_models(request: Request, loss: float) -> dict[str, float | None]:
    """Log the student's loss beside those of the site's own models; return the latter."""
    local_losses = node_model_losses(request.paths.folder, _own_heldout(request), 0, request.spec.length)
    parts = [f"the student {loss:.4f}"]
    for name, what in (("own", "this node's own model of this round"), ("alone", "its model without the federation")):
        if local_losses[name] is not None:
            parts.append(f"{what} {local_losses[name]:.4f}")
    site = request.site
    append_log(site.folder, f"nats per token on the held-out text of {site.terms.name}: {', '.join(parts)}")
    return local_losses


def _own_heldout(request: Request) -> list[HeldoutText]:
    """Return the held-out text in the tokens of the site's own model."""
    own = request.paths.folder / OWN_HELDOUT
    return read_heldout(read_arrays(own if own.exists() else request.heldout)[0])


def _adopt_student(request: Request, student: Arrays) -> None:
    """Let the site's own model, which is of another kind, learn from the last student.

    The model stays at the site. A failure must not cost the student's evaluation. A round is at least as much work, so
    this takes no longer than a round's deadline.
    """
    if not (request.paths.folder / OWN_MODEL).exists():  # this node was in no round
        return
    try:
        with RunFolder(request.paths.folder).lock():
            append_log(request.site.folder, _adopted_losses(request, student))
    except Exception as error:  # whatever it is, the details stay at the site
        redact("learning from the last student", error, request.site.folder)


def _adopted_losses(request: Request, student: Arrays) -> str:
    """Train the site's own model on the student's labels; return its loss before and after, as a line of the log."""
    folder = request.paths.folder
    length = request.spec.length
    texts = _own_heldout(request)
    run = read_arrays(folder / OWN_MODEL)[1]["run"]
    (folder / ADOPTED_MODEL).unlink(missing_ok=True)  # a message that comes again begins with the same model
    before = node_model_losses(folder, texts, 0, length)["own"]
    learn_from_student(request.spec, request.paths, student, run)
    after = node_model_losses(folder, texts, 0, length)["own"]
    losses = f"{before:.4f} nats per token on the held-out text, {after:.4f} after it learnt from the last student"
    return f"{OWN_MODEL_PREFIX}{losses}"


def _with_privacy_loss(request: Request, query: Query) -> Query:
    """Return the query with what its answer will spend of epsilon, if training is private."""
    promise = request.spec.privacy_budget(request.paths.files)
    if promise is None:
        return query
    student = open_student(request.paths.files / request.spec.files.base)
    _, mechanism = private_training(student, [request.paths.text], promise)
    return replace(query, spent=mechanism.spent(request.spec.local.steps), unit=promise.terms.unit)


def _describe_epsilon(site: Site, ledger: Ledger) -> str:
    """Return the epsilon of all answers so far, as a line of the log."""
    terms = site.terms
    epsilon = spent_epsilon(ledger.entries, terms)
    limit = "" if terms.most_epsilon is None else f" of at most {terms.most_epsilon:g}"
    return f"privacy spent over all runs, for each {terms.unit}: epsilon {epsilon:.3g}{limit} at delta {terms.delta:g}"


@contextmanager
def _logged_progress(site: Site, round: int) -> Iterator[None]:
    """Log the progress of this thread's work in the site's folder, every few seconds."""
    label = ProgressLabel(round=round, model=site.terms.name)
    with listen(FolderLogHandler(site.folder, this_thread=True)), labelled(label):
        yield


def _store_files(request: Request, files: Mapping[str, bytes]) -> None:
    """Store files of the run under the digests of their content; refuse models that the site does not allow."""
    for name, content in files.items():
        if name not in request.spec.files.names() or hashlib.sha256(content).hexdigest() != name:
            raise ProtocolError(f"a file was sent whose content is not {name}")
        RunFolder(request.paths.files).write(name, content)
    named = request.spec.files
    check_models(request.site, [request.paths.files / name for name in sorted({named.base, named.student})])


def _unpack_student(request: Request, packed: bytes) -> Arrays:
    """Return the student that the message names: the stored one, or the base model, plus the delta that came."""
    wanted = request.body.get("student")
    base_digest, student_digest = delta_digests(packed) if packed else (str(wanted), str(wanted))
    if student_digest != wanted:
        raise ProtocolError("the student is not the one that the aggregator's message names")
    weights = None
    if _stored_student(request.paths.folder) == base_digest:
        weights = parse_arrays((request.paths.folder / STUDENT).read_bytes(), STUDENT)[0]
    elif (path := request.paths.files / request.spec.files.student).exists():
        base = students.read_state(path)
        weights = base if weights_digest(base) == base_digest else None
    if weights is None:
        raise ProtocolError("the student of the last round is not here: send it along")
    return decode_delta(packed, weights) if packed else weights


def _store_student(request: Request, student: Arrays) -> None:
    """Store the student: the next one comes as a delta to it."""
    if _stored_student(request.paths.folder) != request.body["student"]:
        write_atomic(request.paths.folder / STUDENT, dump_arrays(student, {}))


def _stored_student(folder: Path) -> str | None:
    """Return the digest of the student that is stored for a run; None if there is none."""
    path = folder / STUDENT
    return digest(path.read_bytes()) if path.exists() else None


def _run_folder(site: Site, session: bytes) -> Path:
    return site.folder / "runs" / session.hex()[:16]


def _session(body: Mapping[str, Any]) -> bytes:
    session = body.get("session")
    if not _is_digest(session):
        raise ProtocolError("a message must name its run's session in 64 hexadecimal digits")
    return bytes.fromhex(str(session))


def _is_digest(text: object) -> bool:
    return isinstance(text, str) and len(text) == 64 and set(text) <= set("0123456789abcdef")


def _check_equal(what: str, actual: str, expected: str) -> None:
    if actual != expected:
        raise ProtocolError(f"the run's {what} is {actual}, the probe set's is {expected}: fetch the same one")
