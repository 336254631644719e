"""What can be known to be wrong before a run begins, all of it at once: nothing is trained, fetched or written."""

from __future__ import annotations

import os
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from fpld import data
from fpld.budget.limits import Uplinks, senders
from fpld.data.fetch import ARCHIVES, cache_folder
from fpld.errors import FpldError, InputError
from fpld.federation.budgets import configured
from fpld.federation.texts import deal, first_documents, read_corpus
from fpld.privacy.accounting import library as accounting_library
from fpld.protocol.wire import OVERHEAD
from fpld.registry import rules
from fpld.rules.base import configured as configured_rule
from fpld.students import student_class
from fpld.students.configs import HuggingFaceConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fpld.config import Config
    from fpld.data import Document, Tokenizer
    from fpld.students.choice import StudentChoice

T = TypeVar("T")
MOST = 200_000_000  # bytes of text that are read for a check; more than that is only looked for


class Finding(NamedTuple):
    """What a check found about a key: a problem, or (`wrong` false) something to know."""

    key: str
    says: str
    wrong: bool = True


class Check:
    """The checks of a configuration; `local` says that the nodes' texts are on this machine."""

    def __init__(self, config: Config, *, local: bool) -> None:
        self._config, self._local = config, local

    def findings(self) -> list[Finding]:
        """Return everything that was found, in the order of the sections."""
        found = [*self._texts(), *self._tokenizer(), *self._students(), *self._rule(), *self._budget()]
        return found if self._config.privacy is None else [*found, *self._privacy()]

    def _texts(self) -> Iterator[Finding]:
        config = self._config
        corpus, problems = _tried("data.corpus" if config.data.corpus else "data.path", self._documents)
        yield from problems
        if corpus is None:
            return
        public, problems = _tried("probe.source", lambda: self._public(corpus))
        yield from problems
        if public is not None:
            yield Finding(
                "probe.source", f"{len(public)} documents, {sum(d.size for d in public):,} bytes", wrong=False
            )
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
        found = [document for document in corpus if document.label == config.probe.source]
        if not found:
            labels = sorted({document.label for document in corpus if document.label})
            if not Path(config.probe.source).exists():
                known = f"one of the labels {', '.join(labels)} or " if labels else ""
                raise InputError(f"must be {known}a path that exists, got {config.probe.source!r}")
            _look(config.probe.source)
            found = data.read_documents(config.probe.source, field=config.data.field)
        found = first_documents(found, config.probe.limit)
        size = sum(document.size for document in found)
        if size < config.probe.contexts:
            raise InputError(
                f"has {size:,} bytes, fewer than probe.contexts = {config.probe.contexts:,}: give more public text"
            )
        return found

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
            text, problems = _tried(key, partial(self._text, alone, corpus, node.name))
            yield from problems
            if text is not None:
                yield Finding(key, f"{node.name}: {text}", wrong=False)

    def _text(self, config: Config, corpus: list[Document], name: str) -> str:
        documents = deal(config, corpus)[name]
        sides = data.hold_out(documents, fraction=config.data.heldout, seed=0)
        length = config.probe.length
        for what, side in zip(("training", "held-out"), sides, strict=True):
            size = sum(document.size + len(data.tokenize.SEPARATOR) for document in side)
            if size <= length:  # a token is a byte or more
                raise InputError(f"its {what} text has {size} bytes, no more than a context of {length} tokens")
        self._units(config, sides[0], single=len(documents) == 1)
        return f"{len(documents)} documents, {sum(document.size for document in documents):,} bytes"

    @staticmethod
    def _units(config: Config, training: list[Document], *, single: bool) -> None:
        """Refuse a text with fewer units than take part in a step; of windows only the most there can be is known."""
        terms, student = config.privacy, config.nodes[0].student or config.student
        if terms is None or not hasattr(student.settings, "length"):
            return
        most = 1 if single else len({document.group or document.name for document in training})
        if terms.unit == "window":
            most = sum(-(-document.size // (student.settings.length + 1)) + 1 for document in training)
        batch = terms.batch or student.settings.batch
        if most < batch:
            raise InputError(
                f"its text has {'at most ' if terms.unit == 'window' else ''}{most} {terms.unit}s to train on, and "
                f"privacy.batch asks for {batch} in a step: give it more text, or a smaller batch"
            )

    def _privacy(self) -> Iterator[Finding]:
        """Check that all students can be trained privately, and that privacy can be accounted for."""
        config = self._config
        for key, choice in self._choices():
            found, _ = _tried(key, partial(student_class, choice.kind))
            if found is not None and not found.private:
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

    @cached_property
    def _model_tokenizer(self) -> Tokenizer:
        from fpld.students.folders import model_tokenizer

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
        data.tokenize.tokenizers_library()
        return self._config.tokenizer.vocab

    def _choices(self) -> list[tuple[str, StudentChoice]]:
        """Return the [student] tables by their keys."""
        nodes = [(f"nodes[{i}].student", node.student) for i, node in enumerate(self._config.nodes)]
        return [("student", self._config.student), *((key, choice) for key, choice in nodes if choice)]

    def _students(self) -> Iterator[Finding]:
        config = self._config
        for key, choice in self._choices():
            found, problems = _tried(f"{key}.kind", partial(student_class, choice.kind))
            yield from problems
            if found is None:
                continue
            _, problems = _tried(f"{key}.device", partial(_device, choice))
            yield from problems
            length = getattr(choice.settings, "length", None)
            if length is not None and length < config.probe.length:
                yield Finding(f"{key}.length", f"must be at least probe.length = {config.probe.length}, got {length}")
            if isinstance(choice.settings, HuggingFaceConfig):
                _, problems = _tried(f"{key}.path", partial(self._pretrained, choice.settings.path))
                yield from problems

    def _pretrained(self, path: str) -> None:
        """Check a pretrained model's place, and that its tokens are the federation's."""
        from fpld.students.folders import check_tokenizer, model_tokenizer

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
        answering, whose = len(config.nodes), "the number of nodes"
        if config.run.quorum is not None:
            answering, whose = config.run.quorum, "run.quorum"
        if answering < least:
            key = "combine.trim" if config.combine.trim is not None else "combine.rule"
            yield Finding(
                key, f"{config.combine.rule!r} needs at least {least} nodes in a round, {whose} is {answering}"
            )

    def _budget(self) -> Iterator[Finding]:
        """Check every node's limit against the least that the codec works with, then the budget as a whole."""
        config = self._config
        try:
            vocab = self.vocab
        except (FpldError, OSError):
            return  # said above
        contexts = -(-config.probe.contexts // config.probe.length) * config.probe.length
        problems = []
        for index, (node, sender) in enumerate(zip(config.nodes, senders(config.nodes, vocab), strict=True)):
            links = Uplinks([sender], contexts, vocab, config.budget.deadline, config.codec.name, OVERHEAD)
            limit = next(name for name in ("bits", "context_bits", "uplink") if getattr(node, name) is not None)
            key = f"nodes[{index}].{limit}"
            problems += _tried(key, links.feasible)[1]
        if not problems:
            problems = _tried("budget", lambda: configured(config, contexts=contexts, vocab=vocab))[1]
        yield from problems


class _UnknownError(InputError):
    """What cannot be said before the run."""


def _tried(key: str, what: Callable[[], T]) -> tuple[T | None, list[Finding]]:
    """Do something; return what came of it, or what is wrong with the key."""
    try:
        return what(), []
    except _UnknownError as unknown:
        return None, [Finding(key, str(unknown), wrong=False)]
    except (FpldError, OSError) as error:
        return None, [Finding(key, str(error))]


def _look(path: str) -> None:
    """Refuse a path that is not there; leave a large one for the run."""
    root = Path(path)
    if not root.exists():
        raise InputError(f"{path} does not exist: give the path of an existing file or folder")
    files = [root] if root.is_file() else (Path(folder, name) for folder, _, names in os.walk(root) for name in names)
    size = sum(file.stat().st_size for file in files)
    if size > MOST:
        raise _UnknownError(f"{path} is large ({size / 1e6:.0f} MB): it is not read before the run")


def _here(path: str) -> None:
    """Leave a model by name that is not in the cache for the run, which fetches it."""
    if path in ARCHIVES and not (cache_folder() / ARCHIVES[path].filename).exists():
        raise _UnknownError(f"the model {path} will be fetched ({ARCHIVES[path].size / 1e6:.0f} MB)")


def _device(choice: StudentChoice) -> None:
    if choice.kind == "ngram":
        if choice.device == "cuda":
            raise InputError("must be 'cpu' or 'auto' for an n-gram model, which is in NumPy, got 'cuda'")
        return
    from fpld.students.gradient import pick_device

    pick_device(choice.device)


def check(config: Config, *, local: bool) -> list[Finding]:
    """Return what is wrong with a configuration, and what is worth knowing; `local`: the nodes' texts are here."""
    return Check(config, local=local).findings()


def refuse(config: Config, source: str, *, local: bool) -> None:
    """Raise InputError with every problem of a configuration, before anything is written."""
    problems = [f"{found.key}: {found.says}" for found in check(config, local=local) if found.wrong]
    if len(problems) == 1:
        raise InputError(f"{source}: {problems[0]}")
    if problems:
        raise InputError(f"{source} has {len(problems)} problems:" + "".join(f"\n  {line}" for line in problems))
