"""A node's work on a task: fine-tune, probe, code, answer. One call does all of a round.

Nothing is kept in memory between two calls, since on a real site each message may meet a new process. What must
survive is in one file, written whole: the machine's state with its last frame, and the node's own model if it has one.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from fpld.codecs.prior import FINE_GRID, coarse_grid
from fpld.data.places import round_probe
from fpld.data.token_stream import open_text
from fpld.errors import ProtocolError
from fpld.node.labels import NodeReaders
from fpld.node.prior_cache import Predictions, open_prior
from fpld.node.training import keep_node_model, open_student, read_kept_model, record_dp_steps, train_on_texts
from fpld.node.writing import record_writing, write_reply
from fpld.progress import followed_by
from fpld.protocol.messages import Task, encode_prior_request
from fpld.protocol.node import Node
from fpld.protocol.shared_prior import ComputedPrior, describe_differing
from fpld.protocol.updates import CURVATURE_SEQUENCES, UPDATES
from fpld.seeds import derive_seed
from fpld.storage.arrays import load_checkpoint, previous_file, read_checkpoint, write_checkpoint
from fpld.storage.run_folder import ADOPTED_MODEL, NODE_STATE, OWN_MODEL, PRIOR, WRITTEN_PRIOR, RunFolder
from fpld.target import Target

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from fpld.data import ProbeSet
    from fpld.data.places import PlaceProbe
    from fpld.node.spec import NodeSpec
    from fpld.students import Student
    from fpld.types import Arrays

log = logging.getLogger(__name__)

PRIVATE_TEXT_WEIGHT = 1.0
"""The weight of a node's own text beside the student's predictions, when its own model learns from the last student."""
_MODEL = "model/"


@dataclass(frozen=True, slots=True)
class NodePaths:
    """Where a node works: its folder of the run, the folder of the files that its spec names, its tokens.

    `prior` is the aggregator's file of the prior, where the node can read it.
    """

    folder: Path
    files: Path
    text: Path
    prior: Path | None = None


def answer_task(
    spec: NodeSpec,
    paths: NodePaths,
    task: Task,
    *,
    key: bytes = b"",
    secret: bool = False,
    before_training: Callable[[], None] = lambda: None,
) -> bytes:
    """Run a task; return the frame to send, sealed with the key. A task that was answered before has the same frame.

    `secret`: the draws of private training are nobody's to repeat; else they follow from the run's seed.
    `before_training` is called when training on the private text is about to begin.

    Where this machine cannot compute the prior as the aggregator did, a message that asks for blocks of it is returned,
    before any training.
    """
    store = RunFolder(paths.folder)
    public = None if spec.files.public is None else paths.files / spec.files.public
    probe = round_probe(paths.files / spec.files.probe, public, spec.seed, task.plan.round)
    run = task.plan.run_id.hex()
    node, model = _load(store, Node(spec.index, bytes.fromhex(probe.digest)), run)
    if task.plan.round < node.round and (sent := _sent_before(store, task, run)) is not None:
        return sent
    node, frame = node.receive(task)
    if frame is not None:
        return frame
    updates = task.codec == UPDATES
    if updates and (spec.differs or task.broadcast != "weights"):
        raise ProtocolError("an update needs the aggregator's student, and this node has a model of its own or none")
    student = open_student(paths.files / spec.files.base, model or None)
    with followed_by("local training"):
        shared = _shared(student, task, spec, paths)
        readers = NodeReaders.open(spec, paths.files, probe, student, shared)
        readers.check(task.plan.space)
        seen = None if shared is None else readers.shared.view(shared)
        task, missing = _with_prior(seen, task, probe, paths)
        if missing and task.notes is not None:
            log.warning("this node asks for %s", describe_differing(len(missing), len(task.notes.counts)))
            return encode_prior_request(missing, task.plan, key=key)
        _adopt(readers.own.view(student), seen, task, spec, probe)
    seed = derive_seed(spec.seed, "local", node.round, spec.index)
    how = spec.training(spec.local, node.round)
    before_training()
    with followed_by("coding its update" if updates else "coding the probe set's logits"):
        budget = spec.privacy_budget(paths.files)
        spent = train_on_texts(student, [paths.text], budget, seed=seed, secret=secret, **how)
    if spent is not None:
        record_dp_steps(paths.folder, node.round, spent)
    keep_node_model(paths.folder, node.round, student, run=run)
    if updates:
        curvature = student.curvature(probe.sequences[:CURVATURE_SEQUENCES])
        node, frame = node.answer_update(task, student.state(), curvature=curvature, key=key)
    else:
        with followed_by("sending them"):
            write = partial(_write, student, shared, task, spec, paths, probe)
            labels = readers.own.view(student).logit_blocks(probe.sequences)
            node, frame = node.answer(task, labels, key=key, write=write)
    _save(store, node, {} if task.broadcast == "weights" and not spec.differs else student.state(), run)
    (paths.folder / PRIOR).unlink(missing_ok=True)
    return frame


def _write(
    student: Student,
    shared: Student | None,
    task: Task,
    spec: NodeSpec,
    paths: NodePaths,
    probe: ProbeSet | PlaceProbe,
    labels: bytes,
) -> bytes:
    """Return the payload with text that the node's model writes, from that of the labels on public contexts."""
    if spec.written is None or shared is None:
        raise ProtocolError("the task asks for written text, and this node was given no [written] or no student")
    private = open_text(paths.text).tokens
    payload, writing = write_reply(
        student,
        shared,
        task,
        probe.sequences,
        private,
        spec.written,
        labels,
        margin=spec.margin,
        seed=derive_seed(spec.seed, "written", task.plan.round, spec.index),
        scratch=paths.folder / WRITTEN_PRIOR,
    )
    record_writing(paths.folder, task.plan.round, writing, spec.written.private_run)
    return payload


def _shared(student: Student, task: Task, spec: NodeSpec, paths: NodePaths) -> Student | None:
    """Return the aggregator's student, if its weights came: the node's model with them, or one beside it."""
    if task.broadcast != "weights":
        return None
    if spec.differs:
        return open_student(paths.files / spec.files.student, task.arrays)
    student.load_state(task.arrays)
    return student.copy()


def _adopt(student: Student, shared: Student | None, task: Task, spec: NodeSpec, probe: ProbeSet | PlaceProbe) -> None:
    """Let a model of the node's own learn from the aggregator's student, or from the combined logits.

    Before the first round there is nothing to learn: all models are those that the run began with.
    """
    seed = derive_seed(spec.seed, "adopt", task.plan.round, spec.index)
    settings = spec.training(spec.distill, task.plan.round)
    if task.broadcast == "logits":
        if "logits" not in task.arrays:
            raise ProtocolError("the task announces combined logits and holds none")
        student.distill(probe.sequences, task.arrays["logits"], seed=seed, **settings)
    elif shared is not None and spec.differs and task.plan.round > 1:
        _learn(student, shared, probe, seed, settings)


def learn_from_student(spec: NodeSpec, paths: NodePaths, state: Arrays, run: str) -> None:
    """Distil the last student into a node's own model of another kind, and keep the result.

    It goes on learning from the node's own text meanwhile, or it would forget that. Nothing of it is sent. Where
    training is private it does not: text without noise would undo what [privacy] promises of the models that a node
    keeps. The student alone follows from what the others have sent.
    """
    probe = round_probe(paths.files / spec.files.probe, None, spec.seed, spec.rounds)
    read_kept_model(paths.folder / OWN_MODEL, run)
    model = open_student(paths.folder / OWN_MODEL)
    shared = open_student(paths.files / spec.files.student, state)
    readers = NodeReaders.open(spec, paths.files, probe, model, shared)
    seed = derive_seed(spec.seed, "adopt", spec.rounds + 1, spec.index)
    with followed_by("evaluating it"):
        settings = spec.training(spec.distill, spec.rounds)
        if spec.privacy is None:
            text = open_text(paths.text)
            settings |= {"public": text.lesson, "public_weight": PRIVATE_TEXT_WEIGHT}
        _learn(readers.own.view(model), readers.shared.view(shared), probe, seed, settings)
    model.save(paths.folder / ADOPTED_MODEL, run=run)


def _learn(
    student: Student, shared: Student, probe: ProbeSet | PlaceProbe, seed: int, settings: dict[str, Any]
) -> None:
    target = Target.unchanged(probe.contexts, probe.vocab)
    student.distill(probe.sequences, target, seed=seed, reference=shared, **settings)


def _with_prior(
    shared: Student | None, task: Task, probe: ProbeSet | PlaceProbe, paths: NodePaths
) -> tuple[Task, list[int]]:
    """Return the task with the prior that its notes let the node compute, or the blocks that it must ask for."""
    if task.notes is None:
        return task, []
    if shared is None:
        raise ProtocolError("the task has notes on a prior and no weights to compute it from")
    grid = coarse_grid(probe.vocab) if task.plan.written else FINE_GRID
    computed = ComputedPrior(Predictions(shared, probe.sequences), task.notes, task.sent, grid)
    prior, missing = open_prior(computed, [] if paths.prior is None else [paths.prior], paths.folder / PRIOR)
    return (task, missing) if missing else (replace(task, plan=replace(task.plan, prior=prior)), [])


def _load(store: RunFolder, fresh: Node, run: str) -> tuple[Node, Arrays]:
    checkpoint = load_checkpoint(store.path / NODE_STATE, run=run)
    if checkpoint is None:
        return fresh, {}
    arrays, meta = checkpoint
    node = fresh.restore(meta["round"], meta["task"], arrays["frame"].tobytes(), arrays.get("reconstruction"))
    return node, {name.removeprefix(_MODEL): value for name, value in arrays.items() if name.startswith(_MODEL)}


def _sent_before(store: RunFolder, task: Task, run: str) -> bytes | None:
    """Return the frame of the round before the last, if this is its task: an aggregator lost its newest checkpoint."""
    older = previous_file(store.path / NODE_STATE)
    if not older.exists():
        return None
    arrays, meta = read_checkpoint(older, run=run)
    return arrays["frame"].tobytes() if meta["task"] == task.identity else None


def _save(store: RunFolder, node: Node, model: Arrays, run: str) -> None:
    arrays: Arrays = {"frame": np.frombuffer(node.frame, np.uint8)}
    if node.reconstruction is not None:
        arrays["reconstruction"] = node.reconstruction
    arrays.update({_MODEL + name: value for name, value in model.items()})
    write_checkpoint(store.path / NODE_STATE, arrays, {"round": node.round, "task": node.task}, run=run)
