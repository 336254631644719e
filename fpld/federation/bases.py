"""The models that a run begins with: one file for each [student] table, trained on the public text."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fpld.data import load_tokenizer
from fpld.errors import InputError
from fpld.federation.training import make_student, open_student, save_base
from fpld.pace import Subject, before, working_on
from fpld.rules.target import Target
from fpld.seeds import derive_seed
from fpld.storage.seals import is_sealed, seal

if TYPE_CHECKING:
    from fpld.config import Config, TrainSection
    from fpld.storage.folder import RunFolder
    from fpld.students import Student
    from fpld.students.choice import StudentChoice

    Tokens = np.ndarray[Any, np.dtype[np.int32]]

log = logging.getLogger(__name__)


TAUGHT = 1 << 16
"""The most contexts of public text on which one base model learns from another."""


@dataclass(frozen=True, slots=True)
class Base:
    """How a base model is made: what it is, and how it is trained. Nodes for whom both are the same share one."""

    student: StudentChoice
    taught: bool = False
    effort: float = 1.0

    @classmethod
    def of(cls, config: Config, index: int | None) -> Base:
        """Return the base model of a node (None: of the aggregator's student)."""
        node = None if index is None else config.nodes[index]
        if node is None or node.student is None:
            return cls(config.student)
        return cls(node.student, node.taught, node.effort)


def base_file(config: Config, index: int | None) -> str:
    """Name the file with the base model that a node starts from."""
    different: list[Base] = []
    for i in (None, *range(len(config.nodes))):
        base = Base.of(config, i)
        if base not in different:
            different.append(base)
    return f"base-{different.index(Base.of(config, index))}.safetensors"


def make_bases(config: Config, store: RunFolder, vocab: int, tokens: Tokens) -> None:
    """Train each kind of model on the public text: the shared base of Algorithm 1. The aggregator's is first."""
    for index in (None, *range(len(config.nodes))):
        name, base = base_file(config, index), Base.of(config, index)
        if is_sealed(store, name):
            continue
        student = make_student(base.student, vocab, derive_seed(config.run.seed, "base", name))
        log.info("%s: a %s of %s parameters, %s", name, student.kind, f"{student.parameters:,}", student.place)
        student.check_tokenizer(load_tokenizer(store.path / "tokenizer.json", vocab=vocab))
        if student.longest is not None and student.longest < config.probe.length:
            raise InputError(
                f"student.length must be at least probe.length = {config.probe.length}, got {student.longest}"
            )
        if config.base is not None:
            how = config.base.times(base.effort)
            seed = derive_seed(config.run.seed, "base text", name)
            with working_on(Subject(model=name.removesuffix(".safetensors"))), before("the first round"):
                if base.taught:
                    log.info("teaching the base model by the aggregator's (%d steps)", how.steps)
                    teacher = open_student(store.path / base_file(config, None))
                    _teach(student, teacher, windows(tokens, config.probe.length, seed), how, seed)
                else:
                    log.info("training the base model on public text (%d steps)", how.steps)
                    student.finetune(tokens, steps=how.steps, seed=seed, rate=how.rate)
        save_base(student, store.path / name, base.student.device)
        seal(store, name)


def _teach(student: Student, teacher: Student, sequences: Tokens, how: TrainSection, seed: int) -> None:
    """Let a model learn what another one predicts for sequences of the public text."""
    target = Target.unchanged(sequences.size, student.vocab)
    student.distill(sequences, target, steps=how.steps, seed=seed, rate=how.rate, reference=teacher)


def windows(tokens: Tokens, length: int, seed: int) -> Tokens:
    """Return sequences [S, length] of a text, at random places: no more than the text has, or `TAUGHT` contexts."""
    count = max(min(len(tokens), TAUGHT) // length, 1)
    starts = np.random.default_rng(seed).integers(len(tokens) - length + 1, size=count)
    found: Tokens = tokens[starts[:, None] + np.arange(length)]
    return found
