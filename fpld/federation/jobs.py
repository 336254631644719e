"""The heavy work as functions of plain arguments, so that worker processes can do it side by side."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from fpld.codecs.prior import ranges
from fpld.data import load_tokenizer
from fpld.errors import InputError
from fpld.federation.continuations import prompts, write_continuations
from fpld.federation.own import own_losses
from fpld.federation.predictions import Predictions
from fpld.federation.private import train
from fpld.federation.training import blank_kl, open_student
from fpld.federation.work import adopt_last, work
from fpld.pace import before
from fpld.protocol.priors import collect, take_notes
from fpld.protocol.weights import rounded
from fpld.storage.arrays import read_arrays
from fpld.students import divergence

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path
    from typing import BinaryIO

    from fpld.data import ProbeSet
    from fpld.federation.heldout import Nats
    from fpld.federation.part import Part
    from fpld.federation.private import Promise
    from fpld.federation.work import Place
    from fpld.protocol.priors import Block, Notes
    from fpld.storage.folder import Arrays
    from fpld.students import Student, Target

log = logging.getLogger(__name__)

LITTLE = 0.02
"""Nats by which a student may be worse than the last one without having diverged: steps that follow noise."""


def node_round(part: Part, place: Place, task: bytes) -> bytes:
    """Run a node's round: `work`."""
    return work(part, place, task)


def adopt(part: Part, place: Place, state: Arrays, run: str) -> None:
    """Let a node's own model learn from the last student: `adopt_last`."""
    adopt_last(part, place, state, run)


def learn(
    student: Student, probe: ProbeSet, target: Target, options: dict[str, Any], public: Path | None, bits: int
) -> None:
    """Distil a student to a target; with `bits` = 16 its weights are rounded to what all ends will have."""
    text = None if public is None else read_arrays(public)[0]["tokens"]
    student.distill(probe.sequences, target, public=text, **options)
    if bits < 32:
        student.load_state(rounded(student.state(), bits))


def distill(
    base: Path,
    state: Arrays,
    probe: ProbeSet,
    target: Target,
    options: dict[str, Any],
    public: Path | None,
    bits: int = 32,
) -> tuple[Arrays, float]:
    """Distil the student from a target; return its weights, and how far it is from the target (`divergence`).

    With `bits` = 16 the weights are rounded first: what is measured and returned is what all ends will have.

    Labels may have nothing to teach, after little local training or with the noise of privacy: then the weights come
    back as they were.
    """
    student = open_student(base, state)
    reference = student.copy()
    with before("measuring its distance to the target"):
        learn(student, probe, target, options, public, bits)
    with before("evaluating the student"):
        found = divergence(student, probe.sequences, target, reference)
    # A student that knows less than nothing, or less than the last one, must not be broadcast.
    if target.relative and 0 <= found < LITTLE:
        log.warning("the student has learnt nothing from these labels (%.2g nats worse): the last one stays", found)
        return state, 0.0
    most, what = (0.0, "the last student has") if target.relative else (blank_kl(target.array), "equal chances have")
    if not found < most:
        raise InputError(
            f"distill.rate must be lower: the student diverged, with {found:.3g} nats to its target; {what} "
            f"{most:.3g}; the last checkpoint is intact"
        )
    return student.state(), found


def predict(base: Path, state: Arrays, probe: ProbeSet, path: Path | None, margin: float) -> Notes:
    """Predict a probe set with a student; write the integers of the prior to a file, and return the notes on it."""
    shape = probe.contexts, probe.vocab
    predict = Predictions(open_student(base, state), probe.sequences)
    blocks = take_notes((predict(rows) for rows in ranges(shape)), shape, margin=margin)
    with before("local training at the nodes"):
        if path is None:
            return collect(blocks, shape)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            return collect(_written(blocks, file), shape)


def _written(blocks: Iterable[Block], file: BinaryIO) -> Iterator[Block]:
    for block in blocks:
        file.write(block.integers.tobytes())
        yield block


def continuations(
    base: Path, state: Arrays, tokenizer: Path, public: Path, count: int, seed: int
) -> list[dict[str, str]]:
    """Let a student go on from a few pieces of the public text: `fpld.federation.continuations`."""
    student = open_student(base, state)
    words = load_tokenizer(tokenizer, vocab=student.vocab)
    texts = prompts(read_arrays(public)[0]["tokens"], words, count=count, seed=seed)
    with before("noting them"):
        return write_continuations(student, words, texts, seed=seed)


def finetune(
    base: Path,
    state: Arrays | None,
    texts: Sequence[Path],
    steps: int,
    seed: int,
    rate: float | None,
    promise: Promise | None = None,
) -> Arrays:
    """Fine-tune a model on one text, or on several pooled."""
    student = open_student(base, state)
    with before("evaluating it"):
        train(student, texts, promise, steps=steps, seed=seed, rate=rate)
    return student.state()


def evaluate(base: Path, state: Arrays | None, heldout: Path, length: int) -> Nats:
    """Return a model's nats on the held-out text of each node: `fpld.federation.heldout`."""
    return _nats(open_student(base, state), heldout, length)


def evaluate_stacked(base: Path, states: Sequence[Arrays], heldout: Path, length: int) -> Nats:
    """Return the nats of a model with the adapters of several stacked, on the held-out text of each node."""
    student: Any = open_student(base)  # only a model with adapters can
    return _nats(student.stacked(states), heldout, length)


def _nats(student: Student, heldout: Path, length: int) -> Nats:
    texts, _ = read_arrays(heldout)
    with before("noting its loss"):
        return [student.token_nats(texts[str(i)], length) for i in range(len(texts))]


def evaluate_own(
    folder: Path, heldout: Path, length: int, run: str, *, everywhere: bool
) -> list[dict[str, float | None]]:
    """Return the loss of each node's own models of a run on its held-out text, or `everywhere` on all nodes' texts too.

    `folder` has a folder for each node.
    """
    found, _ = read_arrays(heldout)
    texts = [found[str(i)] for i in range(len(found))]
    with before("noting their losses"):
        if everywhere:
            return [own_losses(folder / str(i), texts, i, length, run=run) for i in range(len(texts))]
        return [own_losses(folder / str(i), [text], 0, length, run=run) for i, text in enumerate(texts)]
