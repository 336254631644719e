"""What a run takes on this machine: disk, memory and time, estimated before it begins.

The time is that of the work. `Work` counts it: steps of training and distillation, contexts that models predict, write
and label. `fpld.federation.rates` says what each takes here. A run's work has four parts: what comes before the first
round, what nodes do side by side, what the aggregator does alone, and the baselines. Workers share all but the first.
In a deployment nodes are machines of their own, and the slowest one counts.

Steps are timed with the device, precision and threads of [engine], in one process; several processes of a training
divide them. Left out are the compiling of kernels (`fpld warm`) and the time that messages take.
"""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from fpld import data
from fpld.config.config import Finding
from fpld.data.fetch import ARCHIVES, cache_folder
from fpld.errors import FpldError, InputError
from fpld.federation.preflight import Preflight, file_bytes
from fpld.federation.prepare import MAX_TAUGHT_CONTEXTS
from fpld.federation.rates import ModelSize, Rates, measure_rates, pretrained_size, scaled_rates
from fpld.node.training import computing_with, make_student
from fpld.progress import show_seconds
from fpld.students.configs import HuggingFaceConfig, TransformerConfig
from fpld.students.shapes import read_shape
from fpld.units import show_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fpld.config import Config

MAX_TIMED_PARAMETERS = 20_000_000
"""Parameters of a model that is made only to be timed."""
MAX_TIMED_BYTES = 1_000_000_000
"""Bytes of the files of a pretrained model that is loaded only to be timed."""
_START_SECONDS = 3.0  # of a process with PyTorch in it, on a core
_PROCESS_BYTES = 300_000_000  # of a process with PyTorch in it
_TRAINING_COPIES = 4  # of a model while it trains: weights, gradients and the two moments of AdamW
_BUILT_IN_BYTES = 20_000_000  # of the largest corpus that is not an archive
_TOKENIZING_SECONDS = 4e-7  # for a byte of text
_HELD_COORDINATES = 1 << 24  # of a mixture of models, which are held in memory (`fpld.students.losses`)


@dataclass(frozen=True, slots=True)
class Work:
    """An amount of work with models.

    Parameters
    ----------
    steps
        Steps of training on text, without differential privacy (`Config.step_cost`).
    distilled
        Steps of distillation to labels, of which the student's own prediction is a part.
    taught
        Steps of distillation to models, without what the teachers predict.
    predicted
        Contexts that models predict: for priors, labels, evaluations, and as teachers.
    written
        Contexts that models write, token by token.
    labelled
        Contexts whose labels are coded, sent and decoded.
    """

    steps: float = 0.0
    distilled: float = 0.0
    taught: float = 0.0
    predicted: float = 0.0
    written: float = 0.0
    labelled: float = 0.0

    def __add__(self, other: Work) -> Work:
        """Return both amounts together."""
        return Work(*(getattr(self, name) + getattr(other, name) for name in self.__slots__))

    def __mul__(self, times: float) -> Work:
        """Return the amount so many times."""
        return Work(*(times * getattr(self, name) for name in self.__slots__))


class RunWork(NamedTuple):
    """The work of a run on one machine: before the first round, of nodes side by side, of the aggregator."""

    before: Work
    nodes: Work
    aggregator: Work


def run_work(config: Config) -> RunWork:
    """Count the work of a run, but for its baselines."""
    if config.base is None:
        before = Work()
    else:
        # Nodes with the same kind of model share one base of that kind.
        kinds = {str(node.student): index for index, node in enumerate(config.nodes) if node.differs}
        models = 1 + sum(relative_size(config, index) for index in kinds.values())
        taught = sum(node.taught for node in config.nodes)
        before = Work(
            steps=config.base.steps * models, predicted=taught * MAX_TAUGHT_CONTEXTS * (config.base.steps > 0)
        )
    federation = federation_work(config)
    return RunWork(before, federation.nodes, federation.aggregator)


class FederationWork(NamedTuple):
    """The work of all rounds: of nodes, and of the aggregator."""

    nodes: Work
    aggregator: Work

    @property
    def all(self) -> Work:
        """Return both together."""
        return self.nodes + self.aggregator


def federation_work(config: Config) -> FederationWork:
    """Count the work of the rounds of a federation."""
    rounds = config.run.rounds
    asked = config.run.asked(len(config.nodes))
    public = config.probe.contexts
    evaluated = len(config.nodes) * config.data.heldout_tokens
    nodes = sum((node_work(config, index) for index in range(len(config.nodes))), Work())
    if config.update_bits is not None:
        written = asked * config.contexts_by_model
        teachers = teacher_contexts(config, config.distill.steps, public, written)
        learning = Work(taught=config.distill.steps, written=written, predicted=teachers + 2 * evaluated)
        return FederationWork(nodes, learning * rounds + _own_evaluations(config))
    # The aggregator predicts the priors again, and at the end compares two students on all of it.
    contexts = public + asked * config.written_contexts
    aggregator = Work(distilled=config.distill.steps, predicted=3 * contexts + 2 * evaluated)
    return FederationWork(nodes, aggregator * rounds + _own_evaluations(config))


def node_work(config: Config, index: int) -> Work:
    """Count the work of a node in all rounds."""
    node = config.nodes[index]
    rounds = config.run.rounds
    asked = config.run.asked(len(config.nodes)) / len(config.nodes)
    size = relative_size(config, index)
    steps = Work(steps=size * config.local.scaled(node.effort).steps * rounds * config.step_cost * asked)
    if config.update_bits is not None:
        return steps
    public = config.probe.contexts
    written = config.written_contexts
    # A node predicts its labels on both kinds of contexts, and with the student the prior of what it has written.
    labels = Work(predicted=public + 2 * written, written=written, labelled=public + written)
    return steps + labels * (asked * rounds) + _adoption(config, index)


def _adoption(config: Config, index: int) -> Work:
    """Count what a node with a model of another kind learns from the student: before each round but the first.

    After the last round it does so too, then with a step on its own text for each, unless training is private.
    """
    if not config.nodes[index].differs:
        return Work()
    steps = config.distill.steps * config.run.rounds
    text = 0 if config.privacy is not None else config.distill.steps
    predicted = steps * _distilled_contexts(config)
    return Work(taught=relative_size(config, index) * (steps + text), predicted=predicted)


def relative_size(config: Config, index: int) -> float:
    """Return how much a step of a node's model takes over one of the aggregator's student, by their parameters.

    Those of the vocabulary are left out. A model that has no others looks its logits up, in next to no time.
    """
    student = config.nodes[index].student
    shared = config.student.settings.parameters
    return 1.0 if student is None or not shared else float(student.settings.parameters / shared)


def _distilled_contexts(config: Config) -> int:
    """Return the contexts of a minibatch of distillation."""
    batch = config.distill.batch or getattr(config.student.settings, "batch", None) or 1
    return int(batch) * config.probe.length


def teacher_contexts(config: Config, steps: int, public: float, written: float = 0.0) -> float:
    """Count the contexts that models predict as teachers in so many steps on a text.

    The mixture of all models teaches a public context, and the model that wrote it a written one. A text that is held
    in memory is predicted once.
    """
    models = config.run.asked(len(config.nodes))
    once = models * public + written
    if (public + written) * config.tokenizer.vocab <= _HELD_COORDINATES:
        return once
    return steps * _distilled_contexts(config) * once / (public + written)


def _own_evaluations(config: Config) -> Work:
    """Count the evaluation of each node's own models: on all texts where models differ, else on the node's."""
    differ = any(node.differs for node in config.nodes)
    texts = len(config.nodes) if differ else 1
    models = 2 if differ or config.run.rounds > 1 else 1
    return Work(predicted=len(config.nodes) * models * texts * config.data.heldout_tokens)


def evaluations(config: Config, count: int) -> Work:
    """Return the work of evaluating so many models on the held-out texts of all nodes."""
    return Work(predicted=count * len(config.nodes) * config.data.heldout_tokens)


def expected_cost(config: Config, *, baselines: Work) -> Iterator[Finding]:
    """Yield disk, memory and time to expect; more than there is, is a problem. The configuration must be sound.

    A pretrained model is loaded if it is in the cache and not large. Nothing is fetched.
    """
    try:
        vocab = Preflight(config, local=False).vocab
        # Processes of a training divide what one of them takes.
        with computing_with(replace(config.engine.compute, processes=1, shard=False)):
            yield from _expected_cost(config, _timed_model(config, vocab), baselines)
    except (FpldError, OSError) as error:
        says = f"time, memory and disk are not estimated: {error}; `fpld bench training` times the steps of any model"
        yield Finding("run.rounds", says, wrong=False)


class _TimedModel(NamedTuple):
    """A model's size, a function that times its work, and what to say of how it is done."""

    size: ModelSize
    rates: Callable[[], Rates]
    note: str = ""


def _timed_model(config: Config, vocab: int) -> _TimedModel:
    """Make the model of a run to time it, or scale the times of one that is too large for that.

    Raises
    ------
    InputError
        If neither is possible.
    """
    settings = config.student.settings
    if isinstance(settings, HuggingFaceConfig):
        frozen = _model_bytes(settings.path)
        if frozen is None:
            raise InputError(f"the model {settings.path} is not on this machine yet")
        if frozen > MAX_TIMED_BYTES:
            return _scaled_model(config, pretrained_size(settings, read_shape(_model_place(settings.path))))
    else:
        frozen = 0
        parameters = replace(settings, vocab=vocab).parameters
        if not 0 < parameters <= MAX_TIMED_PARAMETERS:
            if not isinstance(settings, TransformerConfig):
                raise InputError(f"the model is large ({parameters:,} parameters), and is not made for it")
            return _scaled_model(config, ModelSize(vocab, parameters, 0, parameters, parameters))
    student = make_student(config.student, vocab, 0)
    size = ModelSize(student.vocab, student.parameters, frozen, 0, 0)
    return _TimedModel(size, partial(measure_rates, config, student))


def _scaled_model(config: Config, size: ModelSize) -> _TimedModel:
    note = f"; the model is large ({size.multiplied:,} weights): its steps are scaled from the rate of a matrix product"
    return _TimedModel(size, partial(scaled_rates, config, size), note)


def _model_bytes(path: str) -> int | None:
    """Return the bytes of a pretrained model's files; None if it would have to be fetched."""
    if path in ARCHIVES and not (cache_folder() / ARCHIVES[path].filename).exists():
        return None
    return file_bytes(_model_place(path))


def _model_place(path: str) -> Path:
    from fpld.students.pretrained import locate  # imports nothing heavy, but makes a model of what is fetched

    return locate(path)


def _expected_cost(config: Config, model: _TimedModel, baselines: Work) -> Iterator[Finding]:
    settings = config.student.settings
    vocab = model.size.vocab
    logits = 4 * max(config.probe.contexts, config.written_contexts) * vocab
    trained = 4 * model.size.trained
    windows = settings.micro if isinstance(settings, HuggingFaceConfig) else getattr(settings, "batch", 1)
    batch = 4 * windows * getattr(settings, "length", 1) * vocab
    federations = 1 + ("float32" in config.baselines.methods)
    # Models of each node and of the rounds; the prior's integers, and a node's last frame and reconstruction.
    disk = federations * ((3 * len(config.nodes) + 4) * trained + 2 * logits) + 4 * _text_bytes(config)
    free = shutil.disk_usage(_existing(Path(config.run.out))).free
    text = f"{show_size(disk)} at most, {show_size(free)} are free"
    yield Finding("run.out", f"disk: {text}", wrong=disk > free)
    workers = config.engine.workers
    training = model.size.frozen + _TRAINING_COPIES * (trained + batch) + logits // 4
    memory = 3 * logits + max(workers, 1) * training + (workers + 1) * _PROCESS_BYTES
    free_memory = _free_memory()
    text = "" if free_memory is None else f", {show_size(free_memory)} are free"
    most = config.engine.memory
    if most is not None and most < (free_memory or most + 1):
        free_memory = most
        text = f", engine.memory allows {show_size(most)}"
    yield Finding("engine.workers", f"memory: about {show_size(memory)}{text}", wrong=memory > (free_memory or memory))
    if memory > (free_memory or memory):  # the steps that are timed would not fit either
        return
    rates = model.rates()
    if config.flower is None:
        estimate = str(estimate_time(config, rates, baselines))
    else:
        estimate = str(estimate_deployment(config, rates))
    yield Finding("run.rounds", f"{estimate}{model.note}", wrong=False)


class TimeEstimate(NamedTuple):
    """Seconds of a run: before its first round, of nodes and aggregator, of baselines, and in all by the clock."""

    before: float
    nodes: float
    aggregator: float
    baselines: float
    all: float

    def __str__(self) -> str:
        parts = {
            "texts and base model": self.before,
            "nodes": self.nodes,
            "aggregator": self.aggregator,
            "baselines": self.baselines,
        }
        work = ", ".join(f"{name} {show_seconds(seconds)}" for name, seconds in parts.items())
        return f"time: about {show_seconds(self.all)} on this machine as it is now; one after the other: {work}"


def estimate_time(config: Config, rates: Rates, baselines: Work) -> TimeEstimate:
    """Return the seconds that a run on one machine takes with these rates."""
    work = run_work(config)
    lanes = _lanes(config)
    processes = min(config.engine.processes, lanes)
    before = rates.seconds(work.before, processes) + _TOKENIZING_SECONDS * _text_bytes(config)
    nodes, aggregator, others = (rates.seconds(each, processes) for each in (work.nodes, work.aggregator, baselines))
    workers = config.engine.workers
    at_once = max(min(workers, lanes // processes), 1)
    # The aggregator has one worker, and the baselines what is free beside it.
    alone = nodes / min(at_once, len(config.nodes)) + aggregator
    rounds = max(alone, (nodes + aggregator + others) / at_once)
    started = 1 + workers if "torch" in sys.modules else 0
    starts = _START_SECONDS * started / max(min(started, os.cpu_count() or 1), 1)
    return TimeEstimate(before, nodes, aggregator, others, before + starts + rounds)


class DeploymentEstimate(NamedTuple):
    """Seconds of a deployment whose machines are as this one: before its first round, of a node, of the aggregator."""

    before: float
    slowest: str
    node: float
    aggregator: float

    def __str__(self) -> str:
        seconds = show_seconds(self.before + self.node + self.aggregator)
        parts = f"the node {self.slowest} {show_seconds(self.node)}, aggregator {show_seconds(self.aggregator)}"
        return (
            f"time: about {seconds} if nodes are as fast as this machine, without what messages take: texts and base "
            f"model {show_seconds(self.before)}, {parts}"
        )


def estimate_deployment(config: Config, rates: Rates) -> DeploymentEstimate:
    """Return the seconds of a deployment, with these rates at every node: a round takes what its slowest node does."""
    work = run_work(config)
    processes = min(config.engine.processes, _lanes(config))
    before = rates.seconds(work.before, processes) + _TOKENIZING_SECONDS * _text_bytes(config)
    # What is asked of a node on the average: of a part of the nodes, those that are asked are as busy as all would be.
    asked = config.run.asked(len(config.nodes)) / len(config.nodes)
    nodes = {node.name: rates.seconds(node_work(config, index)) / asked for index, node in enumerate(config.nodes)}
    slowest = max(nodes, key=nodes.__getitem__)
    return DeploymentEstimate(before, slowest, nodes[slowest], rates.seconds(work.aggregator, processes))


def _lanes(config: Config) -> int:
    """Return how many processes compute side by side at full speed: on the cores, or each on a GPU."""
    cores = max((os.cpu_count() or 1) // config.engine.threads, 1)
    if "torch" not in sys.modules:  # a model without PyTorch
        return cores
    from fpld.students.devices import pick_device

    device = pick_device(config.student.device or config.engine.device)
    return cores if device.type == "cpu" else config.engine.processes


def _text_bytes(config: Config) -> int:
    """Return the most bytes of text that a run on this machine tokenizes, by the sizes of files and archives."""
    sources = [path for path in (config.data.path, *(node.data for node in config.nodes)) if path is not None]
    places = [data.text_folder(path) for path in sources]
    size = sum(file_bytes(place) for place in places if place.exists())
    name = config.data.corpus
    if name is not None:
        size += ARCHIVES[name].size if name in ARCHIVES else _BUILT_IN_BYTES
    limit = config.data.limit
    return size if limit is None else min(size, limit * len(config.nodes))


def _existing(path: Path) -> Path:
    return path if path.exists() else _existing(path.absolute().parent)


def _free_memory() -> int | None:
    """Return the bytes of memory that are free, where the system tells."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    fields = dict(line.split(":", 1) for line in lines)
    return int(fields["MemAvailable"].split()[0]) * 1024 if "MemAvailable" in fields else None
