"""The models in a run's folder or a node's, with the tokenizer and the held-out text that belong to them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from fpld import students
from fpld.data import ProbeSet, load_tokenizer
from fpld.errors import InputError
from fpld.federation.keep import ADOPTED, ALONE, BEST, OWN
from fpld.federation.part import Part
from fpld.federation.state import CHECKPOINT, read_student
from fpld.federation.training import open_student
from fpld.storage.arrays import read_arrays
from fpld.storage.files import read_utf8
from fpld.storage.folder import HELDOUT, RunFolder

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    import numpy as np

    from fpld.data import Tokenizer
    from fpld.students import Student

PART, NODE_FILE = "part.json", "node.toml"


@dataclass(frozen=True, eq=False, slots=True)
class Models:
    """Models by name, each opened when it is called; `length` is the context in which a run evaluates."""

    models: Mapping[str, Callable[[], Student]]
    tokenizer: Tokenizer
    length: int
    heldout: list[np.ndarray[Any, Any]]

    def open(self, name: str) -> Student:
        """Open a model."""
        if name not in self.models:
            raise InputError(f"the folder holds no model {name!r}: it has {', '.join(self.models) or 'none yet'}")
        return self.models[name]()


def open_models(folder: Path) -> Models:
    """Return the models of a run (student, best, base), or of a node (and of its own: own, alone)."""
    if (folder / NODE_FILE).is_file():
        return _of_node(folder)
    store = RunFolder(folder)
    if not store.has("tokenizer.json") or not store.has("probe.json"):
        raise InputError(
            f"{folder} holds no models: give the folder of a run that has begun training, or a node's folder"
        )
    names = {"student": "student.safetensors", "best": f"fpld/{BEST}", "base": "base-0.safetensors"}
    found = {name: partial(open_student, folder / file) for name, file in names.items() if store.has(file)}
    if "student" not in found and store.has(f"fpld/{CHECKPOINT}"):  # a run that goes on: as of its last closed round
        found = {"student": partial(_of_checkpoint, folder)} | found
    probe = ProbeSet.load(folder / "probe.json")
    texts = read_arrays(folder / HELDOUT)[0] if store.has(HELDOUT) else {}
    heldout = [texts[str(index)] for index in range(len(texts))]
    tokenizer = load_tokenizer(folder / "tokenizer.json", vocab=probe.vocab)
    return Models(found, tokenizer, probe.sequences.shape[1], heldout)


def _of_checkpoint(folder: Path) -> Student:
    return open_student(folder / "base-0.safetensors", read_student(folder / "fpld" / CHECKPOINT))


def _of_node(folder: Path) -> Models:
    """Return the models of the last run in which a node has evaluated a student."""
    runs = [path.parent for path in folder.glob(f"runs/*/{PART}") if (path.parent / "student.safetensors").is_file()]
    if not runs:
        raise InputError(f"{folder} has got no student yet: wait until its first round has ended")
    run = max(runs, key=lambda each: (each / "student.safetensors").stat().st_mtime)
    part, files = Part.parse(json.loads(read_utf8(run / PART))), folder / "files"
    base = files / part.files.student
    found: dict[str, Callable[[], Student]] = {"student": partial(_received, base, run / "student.safetensors")}
    kept = {"adopted": run / ADOPTED, "own": run / OWN, "alone": run / ALONE, "base": base}
    for name, file in kept.items():
        if file.is_file():
            found[name] = partial(open_student, file)
    heldout = read_arrays(run / "heldout.safetensors")[0]
    tokenizer = load_tokenizer(files / part.files.tokenizer, vocab=ProbeSet.load(files / part.files.probe).vocab)
    return Models(found, tokenizer, part.length, [heldout["0"]])


def _received(base: Path, file: Path) -> Student:
    return open_student(base, students.read_state(file))
