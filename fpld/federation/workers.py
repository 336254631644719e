"""The heavy work as functions of plain arguments, so that worker processes can do it side by side."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fpld.codecs.base import MAX_LOGIT
from fpld.codecs.prior import block_ranges, coarse_grid
from fpld.codecs.samples.codec import SAMPLES
from fpld.data.token_stream import open_text
from fpld.errors import InputError
from fpld.node.prior_cache import Predictions, read_rounded_prior, saved_to
from fpld.node.round import answer_task
from fpld.node.spec import base_file, tokenizer_number
from fpld.node.training import average, node_model_nats, open_student, train_on_texts
from fpld.numerics import log_softmax, softmax, split
from fpld.progress import followed_by
from fpld.protocol.messages import Task
from fpld.protocol.shared_prior import collect_notes, round_blocks
from fpld.protocol.updates import rebuild_weights
from fpld.protocol.weights import round_weights
from fpld.seeds import derive_seed
from fpld.storage.arrays import read_arrays
from fpld.storage.run_folder import HELDOUT, RunFolder, numbered
from fpld.students import divergence
from fpld.students.generate import write_sequences
from fpld.students.heldout import read_heldout, window_losses
from fpld.target import Target

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from fpld.codecs.prior import PriorGrid
    from fpld.config import Config
    from fpld.data import ProbeSet
    from fpld.data.places import PlaceProbe
    from fpld.node.labels import ProbeFiles
    from fpld.node.round import NodePaths
    from fpld.node.spec import NodeSpec
    from fpld.node.training import PrivacyBudget
    from fpld.protocol.shared_prior import PriorNotes
    from fpld.protocol.written import WrittenText
    from fpld.students import Student
    from fpld.students.heldout import Nats, Windows
    from fpld.types import Arrays, Floats, Plan, Tokens

log = logging.getLogger(__name__)

_BLOCK = 1 << 15  # coordinates that are worked on at a time: what is computed from them stays in the cache

_TRIED_SEQUENCES = 16  # of the probe set: the logits of a rebuilt model are checked on them
_MAX_MEASURED = 1 << 24  # coordinates of a target on which a student is measured

NOISE_NATS = 0.02
"""Nats by which a student may be worse than the last one without having diverged: steps that follow noise."""


def node_round(spec: NodeSpec, paths: NodePaths, task: bytes) -> bytes:
    """Run a node's round on the bytes of its task, as a network would carry them."""
    return answer_task(spec, paths, Task.from_bytes(task))


def learn(
    student: Student, sequences: Tokens, target: Target, options: dict[str, Any], public: Path | None, bits: int
) -> None:
    """Distil a student to a target; with `bits` = 16 its weights are rounded to what all ends will have."""
    text = None if public is None else open_text(public).tokens
    student.distill(sequences, target, public=text, **options)
    if bits < 32:
        student.load_state(round_weights(student.state(), bits))


def distill(
    base: Path,
    state: Arrays,
    sequences: Tokens,
    target: Target,
    options: dict[str, Any],
    public: Path | None,
    bits: int = 32,
    strings: ProbeFiles | None = None,
) -> tuple[Arrays, float]:
    """Distil the student from a target; return its weights, and how far it is from the target (`divergence`).

    With `bits` = 16 the weights are rounded first: what is measured and returned is what all ends will have. With
    labels over strings, `strings` are the files of the probe set whose places the sequences are.

    Labels may have nothing to teach, after little local training or with the noise of privacy: then the weights come
    back as they were.
    """
    model = open_student(base, state)
    student = model if strings is None else strings.view(model)
    reference = student.copy()
    with followed_by("measuring its distance to the target"):
        learn(student, sequences, target, options, public, bits)
    with followed_by("evaluating the student"):
        distance = divergence(student, sequences, target, reference)
    # A student that knows less than nothing, or less than the last one, must not be broadcast.
    if target.relative:
        return _kept_if_better(student, state, distance)
    most = blank_kl(target.array)
    if not distance < most:
        raise InputError(
            f"distill.rate must be lower: the student diverged, with {distance:.3g} nats to its target; equal chances "
            f"have {most:.3g}; the last checkpoint is intact"
        )
    return student.state(), distance


def _kept_if_better(student: Student, last: Arrays, distance: float) -> tuple[Arrays, float]:
    """Return a student's weights and its distance to the target, less that of the last student, if it is negative.

    A little worse than the last one is noise: the last one stays. More is an error.
    """
    if 0 <= distance < NOISE_NATS:
        log.warning("the student has learnt nothing in this round (%.2g nats worse): the last one stays", distance)
        return last, 0.0
    if not distance < 0:
        raise InputError(
            f"distill.rate must be lower: the student diverged, with {distance:.3g} nats to its target; the last "
            "student has 0; the last checkpoint is intact"
        )
    return student.state(), distance


class NodeUpdate(NamedTuple):
    """The payload of a node's accepted frame, with its plan."""

    plan: Plan
    payload: bytes


class WritingOptions(NamedTuple):
    """How a rebuilt model writes: so many sequences, at a temperature, with draws by a seed for each model."""

    sequences: int
    temperature: float
    seed: int


def write_rebuilt(
    base: Path, state: Arrays, update: NodeUpdate, probe: Tokens, writing: WritingOptions
) -> Tokens | None:
    """Rebuild a node's model from its update of the student `state`, and let it write sequences [n, T].

    Each begins with a token of the probe set [S, T]. None stands for a model whose logits on the probe set are not
    such as labels may have, of at most `MAX_LOGIT`.
    """
    model = open_student(base, state)
    try:
        model.load_state(rebuild_weights(update.payload, state, update.plan))
    except InputError:  # weights that are not finite
        return None
    with np.errstate(all="ignore"):
        logits = model.logits(probe[:_TRIED_SEQUENCES])
    if not (np.abs(logits) <= MAX_LOGIT).all():  # NaN is not
        return None
    if not writing.sequences:
        return probe[:0]
    seed = derive_seed(writing.seed, update.plan.node)
    first = np.random.default_rng(seed).choice(probe.ravel(), writing.sequences)
    with followed_by("distilling"):
        return write_sequences(model, first, probe.shape[1], seed=seed, temperature=writing.temperature)


def distill_from_updates(
    base: Path,
    state: Arrays,
    updates: Sequence[NodeUpdate],
    probe: Tokens,
    written: Sequence[Tokens],
    options: dict[str, Any],
    public: Path | None,
    bits: int = 32,
) -> tuple[Arrays, float]:
    """Distil the student from the models that updates of it stand for; return its weights and `mixture_divergence`.

    It starts at the average of the models. Each is the only teacher of the sequences that it has `written`; on the
    probe set [S, T] the teacher is the mixture of all. `bits` are as in `distill`, and so is a student that has learnt
    nothing.
    """
    models = [rebuild_weights(update.payload, state, update.plan) for update in updates]
    sequences = np.concatenate([probe, *written])
    authors = [np.tile(row, (len(text), 1)) for row, text in zip(np.eye(len(models)), written, strict=True)]
    shares = np.concatenate([np.full((len(probe), len(models)), 1 / len(models)), *authors])
    student = open_student(base, average(models))
    text = None if public is None else open_text(public).tokens
    with followed_by("measuring its distance to the nodes' models"):
        student.distill_from_models(sequences, models, shares, public=text, **options)
    if bits < 32:
        student.load_state(round_weights(student.state(), bits))
    with followed_by("evaluating the student"):
        distance = mixture_divergence(student, open_student(base, state), models, sequences, shares)
    return _kept_if_better(student, state, distance)


def mixture_divergence(
    student: Student, reference: Student, states: Sequence[Arrays], sequences: Tokens, shares: Floats
) -> float:
    """Return the cross entropy of a student to a mixture of models, less that of a reference: a mean in nats.

    It is negative for a student that is nearer to the mixture. Of many sequences some are evaluated, spread evenly.
    """
    step = -(-sequences.size * student.vocab // _MAX_MEASURED)
    sequences = sequences[::step]
    shares = shares[::step]
    target = np.zeros((sequences.size, student.vocab), np.float32)
    by_sequence = target.reshape(len(sequences), -1)
    model = student.copy()
    for state, share in zip(states, shares.T, strict=True):
        rows = np.flatnonzero(share)
        if rows.size:
            model.load_state(state)
            p = softmax(model.logits(sequences[rows]), np.float32)
            by_sequence[rows] += share[rows, None].astype(np.float32) * p.reshape(len(rows), -1)
    total = 0.0
    start = 0
    for new, old in zip(student.logit_blocks(sequences), reference.logit_blocks(sequences), strict=True):
        some = target[start : start + len(new)]
        total += float((some * (log_softmax(old) - log_softmax(new))).sum(dtype=np.float64))
        start += len(new)
    return total / start


def read_written(base: Path, state: Arrays, plan: Plan, text: WrittenText, path: Path) -> Target:
    """Decode a node's labels on what it has written, against the prediction of the student that the node had."""
    student = open_student(base, state)
    grid = coarse_grid(plan.vocab)
    with (
        followed_by("distilling"),
        read_rounded_prior(student, text.sequences, text.notes, path, grid) as prior,
    ):
        written_plan = text.plan(plan, prior)
        parts = list(SAMPLES.reader(text.labels, written_plan).sparse())
    counts = np.concatenate([np.diff(part.starts) for part in parts])
    return Target.sparse(
        np.concatenate([[0], np.cumsum(counts)]),
        np.concatenate([part.tokens for part in parts]),
        np.concatenate([part.changes for part in parts]),
        vocab=plan.vocab,
        grid=grid,
    )


def predict(
    base: Path,
    state: Arrays,
    probe: ProbeSet | PlaceProbe,
    path: Path | None,
    margin: float,
    grid: PriorGrid,
    strings: ProbeFiles | None = None,
) -> PriorNotes:
    """Predict a probe set with a student; write the integers of the prior to a file, and return the notes on it.

    `strings` are as in `distill`.
    """
    shape = probe.contexts, probe.vocab
    model = open_student(base, state)
    predict = Predictions(model if strings is None else strings.view(model), probe.sequences)
    blocks = round_blocks((predict(rows) for rows in block_ranges(shape)), shape, margin=margin, grid=grid)
    with followed_by("local training at the nodes"):
        if path is None:
            return collect_notes(blocks, shape)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            return collect_notes(saved_to(file, blocks), shape)


def finetune(
    base: Path,
    state: Arrays | None,
    texts: Sequence[Path],
    steps: int,
    seed: int,
    rate: float | None,
    promise: PrivacyBudget | None = None,
) -> Arrays:
    """Fine-tune a model on one text, or on several pooled."""
    student = open_student(base, state)
    with followed_by("evaluating it"):
        train_on_texts(student, texts, promise, steps=steps, seed=seed, rate=rate)
    return student.state()


def evaluate(base: Path, state: Arrays | None, heldout: Path, length: int) -> Nats:
    """Return a model's nats on the held-out text of each node: `fpld.federation.evaluation`."""
    return _nats(open_student(base, state), heldout, length)


def evaluate_stacked(base: Path, states: Sequence[Arrays], heldout: Path, length: int) -> Nats:
    """Return the nats of a model with the adapters of several stacked, on the held-out text of each node."""
    student: Any = open_student(base)  # only a model with adapters can
    return _nats(student.stacked(states), heldout, length)


def _nats(student: Student, heldout: Path, length: int) -> Nats:
    texts = read_heldout(read_arrays(heldout)[0])
    with followed_by("noting its loss"):
        return [text.nats(student, length) for text in texts]


class OwnModel(NamedTuple):
    """The losses of a node's own models; those of the last one by windows of all texts too, if it has read them."""

    losses: dict[str, float | None]
    windows: Windows | None


def evaluate_own(folder: Path, heldout: Sequence[Path], length: int, run: str, *, everywhere: bool) -> list[OwnModel]:
    """Evaluate each node's own models of a run on its held-out text, or `everywhere` on all nodes' texts too.

    `folder` has a folder for each node, `heldout` the file of all texts in the tokens of each node.
    """
    models = []
    with followed_by("noting their losses"):
        for index, path in enumerate(heldout):
            texts = read_heldout(read_arrays(path)[0])
            some, node = (texts, index) if everywhere else ([texts[index]], 0)
            nats = node_model_nats(folder / str(index), some, length, run=run)
            windows = window_losses(nats.own, length) if everywhere and nats.own is not None else None
            models.append(OwnModel(nats.losses(node), windows))
    return models


def blank_kl(target: np.ndarray[Any, Any]) -> float:
    """Return the mean over contexts of KL(softmax(target) || equal probabilities): log V less the entropy."""
    total = 0.0
    for rows in split(len(target), target.shape[1], _BLOCK):
        log_p = log_softmax(target[rows.start : rows.stop])
        total += float((np.exp(log_p) * log_p).sum(dtype=np.float64))
    return total / len(target) + math.log(target.shape[1])


def evaluation_arguments(
    config: Config, run: RunFolder, state: Arrays | None, index: int | None = None
) -> tuple[Any, ...]:
    """Return the arguments of an evaluation job: of a node's model, or of the student (None)."""
    return run.path / base_file(config, index), state, heldout_path(config, run, index), config.probe.length


def heldout_path(config: Config, run: RunFolder, index: int | None) -> Path:
    """Return the file with all held-out texts in the tokens of a node, or of the student (None)."""
    return run.path / numbered(HELDOUT, tokenizer_number(config, index))
