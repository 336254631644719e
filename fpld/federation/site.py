"""A node's own folder and its work on a task: fine-tune, probe, code, answer. One call does all of a round.

Nothing is kept in memory between two calls, since on a real site each message may meet a new process. What must
survive is in one file, written whole: the machine's state with its last frame, and the node's own model if it has one.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fpld import students
from fpld.config import TrainSection
from fpld.data import ProbeSet
from fpld.errors import ProtocolError
from fpld.federation.training import one_thread
from fpld.protocol.node import Node, Phase
from fpld.seeds import derive_seed
from fpld.storage.folder import RunFolder

if TYPE_CHECKING:
    from pathlib import Path

    from fpld.protocol.messages import Task
    from fpld.storage.folder import Arrays
    from fpld.students import Student

STATE = "state.safetensors"
_MODEL = "model/"


@dataclass(frozen=True, slots=True)
class Site:
    """What a site is configured with; `site.json` in its folder. Paths are relative to the folder."""

    name: str
    index: int
    seed: int
    rounds: int
    text: str
    base: str
    probe: str
    kind: str
    local: dict[str, Any]
    distill: dict[str, Any]

    @classmethod
    def open(cls, folder: Path) -> Site:
        """Read the folder's configuration."""
        return cls(**RunFolder(folder).read_json("site.json"))

    def save(self, folder: Path) -> None:
        """Write the folder's configuration."""
        RunFolder(folder).write_json("site.json", asdict(self))

    def training(self, section: dict[str, Any], round: int) -> dict[str, Any]:
        """Return steps and the learning rate of a round."""
        settings = TrainSection.model_validate(section)
        return {"steps": settings.steps, "rate": settings.rate_in(round, self.rounds)}


def work(folder: Path, data: bytes, *, key: bytes = b"") -> bytes:
    """Do a task and return the frame to send, sealed with the key; a task done before gives the very same frame."""
    site, store = Site.open(folder), RunFolder(folder)
    probe = ProbeSet.load(folder / site.probe)
    node, model = _load(store, Node(site.index, bytes.fromhex(probe.digest)))
    node, task, frame = node.receive(data)
    if frame is not None:
        return frame
    one_thread(site.kind)
    student = students.load(folder / site.base)
    if model:
        student.load_state(model)
    _adopt(student, task, site, probe)
    text, _ = store.read_arrays(site.text)
    seed = derive_seed(site.seed, "local", node.round, site.index)
    student.finetune(text["tokens"], seed=seed, **site.training(site.local, node.round))
    node, frame = node.answer(task, student.logit_blocks(probe.sequences), key=key)
    _save(store, node, {} if task.broadcast == "weights" else student.state())
    return frame


def _adopt(student: Student, task: Task, site: Site, probe: ProbeSet) -> None:
    """Take over what the aggregator broadcast: its weights, or what its combined logits teach."""
    if task.broadcast == "weights":
        student.load_state(task.arrays)
    elif task.broadcast == "logits":
        if "logits" not in task.arrays:
            raise ProtocolError("the task announces combined logits and holds none")
        seed = derive_seed(site.seed, "adopt", task.plan.round, site.index)
        settings = site.training(site.distill, task.plan.round)
        student.distill(probe.sequences, task.arrays["logits"], seed=seed, **settings)


def _load(store: RunFolder, fresh: Node) -> tuple[Node, Arrays]:
    if not store.has(STATE):
        return fresh, {}
    arrays, meta = store.read_arrays(STATE)
    node = Node(
        fresh.index,
        fresh.probe,
        Phase.ANSWERED,
        meta["round"],
        meta["task"],
        arrays["frame"].tobytes(),
        arrays.get("reconstruction"),
    )
    return node, {name.removeprefix(_MODEL): value for name, value in arrays.items() if name.startswith(_MODEL)}


def _save(store: RunFolder, node: Node, model: Arrays) -> None:
    arrays: Arrays = {"frame": np.frombuffer(node.frame, np.uint8)}
    if node.reconstruction is not None:
        arrays["reconstruction"] = node.reconstruction
    arrays.update({_MODEL + name: value for name, value in model.items()})
    store.write_arrays(STATE, arrays, {"round": node.round, "task": node.task})
