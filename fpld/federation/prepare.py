"""From a configuration to what a run needs on disk: tokenizer, probe set, base models, tokens of each node.

`claim` takes a folder for one configuration. `prepare` makes everything of a run on one machine, `prepare_public` what
the aggregator of a deployment needs, whose nodes have their texts elsewhere. What is made once is recorded with its
digest: a resumed run finds it, and a damaged file is an error.
"""

from __future__ import annotations

import logging
import math
import platform
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

import fpld
from fpld import data
from fpld.config.paths import absolute_paths
from fpld.data import TextUse, load_tokenizer
from fpld.data.chat import are_chats, plain_texts
from fpld.data.documents import of_label
from fpld.data.stored import document_texts
from fpld.data.token_stream import open_text, text_arrays
from fpld.errors import InputError
from fpld.node.spec import BaseSpec, base_file, node_specs, tokenizer_choices, tokenizer_number
from fpld.node.text import encode_text, node_text
from fpld.node.training import make_student, open_student, save_base, use_compute
from fpld.progress import ProgressLabel, followed_by, labelled, report_elapsed
from fpld.seeds import derive_seed
from fpld.storage.files import read_utf8, remove_half_written
from fpld.storage.run_folder import (
    CONFIG,
    HELDOUT,
    PREPARED,
    PRIVATE,
    PROBE,
    PUBLIC,
    TEXTS,
    TOKENIZER,
    VERSIONS,
    check_digests,
    is_complete,
    numbered,
    record_digests,
    text_file,
)
from fpld.students.heldout import HeldoutText, heldout_arrays
from fpld.target import Target
from fpld.units import show_count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fpld.config import Config, NodeSection, TrainSection
    from fpld.config.sections import TokenizerSection
    from fpld.data import Document, Tokenizer
    from fpld.storage.run_folder import RunFolder
    from fpld.students import Student
    from fpld.types import Tokens

log = logging.getLogger(__name__)

MAX_TAUGHT_CONTEXTS = 1 << 16
"""The most contexts of public text on which one base model learns from another."""

MAX_TOKENIZER_BYTES = 50_000_000
"""The most bytes of public text on which a tokenizer is trained: of a longer text a sample of the documents.

Places over strings are drawn from the same sample.
"""

_PRIVATE_README = b"""\
This folder holds the private texts of all nodes, as tokens: with tokenizer.json anyone can read them. The tokens of a
text of more than 8 MB are in the user's cache instead, and the files here name them. No command copies either. Leave
this folder out when you pass the run's folder on; `fpld run --resume` and `fpld evaluate` without --data need it. The
models in ../fpld/nodes/ were trained on these texts, and are the nodes' own.
"""


def claim(store: RunFolder, text: str, resume: bool) -> None:
    """Take the folder for this configuration; a folder of another run is not overwritten."""
    if store.has(CONFIG):
        if not resume:
            raise InputError(f"{store.path} holds a run already: choose another --out, or continue it with --resume")
        kept = read_utf8(store.path / CONFIG)
        # Earlier versions kept relative paths, from the folder that the run was started in.
        if text not in (kept, absolute_paths(kept, Path.cwd())):
            raise InputError(
                f"{store.path} holds a run of another configuration: --resume with the one in its config.toml"
            )
        remove_half_written(store.path)
        return
    if resume:
        raise InputError(f"{store.path} holds no run to resume: leave --resume out to start one")
    store.write_json(VERSIONS, versions())
    store.write(CONFIG, text.encode())


def versions() -> dict[str, str]:
    """Return the versions of Python, of this package and of its main dependencies."""
    names = {"python": platform.python_version(), "machine": platform.platform(), "fpld": fpld.__version__}
    for name in ("numpy", "torch", "tokenizers", "transformers"):
        try:
            names[name] = version(name)
        except PackageNotFoundError:
            continue
    return names


def make_bases(config: Config, store: RunFolder, public: Public) -> None:
    """Train each kind of model on the public text: the shared base of Algorithm 1. The aggregator's is first."""
    for index in (None, *range(len(config.nodes))):
        name = base_file(config, index)
        base = BaseSpec.of(config, index)
        if is_complete(store, name):
            continue
        vocab = public.vocabularies[base.tokenizer]
        tokens = _public_tokens(store, base.tokenizer)
        student = make_student(base.student, vocab, derive_seed(config.run.seed, "base", name))
        log.info("%s: a %s of %s parameters, %s", name, student.kind, f"{student.parameters:,}", student.place)
        student.check_tokenizer(load_tokenizer(store.path / numbered(TOKENIZER, base.tokenizer), vocab=vocab))
        if student.longest is not None and student.longest < config.probe.length:
            raise InputError(
                f"student.length must be at least probe.length = {config.probe.length}, got {student.longest}"
            )
        if config.base is not None:
            training = config.base.scaled(base.effort)
            seed = derive_seed(config.run.seed, "base text", name)
            with labelled(ProgressLabel(model=name.removesuffix(".safetensors"))), followed_by("the first round"):
                if base.taught:
                    log.info("teaching the base model by the aggregator's (%s)", show_count(training.steps, "step"))
                    teacher = open_student(store.path / base_file(config, None))
                    _teach(student, teacher, windows(tokens, config.probe.length, seed), training, seed)
                else:
                    log.info("training the base model on public text (%s)", show_count(training.steps, "step"))
                    student.finetune(tokens, steps=training.steps, seed=seed, rate=training.rate)
        save_base(student, store.path / name, base.student.device)
        record_digests(store, name)


def _teach(student: Student, teacher: Student, sequences: Tokens, training: TrainSection, seed: int) -> None:
    """Let a model learn what another one predicts for sequences of the public text."""
    target = Target.unchanged(sequences.size, student.vocab)
    student.distill(sequences, target, steps=training.steps, seed=seed, rate=training.rate, reference=teacher)


def windows(tokens: Tokens, length: int, seed: int) -> Tokens:
    """Return sequences [S, length] of a text, at random places: no more than the text has, or `MAX_TAUGHT_CONTEXTS`."""
    count = max(min(len(tokens), MAX_TAUGHT_CONTEXTS) // length, 1)
    starts = np.random.default_rng(seed).integers(len(tokens) - length + 1, size=count)
    sequences: Tokens = tokens[starts[:, None] + np.arange(length)]
    return sequences


def write_texts(config: Config, documents: Sequence[Document], tokenizers: list[Tokenizer], store: RunFolder) -> None:
    """Deal and tokenize the nodes' texts; the digest of `prepared.json` is recorded last and marks all as complete.

    The first tokenizer is that of the student, others are those of nodes.
    """
    tokenizer = tokenizers[0]
    dealt = deal(config, documents)
    texts = []
    for spec in node_specs(config):
        log.info("tokenizing the text of %s", spec.name)
        own = tokenizers[tokenizer_number(config, spec.index)]
        texts.append(node_text(spec, dealt[spec.name], own, shared=tokenizer))
        log_use(texts[-1].use)
        store.write_arrays(text_file(spec.index), texts[-1].arrays)
    store.write(f"{PRIVATE}/README.txt", _PRIVATE_README)
    store.write_arrays(HELDOUT, heldout_arrays([text.heldout for text in texts]))
    strings = [data.TokenStrings(each) for each in tokenizers] if len(tokenizers) > 1 else []
    for number, spelling in enumerate(strings[1:], 1):
        respelled = [HeldoutText.respelled(text.heldout.tokens, strings[0], spelling) for text in texts]
        store.write_arrays(numbered(HELDOUT, number), heldout_arrays(respelled))
    summary = {
        "bytes_per_token": sum(text.heldout_bytes for text in texts) / sum(len(text.heldout.counted) for text in texts),
        "private_bytes": sum(text.train_bytes for text in texts),
        "tokenizer": tokenizer.digest,
        "documents": {name: len(documents) for name, documents in dealt.items()},
    }
    record_use(store, *(text.use for text in texts))
    store.write_json(PREPARED, summary)
    heldout = [numbered(HELDOUT, number) for number in range(len(tokenizers))]
    record_digests(store, *(text_file(index) for index in range(len(texts))), *heldout, PREPARED)


def log_use(use: TextUse) -> None:
    """Log how much of a text is held out, and what of it is left out."""
    if use.left_out:
        log.warning("%s", use.left_out)
    if use.heldout:
        log.info("%s: %s are held out", use.name, use.heldout_share)


def record_use(store: RunFolder, *uses: TextUse) -> None:
    """Add to the list of how much of each text is used."""
    names = {use.name for use in uses}
    earlier = store.read_json(TEXTS) if store.has(TEXTS) else []
    store.write_json(TEXTS, [row for row in earlier if row["name"] not in names] + [asdict(use) for use in uses])


def read_use(store: RunFolder) -> list[TextUse]:
    """Return how much of each text is used; nothing is known about a run of an earlier version."""
    return [TextUse(**row) for row in store.read_json(TEXTS)] if store.has(TEXTS) else []


def read_corpus(config: Config) -> Sequence[Document]:
    """Return all documents that the configuration names, public and private."""
    if config.data.corpus is not None:
        return data.corpus(config.data.corpus)
    return data.read_documents(config.data.path, field=config.data.field) if config.data.path is not None else []


def node_documents(config: Config, index: int) -> Sequence[Document]:
    """Return the documents that a run on one machine deals to a node."""
    return deal(config, read_corpus(config))[config.nodes[index].name]


def deal(config: Config, documents: Sequence[Document]) -> dict[str, Sequence[Document]]:
    """Deal documents to the nodes that have no data of their own."""
    read = {
        node.name: data.read_documents(node.data, field=node.field or config.data.field)
        for node in config.nodes
        if node.data is not None
    }
    others = [node for node in config.nodes if node.data is None]
    if not others:
        return read
    if config.data.corpus is None and config.data.path is None:
        raise InputError("data.corpus or data.path must be given, or data at every node")
    private = of_label(documents, config.probe.source, others=True)
    names = [node.name for node in others]
    seed = derive_seed(config.run.seed, "split")
    if config.data.split == "label":
        dealt = data.by_label(private, nodes=[_label(node) for node in others])
        return read | {node.name: dealt[_label(node)] for node in others}
    if config.data.split == "iid":
        return read | data.iid(private, names, seed=seed)
    return read | data.dirichlet(private, names, alpha=config.data.alpha, seed=seed)


def _label(node: NodeSection) -> str:
    return node.label if node.label is not None else node.name


@dataclass(frozen=True, eq=False, slots=True)
class Public:
    """What the aggregator and all nodes share; the files that hold it are in the run's folder.

    `tokens` are the public text in the student's tokens. `vocabularies` are the numbers of tokens of the run's
    tokenizers, the student's first.
    """

    probe: data.ProbeSet | data.PlaceProbe
    tokens: Tokens
    vocabularies: tuple[int, ...]

    @property
    def vocab(self) -> int:
        """Return V of the labels: tokens, or symbols."""
        return self.probe.vocab


@dataclass(frozen=True, eq=False, slots=True)
class Prepared(Public):
    """What a run on one machine knows besides: how much text the nodes' held-out tokens stand for."""

    bytes_per_token: float


def prepare(config: Config, store: RunFolder) -> Prepared:
    """Make everything that is not there yet, the nodes' texts too; a resumed run finds it there."""
    check_digests(store)
    if not is_complete(store, PREPARED):
        log.info("reading texts")
        with followed_by("the base model"), report_elapsed("preparing texts, tokenizer and probe set"):
            documents = read_corpus(config)
            write_texts(config, documents, _write_public(config, documents, store), store)
    public = _read_public(config, store)
    summary = store.read_json(PREPARED)
    size = summary.get("bytes_per_token") if isinstance(summary, dict) else None
    if not isinstance(size, float) or not 0 < size < math.inf:
        raise InputError(f"{store.path / PREPARED} must say bytes_per_token, got {size!r}: start the run again")
    return Prepared(public.probe, public.tokens, public.vocabularies, size)


def prepare_public(config: Config, store: RunFolder) -> Public:
    """Make what the aggregator needs when the nodes' texts are elsewhere: tokenizer, probe set, base models."""
    use_compute(config.engine.compute)
    check_digests(store)
    if not is_complete(store, PROBE):
        log.info("reading the public text")
        with followed_by("the base model"), report_elapsed("preparing texts, tokenizer and probe set"):
            _write_public(config, read_corpus(config), store)
    return _read_public(config, store)


def _write_public(config: Config, documents: Sequence[Document], store: RunFolder) -> list[Tokenizer]:
    """Make tokenizers and probe set of the public text; return the tokenizers, the student's first."""
    found = public_documents(config, documents)
    public = sample_public(config, found)
    use = data.TextUse("public text", len(found), data.total_size(found), data.total_size(public), 0, "probe.limit")
    log_use(use)
    record_use(store, use)
    choices = tokenizer_choices(config)
    sample = public
    if config.over_strings or any(choice.kind == "bpe" for choice in choices):
        sample = _tokenizer_sample(config, public, store)
    tokenizers = []
    for number, choice in enumerate(choices):
        made = _tokenizer(choice, sample)
        file = store.path / numbered(TOKENIZER, number)
        made.save(file)
        tokenizers.append(data.load_tokenizer(file, vocab=made.vocab))  # what everyone else will read
        tokens = encode_text(public, tokenizers[-1]).tokens
        # Nodes that draw contexts from it get the file itself, so it has all tokens.
        arrays = text_arrays(np.asarray(tokens) if config.probe.fresh else tokens)
        # Over tokens the probe set says how many there are.
        meta = {"vocab": made.vocab} if config.over_strings else None
        store.write_arrays(numbered(PUBLIC, number), arrays, meta)
    _draw_probe(config, sample, tokenizers, store).save(store.path / PROBE)
    files = [numbered(file, number) for number in range(len(tokenizers)) for file in (TOKENIZER, PUBLIC)]
    record_digests(store, *files, PROBE)
    return tokenizers


def _draw_probe(
    config: Config, sample: Sequence[Document], tokenizers: list[Tokenizer], store: RunFolder
) -> data.ProbeSet | data.PlaceProbe:
    """Draw the probe set: of tokens of the public text, or of places of a sample of it that all tokenizers share."""
    seed = derive_seed(config.run.seed, "probe")
    contexts = config.probe.contexts
    length = config.probe.length
    if config.over_strings and are_chats(sample):
        raise InputError("probe.source must be plain text where models have tokenizers of their own, not conversations")
    if config.labels is None or not config.over_strings:
        tokens = _public_tokens(store, 0)
        return data.ProbeSet.draw(tokens, contexts=contexts, length=length, tokenizer=tokenizers[0], seed=seed)
    return data.PlaceProbe.draw(
        document_texts(sample),
        probe_readers(config, tokenizers),
        contexts=contexts,
        length=length,
        size=data.AlphabetSize(config.labels.symbols, config.labels.symbol_bytes),
        seed=seed,
    )


def probe_readers(config: Config, tokenizers: list[Tokenizer]) -> list[data.ReaderLimits]:
    """Return who must be able to read the places: each model's tokenizer, and the most tokens of its context."""
    readers = []
    for index in (None, *range(len(config.nodes))):
        node = None if index is None else config.nodes[index]
        if node is not None and not node.differs:
            continue
        choice = config.student if node is None or node.student is None else node.student
        name = "the student" if node is None else node.name
        strings = data.TokenStrings(tokenizers[tokenizer_number(config, index)])
        readers.append(data.ReaderLimits(name, strings, getattr(choice.settings, "length", MAX_TAUGHT_CONTEXTS)))
    return readers


def _public_tokens(store: RunFolder, number: int) -> Tokens:
    """Return the public text in the tokens of one of the run's tokenizers."""
    return open_text(store.path / numbered(PUBLIC, number)).tokens


def _read_public(config: Config, store: RunFolder) -> Public:
    probe = data.load_probe(store.path / PROBE)
    vocabularies = [probe.vocab]
    if isinstance(probe, data.PlaceProbe):
        names = [numbered(PUBLIC, number) for number in range(len(tokenizer_choices(config)))]
        vocabularies = [int(store.read_arrays(name)[1]["vocab"]) for name in names]
    public = Public(probe, _public_tokens(store, 0), tuple(vocabularies))
    make_bases(config, store, public)
    return public


def public_documents(config: Config, documents: Sequence[Document]) -> Sequence[Document]:
    """Find the public text: the documents of a label, or a path."""
    public = of_label(documents, config.probe.source)
    return public or data.read_documents(config.probe.source, field=config.data.field)


def sample_public(config: Config, public: Sequence[Document]) -> Sequence[Document]:
    """Return what `probe.limit` leaves of the public text."""
    return data.sample_documents(public, config.probe.limit, seed=derive_seed(config.run.seed, "public sample"))


def _tokenizer_sample(config: Config, public: Sequence[Document], store: RunFolder) -> Sequence[Document]:
    """Return the part of the public text on which tokenizers are trained, and in which places over strings are."""
    seed = derive_seed(config.run.seed, "tokenizer sample")
    sample = data.sample_documents(public, MAX_TOKENIZER_BYTES, seed=seed)
    size = data.total_size(sample)
    total = data.total_size(public)
    use = data.TextUse("the tokenizer's training", len(public), total, size, 0, "MAX_TOKENIZER_BYTES")
    if use.left_out:
        log_use(use)
        record_use(store, use)
    return sample


def _tokenizer(choice: TokenizerSection, sample: Sequence[Document]) -> Tokenizer:
    if choice.kind == "bytes":
        return data.ByteTokenizer(end_of_text=choice.end_of_text)
    if choice.kind == "bpe":
        log.info("training the tokenizer on public text (%.1f MB)", data.total_size(sample) / 1e6)
        texts = plain_texts(sample, document_texts(sample))
        return data.BpeTokenizer.train(texts, vocab=choice.vocab, end_of_text=choice.end_of_text)
    from fpld.students.pretrained import model_tokenizer

    path = choice.path or ""
    log.info("reading the tokenizer of %s (a model by name is fetched and converted the first time)", path)
    return model_tokenizer(path)
