"""A node's work on a task: fine-tune, probe, code, answer. One call does all of a round.

Nothing is kept in memory between two calls, since on a real site each message may meet a new process. What must
survive is in one file, written whole: the machine's state with its last frame, and the node's own model if it has one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from fpld.errors import ProtocolError
from fpld.federation.keep import ADOPTED, OWN, keep_own, read_of_run
from fpld.federation.predictions import Predictions
from fpld.federation.priorfile import FILE, agree
from fpld.federation.private import note_spent, train
from fpld.federation.probes import round_probe
from fpld.federation.training import open_student
from fpld.pace import before
from fpld.protocol.asking import write_ask
from fpld.protocol.messages import Task
from fpld.protocol.node import Node
from fpld.protocol.priors import ComputedPrior
from fpld.rules.target import Target
from fpld.seeds import derive_seed
from fpld.storage.arrays import read_arrays
from fpld.storage.folder import RunFolder
from fpld.storage.kept import previous, read_kept, recall_kept, write_kept

if TYPE_CHECKING:
    from pathlib import Path

    from fpld.data import ProbeSet
    from fpld.federation.part import Part
    from fpld.storage.folder import Arrays
    from fpld.students import Student

STATE = "state.safetensors"
OWN_TEXT = 1.0
"""The weight of a node's own text beside the student's predictions, when its own model learns from the last student."""
_MODEL = "model/"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a node works: its folder of the run, the folder of the files that its part names, its tokens.

    `prior` is the aggregator's file of the prior, where the node can read it.
    """

    folder: Path
    files: Path
    text: Path
    prior: Path | None = None


def work(part: Part, place: Place, data: bytes, *, key: bytes = b"", secret: bool = False) -> bytes:
    """Run a task; return the frame to send, sealed with the key. A task that was answered before has the same frame.

    `secret`: the draws of private training are nobody's to repeat; else they follow from the run's seed.

    Where this machine cannot compute the prior as the aggregator did, a message that asks for blocks of it is returned,
    before any training.
    """
    store, task = RunFolder(place.folder), Task.from_bytes(data)
    public = None if part.files.public is None else place.files / part.files.public
    probe = round_probe(place.files / part.files.probe, public, part.seed, task.plan.round)
    run = task.plan.run_id.hex()
    node, model = _load(store, Node(part.index, bytes.fromhex(probe.digest)), run)
    if task.plan.round < node.round and (sent := _sent_before(store, task, run)) is not None:
        return sent
    node, task, frame = node.receive(data)
    if frame is not None:
        return frame
    student = open_student(place.files / part.files.base, model or None)
    with before("local training"):
        shared = _shared(student, task, part, place)
        task, missing = _with_prior(shared, task, probe, place)
        if missing:
            return write_ask(missing, task.plan, key=key)
        _adopt(student, shared, task, part, probe)
    seed = derive_seed(part.seed, "local", node.round, part.index)
    how = part.training(part.local, node.round)
    with before("coding the probe set's logits"):
        spent = train(student, [place.text], part.promise, seed=seed, secret=secret, **how)
    if spent is not None:
        note_spent(place.folder, node.round, spent)
    keep_own(place.folder, node.round, student, run=run)
    with before("sending them"):
        node, frame = node.answer(task, student.logit_blocks(probe.sequences), key=key)
    _save(store, node, {} if task.broadcast == "weights" and not part.differs else student.state(), run)
    (place.folder / FILE).unlink(missing_ok=True)
    return frame


def _shared(student: Student, task: Task, part: Part, place: Place) -> Student | None:
    """Return the aggregator's student, if its weights came: the node's model with them, or one beside it."""
    if task.broadcast != "weights":
        return None
    if part.differs:
        return open_student(place.files / part.files.student, task.arrays)
    student.load_state(task.arrays)
    return student.copy()


def _adopt(student: Student, shared: Student | None, task: Task, part: Part, probe: ProbeSet) -> None:
    """Let a model of the node's own learn from the aggregator's student, or from the combined logits.

    Before the first round there is nothing to learn: all models are those that the run began with.
    """
    seed = derive_seed(part.seed, "adopt", task.plan.round, part.index)
    settings = part.training(part.distill, task.plan.round)
    if task.broadcast == "logits":
        if "logits" not in task.arrays:
            raise ProtocolError("the task announces combined logits and holds none")
        student.distill(probe.sequences, task.arrays["logits"], seed=seed, **settings)
    elif shared is not None and part.differs and task.plan.round > 1:
        _learn(student, shared, probe, seed, settings)


def adopt_last(part: Part, place: Place, state: Arrays, run: str) -> None:
    """Let a model of the node's own kind learn from the last student, and keep what came of it.

    It goes on learning from the node's own text meanwhile, or it would forget that. Nothing of it is sent.
    """
    probe = round_probe(place.files / part.files.probe, None, part.seed, part.rounds)
    read_of_run(place.folder / OWN, run)
    own, shared = open_student(place.folder / OWN), open_student(place.files / part.files.student, state)
    seed = derive_seed(part.seed, "adopt", part.rounds + 1, part.index)
    with before("evaluating it"):
        settings = part.training(part.distill, part.rounds)
        text = read_arrays(place.text)[0]
        _learn(own, shared, probe, seed, settings | {"public": text["tokens"], "public_weight": OWN_TEXT})
    own.save(place.folder / ADOPTED, run=run)


def _learn(student: Student, shared: Student, probe: ProbeSet, seed: int, settings: dict[str, Any]) -> None:
    target = Target.unchanged(probe.contexts, probe.vocab)
    student.distill(probe.sequences, target, seed=seed, reference=shared, **settings)


def _with_prior(shared: Student | None, task: Task, probe: ProbeSet, place: Place) -> tuple[Task, list[int]]:
    """Return the task with the prior that its notes let the node compute, or the blocks that it must ask for."""
    if task.notes is None:
        return task, []
    if shared is None:
        raise ProtocolError("the task has notes on a prior and no weights to compute it from")
    computed = ComputedPrior(Predictions(shared, probe.sequences), task.notes, task.sent)
    prior, missing = agree(computed, [] if place.prior is None else [place.prior], place.folder / FILE)
    return (task, missing) if missing else (replace(task, plan=replace(task.plan, prior=prior)), [])


def _load(store: RunFolder, fresh: Node, run: str) -> tuple[Node, Arrays]:
    found = recall_kept(store.path / STATE, run=run)
    if found is None:
        return fresh, {}
    arrays, meta = found
    node = fresh.restore(meta["round"], meta["task"], arrays["frame"].tobytes(), arrays.get("reconstruction"))
    return node, {name.removeprefix(_MODEL): value for name, value in arrays.items() if name.startswith(_MODEL)}


def _sent_before(store: RunFolder, task: Task, run: str) -> bytes | None:
    """Return the frame of the round before the last, if this is its task: an aggregator lost its newest checkpoint."""
    older = previous(store.path / STATE)
    if not older.exists():
        return None
    arrays, meta = read_kept(older, run=run)
    return arrays["frame"].tobytes() if meta["task"] == task.identity else None


def _save(store: RunFolder, node: Node, model: Arrays, run: str) -> None:
    arrays: Arrays = {"frame": np.frombuffer(node.frame, np.uint8)}
    if node.reconstruction is not None:
        arrays["reconstruction"] = node.reconstruction
    arrays.update({_MODEL + name: value for name, value in model.items()})
    write_kept(store.path / STATE, arrays, {"round": node.round, "task": node.task}, run=run)
