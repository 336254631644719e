"""The models that a run begins with: one file for each [student] table, trained on the public text."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from fpld.data import load_tokenizer
from fpld.errors import InputError
from fpld.federation.training import make_student, save_base
from fpld.pace import Subject, before, working_on
from fpld.seeds import derive_seed
from fpld.storage.seals import is_sealed, seal

if TYPE_CHECKING:
    import numpy as np

    from fpld.config import Config
    from fpld.storage.folder import RunFolder
    from fpld.students.choice import StudentChoice

log = logging.getLogger(__name__)


def student_options(config: Config, index: int | None) -> StudentChoice:
    """Return the [student] table of a node (None: of the aggregator's student)."""
    own = None if index is None else config.nodes[index].student
    return own if own is not None else config.student


def base_file(config: Config, index: int | None) -> str:
    """Name the file with the base model that a node starts from; equal tables share one."""
    different: list[StudentChoice] = []
    for i in (None, *range(len(config.nodes))):
        options = student_options(config, i)
        if options not in different:
            different.append(options)
    return f"base-{different.index(student_options(config, index))}.safetensors"


def make_bases(config: Config, store: RunFolder, vocab: int, tokens: np.ndarray[Any, np.dtype[np.int32]]) -> None:
    """Train each kind of model on the public text: the shared base of Algorithm 1."""
    for index in (None, *range(len(config.nodes))):
        name = base_file(config, index)
        if is_sealed(store, name):
            continue
        options = student_options(config, index)
        student = make_student(options, vocab, derive_seed(config.run.seed, "base", name))
        log.info("%s: a %s of %s parameters, %s", name, student.kind, f"{student.parameters:,}", student.place)
        student.check_tokenizer(load_tokenizer(store.path / "tokenizer.json", vocab=vocab))
        if student.longest is not None and student.longest < config.probe.length:
            raise InputError(
                f"student.length must be at least probe.length = {config.probe.length}, got {student.longest}"
            )
        if config.base is not None:
            log.info("training the base model on public text (%d steps)", config.base.steps)
            seed = derive_seed(config.run.seed, "base text", name)
            with working_on(Subject(model=name.removesuffix(".safetensors"))), before("the first round"):
                student.finetune(tokens, steps=config.base.steps, seed=seed, rate=config.base.rate)
        save_base(student, store.path / name, options.device)
        seal(store, name)
