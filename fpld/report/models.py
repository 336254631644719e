"""Open the models in the folder of a run or a node, and evaluate them on a text."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from fpld import students
from fpld.data import TokenStrings, load_probe, load_tokenizer, read_documents
from fpld.errors import InputError
from fpld.federation.state import read_student
from fpld.node.spec import NodeSpec
from fpld.node.text import heldout_text
from fpld.node.training import open_student
from fpld.progress import report_elapsed
from fpld.protocol.weights import weights_digest
from fpld.storage.arrays import read_arrays
from fpld.storage.run_folder import (
    ADOPTED_MODEL,
    ALONE_MODEL,
    BEST_STUDENT,
    CHECKPOINT,
    HELDOUT,
    MAIN,
    NODE_FILE,
    NODE_SPEC,
    OWN_MODEL,
    PROBE,
    STUDENT,
    TOKENIZER,
    RunFolder,
)
from fpld.students.heldout import HeldoutText, mean_losses, read_heldout

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from fpld.data import Tokenizer
    from fpld.students import Student

_OWN_MODELS = ("adopted", "own", "alone")
_BASE_MODEL = "base-0.safetensors"


@dataclass(frozen=True, eq=False, slots=True)
class SavedModels:
    """The models of a folder, with their tokenizer and the held-out tokens of each node.

    `models` maps a name to a function that opens the model. `length` is the context in which the run evaluates. A
    node's own models may have a tokenizer of their own, `own_tokenizer`; texts are in the tokens of the student.
    """

    models: Mapping[str, Callable[[], Student]]
    tokenizer: Tokenizer
    length: int
    heldout: list[HeldoutText]
    own_tokenizer: Tokenizer | None = None

    def tokenizer_of(self, name: str) -> Tokenizer:
        """Return the tokenizer of a model."""
        own = self.own_tokenizer if name in _OWN_MODELS else None
        return self.tokenizer if own is None else own

    def open(self, name: str) -> Student:
        """Open a model; raise InputError if the folder has none of that name."""
        if name not in self.models:
            raise InputError(f"the folder holds no model {name!r}: it has {', '.join(self.models) or 'none yet'}")
        return self.models[name]()


def open_models(folder: Path) -> SavedModels:
    """Return the models of a run (student, best, base), or of a node (student, adopted, own, alone, base)."""
    if (folder / NODE_FILE).is_file():
        return _node_models(folder)
    store = RunFolder(folder)
    if not store.has(TOKENIZER) or not store.has(PROBE):
        raise InputError(
            f"{folder} holds no models: give the folder of a run that has begun training, or a node's folder"
        )
    names = {"student": STUDENT, "best": f"{MAIN}/{BEST_STUDENT}", "base": _BASE_MODEL}
    models = {name: partial(open_student, folder / file) for name, file in names.items() if store.has(file)}
    if "student" not in models and store.has(f"{MAIN}/{CHECKPOINT}"):
        # The run goes on: its student is that of the last closed round.
        models = {"student": partial(_open_checkpoint, folder)} | models
    length = load_probe(folder / PROBE).sequences.shape[1]
    heldout = read_heldout(read_arrays(folder / HELDOUT)[0]) if store.has(HELDOUT) else []
    vocab = students.read_vocab(folder / _BASE_MODEL) if store.has(_BASE_MODEL) else None
    tokenizer = load_tokenizer(folder / TOKENIZER, vocab=vocab)
    return SavedModels(models, tokenizer, length, heldout)


def _open_checkpoint(folder: Path) -> Student:
    return open_student(folder / _BASE_MODEL, read_student(folder / MAIN / CHECKPOINT))


def _node_models(folder: Path) -> SavedModels:
    """Return the models of the last run in which a node has evaluated a student."""
    runs = [path.parent for path in folder.glob(f"runs/*/{NODE_SPEC}") if (path.parent / STUDENT).is_file()]
    if not runs:
        raise InputError(f"{folder} has got no student yet: wait until its first round has ended")
    run = max(runs, key=lambda each: (each / STUDENT).stat().st_mtime)
    spec = NodeSpec.parse(RunFolder(run).read_json(NODE_SPEC))
    files = folder / "files"
    base = files / spec.files.student
    models: dict[str, Callable[[], Student]] = {"student": partial(_open_received, base, run / STUDENT)}
    saved = {"adopted": run / ADOPTED_MODEL, "own": run / OWN_MODEL, "alone": run / ALONE_MODEL, "base": base}
    for name, file in saved.items():
        if file.is_file():
            models[name] = partial(open_student, file)
    heldout = read_heldout(read_arrays(run / "heldout.safetensors")[0])
    tokenizer = load_tokenizer(files / spec.files.shared_tokenizer, vocab=students.read_vocab(base))
    own = None
    if spec.files.student_tokenizer is not None:
        own = load_tokenizer(files / spec.files.tokenizer, vocab=students.read_vocab(files / spec.files.base))
    return SavedModels(models, tokenizer, spec.length, heldout, own)


def _open_received(base: Path, file: Path) -> Student:
    return open_student(base, students.read_state(file))


def read_evaluation_texts(models: SavedModels, path: Path | None, field: str) -> list[HeldoutText]:
    """Return a text as the models' tokens; without a path the held-out texts, one for each node."""
    if path is not None:
        with report_elapsed(f"reading {path}"):
            return [heldout_text(read_documents(path, field=field), models.tokenizer)]
    if not models.heldout:
        raise InputError("--data must be given: the held-out texts are with the nodes, not in this folder")
    return models.heldout


def evaluate_models(models: SavedModels, texts: Sequence[HeldoutText], length: int) -> list[dict[str, Any]]:
    """Return a row for each model: nats per token of the student, averaged over the texts, bits per byte, perplexity.

    `length` is the tokens of a context. Of conversations the answers count.
    """
    tokens = sum(len(text.counted) for text in texts)
    size = sum(models.tokenizer.text_bytes(text.counted) for text in texts)
    rows = []
    losses = dict[str, float]()
    for name in models.models:
        with report_elapsed(f"opening {name}"):
            student = models.open(name)
        # The best student is often the last one, too: equal weights are evaluated once.
        digest = weights_digest(student.state())
        if digest not in losses:
            own = models.tokenizer_of(name)
            spelled = texts
            if own is not models.tokenizer:
                strings = TokenStrings(models.tokenizer), TokenStrings(own)
                spelled = [HeldoutText.respelled(text.tokens, *strings) for text in texts]
            with report_elapsed(f"evaluating {name}"):
                losses[digest] = float(np.mean(mean_losses([text.nats(student, length) for text in spelled])))
        loss = losses[digest]
        rows.append(
            {
                "model": name,
                "loss": loss,
                "bits_per_byte": loss * tokens / size / math.log(2),
                "perplexity": math.exp(loss),
                "tokens": tokens,
                "bytes": size,
            }
        )
    return rows
