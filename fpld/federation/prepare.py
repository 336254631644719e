"""From a configuration to what a run needs on disk: tokenizer, probe set, tokens of each node, base models."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fpld import data
from fpld.errors import InputError
from fpld.federation.training import make_student
from fpld.seeds import derive_seed

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

    from fpld.config import Config, NodeSection
    from fpld.data import Document, Tokenizer
    from fpld.federation.store import RunFolder


@dataclass(frozen=True, eq=False, slots=True)
class Prepared:
    """What all parts of a run share; files that it names are in the run's folder."""

    probe: data.ProbeSet
    public: np.ndarray[Any, np.dtype[np.int32]]
    heldout: list[np.ndarray[Any, np.dtype[np.int32]]]
    bytes_per_token: float

    @property
    def vocab(self) -> int:
        """Give V."""
        return self.probe.vocab


def prepare(config: Config, store: RunFolder, report: Callable[[str], None]) -> Prepared:
    """Make everything that is not there yet; a resumed run finds it there."""
    if not store.has("prepared.json"):
        _texts(config, store, report)
    arrays, _ = store.read_arrays("heldout.safetensors")
    public, _ = store.read_arrays("public.safetensors")
    known = store.read_json("prepared.json")
    probe = data.ProbeSet.load(store.path / "probe.json")
    prepared = Prepared(
        probe, public["tokens"], [arrays[str(i)] for i in range(len(config.nodes))], known["bytes_per_token"]
    )
    _bases(config, store, prepared, report)
    return prepared


def _texts(config: Config, store: RunFolder, report: Callable[[str], None]) -> None:
    """Read, split and tokenize; `prepared.json` comes last and says that all is there."""
    seed = config.run.seed
    report("reading texts")
    documents = _documents(config)
    shards = _shards(config, documents)
    public = _public(config, documents)
    tokenizer = _tokenizer(config, public, report)
    tokenizer.save(store.path / "tokenizer.json")
    public_tokens = data.encode_documents(public, tokenizer)
    store.write_arrays("public.safetensors", {"tokens": public_tokens})
    data.ProbeSet.draw(
        public_tokens,
        contexts=config.probe.contexts,
        length=config.probe.length,
        tokenizer=tokenizer,
        seed=derive_seed(seed, "probe"),
    ).save(store.path / "probe.json")
    heldout, sizes, private = {}, 0, 0
    for index, node in enumerate(config.nodes):
        report(f"tokenizing the text of {node.name}")
        try:
            train, held = data.hold_out(
                shards[node.name], fraction=config.data.heldout, seed=derive_seed(seed, "hold", index)
            )
        except InputError as error:
            raise InputError(f"node {node.name!r}: {error}") from None
        tokens = data.encode_documents(_limit(train, config.data.limit), tokenizer)
        held_tokens = data.encode_documents(_limit(held, 8 * config.data.heldout_tokens), tokenizer)
        for what, found in (("training", tokens), ("held-out", held_tokens)):
            if len(found) <= config.probe.length:
                raise InputError(
                    f"node {node.name!r}: its {what} text has {len(found)} tokens, fewer than one context of "
                    f"{config.probe.length}: give it more text"
                )
        store.write_arrays(f"text/{index}.safetensors", {"tokens": tokens})
        private += tokenizer.text_bytes(tokens)
        heldout[str(index)] = held_tokens[: config.data.heldout_tokens]
        sizes += tokenizer.text_bytes(heldout[str(index)])
    store.write_arrays("heldout.safetensors", heldout)
    count = sum(len(tokens) for tokens in heldout.values())
    known = {"bytes_per_token": sizes / count, "private_bytes": private, "tokenizer": tokenizer.digest}
    store.write_json("prepared.json", known)


def _documents(config: Config) -> list[Document]:
    if config.data.corpus is not None:
        return data.corpus(config.data.corpus)
    return data.read_documents(config.data.path, field=config.data.field) if config.data.path is not None else []


def _shards(config: Config, documents: list[Document]) -> dict[str, list[Document]]:
    """Deal documents to the nodes that have no data of their own."""
    own = {
        node.name: data.read_documents(node.data, field=config.data.field)
        for node in config.nodes
        if node.data is not None
    }
    others = [node for node in config.nodes if node.data is None]
    if not others:
        return own
    private = [document for document in documents if document.label != config.probe.source]
    names = [node.name for node in others]
    seed = derive_seed(config.run.seed, "split")
    if config.data.split == "label":
        dealt = data.by_label(private, nodes=[_label(node) for node in others])
        return own | {node.name: dealt[_label(node)] for node in others}
    if config.data.split == "iid":
        return own | data.iid(private, names, seed=seed)
    return own | data.dirichlet(private, names, alpha=config.data.alpha, seed=seed)


def _label(node: NodeSection) -> str:
    return node.label if node.label is not None else node.name


def _public(config: Config, documents: list[Document]) -> list[Document]:
    """Find the public text: the documents of a label, or a path."""
    labelled = [document for document in documents if document.label == config.probe.source]
    return _limit(labelled or data.read_documents(config.probe.source, field=config.data.field), config.probe.limit)


def _limit(documents: list[Document], most: int) -> list[Document]:
    """Take documents from the start until they hold `most` bytes; always at least one."""
    kept: list[Document] = []
    size = 0
    for document in documents:
        if kept and size >= most:
            break
        kept.append(document)
        size += document.size
    return kept


def data_size(documents: list[Document]) -> float:
    """Give the size of texts in MB."""
    return sum(document.size for document in documents) / 1e6


def _tokenizer(config: Config, public: list[Document], report: Callable[[str], None]) -> Tokenizer:
    if config.tokenizer.kind == "bytes":
        return data.ByteTokenizer()
    if config.tokenizer.kind == "bpe":
        report(f"training the tokenizer on public text ({data_size(public):.1f} MB)")
        return data.BpeTokenizer.train([document.text for document in public], vocab=config.tokenizer.vocab)
    from fpld.students.huggingface import model_tokenizer

    path = config.model_path
    report(f"reading the tokenizer of {path} (a model by name is fetched and converted the first time)")
    return model_tokenizer(path)


def student_options(config: Config, index: int | None) -> dict[str, Any]:
    """Give the [student] table of a node (None: of the aggregator's student)."""
    own = None if index is None else config.nodes[index].student
    return own if own is not None else config.student


def base_file(config: Config, index: int | None) -> str:
    """Name the file with the base model that a node starts from; equal tables share one."""
    tables = [json.dumps(student_options(config, None), sort_keys=True)]
    for i in range(len(config.nodes)):
        text = json.dumps(student_options(config, i), sort_keys=True)
        if text not in tables:
            tables.append(text)
    return f"base-{tables.index(json.dumps(student_options(config, index), sort_keys=True))}.safetensors"


def _bases(config: Config, store: RunFolder, prepared: Prepared, report: Callable[[str], None]) -> None:
    """Train each kind of model on the public text: the shared base of Algorithm 1."""
    for index in (None, *range(len(config.nodes))):
        name = base_file(config, index)
        if store.has(name):
            continue
        options = student_options(config, index)
        student = make_student(options, prepared.vocab, derive_seed(config.run.seed, "base", name))
        if student.longest is not None and student.longest < config.probe.length:
            raise InputError(
                f"student.length must be at least probe.length = {config.probe.length}, got {student.longest}"
            )
        if config.base is not None:
            report(f"training the base model on public text ({config.base.steps} steps)")
            seed = derive_seed(config.run.seed, "base text", name)
            student.finetune(prepared.public, steps=config.base.steps, seed=seed, rate=config.base.rate)
        student.save(store.path / name)
