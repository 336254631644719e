"""Fuzzers of what comes over a wire: frames, payloads with right checksums, events, tasks."""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
from flwr.app import Context, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from fpld.budget.policy import Budget
from fpld.codecs import encode, make_prior
from fpld.codecs.base import MAX_LOGIT
from fpld.engines.flower import client, client_app
from fpld.engines.flower.credentials import INVITATION, make_certificates, sign_message
from fpld.engines.flower.exchange import SLACK_BYTES, SentMessage
from fpld.engines.flower.messages import (
    FRAME,
    SIGNED_MESSAGE,
    STUDENT,
    TASK,
    content_bytes,
    pack_fields,
    read_field,
    unpack_task,
)
from fpld.engines.flower.site.config import Invitation, init_node, open_site
from fpld.engines.flower.site.disclosure import SiteError
from fpld.errors import FpldError, FrameError, InputError, ProtocolError, QuorumError
from fpld.protocol import Aggregator, Node, Settings, Task
from fpld.protocol.shared_prior import PriorNotes
from fpld.protocol.states import AGGREGATOR, AggregatorEvent, AggregatorPhase
from fpld.protocol.wire import HEADER, VERSION, decode_frame, encode_frame
from fpld.registry import codecs
from fpld.storage.arrays import dump_arrays, parse_arrays
from tests.engines.flower.link import NODE, Link, LinkedGrid, pulled
from tests.fuzz.target import Target, disturbed, limited_memory, mutated, odd
from tests.helpers import make_plan

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from fpld.types import Plan

    Once = Callable[[np.random.Generator], int]

PROBE = bytes(32)


def plans() -> dict[str, list[Plan]]:
    """Small plans of every codec, with a prior and without, with little and with much."""
    shape = (5, 24)
    prior = make_prior(np.random.default_rng(0).normal(0, 2, shape))
    found = {}
    for name in codecs.names():
        given = [
            make_plan(contexts=5, vocab=24, bits=bits * 24, clip=clip, prior=held, slots=slots)
            for bits in (2.0, 33.0)
            for clip in (None, 3.0)
            for held in (None, prior)
            for slots in (1, 3)
        ]
        found[name] = [plan for plan in given if _works(name, plan)]
    return found


def _works(name: str, plan: Plan) -> bool:
    with contextlib.suppress(InputError):
        encode(codecs.get(name), np.zeros(plan.shape, np.float32), plan)
        return True
    return False


def frames(_folder: Path) -> Once:
    """Frames that are altered anywhere: all are refused."""
    plan = make_plan()
    codec = codecs.get("uniform")
    frame = encode_frame(encode(codec, np.linspace(-3, 3, 300).reshape(6, 50), plan), plan, codec.code, key=b"key")

    def once(rng: np.random.Generator) -> int:
        data = mutated(frame, rng) if rng.random() < 0.8 else rng.bytes(int(rng.integers(300)))
        if data != frame:
            try:
                decode_frame(data, plan, codec.code, key=b"key")
            except FrameError:
                return 1
            raise AssertionError("an altered frame was taken")
        return 1

    return once


def payloads(_folder: Path) -> Once:
    """Payloads of every codec in frames with right headers and checksums: decoded within the range, or refused."""
    rows = [(codecs.get(name), plan) for name, given in plans().items() for plan in given]
    logits = np.random.default_rng(1).normal(0, 3, (5, 24)).astype(np.float32)
    good = [encode(codec, logits, plan) for codec, plan in rows]

    def once(rng: np.random.Generator) -> int:
        number = int(rng.integers(len(rows)))
        codec, plan = rows[number]
        data = mutated(good[number], rng) if rng.random() < 0.7 else rng.bytes(len(good[number]))
        data = data[: plan.budget_bytes]
        payload = decode_frame(encode_frame(data, plan, codec.code), plan, codec.code)
        with contextlib.suppress(FrameError):
            reader = codec.reader(payload, plan)
            reader.check()
            for block in codec.reader(payload, plan).blocks():
                values = np.asarray(block.values)
                variance = np.asarray(block.variance)
                if not (np.abs(values) <= 1.05 * MAX_LOGIT).all() or not (variance >= 0).all():
                    raise AssertionError(f"{codec} decoded {np.abs(values).max()} with variance {variance.min()}")
        return 1

    return once


def events(_folder: Path) -> Once:
    """Events in any order at an aggregator and its nodes, against the table of states and a count of our own."""
    names = ["a", "b", "c"]
    fixed: dict[str, Any] = {"run_key": bytes(16), "probe": PROBE, "contexts": 3, "vocab": 8, "rounds": 2}
    budget = Budget(caps=np.full(3, 40.0), floors=np.zeros(3), vocab=8)
    settings = Settings(names=names, budget=budget, clips=[2.0] * 3, quorum=2, threads=1, **fixed)
    table = AGGREGATOR

    def once(rng: np.random.Generator) -> int:
        aggregator = Aggregator(settings)
        accepted: dict[int, bytes] = {}
        tasks: dict[int, Task] = {}
        old: list[bytes] = []
        for _ in range(40):
            before = aggregator.phase
            event = int(rng.integers(7))
            try:
                if event == 0:
                    tasks = aggregator.open("none", {})
                    accepted = {}
                elif event == 1:
                    aggregator.close()
                elif event == 2:
                    aggregator.combine()
                elif event == 3:
                    state = aggregator.end()
                    if state.round < settings.rounds and rng.random() < 0.5:
                        aggregator = Aggregator(settings, state)
                        before = AggregatorPhase.COMBINED
                        if aggregator.round != state.round + 1:
                            raise AssertionError("the aggregator of the next round is in another one")
                else:
                    _frame(aggregator, tasks, accepted, old, rng)
            except (ProtocolError, QuorumError):
                if aggregator.phase is not before:
                    raise AssertionError("a refused event changed the phase") from None
            if aggregator.phase is AggregatorPhase.COLLECTING and len(aggregator.missing) != 3 - len(accepted):
                raise AssertionError("the aggregator counts other frames than were accepted")
        return 40

    assert table[AggregatorPhase.READY][AggregatorEvent.OPEN] is AggregatorPhase.COLLECTING
    return once


def _answer(task: Task, which: int, _made: dict[tuple[int, int, int], bytes] = {}) -> bytes:  # noqa: B006  # a cache
    """Return one of four right answers to a task; tasks of a round and node are the same in every example."""
    key = task.plan.round, task.plan.node, which
    if key not in _made:
        worker, _ = Node(task.plan.node, PROBE).receive(task)
        logits = np.random.default_rng(which).normal(0, 1, (3, 8)).astype(np.float32)
        _made[key] = worker.answer(task, logits)[1]
    return _made[key]


def _frame(aggregator: Aggregator, tasks: Any, accepted: Any, old: Any, rng: np.random.Generator) -> None:
    """Send a frame: a right one, one of another node or round, the same again, or an altered one."""
    node = int(rng.integers(-1, 4))
    data = b""
    right = node in tasks
    if right:
        data = _answer(tasks[node], int(rng.integers(4)))
    if old and rng.random() < 0.3:
        data = old[int(rng.integers(len(old)))]
        right = False
    if rng.random() < 0.2:
        data = mutated(data, rng)
        right = False
    receipt = aggregator.frame(node, data)
    if receipt.verdict == "accepted":
        if node in accepted or aggregator.phase is not AggregatorPhase.COLLECTING:
            raise AssertionError("a frame was accepted twice or late")
        accepted[node] = data
        old.append(data)
    elif receipt.verdict == "duplicate" and accepted.get(node) != data:
        raise AssertionError("other bytes passed for the same")
    waiting = right and node not in accepted and aggregator.phase is AggregatorPhase.COLLECTING
    if receipt.verdict == "refused" and waiting:
        raise AssertionError(f"a right frame was refused: {receipt.reason}")


MAX_TASK_BYTES = 1 << 20
"""Memory that a node may take for parsing a task of some kilobytes, whatever sizes it claims."""
MAX_ANSWER_BYTES = 1 << 27
"""Memory for an answer to it: phases of as many slots as a plan may name."""
CLAIMS = (2**16, 2**24, 2**31 - 1, 2**32 - 1, 2**40, 2**63)


def _claiming(head: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """Return a task's head that claims large sizes."""
    names = rng.permutation(["contexts", "vocab", "bits", "slots", "written"])[: int(rng.integers(1, 4))]
    return head | {"plan": head["plan"] | {str(name): int(rng.choice(CLAIMS)) for name in names}}


def tasks(_folder: Path) -> Once:
    """Tasks at a node, altered in their head, their arrays, their sizes or their bytes: refused in little memory."""
    logits = np.random.default_rng(0).normal(0, 2, (6, 50))
    with_prior = make_plan(probe=PROBE, prior=make_prior(logits))
    # Its head claims sizes, and nothing else in it is as large.
    notes = PriorNotes((6, 50), np.zeros(1, np.int32), np.zeros(0, np.uint16), np.zeros((1, 8), np.uint8))
    good = [
        Task(with_prior, "predictive", arrays={"w": np.ones((2, 3), np.float32)}).to_bytes(),
        Task(make_plan(probe=PROBE), "samples", notes=notes).to_bytes(),
    ]
    parsed = [(*parse_arrays(data, "task"), data) for data in good]

    def receive(data: bytes) -> None:
        with contextlib.suppress(InputError, ProtocolError):
            with limited_memory(MAX_TASK_BYTES):
                received = Task.from_bytes(data)
                node, _ = Node(1, PROBE).receive(received)
            with limited_memory(MAX_ANSWER_BYTES), contextlib.suppress(FpldError):
                node.answer(received, np.zeros((6, 50), np.float32))

    def once(rng: np.random.Generator) -> int:
        arrays, metadata, data = parsed[int(rng.integers(len(parsed)))]
        hostile = mutated(data, rng)
        if rng.random() < 0.7:
            head = json.loads(metadata["task"])
            head = _claiming(head, rng) if rng.random() < 0.3 else disturbed(head, rng)
            hostile = dump_arrays(arrays, {**metadata, "task": json.dumps(head)})
        receive(hostile)
        return 1

    task = Task.from_bytes(good[0])
    Node(1, PROBE).receive(task)[0].answer(task, logits.astype(np.float32))  # compiles kernels, which takes memory
    return once


def messages(folder: Path) -> Once:
    """Messages at a node whose tag is wrong, with a task that claims anything: refused, and the task is not parsed."""
    _pretend_to_be_in_a_run()
    certificates = folder / "certs"
    make_certificates(certificates, "127.0.0.1:8000", ["localhost"], days=2)
    init_node(folder / "north", "north", Invitation.read(certificates / INVITATION), 'data = "texts"')
    file = folder / "north/node.toml"
    app = client_app()
    plan = make_plan(probe=PROBE)
    metadata = Task(plan, "samples").metadata()
    body = {
        "session": "ab" * 32,
        "part": {"name": "north"},
        "task": "cd" * 32,
        "round": 1,
        "files": [],
        "wire": VERSION,
    }
    key = open_site(file).secret(bytes.fromhex("ab" * 32))

    def letter(kind: str, rng: np.random.Generator) -> bytes:
        right = sign_message(key, body | {"kind": kind})
        said = body | {"kind": kind}
        if rng.random() < 0.5:
            said = {**said, "session": odd(rng)} if rng.random() < 0.3 else _mapping(disturbed(said, rng))
        forged = sign_message(rng.bytes(32), said)
        return mutated(right, rng) if rng.random() < 0.3 else forged

    def once(rng: np.random.Generator) -> int:
        kind = str(rng.choice(["train", "train", "evaluate", "query.join"]))
        head = _claiming(json.loads(metadata["task"]), rng)
        hostile = dump_arrays({}, {**metadata, "task": json.dumps(head)})
        sent = letter("join" if kind == "query.join" else kind, rng)
        content = pack_fields(letter=(sent, SIGNED_MESSAGE), task=(hostile, TASK), student=(rng.bytes(99), STUDENT))
        message = Message(content, NODE, kind)
        with (
            mock.patch.object(client, "unpack_task", side_effect=unpack_task) as parse,
            limited_memory(MAX_TASK_BYTES),
            contextlib.suppress(SiteError),
        ):
            app(message, _context(file))
            if kind != "query.join":  # which only asks who is there, and is answered under the node's own tag
                raise AssertionError("a message with a wrong tag was answered")
        if parse.called:
            raise AssertionError("a task was parsed before the tag was checked")
        return 1

    right = sign_message(key, body | {"kind": "join", "challenge": "x"})
    app(Message(pack_fields(letter=(right, SIGNED_MESSAGE)), NODE, "query.join"), _context(file))
    return once


def _context(file: Path) -> Context:
    return Context(1, NODE, {"node": str(file)}, RecordDict(), {})


def _mapping(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _pretend_to_be_in_a_run() -> None:
    for name, value in (("_task_id", 1), ("_run_id", 1), ("_node_id", 1)):
        setattr(TaskIdentity, name, value)  # Flower makes messages only inside a run


def headers(_folder: Path) -> Once:
    """Headers with odd fields in front of a sound payload."""
    plan = make_plan()
    codec = codecs.get("uniform")
    frame = encode_frame(encode(codec, np.zeros((6, 50)), plan), plan, codec.code)
    good = list(HEADER.unpack_from(frame))

    def once(rng: np.random.Generator) -> int:
        fields = list(good)
        place = int(rng.choice([1, 2, 4, 5, 7, 8, 11]))
        fields[place] = int(rng.integers(0, {1: 2**16, 2: 2**16, 11: 2**63}.get(place, 2**32)))
        if fields != good:
            try:
                decode_frame(HEADER.pack(*fields) + frame[HEADER.size :], plan, codec.code)
            except FrameError:
                return 1
            raise AssertionError("a frame with another header was taken")
        return 1

    return once


def replies(_folder: Path) -> Once:
    """Replies over Flower whose pieces are altered: refused, or within the size that was stated."""
    _pretend_to_be_in_a_run()
    asked = Message(pack_fields(frame=(b"task", FRAME)), NODE, "train")
    most = 300
    asked.metadata.__dict__["_message_id"] = "question 0"
    right = Message(pack_fields(frame=(bytes(range(200)), FRAME)), reply_to=asked)
    link = Link()
    grid = LinkedGrid(link)

    def altered(piece: bytes, rng: np.random.Generator) -> bytes:
        return mutated(piece, rng) or b"x" if rng.random() < 0.4 else piece  # an empty one is one that is yet to come

    def once(rng: np.random.Generator) -> int:
        link.reply("question 0", right, lambda piece: altered(piece, rng))
        found = pulled(grid, SentMessage("question 0", NODE, most))
        if found is None or not (found.has_error() or content_bytes(found.content) <= most + SLACK_BYTES):
            raise AssertionError("a reply was lost, or is longer than it may be")
        if not found.has_error():
            with contextlib.suppress(ProtocolError):
                read_field(found.content, "frame", FRAME)
        return 1

    return once


TARGETS = [
    Target("frames", "frames", 4, frames),
    Target("headers", "frames", 1, headers),
    Target("payloads", "payloads", 16, payloads),
    Target("events", "protocol events", 5, events),
    Target("tasks", "tasks", 2, tasks),
    Target("messages", "messages with wrong tags", 2, messages),
    Target("replies", "replies", 1, replies),
]
