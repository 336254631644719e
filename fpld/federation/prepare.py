"""From a configuration to what a run needs on disk: tokenizer, probe set, base models, tokens of each node.

`claim` takes a folder for one configuration. `prepare` makes everything of a run on one machine, `prepare_public` what
the aggregator of a deployment needs, whose nodes have their texts elsewhere. What is made once is recorded with its
digest: a resumed run finds it, and a damaged file is an error.
"""

from __future__ import annotations

import logging
import math
import platform
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import numpy as np

import fpld
from fpld import data
from fpld.data import load_tokenizer
from fpld.errors import InputError
from fpld.node.spec import BaseSpec, base_file, node_specs
from fpld.node.text import first_documents, node_text
from fpld.node.training import make_student, open_student, save_base
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
    TOKENIZER,
    VERSIONS,
    check_digests,
    is_complete,
    record_digests,
    text_file,
)
from fpld.target import Target

if TYPE_CHECKING:
    from fpld.config import Config, NodeSection, TrainSection
    from fpld.data import Document, Tokenizer
    from fpld.storage.run_folder import RunFolder
    from fpld.students import Student
    from fpld.types import Tokens

log = logging.getLogger(__name__)

MAX_TAUGHT_CONTEXTS = 1 << 16
"""The most contexts of public text on which one base model learns from another."""

_PRIVATE_README = b"""\
This folder holds the private texts of all nodes, as tokens: with tokenizer.json anyone can read them.
No command copies it. Leave it out when you pass the run's folder on; `fpld run --resume` and `fpld evaluate` without
--data need it. The models in ../fpld/nodes/ were trained on these texts, and are the nodes' own.
"""


def claim(store: RunFolder, text: str, resume: bool) -> None:
    """Take the folder for this configuration; a folder of another run is not overwritten."""
    if store.has(CONFIG):
        if not resume:
            raise InputError(f"{store.path} holds a run already: choose another --out, or continue it with --resume")
        if read_utf8(store.path / CONFIG) != text:
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


def make_bases(config: Config, store: RunFolder, vocab: int, tokens: Tokens) -> None:
    """Train each kind of model on the public text: the shared base of Algorithm 1. The aggregator's is first."""
    for index in (None, *range(len(config.nodes))):
        name = base_file(config, index)
        base = BaseSpec.of(config, index)
        if is_complete(store, name):
            continue
        student = make_student(base.student, vocab, derive_seed(config.run.seed, "base", name))
        log.info("%s: a %s of %s parameters, %s", name, student.kind, f"{student.parameters:,}", student.place)
        student.check_tokenizer(load_tokenizer(store.path / TOKENIZER, vocab=vocab))
        if student.longest is not None and student.longest < config.probe.length:
            raise InputError(
                f"student.length must be at least probe.length = {config.probe.length}, got {student.longest}"
            )
        if config.base is not None:
            training = config.base.scaled(base.effort)
            seed = derive_seed(config.run.seed, "base text", name)
            with labelled(ProgressLabel(model=name.removesuffix(".safetensors"))), followed_by("the first round"):
                if base.taught:
                    log.info("teaching the base model by the aggregator's (%d steps)", training.steps)
                    teacher = open_student(store.path / base_file(config, None))
                    _teach(student, teacher, windows(tokens, config.probe.length, seed), training, seed)
                else:
                    log.info("training the base model on public text (%d steps)", training.steps)
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


def write_texts(config: Config, documents: list[Document], tokenizer: Tokenizer, store: RunFolder) -> None:
    """Deal and tokenize the nodes' texts; the digest of `prepared.json` is recorded last and marks all as complete."""
    dealt = deal(config, documents)
    texts = []
    for spec in node_specs(config):
        log.info("tokenizing the text of %s", spec.name)
        texts.append(node_text(spec, dealt[spec.name], tokenizer))
        store.write_arrays(text_file(spec.index), texts[-1].arrays)
    store.write(f"{PRIVATE}/README.txt", _PRIVATE_README)
    store.write_arrays(HELDOUT, {str(index): text.heldout for index, text in enumerate(texts)})
    summary = {
        "bytes_per_token": sum(text.heldout_bytes for text in texts) / sum(len(text.heldout) for text in texts),
        "private_bytes": sum(text.train_bytes for text in texts),
        "tokenizer": tokenizer.digest,
        "documents": {name: len(documents) for name, documents in dealt.items()},
    }
    store.write_json(PREPARED, summary)
    record_digests(store, *(text_file(index) for index in range(len(texts))), HELDOUT, PREPARED)


def read_corpus(config: Config) -> list[Document]:
    """Return all documents that the configuration names, public and private."""
    if config.data.corpus is not None:
        return data.corpus(config.data.corpus)
    return data.read_documents(config.data.path, field=config.data.field) if config.data.path is not None else []


def node_documents(config: Config, index: int) -> list[Document]:
    """Return the documents that a run on one machine deals to a node."""
    return deal(config, read_corpus(config))[config.nodes[index].name]


def deal(config: Config, documents: list[Document]) -> dict[str, list[Document]]:
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
    private = [document for document in documents if document.label != config.probe.source]
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
    """What the aggregator and all nodes share; the files that hold it are in the run's folder."""

    probe: data.ProbeSet
    tokens: np.ndarray[Any, np.dtype[np.int32]]

    @property
    def vocab(self) -> int:
        """Return V."""
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
        raise InputError(f"{store.path / PREPARED} must say bytes_per_token, got {size!r}: start the run anew")
    return Prepared(public.probe, public.tokens, size)


def prepare_public(config: Config, store: RunFolder) -> Public:
    """Make what the aggregator needs when the nodes' texts are elsewhere: tokenizer, probe set, base models."""
    check_digests(store)
    if not is_complete(store, PROBE):
        log.info("reading the public text")
        with followed_by("the base model"), report_elapsed("preparing texts, tokenizer and probe set"):
            _write_public(config, read_corpus(config), store)
    return _read_public(config, store)


def _write_public(config: Config, documents: list[Document], store: RunFolder) -> Tokenizer:
    """Make tokenizer and probe set of the public text."""
    public = _public_documents(config, documents)
    made = _tokenizer(config, public)
    file = store.path / TOKENIZER
    made.save(file)
    tokenizer = data.load_tokenizer(file, vocab=made.vocab)  # what everyone else will read
    tokens = data.encode_documents(public, tokenizer)
    store.write_arrays(PUBLIC, {"tokens": tokens})
    data.ProbeSet.draw(
        tokens,
        contexts=config.probe.contexts,
        length=config.probe.length,
        tokenizer=tokenizer,
        seed=derive_seed(config.run.seed, "probe"),
    ).save(store.path / PROBE)
    record_digests(store, TOKENIZER, PUBLIC, PROBE)
    return tokenizer


def _read_public(config: Config, store: RunFolder) -> Public:
    arrays, _ = store.read_arrays(PUBLIC)
    if "tokens" not in arrays:
        raise InputError(f"{store.path / PUBLIC} must hold the tokens of the public text: start the run anew")
    public = Public(data.ProbeSet.load(store.path / PROBE), arrays["tokens"])
    make_bases(config, store, public.vocab, public.tokens)
    return public


def _public_documents(config: Config, documents: list[Document]) -> list[Document]:
    """Find the public text: the documents of a label, or a path."""
    public = [document for document in documents if document.label == config.probe.source]
    public = public or data.read_documents(config.probe.source, field=config.data.field)
    return first_documents(public, config.probe.limit)


def _tokenizer(config: Config, public: list[Document]) -> Tokenizer:
    if config.tokenizer.kind == "bytes":
        return data.ByteTokenizer()
    if config.tokenizer.kind == "bpe":
        size = sum(document.size for document in public) / 1e6
        log.info("training the tokenizer on public text (%.1f MB)", size)
        return data.BpeTokenizer.train([document.text for document in public], vocab=config.tokenizer.vocab)
    from fpld.students.pretrained import model_tokenizer

    path = config.model_path
    log.info("reading the tokenizer of %s (a model by name is fetched and converted the first time)", path)
    return model_tokenizer(path)
