"""Preflight: everything that can be known to be wrong before a run begins, and what the run will take.

`run_preflight` looks at texts, tokenizer, students, rule, budget and privacy, and returns all findings at once: nothing
is trained, fetched or written. `expected_cost` estimates disk, memory and time on this machine, rounded up.
"""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from fpld import data
from fpld.budget.limits import Uplinks, senders
from fpld.config.config import Finding
from fpld.data.fetch import ARCHIVES, cache_folder
from fpld.errors import FpldError, InputError
from fpld.federation.prepare import deal, public_documents, read_corpus, sample_public
from fpld.federation.state import configured_budget, update_budget
from fpld.federation.tracking import tracker_class
from fpld.node.spec import make_node_spec
from fpld.node.text import split_text
from fpld.node.training import make_student
from fpld.privacy.accounting import accounting_library
from fpld.protocol.wire import OVERHEAD_BYTES
from fpld.protocol.written import least_bits
from fpld.registry import rules
from fpld.rules.base import with_trim as configured_rule
from fpld.students import student_class
from fpld.students.configs import HuggingFaceConfig
from fpld.units import show_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fpld.config import Config
    from fpld.config.sections import EngineSection
    from fpld.data import Document, Tokenizer
    from fpld.students import Student
    from fpld.students.configs import StudentChoice

MAX_READ_BYTES = 200_000_000
"""Bytes of text that are read for a check; of a larger text only its existence is checked."""
_TIMED_STEPS = 3
_MAX_TIMED_PARAMETERS = 20_000_000  # of a model that is made only to be timed
_PROCESS_BYTES = 300_000_000  # of a process with PyTorch in it
_TRAINING_COPIES = 4  # of a model while it trains: weights, gradients and the two moments of AdamW
_BUILT_IN_BYTES = 20_000_000  # of the largest corpus that is not an archive
T = TypeVar("T")


def expected_cost(config: Config, *, baseline_steps: int) -> Iterator[Finding]:
    """Yield disk, memory and time to expect; more than there is, is a problem. The configuration must be sound.

    `baseline_steps` are the training steps of the run's baselines.

    Pretrained models are not loaded for this, so there is no estimate for them.
    """
    vocab = Preflight(config, local=False).vocab
    settings = replace(config.student.settings, vocab=vocab)
    if config.student.kind == "huggingface" or not 0 < settings.parameters <= _MAX_TIMED_PARAMETERS:
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
    steps = baseline_steps + config.federation_steps + (0 if config.base is None else config.base.steps)
    seconds = _step_seconds(student) * steps / max(min(config.engine.workers, len(config.nodes)), 1)
    yield Finding(
        "run.rounds", f"training: about {_minutes(seconds)}, by {_TIMED_STEPS} steps on this machine", wrong=False
    )


def _step_seconds(student: Student) -> float:
    """Return the seconds of a training step, after a first one that warms up."""
    text = np.random.default_rng(0).integers(student.vocab, size=4 * student.window + 64).astype(np.int32)
    student.finetune(text, steps=1, seed=0)
    start = time.perf_counter()
    student.finetune(text, steps=_TIMED_STEPS, seed=0)
    return (time.perf_counter() - start) / _TIMED_STEPS


def _minutes(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _text_bytes(config: Config) -> int:
    """Return the most bytes of text that a run on this machine tokenizes, by the sizes of files and archives."""
    sources = [path for path in (config.data.path, *(node.data for node in config.nodes)) if path is not None]
    places = [data.text_folder(path) for path in sources]
    size = sum(_file_bytes(place) for place in places if place.exists())
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


class Preflight:
    """The checks of a configuration; `local` says that the nodes' texts are on this machine."""

    def __init__(self, config: Config, *, local: bool) -> None:
        self._config = config
        self._local = local

    def findings(self) -> list[Finding]:
        """Return all findings, in the order of the sections."""
        findings = [
            *self._trackers(),
            *self._texts(),
            *self._tokenizer(),
            *self._students(),
            *self._rule(),
            *self._budget(),
        ]
        return findings if self._config.privacy is None else [*findings, *self._privacy()]

    def _trackers(self) -> Iterator[Finding]:
        for name in self._config.run.track:
            yield from _tried("run.track", partial(tracker_class, name))[1]

    def _texts(self) -> Iterator[Finding]:
        config = self._config
        corpus, problems = _tried("data.corpus" if config.data.corpus else "data.path", self._documents)
        yield from problems
        if corpus is None:
            return
        public, problems = _tried("probe.source", lambda: self._public(corpus))
        yield from problems
        if public is not None:
            sample = sample_public(config, public)
            size = data.total_size(public)
            use = data.TextUse("public text", len(public), size, data.total_size(sample), 0, "probe.limit")
            more = f"; {use.left_out}" if use.left_out else ""
            yield Finding("probe.source", f"{use.documents} documents, {use.bytes:,} bytes{more}", wrong=False)
        if config.data.limit is not None:
            yield Finding("data.limit", f"a node uses at most {config.data.limit:,} bytes of its text", wrong=False)
        if self._local:
            yield from self._nodes(corpus)

    def _documents(self) -> list[Document]:
        """Read what [data] names; a corpus that is not here yet, or a large one, is left for the run."""
        config = self._config
        name = config.data.corpus
        if name in ARCHIVES:
            archive = ARCHIVES[name]
            there = "is large" if (cache_folder() / archive.filename).exists() else "will be fetched"
            raise _UnknownError(
                f"the corpus {name} {there} ({archive.size / 1e6:.0f} MB): its documents are not looked at"
            )
        if config.data.path is not None:
            _look(config.data.path)
        return read_corpus(config)

    def _public(self, corpus: list[Document]) -> list[Document]:
        config = self._config
        public = [document for document in corpus if document.label == config.probe.source]
        if not public:
            labels = sorted({document.label for document in corpus if document.label})
            if not data.text_folder(config.probe.source).exists():
                choices = f"one of the labels {', '.join(labels)} or " if labels else ""
                raise InputError(f"must be {choices}a path that exists, got {config.probe.source!r}")
            _look(config.probe.source)
            public = public_documents(config, corpus)
        size = data.total_size(sample_public(config, public))
        if size < config.probe.contexts:
            raise InputError(
                f"has {size:,} bytes, fewer than probe.contexts = {config.probe.contexts:,}: give more public text"
            )
        return public

    def _nodes(self, corpus: list[Document]) -> Iterator[Finding]:
        """Check the text of every node by itself, so that all that are wrong are named."""
        config = self._config
        for index, node in enumerate(config.nodes):
            key = f"nodes[{index}].{'data' if node.data is not None else 'label' if node.label else 'name'}"
            if node.data is not None:
                _, problems = _tried(key, partial(_look, node.data))
                if problems:
                    yield from problems
                    continue
            alone = config if config.data.split != "label" else config.model_copy(update={"nodes": [node]})
            text, problems = _tried(key, partial(self._text, alone, corpus, index))
            yield from problems
            if text is not None:
                yield Finding(key, text, wrong=False)

    def _text(self, config: Config, corpus: list[Document], index: int) -> str:
        """Return what there is of a node's text, what is left out and what is held out."""
        spec = make_node_spec(self._config, index)
        documents = deal(config, corpus)[spec.name]
        split = split_text(spec, documents)
        sides = (split.train, split.heldout)
        length = config.probe.length
        for what, side in zip(("training", "held-out"), sides, strict=True):
            size = sum(document.size + len(data.encoding.SEPARATOR) for document in side)
            if size <= length:  # a token is a byte or more
                raise InputError(f"its {what} text has {size} bytes, no more than a context of {length} tokens")
        self._units(config, split.train, single=split.single)
        use = split.use
        says = f"{use.name}: {use.documents} documents, {use.bytes:,} bytes, {use.heldout_share} held out"
        return f"{says}; {use.left_out}" if use.left_out else says

    @staticmethod
    def _units(config: Config, training: list[Document], *, single: bool) -> None:
        """Refuse a text with fewer units than take part in a step; of windows only the most there can be is known."""
        terms = config.privacy
        student = config.nodes[0].student or config.student
        if terms is None or not hasattr(student.settings, "length"):
            return
        most = 1 if single else len({document.group or document.name for document in training})
        if terms.unit == "window":
            most = sum(-(-document.size // (student.settings.length + 1)) + 1 for document in training)
        batch = terms.units(student.settings.batch) or 1
        if most < batch:
            raise InputError(
                f"its text has {'at most ' if terms.unit == 'window' else ''}{most} {terms.unit}s to train on, and "
                f"privacy.batch asks for {batch} in a step: give it more text, or a smaller batch"
            )

    def _privacy(self) -> Iterator[Finding]:
        """Check that all students can be trained privately, and that privacy can be accounted for."""
        config = self._config
        for key, choice in self._choices():
            kind, _ = _tried(key, partial(student_class, choice.kind))
            if kind is not None and not kind.private:
                yield Finding(
                    "privacy",
                    f"must be left out with {key}.kind = {choice.kind!r}, which has no gradients of single units: take "
                    "'transformer' or 'huggingface'",
                )
        _, problems = _tried("privacy", accounting_library)
        yield from problems
        if config.privacy is not None and config.privacy.delta > 1e-3:
            yield Finding("privacy.delta", "is larger than a thousandth: with it, a unit in so many may show whole")

    def _tokenizer(self) -> Iterator[Finding]:
        _, problems = _tried("tokenizer", lambda: self.vocab)
        yield from problems
        if not self._config.over_strings:
            return
        for index in (None, *range(len(self._config.nodes))):
            if index is None or self._config.nodes[index].tokenizer is not None:
                key = "tokenizer" if index is None else f"nodes[{index}].tokenizer"
                yield from _tried(key, partial(self._spelling, index))[1]

    def _spelling(self, index: int | None) -> None:
        """Refuse the tokenizer of a pretrained model whose tokens are not the bytes of the text."""
        choice = self._config.tokenizer_choice(index)
        if choice.kind == "huggingface" and choice.path:
            from fpld.students.pretrained import model_tokenizer

            _here(choice.path)
            data.TokenStrings(model_tokenizer(choice.path))

    @cached_property
    def _model_tokenizer(self) -> Tokenizer:
        from fpld.students.pretrained import model_tokenizer

        _here(self._config.model_path)
        return model_tokenizer(self._config.model_path)

    @cached_property
    def vocab(self) -> int:
        """Return V, which a BPE reaches if the public text has as many merges."""
        kind = self._config.tokenizer.kind
        if kind == "bytes":
            return data.ByteTokenizer().vocab
        if kind == "huggingface":
            return self._model_tokenizer.vocab
        data.tokenizers.tokenizers_library()
        return self._config.tokenizer.vocab

    def _choices(self) -> list[tuple[str, StudentChoice]]:
        """Return the [student] tables by their keys."""
        nodes = [(f"nodes[{i}].student", node.student) for i, node in enumerate(self._config.nodes)]
        return [("student", self._config.student), *((key, choice) for key, choice in nodes if choice)]

    def _students(self) -> Iterator[Finding]:
        config = self._config
        own = [f"nodes[{i}].student" for i, node in enumerate(config.nodes) if node.tokenizer is not None]
        for key, choice in self._choices():
            kind, problems = _tried(f"{key}.kind", partial(student_class, choice.kind))
            yield from problems
            if kind is None:
                continue
            where, problems = _tried(f"{key}.device", partial(_device, choice, config.engine))
            yield from problems
            if where is not None:
                yield Finding(f"{key}.device" if choice.device else "engine.device", where, wrong=False)
            if config.over_strings and not hasattr(kind, "read_out_parts"):
                why = "with labels over strings: it cannot learn through a map"
                yield Finding(f"{key}.kind", f"must be 'transformer' or 'huggingface' {why}, got {choice.kind!r}")
            length = getattr(choice.settings, "length", None)
            if length is not None and length < config.probe.length:
                yield Finding(f"{key}.length", f"must be at least probe.length = {config.probe.length}, got {length}")
            if isinstance(choice.settings, HuggingFaceConfig) and key not in own:
                yield from _tried(f"{key}.path", partial(self._pretrained, choice.settings.path))[1]

    def _pretrained(self, path: str) -> None:
        """Check a pretrained model's place, and that its tokens are the federation's."""
        from fpld.students.pretrained import check_tokenizer, model_tokenizer

        _here(path)
        kind = self._config.tokenizer.kind
        if kind == "huggingface":
            check_tokenizer(path, self._model_tokenizer)
        elif kind == "bytes":
            check_tokenizer(path, data.ByteTokenizer())
        vocab = model_tokenizer(path).vocab
        if vocab != self.vocab:
            raise InputError(f"{path} has {vocab} tokens, the federation's tokenizer {self.vocab}")

    def _rule(self) -> Iterator[Finding]:
        """Check that so many nodes answer in every round as the rule needs."""
        config = self._config
        least = configured_rule(rules.get(config.combine.rule), trim=config.combine.trim).traits.least_nodes
        answering = config.run.asked(len(config.nodes))
        whose = "the number of nodes" if config.run.fraction is None else "that of nodes which run.fraction asks"
        if config.run.quorum is not None:
            answering = config.run.quorum
            whose = "run.quorum"
        if answering < least:
            key = "combine.trim" if config.combine.trim is not None else "combine.rule"
            yield Finding(
                key, f"{config.combine.rule!r} needs at least {least} nodes in a round, {whose} is {answering}"
            )

    def _budget(self) -> Iterator[Finding]:
        """Check every node's limit against the least that the codec works with, then the budget as a whole."""
        config = self._config
        try:
            vocab = config.labels.symbols if config.labels and config.over_strings else self.vocab
        except (FpldError, OSError):
            return  # the finding about the tokenizer names it
        contexts = -(-config.probe.contexts // config.probe.length) * config.probe.length + config.written_contexts
        if config.update_bits is not None:
            yield from self._update_budget(contexts, vocab)
            return
        problems = []
        for index, (node, sender) in enumerate(zip(config.nodes, senders(config.nodes, vocab), strict=True)):
            text = least_bits(config.written_contexts)
            links = Uplinks([sender], contexts, vocab, config.budget.deadline, config.codec.name, OVERHEAD_BYTES, text)
            limit = next(name for name in ("bits", "context_bits", "uplink") if getattr(node, name) is not None)
            key = f"nodes[{index}].{limit}"
            problems += _tried(key, links.feasible)[1]
        if not problems:
            problems = _tried("budget", lambda: configured_budget(config, contexts=contexts, vocab=vocab))[1]
        yield from problems

    def _update_budget(self, contexts: int, vocab: int) -> Iterator[Finding]:
        """Check every node's limit against an update in one bit per weight, where the number of weights is known."""
        weights = replace(self._config.student.settings, vocab=vocab).parameters
        if weights > 0:
            key = "send.updates"
            yield from _tried(
                key, lambda: update_budget(self._config, weights=weights, contexts=contexts, vocab=vocab)
            )[1]


class _UnknownError(InputError):
    """What cannot be said before the run."""


def _tried(key: str, what: Callable[[], T]) -> tuple[T | None, list[Finding]]:
    """Return the result of a call, or the finding about the key if it fails."""
    try:
        return what(), []
    except _UnknownError as unknown:
        return None, [Finding(key, str(unknown), wrong=False)]
    except (FpldError, OSError) as error:
        return None, [Finding(key, str(error))]


def _look(path: str) -> None:
    """Refuse a path that is not there; leave a large one for the run."""
    root = data.text_folder(path)
    if not root.exists():
        raise InputError(f"{path} does not exist: give the path of an existing file or folder")
    size = _file_bytes(root)
    if size > MAX_READ_BYTES:
        raise _UnknownError(f"{path} is large ({size / 1e6:.0f} MB): it is not read before the run")


def _file_bytes(root: Path) -> int:
    """Return the bytes of a file, or of all files in a folder."""
    files = [root] if root.is_file() else (Path(folder, name) for folder, _, names in os.walk(root) for name in names)
    return sum(file.stat().st_size for file in files)


def _here(path: str) -> None:
    """Leave a model by name that is not in the cache for the run, which fetches it."""
    if path in ARCHIVES and not (cache_folder() / ARCHIVES[path].filename).exists():
        raise _UnknownError(f"the model {path} will be fetched ({ARCHIVES[path].size / 1e6:.0f} MB)")


def _device(choice: StudentChoice, engine: EngineSection) -> str | None:
    """Return where a model will be computed, and what stands idle; None for a model in NumPy."""
    if not student_class(choice.kind).has_devices:
        if choice.device not in (None, "cpu", "auto"):
            raise InputError(f"must be 'cpu' or 'auto' for an n-gram model, which is in NumPy, got {choice.device!r}")
        return None
    from fpld.students.devices import describe_device

    return describe_device(choice.device or engine.device, max(engine.workers, 1), engine.threads)


def run_preflight(config: Config, *, local: bool) -> list[Finding]:
    """Return what is wrong with a configuration, and what is worth knowing; `local`: the nodes' texts are here."""
    return Preflight(config, local=local).findings()


def refuse(config: Config, source: str, *, local: bool) -> None:
    """Raise InputError with every problem of a configuration, before anything is written."""
    problems = [f"{finding.key}: {finding.says}" for finding in run_preflight(config, local=local) if finding.wrong]
    if len(problems) == 1:
        raise InputError(f"{source}: {problems[0]}")
    if problems:
        raise InputError(f"{source} has {len(problems)} problems:" + "".join(f"\n  {line}" for line in problems))
