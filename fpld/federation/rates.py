"""How long a machine takes for each kind of work with a model: timed with the model, or scaled from its size.

`measure_rates` makes a few steps with a model of the run's size. A model that is too large to be made for it has
`scaled_rates`: the multiplications of its weights, at the rate of a matrix product on this machine. A token takes two
operations for each weight in a forward pass, and four in a backward pass: two for the gradient of what goes in, in the
layers that lie above the lowest trained weight, and two for that of a weight, if it is trained.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fpld.students.generate import write_sequences
from fpld.target import Target

if TYPE_CHECKING:
    from collections.abc import Callable

    from fpld.config import Config
    from fpld.federation.cost import Work
    from fpld.students import Student
    from fpld.students.configs import Device, HuggingFaceConfig, Precision
    from fpld.students.shapes import ModelShape

_TIMED_STEPS = 3
_LONG_SECONDS = 0.5  # what takes longer is timed once more instead of `_TIMED_STEPS` times
_TOO_LONG_SECONDS = 5.0  # what takes longer is timed once
_TIMED_SEQUENCES = 128  # that are predicted and written to time it
_TIMED_PRETRAINED = 8  # the same of a pretrained model
_CODING_SECONDS = 1.2e-8  # for a coordinate of a label: centred, coded, decoded and combined
_QUANTIZED_BYTES = 0.52  # of a weight in four bits, with its share of a scale for each 64
_PRODUCT_ROWS = 512  # of the matrix product that is timed: as many as a minibatch has tokens
_PRODUCT_WIDTH = 2048
_WRITING_TIMES = 2.0  # as long as predicting a context takes to write one
_MODEL_SHARE = 0.5  # of a matrix product's rate, which a model reaches: there is more to it than products


class Rates(NamedTuple):
    """Seconds of a step of training, of a step of distillation, and of a context that is predicted, written, labelled.

    >>> from fpld.federation.cost import Work
    >>> Rates(1.0, 2.0, 0.5, 0.1, 0.2).seconds(Work(steps=3, written=10))
    4.0
    """

    step: float
    distillation: float
    predicted: float
    written: float
    labelled: float

    def seconds(self, work: Work, processes: int = 1) -> float:
        """Return the seconds that an amount of work takes, if so many processes divide each training."""
        trained = work.steps * self.step + work.distilled * self.distillation + work.taught * self.step
        return trained / processes + (
            work.predicted * self.predicted + work.written * self.written + work.labelled * self.labelled
        )


def measure_rates(config: Config, student: Student, clock: Callable[[], float] = time.perf_counter) -> Rates:
    """Time a few steps, and some contexts, with a model of the run's size; of a large one a single step."""
    length = config.probe.length
    rng = np.random.default_rng(0)
    text = rng.integers(student.vocab, size=4 * student.window + 64).astype(np.int32)
    count = _TIMED_PRETRAINED if student.kind == "huggingface" else _TIMED_SEQUENCES
    sequences = rng.integers(student.vocab, size=(count, length)).astype(np.int32)
    target = Target.unchanged(sequences.size, student.vocab)
    batch = config.distill.batch

    def elapsed(act: Callable[[int], object], times: int) -> float:
        start = clock()
        act(times)
        return max(clock() - start, 1e-9) / times

    def timed(act: Callable[[int], object]) -> float:
        # The first time has what is done once: memory, threads, modules that PyTorch imports for its first step.
        first = elapsed(act, 1)
        if first > _TOO_LONG_SECONDS:
            return first
        return min(first, elapsed(act, 1 if first > _LONG_SECONDS else _TIMED_STEPS))

    def predict(times: int) -> None:
        for _ in range(times):
            student.logits(sequences)

    def write(times: int) -> None:
        for _ in range(times):
            write_sequences(student, sequences[:, 0], length, seed=0)

    step = timed(lambda steps: student.copy().finetune(text, steps=steps, seed=0))
    distillation = timed(
        lambda steps: student.copy().distill(sequences, target, steps=steps, seed=0, reference=student, batch=batch)
    )
    written = timed(write) if _writes(config) else 0.0
    return Rates(
        step,
        distillation,
        timed(predict) / sequences.size,
        written / sequences.size,
        labelled=_CODING_SECONDS * student.vocab,
    )


def _writes(config: Config) -> bool:
    """Return whether models write in a run."""
    return bool(config.contexts_by_model) or "feddf-written" in config.baselines.methods


class ModelSize(NamedTuple):
    """What a model comes to, made or not.

    Parameters
    ----------
    vocab
        V.
    trained, frozen
        Parameters that are trained, and bytes of those that are not.
    multiplied
        Weights that a token is multiplied with in a forward pass.
    learning
        Those of them that lie in or above the lowest layer that is trained: gradients go through them.
    """

    vocab: int
    trained: int
    frozen: int
    multiplied: int
    learning: int


def pretrained_size(settings: HuggingFaceConfig, shape: ModelShape) -> ModelSize:
    """Return the size of a pretrained model with adapters, or of one whose weights are all trained."""
    weights = shape.parameters
    if settings.lora == 0:
        return ModelSize(shape.vocab, weights, 0, shape.multiplied, shape.multiplied)
    layers = min(settings.lora_layers or shape.layers, shape.layers)
    below = sum(rows * columns for rows, columns in shape.linear) * (shape.layers - layers)
    adapters = shape.adapters(settings.lora, layers)
    linear = shape.layers * sum(rows * columns for rows, columns in shape.linear)
    others = weights - linear
    frozen = {"float32": 4 * weights, "bfloat16": 2 * weights, "4bit": 4 * others + round(_QUANTIZED_BYTES * linear)}
    return ModelSize(shape.vocab, adapters, frozen[settings.dtype], shape.multiplied, shape.multiplied - below)


def scaled_rates(config: Config, size: ModelSize, clock: Callable[[], float] = time.perf_counter) -> Rates:
    """Scale the times of steps and contexts from a model's size, by the rate of a matrix product here."""
    settings = config.student.settings
    compute = config.engine.compute
    device = config.student.device or compute.device
    forward = 2 * size.multiplied
    backward = 2 * size.learning + 2 * size.trained
    if getattr(settings, "checkpointing", False):
        backward += 2 * size.learning
    per_second = _MODEL_SHARE * product_rate(device, compute.dtype, clock)
    windows = settings.batch * settings.length
    contexts = (config.distill.batch or settings.batch) * config.probe.length
    # What is predicted for the wire is in float32 always.
    predicted = forward / (_MODEL_SHARE * product_rate(device, "float32", clock))
    return Rates(
        step=windows * (forward + backward) / per_second,
        distillation=contexts * ((forward + backward) / per_second + predicted),
        predicted=predicted,
        written=_WRITING_TIMES * predicted if _writes(config) else 0.0,
        labelled=_CODING_SECONDS * size.vocab,
    )


def product_rate(device: Device, dtype: Precision, clock: Callable[[], float] = time.perf_counter) -> float:
    """Return the operations per second of a matrix product on a device."""
    import torch

    from fpld.students.devices import pick_device, pick_precision

    place = pick_device(device)
    precision = pick_precision(dtype, place)
    left = torch.ones((_PRODUCT_ROWS, _PRODUCT_WIDTH), dtype=precision, device=place)
    right = torch.ones((_PRODUCT_WIDTH, _PRODUCT_WIDTH), dtype=precision, device=place)
    times = []
    for _ in range(1 + _TIMED_STEPS):
        start = clock()
        (left @ right)[0, 0].item()  # waits for the device
        times.append(max(clock() - start, 1e-9))
    return 2 * _PRODUCT_ROWS * _PRODUCT_WIDTH**2 / min(times)
