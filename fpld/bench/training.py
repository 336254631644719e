"""How fast models train, label and learn here, over a bare loop in PyTorch with the same model, batch and threads.

What a run adds to a bare loop: progress, drawing of windows, learning rates by parameter, targets that are built from
labels. The bare loops have what any trainer has: forward, loss, backward, gradient clipping, AdamW.

    job           here                                       bare loop
    training      `finetune`                                 cross entropy of random windows
    labelling     forward, and encoding as sampled labels    forward
    distillation  `distill` to sampled labels                forward of a teacher, cross entropy to its softmax

What a label costs depends on how sure the prior is, and on how far the model has moved from it. So the truest numbers
come from the folder of a run: its base model, the model of one of its nodes, its public text. Without one, weights and
tokens are random, and labels cost more than they do in a run.

Both are timed in turn in one process, and the ratio is of medians of processor time: where a second core computes the
next targets, its time counts too. So other work on the machine counts little.
"""

from __future__ import annotations

import time
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fpld.codecs.prior import ArrayPrior, in_eighths
from fpld.codecs.samples.codec import SAMPLES
from fpld.data.token_stream import open_text
from fpld.errors import InputError
from fpld.federation.preflight import Preflight
from fpld.node.spec import base_file
from fpld.node.training import make_student, open_student
from fpld.numerics import centre
from fpld.seeds import derive_key, derive_seed
from fpld.storage.run_folder import MAIN, OWN_MODEL, PUBLIC, RunFolder
from fpld.target import Target
from fpld.types import Plan

if TYPE_CHECKING:
    from collections.abc import Callable

    from fpld.config import Config
    from fpld.students import Student
    from fpld.types import Tokens

CONTEXT_BITS = 30.0  # of a label
_MOVED_STEPS = 2  # training steps of the model whose labels are sent, so that there is something to say


class TrainingRow(NamedTuple):
    """Tokens per second of a job by wall time, those of the bare loop, and the ratio by processor time."""

    job: str
    tokens_per_second: float
    bare_tokens_per_second: float
    ratio: float


class _Job(NamedTuple):
    """A job and its bare loop, each over `tokens` tokens."""

    name: str
    tokens: int
    run: Callable[[], object]
    bare: Callable[[], object]


class TrainingScene(NamedTuple):
    """What is timed: a student, a model whose labels are sent, a text to train on and probe sequences [S, T]."""

    student: Student
    model: Student
    tokens: Tokens
    sequences: Tokens


class _Elapsed(NamedTuple):
    """Seconds of a call on the clock, and of the processor."""

    wall: float
    processor: float


def time_training(
    scene: TrainingScene, *, steps: int, repeat: int, seed: int, tick: Callable[[], None]
) -> list[dict[str, Any]]:
    """Time the jobs of a scene.

    Parameters
    ----------
    scene
        Of `random_scene` or `run_scene`, made for so many steps.
    steps, repeat
        Steps of a job, and how often each is timed.
    seed
        Of labels.
    tick
        Called when a job has been timed.

    Returns
    -------
    list
        A row for each job, with the columns of `TrainingRow`.
    """
    if not hasattr(scene.student, "_network"):
        raise InputError(f"student.kind must be in PyTorch for this comparison, got {scene.student.kind!r}")
    rows = []
    for make in JOBS:
        rows.append(_timed(make(scene, steps, seed), repeat)._asdict())
        tick()
    return rows


def random_scene(config: Config, *, steps: int, seed: int) -> TrainingScene:
    """Return a configuration's student with random tokens; its model has moved by a few steps."""
    vocab = Preflight(config, local=False).vocab
    student = make_student(config.student, vocab, derive_seed(seed, "bench", "training"))
    rng = np.random.default_rng(derive_seed(seed, "bench", "text"))
    length = config.probe.length
    batch = _batch(student)
    window = max(length, student.window)
    tokens = rng.integers(student.vocab, size=batch * (window + 1) * 8).astype(np.int32)
    sequences = rng.integers(student.vocab, size=(steps * batch, length)).astype(np.int32)
    model = student.copy()
    model.finetune(tokens, steps=_MOVED_STEPS, seed=1)
    return TrainingScene(student, model, tokens, sequences)


def run_scene(config: Config, store: RunFolder, *, steps: int) -> TrainingScene:
    """Return the base model of a run, the last model of its first node of the same kind, and its public text."""
    nodes = [index for index, node in enumerate(config.nodes) if not node.differs]
    model = store.path / MAIN / "nodes" / str(nodes[0] if nodes else 0) / OWN_MODEL
    if not nodes or not model.exists():
        raise InputError(f"{store.path} must be the folder of a finished run with a node that has no model of its own")
    student = open_student(store.path / base_file(config, None))
    tokens = open_text(store.path / PUBLIC).tokens
    length = config.probe.length
    count = min(steps * _batch(student), len(tokens) // length)
    return TrainingScene(student, open_student(model), tokens, tokens[: count * length].reshape(-1, length))


def _timed(job: _Job, repeat: int) -> TrainingRow:
    """Time a job and its bare loop in turn, after a first turn that compiles and fills caches."""
    job.run()
    job.bare()
    here = []
    bare = []
    for _ in range(repeat):
        bare.append(_elapsed(job.bare))
        here.append(_elapsed(job.run))
    return TrainingRow(
        job.name,
        job.tokens / median(each.wall for each in here),
        job.tokens / median(each.wall for each in bare),
        median(each.processor for each in bare) / median(each.processor for each in here),
    )


def _elapsed(act: Callable[[], object]) -> _Elapsed:
    wall = time.perf_counter()
    processor = time.process_time()
    act()
    return _Elapsed(max(time.perf_counter() - wall, 1e-9), max(time.process_time() - processor, 1e-9))


class _BareLoop:
    """A training loop as a tutorial of PyTorch has it."""

    def __init__(self, student: Any) -> None:
        import torch

        self._torch = torch
        self.network = student.copy()._network
        self.device = student.device
        self._weights = [weight for weight in self.network.parameters() if weight.requires_grad]
        self._clip = float(student.config.clip)
        self._optimizer = torch.optim.AdamW(self._weights, lr=1e-4, fused=True)

    def ids(self, tokens: Tokens) -> Any:
        return self._torch.from_numpy(tokens.astype(np.int64)).to(self.device)

    def step(self, loss: Any) -> None:
        self._optimizer.zero_grad()
        loss.backward()
        self._torch.nn.utils.clip_grad_norm_(self._weights, self._clip)
        self._optimizer.step()


def _batch(student: Any) -> int:
    return int(getattr(student.config, "batch", 1))


def _training(scene: TrainingScene, steps: int, seed: int) -> _Job:  # noqa: ARG001  # as all
    from torch.nn import functional

    student: Any = scene.student
    tokens = scene.tokens
    batch = _batch(student)
    window = student.window
    loop = _BareLoop(student)
    windows = loop.ids(tokens[: batch * (window + 1)].reshape(batch, window + 1))

    def bare() -> None:
        for _ in range(steps):
            logits = loop.network(windows[:, :-1]).float()
            loop.step(functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten()))

    model = student.copy()
    return _Job("training", steps * batch * window, lambda: model.finetune(tokens, steps=steps, seed=0), bare)


def _label_plan(student: Student, sequences: Tokens, seed: int) -> Plan:
    return Plan(
        run_key=derive_key(seed),
        round=1,
        probe=bytes(32),
        node=0,
        slot=0,
        slots=1,
        prior=ArrayPrior(in_eighths(student.logits(sequences))),
        contexts=sequences.size,
        vocab=student.vocab,
        bits=CONTEXT_BITS,
    )


def _encoded(model: Student, sequences: Tokens, plan: Plan) -> bytes:
    return SAMPLES.encode((centre(block) for block in model.logit_blocks(sequences)), plan)


def _labelling(scene: TrainingScene, steps: int, seed: int) -> _Job:  # noqa: ARG001  # as all
    import torch

    student = scene.student
    sequences = scene.sequences
    batch = _batch(student)
    plan = _label_plan(student, sequences, seed)
    loop = _BareLoop(student)

    @torch.inference_mode()
    def bare() -> None:
        for start in range(0, len(sequences), batch):
            loop.network(loop.ids(sequences[start : start + batch]))

    return _Job("labelling", sequences.size, lambda: _encoded(scene.model, sequences, plan), bare)


def _distillation(scene: TrainingScene, steps: int, seed: int) -> _Job:
    import torch
    from torch.nn import functional

    student: Any = scene.student
    sequences = scene.sequences
    plan = _label_plan(student, sequences, seed)
    parts = list(SAMPLES.reader(_encoded(scene.model, sequences, plan), plan).sparse())
    counts = np.concatenate([np.diff(part.starts) for part in parts])
    target = Target.sparse(
        np.concatenate([[0], np.cumsum(counts)]),
        np.concatenate([part.tokens for part in parts]),
        np.concatenate([part.changes for part in parts]),
        vocab=student.vocab,
    )
    batch = _batch(student)
    loop = _BareLoop(student)
    teacher = student.copy()._network

    def bare() -> None:
        for step in range(steps):
            start = step * batch % (len(sequences) - batch + 1)
            ids = loop.ids(sequences[start : start + batch])
            with torch.no_grad():
                t = functional.softmax(teacher(ids).float(), dim=-1)
            log_q = functional.log_softmax(loop.network(ids).float(), dim=-1)
            loop.step(-(t * log_q).sum() / ids.numel())

    def run() -> None:
        student.copy().distill(sequences, target, steps=steps, seed=0, reference=student)

    return _Job("distillation", steps * batch * sequences.shape[1], run, bare)


JOBS = (_training, _labelling, _distillation)
"""What is timed: each makes a job of a scene, a number of steps and a seed."""
