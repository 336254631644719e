"""FedDF: the nodes' models travel, and the student is distilled to their mixture, from their average on.

After T. Lin, L. Kong, S. U. Stich and M. Jaggi, *Ensemble Distillation for Robust Model Fusion in Federated Learning*,
NeurIPS 2020. Nodes send their models once, after all their local steps, in float32 or as updates of a few bits per
weight (`fpld.codecs.updates`). The student starts at the average of the models that arrive.

    feddf           float32; distilled on windows of all public text, to the mixture of all models
    feddf-kbit      the same with a few bits per weight
    feddf-written   the models that arrive write the text, and each is the only teacher of what it has written

Where the run itself has one round, the models of its nodes are those that travel. Otherwise nodes are trained anew, in
one round: models of a later round would hold what earlier rounds have cost.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fpld.baselines import Baseline
from fpld.baselines.fedavg import local_round, send_float32
from fpld.codecs.updates import decode_update, encode_update
from fpld.data.token_stream import open_text
from fpld.federation.cost import Work, evaluations, teacher_contexts
from fpld.node.spec import base_file
from fpld.node.training import average, open_student
from fpld.progress import ProgressLabel, followed_by, run_labelled
from fpld.protocol.updates import CURVATURE_SEQUENCES
from fpld.seeds import derive_seed
from fpld.storage.run_folder import PUBLIC
from fpld.students.generate import write_sequences

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future
    from pathlib import Path

    from fpld.baselines.context import BaselineContext
    from fpld.config import Config
    from fpld.federation.evaluation import Row
    from fpld.types import Arrays, Floats, Tokens

FLOAT_BITS = 32.0
DEFAULT_BITS = 3.0
_LONG_TEXT = 1 << 24  # contexts: a text that teachers do not hold in memory
WRITTEN_CONTEXTS = 64_000
"""Contexts that each model writes where the configuration has no [written]."""

log = logging.getLogger(__name__)


class Received(NamedTuple):
    """The models as they arrive, and what they took."""

    models: list[Arrays]
    uplink_bytes: int


class ModelLesson(NamedTuple):
    """Sequences [S, T], and the share of each model in their targets [S, K]."""

    sequences: Tokens
    shares: Floats


def distill_models(
    base: Path, models: Sequence[Arrays], sequences: Tokens, shares: Floats, options: dict[str, Any]
) -> Arrays:
    """Distil a student from the average of models to their mixture: a job; return its weights."""
    student = open_student(base, average(models))
    with followed_by("evaluating it"):
        student.distill_from_models(sequences, models, shares, **options)
    return student.state()


def send_update(base: Path, model: Arrays, sequences: Tokens, bits: float, seed: int) -> tuple[Arrays, int]:
    """Send a model as an update of the base, coded as a node's: a job; return it as it arrives, and its bytes."""
    start = open_student(base).state()
    curvature = open_student(base, model).curvature(sequences)
    update = {name: model[name] - value for name, value in start.items()}
    data = encode_update(update, bits=bits, seed=seed, weights=curvature)
    received = decode_update(data, start, seed=seed)
    return {name: np.asarray(value + received[name], np.float32) for name, value in start.items()}, len(data)


def write_windows(base: Path, model: Arrays, first: Tokens, length: int, seed: int, temperature: float) -> Tokens:
    """Let a model write sequences [n, T] after first tokens [n]: a job."""
    with followed_by("distilling"):
        return write_sequences(open_student(base, model), first, length, seed=seed, temperature=temperature)


def send_models(context: BaselineContext, bits: float) -> Received:
    """Send the nodes' models as updates of the base, in so many bits per weight."""
    config = context.config
    start = context.start
    trained = context.models() if config.run.rounds == 1 else local_round(context, start, 1, 1)
    if bits == FLOAT_BITS:
        # The models themselves: adding an update to the base would round.
        return Received(list(trained), sum(send_float32(model, 0)[0] for model in trained))
    sequences = _public_windows(context)[:CURVATURE_SEQUENCES]
    futures: list[Future[tuple[Arrays, int]]] = []
    for node, model in enumerate(trained):
        seed = derive_seed(config.run.seed, "feddf update", node)
        futures.append(_submit(context, config.nodes[node].name, send_update, model, sequences, bits, seed))
    models, sizes = zip(*(future.result() for future in futures), strict=True)
    return Received(list(models), sum(sizes))


def public_lesson(context: BaselineContext, models: Sequence[Arrays]) -> ModelLesson:
    """Return windows of all public text, whose teacher is the mixture of all models."""
    windows = _public_windows(context)
    return ModelLesson(windows, np.full((len(windows), len(models)), 1 / len(models)))


def written_lesson(context: BaselineContext, models: Sequence[Arrays]) -> ModelLesson:
    """Let each model write windows after tokens of the public text; it is the only teacher of what it has written."""
    config = context.config
    length = config.probe.length
    count = written_windows(config)
    temperature = 1.0 if config.written is None else config.written.temperature
    tokens = _public_tokens(context)
    futures: list[Future[Tokens]] = []
    for node, model in enumerate(models):
        seed = derive_seed(config.run.seed, "feddf written", node)
        first = np.random.default_rng(seed).choice(tokens, count)
        futures.append(
            _submit(context, config.nodes[node].name, write_windows, model, first, length, seed, temperature)
        )
    sequences = np.concatenate([future.result() for future in futures])
    return ModelLesson(sequences, np.repeat(np.eye(len(models)), count, axis=0))


def written_windows(config: Config) -> int:
    """Return how many windows each model writes."""
    contexts = WRITTEN_CONTEXTS if config.written is None else config.written.contexts
    return -(-contexts // config.probe.length)


def _public_windows(context: BaselineContext) -> Tokens:
    """Return the public text as windows [n, T]."""
    length = context.config.probe.length
    tokens = _public_tokens(context)
    return tokens[: len(tokens) // length * length].reshape(-1, length)


def _public_tokens(context: BaselineContext) -> Tokens:
    return open_text(context.run.path / PUBLIC).tokens


def _submit(context: BaselineContext, model: str, job: Callable[..., Any], *arguments: Any) -> Future[Any]:
    base = context.run.path / base_file(context.config, None)
    return context.pool.submit(run_labelled, ProgressLabel("baseline", model=model), job, base, *arguments)


def _float32(_config: Config) -> list[float]:
    return [FLOAT_BITS]


def few_bits(config: Config) -> list[float]:
    """Return the numbers of bits per weight of updates that are compared, but for float32."""
    return [bits for bits in _any_bits(config) if bits != FLOAT_BITS]


def _any_bits(config: Config) -> list[float]:
    return config.baselines.update_bits or [DEFAULT_BITS]


def step_counts(config: Config) -> list[int]:
    """Return the numbers of distillation steps that have a row each."""
    return config.baselines.feddf_steps or [config.distill.steps]


def _rows(
    name: str,
    widths: Callable[[Config], list[float]],
    lesson: Callable[[BaselineContext, Sequence[Arrays]], ModelLesson],
    context: BaselineContext,
) -> list[Row]:
    """Return a row for each number of bits per weight and each number of steps."""
    config = context.config
    counts = step_counts(config)
    rows = []
    for bits in widths(config):
        method = name if bits == FLOAT_BITS else f"{name}, {bits:g} bit{'s' * (bits > 1)}"
        log.info("baseline: %s", method)
        models, uplink = send_models(context, bits)
        sequences, shares = lesson(context, models)
        students = [
            _submit(context, method, distill_models, models, sequences, shares, _options(config, steps))
            for steps in counts
        ]
        evaluations = [context.evaluate(student.result()) for student in students]
        # One student, in float32, goes to every node.
        downlink = len(config.nodes) * sum(array.nbytes for array in context.start.values())
        for steps, nats in zip(counts, evaluations, strict=True):
            label = method if config.baselines.feddf_steps is None else f"{method}, {steps} steps"
            rows.append(context.row(label, nats.result(), uplink, downlink))
    return rows


def _options(config: Config, steps: int) -> dict[str, Any]:
    """Return the settings of a distillation: those of the run's first one, without the loss of public text."""
    return {
        "steps": steps,
        "seed": derive_seed(config.run.seed, "feddf"),
        "rate": config.distill.rate,
        "batch": config.distill.batch,
        "average": config.distill.average,
    }


def _jobs(widths: Callable[[Config], list[float]], writing: bool, config: Config) -> int:
    """Count a distillation and an evaluation for each row, the models that write, and trainings of one round."""
    nodes = len(config.nodes)
    rows = len(widths(config)) * len(step_counts(config))
    trainings = nodes * (config.run.rounds > 1)
    return 2 * rows + writing * nodes * len(widths(config)) + trainings


def _work(widths: Callable[[Config], list[float]], writing: bool, config: Config) -> Work:
    """Count all distillations with what their teachers predict and write, and nodes that are trained in one round."""
    nodes = len(config.nodes)
    counts = step_counts(config)
    written = nodes * written_windows(config) * config.probe.length if writing else 0
    # The public text is longer than the probe set: how much longer is not known before it is tokenized.
    public = 0 if writing else _LONG_TEXT
    taught = [Work(taught=steps, predicted=teacher_contexts(config, steps, public, written)) for steps in counts]
    row = sum(taught, Work(written=written)) + evaluations(config, len(counts))
    local = nodes * config.local_steps * config.step_cost * (config.run.rounds > 1)
    return row * len(widths(config)) + Work(steps=local)


FEDDF = Baseline(
    partial(_rows, "feddf", _float32, public_lesson), partial(_jobs, _float32, False), partial(_work, _float32, False)
)
FEDDF_KBIT = Baseline(
    partial(_rows, "feddf", few_bits, public_lesson),
    partial(_jobs, few_bits, False),
    partial(_work, few_bits, False),
)
FEDDF_WRITTEN = Baseline(
    partial(_rows, "feddf, written", _any_bits, written_lesson),
    partial(_jobs, _any_bits, True),
    partial(_work, _any_bits, True),
)
