"""Preflight: everything that can be known to be wrong before a run begins.

`run_preflight` looks at texts, tokenizer, students, rule, budget and privacy, and returns all findings at once: nothing
is trained, fetched or written. What the run will take is estimated by `fpld.federation.cost`.
"""

from __future__ import annotations

import os
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from fpld import data
from fpld.budget.limits import Uplinks, senders
from fpld.config.config import Finding
from fpld.config.paths import SOURCE, model_places, show_place, text_places
from fpld.data.documents import of_label
from fpld.data.fetch import ARCHIVES, cache_folder
from fpld.data.hub import hub_hint
from fpld.data.places import unreadable_share
from fpld.data.stored import document_texts, is_measured
from fpld.errors import FpldError, InputError
from fpld.federation.prepare import deal, public_documents, read_corpus, sample_public
from fpld.federation.state import configured_budget, update_budget
from fpld.federation.tracking import tracker_class
from fpld.node.spec import make_node_spec
from fpld.node.text import split_text
from fpld.privacy.accounting import accounting_library
from fpld.protocol.wire import OVERHEAD_BYTES
from fpld.protocol.written import least_bits
from fpld.registry import codecs, rules
from fpld.registry import students as registry_of_students
from fpld.rules.base import with_trim as configured_rule
from fpld.spawn import REMEDY, unreachable
from fpld.students import student_class
from fpld.students.configs import HuggingFaceConfig
from fpld.units import show_count

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from fpld.config import Config
    from fpld.config.sections import EngineSection
    from fpld.data import Document, Tokenizer
    from fpld.students.configs import StudentChoice

MAX_READ_BYTES = 200_000_000
"""Bytes of text that are read for a check; of a larger text only its existence is checked."""
_MAX_UNREAD = 0.5  # of the public text: with more of it left out, little is drawn from

T = TypeVar("T")


class Preflight:
    """The checks of a configuration; `local` says that the nodes' texts are on this machine."""

    def __init__(self, config: Config, *, local: bool) -> None:
        self._config = config
        self._local = local
        self._public_sample: Sequence[Document] = ()  # empty where the public text is not read

    def findings(self) -> list[Finding]:
        """Return all findings, in the order of the sections."""
        findings = [
            *self._trackers(),
            *self._texts(),
            *self._tokenizer(),
            *self._students(),
            *self._rule(),
            *self._budget(),
            *self._workers(),
        ]
        return findings if self._config.privacy is None else [*findings, *self._privacy()]

    def _trackers(self) -> Iterator[Finding]:
        for name in self._config.run.track:
            yield from _tried("run.track", partial(tracker_class, name))[1]

    def _workers(self) -> Iterator[Finding]:
        """Check that worker processes can import what this process has registered for them."""
        if not self._local or not self._config.engine.workers:
            return
        used = [("codec.name", self._config.codec.name)]
        used += [(f"{key}.kind", choice.kind) for key, choice in self._choices()]
        registered: dict[str, Any] = {**codecs.registered(), **registry_of_students.registered()}
        for key, name in used:
            reason = unreachable(registered[name]) if name in registered else None
            if reason is not None:
                yield Finding(key, f"worker processes cannot import {name!r}, {reason}: {REMEDY}")

    def _texts(self) -> Iterator[Finding]:
        config = self._config
        corpus, problems = _tried("data.corpus" if config.data.corpus else "data.path", self._documents)
        yield from problems
        if corpus is None:
            yield from self._other_paths()
            if not problems[0].wrong:
                yield from self._unread_limit()
            return
        public, problems = _tried("probe.source", lambda: self._public(corpus))
        yield from problems
        if public is not None:
            sample = sample_public(config, public)
            self._public_sample = sample
            size = data.total_size(public)
            use = data.TextUse("public text", len(public), size, data.total_size(sample), 0, "probe.limit")
            more = f"; {use.left_out}" if use.left_out else ""
            yield Finding("probe.source", f"{use.size}{more}", wrong=False)
        if config.data.limit is not None:
            yield Finding("data.limit", f"a node uses at most {config.data.limit:,} bytes of its text", wrong=False)
        if self._local:
            yield from self._nodes(corpus)

    def _unread_limit(self) -> Iterator[Finding]:
        """Compare data.limit with texts that are not read, by the sizes of their files."""
        config = self._config
        limit = config.data.limit
        if limit is None:
            return
        sizes: dict[str, int] = {}
        whole = ARCHIVES[config.data.corpus].text if config.data.corpus in ARCHIVES else 0
        if config.data.path is not None:
            root = data.text_folder(config.data.path)
            whole = file_bytes(root)
            if config.data.split == "label":
                sizes = {node.name: file_bytes(root / (node.label or node.name)) for node in config.nodes}
        if self._local:
            own = {node.name: node.data for node in config.nodes if node.data is not None}
            # What fails here is named by `_other_paths`.
            sizes |= {name: _tried("", partial(_text_bytes, path))[0] or 0 for name, path in own.items()}
        left_out = [_left_out(name, size, limit, "data.limit") for name, size in sizes.items()]
        parts = [part for part in left_out if part]
        if not sizes:
            parts = [
                f"a node uses at most {limit / 1e6:.1f} MB, of {whole / 1e6:.1f} MB of text for all and the public"
            ]
        if parts:
            yield Finding("data.limit", "; ".join(parts), wrong=False)

    def _other_paths(self) -> Iterator[Finding]:
        """Look for the texts that are not of the corpus, where that cannot be read."""
        source = self._config.probe.source
        if "/" in source:  # a label is one word
            yield from _missing("probe.source", source)
        for index, node in enumerate(self._config.nodes if self._local else []):
            if node.data is not None:
                yield from _missing(f"nodes[{index}].data", node.data)

    def _documents(self) -> Sequence[Document]:
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
            _look(config.data.path, field=config.data.field)
        return read_corpus(config)

    def _public(self, corpus: Sequence[Document]) -> Sequence[Document]:
        config = self._config
        public = of_label(corpus, config.probe.source)
        if not public:
            labels = sorted({document.label for document in corpus if document.label})
            if not data.text_folder(config.probe.source).exists():
                choices = f"one of the labels {', '.join(labels)} or " if labels else ""
                hint = hub_hint(config.probe.source, "dataset")
                raise InputError(f"must be {choices}a path that exists, got {config.probe.source!r}{hint}")
            source = config.probe.source
            _look(source, field=config.data.field, limit=config.probe.limit, limited_by="probe.limit")
            public = public_documents(config, corpus)
        size = data.total_size(sample_public(config, public))
        if size < config.probe.contexts:
            raise InputError(
                f"has {size:,} bytes, fewer than probe.contexts = {config.probe.contexts:,}: give more public text"
            )
        return public

    def _nodes(self, corpus: Sequence[Document]) -> Iterator[Finding]:
        """Check the text of every node by itself, so that all that are wrong are named."""
        config = self._config
        for index, node in enumerate(config.nodes):
            key = f"nodes[{index}].{'data' if node.data is not None else 'label' if node.label else 'name'}"
            if node.data is not None:
                field = node.field or config.data.field
                look = partial(_look, node.data, field=field, limit=config.data.limit, limited_by="data.limit")
                _, problems = _tried(key, look)
                if problems:
                    yield from problems
                    continue
            alone = config if config.data.split != "label" else config.model_copy(update={"nodes": [node]})
            text, problems = _tried(key, partial(self._text, alone, corpus, index))
            yield from problems
            if text is not None:
                yield Finding(key, text, wrong=False)

    def _text(self, config: Config, corpus: Sequence[Document], index: int) -> str:
        """Return what there is of a node's text, what is left out and what is held out."""
        spec = make_node_spec(self._config, index)
        documents = deal(config, corpus)[spec.name]
        split = split_text(spec, documents)
        sides = (split.train, split.heldout)
        length = config.probe.length
        ended = self._config.tokenizer_choice(index).end_of_text
        end = data.encoding.END_OF_TEXT if ended else data.encoding.SEPARATOR
        for what, side in zip(("training", "held-out"), sides, strict=True):
            size = data.total_size(side) + len(end) * len(side)
            if size <= length:  # a token is a byte or more
                raise InputError(f"its {what} text has {size} bytes, no more than a context of {length} tokens")
        self._units(config, split.train, single=split.single)
        use = split.use
        says = f"{use.name}: {use.size}, {use.heldout_share} held out"
        return f"{says}; {use.left_out}" if use.left_out else says

    @staticmethod
    def _units(config: Config, training: Sequence[Document], *, single: bool) -> None:
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
            there = show_count(most, terms.unit)
            raise InputError(
                f"its text has {'at most ' if terms.unit == 'window' else ''}{there} to train on, and "
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
        own = self._config.tokenizer
        if own.kind != "huggingface" or own.path is not None:  # else it is the student's: what is wrong is named there
            yield from _tried("tokenizer" if own.path is None else "tokenizer.path", lambda: self.vocab)[1]
        if not self._config.over_strings:
            return
        for index in (None, *range(len(self._config.nodes))):
            if index is None or self._config.nodes[index].tokenizer is not None:
                key = "tokenizer" if index is None else f"nodes[{index}].tokenizer"
                unread, problems = _tried(key, partial(self._spelling, index))
                yield from problems
                if unread:
                    says = f"does not give back {unread:.0%} of the public text byte by byte: that part is left out"
                    yield Finding(key, says, wrong=unread > _MAX_UNREAD)

    def _spelling(self, index: int | None) -> float:
        """Return which share of the public text the tokenizer of a pretrained model changes, of a sample.

        Raises
        ------
        InputError
            If its tokens are not the bytes of the text.
        """
        choice = self._config.tokenizer_choice(index)
        if choice.kind == "huggingface" and choice.path:
            from fpld.students.pretrained import model_tokenizer

            _here(choice.path)
            strings = data.TokenStrings(model_tokenizer(choice.path))
            return unreadable_share(document_texts(self._public_sample), strings)
        return 0.0

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
            if isinstance(choice.settings, HuggingFaceConfig):
                yield from _tried(f"{key}.dtype", partial(_precision, choice.settings.dtype))[1]

    def _pretrained(self, path: str) -> None:
        """Check a pretrained model's place, and that its tokens are the federation's."""
        from fpld.students.pretrained import check_place, check_tokenizer, model_tokenizer

        _here(path)
        check_place(path)
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


def _look(path: str, *, field: str = "text", limit: int | None = None, limited_by: str = "") -> None:
    """Refuse a path that is not there; leave a large one whose documents are not in the cache's index for the run."""
    root = data.text_folder(path)
    if not root.exists():
        raise InputError(
            f"{root.absolute()} does not exist: give the path of an existing file or folder{hub_hint(path, 'dataset')}"
        )
    size = file_bytes(root)
    if size > MAX_READ_BYTES and not is_measured(path, field=field):
        left_out = _left_out("of its files", size, limit, limited_by)
        more = f"; {left_out}" if left_out else ""
        raise _UnknownError(f"{path} is large ({size / 1e6:.0f} MB): it is not read before the run{more}")


def _left_out(name: str, size: int, limit: int | None, limited_by: str) -> str:
    """Return what a limit leaves out of a text of which only the bytes of its files are known; empty if nothing is."""
    used = size if limit is None else min(size, limit)
    return data.TextUse(name, 0, size, used, 0, limited_by).left_out


def _precision(dtype: str) -> None:
    from fpld.students.pretrained import check_precision

    check_precision(dtype)


def _missing(key: str, path: str) -> list[Finding]:
    return [finding for finding in _tried(key, partial(_look, path))[1] if finding.wrong]


def missing_paths(tables: Mapping[str, Any]) -> list[Finding]:
    """Return the paths that are not there, of a configuration whose other mistakes leave nothing else to check."""
    from fpld.students.pretrained import check_place

    labelled = _has_corpus(tables)
    texts = [(place, path) for place, path in text_places(tables) if place != SOURCE or not labelled or "/" in path]
    found = [(place, partial(_look, path)) for place, path in texts]
    found += [(place, partial(check_place, path)) for place, path in model_places(tables)]
    problems = [(place, _tried("", look)[1]) for place, look in found]
    return [finding._replace(key=show_place(place)) for place, some in problems for finding in some if finding.wrong]


def _has_corpus(tables: Mapping[str, Any]) -> bool:
    """Return whether there is a corpus, of which the public text may be a label."""
    section = tables.get("data")
    return isinstance(section, dict) and ("corpus" in section or "path" in section)


def file_bytes(root: Path) -> int:
    """Return the bytes of a file, or of all files in a folder."""
    files = [root] if root.is_file() else (Path(folder, name) for folder, _, names in os.walk(root) for name in names)
    return sum(file.stat().st_size for file in files)


def _text_bytes(path: str) -> int:
    return file_bytes(data.text_folder(path))


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

    device = choice.device or engine.device
    return describe_device(device, max(engine.workers, 1), engine.threads, engine.processes)


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
