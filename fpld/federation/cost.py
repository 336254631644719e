"""What a run takes on this machine: disk, memory and time, estimated before it begins.

The time is that of the work. `Work` counts it: steps of training and distillation, contexts that models predict, write
and label. `Rates` says what each takes here, timed in a second or two with a model of the run's size. A run's work has
four parts: what comes before the first round, what nodes do side by side, what the aggregator does alone, and the
baselines. Workers share all but the first.

Left out are the start of processes and the compiling of kernels (`fpld warm`), so a run of seconds takes longer.
"""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fpld import data
from fpld.config.config import Finding
from fpld.data.fetch import ARCHIVES
from fpld.federation.preflight import Preflight, file_bytes
from fpld.federation.prepare import MAX_TAUGHT_CONTEXTS
from fpld.node.training import make_student
from fpld.progress import show_seconds
from fpld.students.configs import HuggingFaceConfig
from fpld.students.generate import write_sequences
from fpld.target import Target
from fpld.units import show_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fpld.config import Config
    from fpld.students import Student

MAX_TIMED_PARAMETERS = 20_000_000
"""Parameters of a model that is made only to be timed."""
_TIMED_STEPS = 3
_TIMED_SEQUENCES = 128  # that are predicted and written to time it
_PROCESS_BYTES = 300_000_000  # of a process with PyTorch in it
_TRAINING_COPIES = 4  # of a model while it trains: weights, gradients and the two moments of AdamW
_BUILT_IN_BYTES = 20_000_000  # of the largest corpus that is not an archive
_CODING_SECONDS = 1.2e-8  # for a coordinate of a label: centred, coded, decoded and combined
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


class Rates(NamedTuple):
    """Seconds of a step of training, of a step of distillation, and of a context that is predicted, written, labelled.

    >>> Rates(1.0, 2.0, 0.5, 0.1, 0.2).seconds(Work(steps=3, written=10))
    4.0
    """

    step: float
    distillation: float
    predicted: float
    written: float
    labelled: float

    def seconds(self, work: Work) -> float:
        """Return the seconds that an amount of work takes."""
        trained = work.steps * self.step + work.distilled * self.distillation + work.taught * self.step
        return trained + (work.predicted * self.predicted + work.written * self.written + work.labelled * self.labelled)


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
        kinds = {str(node.student) for node in config.nodes if node.differs}
        taught = sum(node.taught for node in config.nodes)
        before = Work(
            steps=config.base.steps * (1 + len(kinds)), predicted=taught * MAX_TAUGHT_CONTEXTS * (config.base.steps > 0)
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
    steps = sum(_node_steps(config, index) for index in range(len(config.nodes))) * asked / len(config.nodes)
    evaluated = len(config.nodes) * config.data.heldout_tokens
    if config.update_bits is not None:
        written = asked * config.contexts_by_model
        teachers = teacher_contexts(config, config.distill.steps, public, written)
        learning = Work(taught=config.distill.steps, written=written, predicted=teachers + 2 * evaluated)
        return FederationWork(Work(steps=steps), learning * rounds)
    written = config.written_contexts
    # A node predicts its labels on both kinds of contexts, and with the student the prior of what it has written.
    # The aggregator predicts the priors again, and at the end compares two students on all of it.
    node = Work(predicted=public + 2 * written, written=written, labelled=public + written)
    contexts = public + asked * written
    aggregator = Work(distilled=config.distill.steps, predicted=3 * contexts + 2 * evaluated)
    adopted = sum(node.differs for node in config.nodes) * config.distill.steps
    return FederationWork(node * (asked * rounds) + Work(steps=steps, distilled=adopted * rounds), aggregator * rounds)


def _node_steps(config: Config, index: int) -> float:
    """Return the local steps of a node in all rounds, in ordinary steps of the aggregator's student."""
    node = config.nodes[index]
    steps = config.local.scaled(node.effort).steps * config.run.rounds * config.step_cost
    shared = config.student.settings.parameters
    own = shared if node.student is None else node.student.settings.parameters
    return steps * own / shared if own and shared else float(steps)


def teacher_contexts(config: Config, steps: int, public: float, written: float = 0.0) -> float:
    """Count the contexts that models predict as teachers in so many steps on a text.

    The mixture of all models teaches a public context, and the model that wrote it a written one. A text that is held
    in memory is predicted once.
    """
    models = config.run.asked(len(config.nodes))
    once = models * public + written
    if (public + written) * config.tokenizer.vocab <= _HELD_COORDINATES:
        return once
    batch = int(config.distill.batch or getattr(config.student.settings, "batch", None) or 1)
    return steps * batch * config.probe.length * once / (public + written)


def evaluations(config: Config, count: int) -> Work:
    """Return the work of evaluating so many models on the held-out texts of all nodes."""
    return Work(predicted=count * len(config.nodes) * config.data.heldout_tokens)


def measure_rates(config: Config, student: Student, clock: Callable[[], float] = time.perf_counter) -> Rates:
    """Time a few steps, and some contexts, with a model of the run's size."""
    length = config.probe.length
    rng = np.random.default_rng(0)
    text = rng.integers(student.vocab, size=4 * student.window + 64).astype(np.int32)
    sequences = rng.integers(student.vocab, size=(_TIMED_SEQUENCES, length)).astype(np.int32)
    target = Target.unchanged(sequences.size, student.vocab)
    batch = config.distill.batch

    def timed(act: Callable[[int], object]) -> float:
        act(1)  # what is done once: memory, threads
        start = clock()
        act(_TIMED_STEPS)
        return max(clock() - start, 1e-9) / _TIMED_STEPS

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
    written = timed(write) if config.contexts_by_model or "feddf-written" in config.baselines.methods else 0.0
    labelled = _CODING_SECONDS * student.vocab
    return Rates(step, distillation, timed(predict) / sequences.size, written / sequences.size, labelled)


def expected_cost(config: Config, *, baselines: Work) -> Iterator[Finding]:
    """Yield disk, memory and time to expect; more than there is, is a problem. The configuration must be sound.

    Pretrained models are not loaded for this, so there is no estimate for them.
    """
    vocab = Preflight(config, local=False).vocab
    settings = replace(config.student.settings, vocab=vocab)
    if isinstance(settings, HuggingFaceConfig) or not 0 < settings.parameters <= MAX_TIMED_PARAMETERS:
        says = "time, memory and disk are not estimated for a model as large: `fpld bench training` times its steps"
        yield Finding("run.rounds", says, wrong=False)
        return
    student = make_student(config.student, vocab, 0)
    logits = 4 * max(config.probe.contexts, config.written_contexts) * vocab
    size = 4 * student.parameters
    batch = 4 * getattr(settings, "batch", 1) * getattr(settings, "length", 1) * vocab
    federations = 1 + ("float32" in config.baselines.methods)
    # Models of each node and of the rounds; the prior's integers, and a node's last frame and reconstruction.
    disk = federations * ((3 * len(config.nodes) + 4) * size + 2 * logits) + 4 * _text_bytes(config)
    free = shutil.disk_usage(_existing(Path(config.run.out))).free
    text = f"{show_size(disk)} at most, {show_size(free)} are free"
    yield Finding("run.out", f"disk: {text}", wrong=disk > free)
    workers = config.engine.workers
    training = _TRAINING_COPIES * (size + batch) + logits // 4
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
    yield Finding("run.rounds", str(estimate_time(config, measure_rates(config, student), baselines)), wrong=False)


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
        return f"time: about {show_seconds(self.all)} on this machine as it is now; work of a core: {work}"


def estimate_time(config: Config, rates: Rates, baselines: Work) -> TimeEstimate:
    """Return the seconds that a run on one machine takes with these rates."""
    work = run_work(config)
    before = rates.seconds(work.before) + _TOKENIZING_SECONDS * _text_bytes(config)
    nodes, aggregator, others = (rates.seconds(each) for each in (work.nodes, work.aggregator, baselines))
    workers = max(config.engine.workers, 1)
    at_once = min(workers, os.cpu_count() or 1)
    # The aggregator has one worker, and the baselines what is free beside it.
    alone = nodes / min(at_once, len(config.nodes)) + aggregator
    return TimeEstimate(before, nodes, aggregator, others, before + max(alone, (nodes + aggregator + others) / at_once))


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
