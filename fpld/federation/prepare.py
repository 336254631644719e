"""From a configuration to what a run needs on disk: tokenizer, probe set, tokens of each node, base models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fpld import data
from fpld.errors import InputError
from fpld.federation.training import make_student
from fpld.seeds import derive_seed

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

    from fpld.config import Config, DataSection, NodeSection
    from fpld.data import Document, Tokenizer
    from fpld.storage.folder import RunFolder
    from fpld.students.choice import StudentChoice


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


@dataclass(frozen=True, eq=False, slots=True)
class SiteText:
    """A node's own text: tokens to train on, and tokens held out, with the bytes of text that each stands for."""

    train: np.ndarray[Any, np.dtype[np.int32]]
    heldout: np.ndarray[Any, np.dtype[np.int32]]
    train_bytes: int
    heldout_bytes: int


def prepare(config: Config, store: RunFolder, report: Callable[[str], None]) -> Prepared:
    """Make everything that is not there yet, the nodes' texts too; a resumed run finds it there."""
    if not store.has("prepared.json"):
        report("reading texts")
        documents = _documents(config)
        tokenizer = _public(config, documents, store, report)
        _texts(config, documents, tokenizer, store, report)
    public = _read_public(config, store, report)
    return Prepared(public.probe, public.tokens, store.read_json("prepared.json")["bytes_per_token"])


def prepare_public(config: Config, store: RunFolder, report: Callable[[str], None]) -> Public:
    """Make what the aggregator needs when the nodes' texts are elsewhere: tokenizer, probe set, base models."""
    if not store.has("probe.json"):
        report("reading the public text")
        _public(config, _documents(config), store, report)
    return _read_public(config, store, report)


def site_text(
    documents: list[Document], tokenizer: Tokenizer, settings: DataSection, *, name: str, length: int, seed: int
) -> SiteText:
    """Hold out and tokenize a node's documents; `seed` draws what is held out, `length` is that of the contexts."""
    try:
        train, held = data.hold_out(documents, fraction=settings.heldout, seed=seed)
    except InputError as error:
        raise InputError(f"node {name!r}: {error}") from None
    tokens = data.encode_documents(_limit(train, settings.limit), tokenizer)
    held_tokens = data.encode_documents(_limit(held, 8 * settings.heldout_tokens), tokenizer)
    for what, found in (("training", tokens), ("held-out", held_tokens)):
        if len(found) <= length:
            raise InputError(
                f"node {name!r}: its {what} text has {len(found)} tokens, fewer than one context of {length}: "
                "give it more text"
            )
    held_tokens = held_tokens[: settings.heldout_tokens]
    return SiteText(tokens, held_tokens, tokenizer.text_bytes(tokens), tokenizer.text_bytes(held_tokens))


def _public(config: Config, documents: list[Document], store: RunFolder, report: Callable[[str], None]) -> Tokenizer:
    """Make tokenizer and probe set of the public text; `probe.json` comes last and says that all is there."""
    public = _public_documents(config, documents)
    tokenizer = _tokenizer(config, public, report)
    tokenizer.save(store.path / "tokenizer.json")
    tokens = data.encode_documents(public, tokenizer)
    store.write_arrays("public.safetensors", {"tokens": tokens})
    data.ProbeSet.draw(
        tokens,
        contexts=config.probe.contexts,
        length=config.probe.length,
        tokenizer=tokenizer,
        seed=derive_seed(config.run.seed, "probe"),
    ).save(store.path / "probe.json")
    return tokenizer


def _read_public(config: Config, store: RunFolder, report: Callable[[str], None]) -> Public:
    arrays, _ = store.read_arrays("public.safetensors")
    public = Public(data.ProbeSet.load(store.path / "probe.json"), arrays["tokens"])
    _bases(config, store, public, report)
    return public


def _texts(
    config: Config, documents: list[Document], tokenizer: Tokenizer, store: RunFolder, report: Callable[[str], None]
) -> None:
    """Deal and tokenize the nodes' texts; `prepared.json` comes last and says that all is there."""
    shards = _shards(config, documents)
    texts = []
    for index, node in enumerate(config.nodes):
        report(f"tokenizing the text of {node.name}")
        text = site_text(
            shards[node.name],
            tokenizer,
            config.data,
            name=node.name,
            length=config.probe.length,
            seed=hold_out_seed(config.run.seed, index),
        )
        store.write_arrays(f"text/{index}.safetensors", {"tokens": text.train})
        texts.append(text)
    store.write_arrays("heldout.safetensors", {str(index): text.heldout for index, text in enumerate(texts)})
    known = {
        "bytes_per_token": sum(text.heldout_bytes for text in texts) / sum(len(text.heldout) for text in texts),
        "private_bytes": sum(text.train_bytes for text in texts),
        "tokenizer": tokenizer.digest,
    }
    store.write_json("prepared.json", known)


def hold_out_seed(seed: int, index: int) -> int:
    """Return the seed that draws what node `index` holds out."""
    return derive_seed(seed, "hold", index)


def _documents(config: Config) -> list[Document]:
    if config.data.corpus is not None:
        return data.corpus(config.data.corpus)
    return data.read_documents(config.data.path, field=config.data.field) if config.data.path is not None else []


def node_documents(config: Config, index: int) -> list[Document]:
    """Return the documents that a run on one machine deals to a node."""
    return _shards(config, _documents(config))[config.nodes[index].name]


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
    if config.data.corpus is None and config.data.path is None:
        raise InputError("data.corpus or data.path must be given, or data at every node")
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


def _public_documents(config: Config, documents: list[Document]) -> list[Document]:
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
    """Return the size of texts in MB."""
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


def _bases(config: Config, store: RunFolder, public: Public, report: Callable[[str], None]) -> None:
    """Train each kind of model on the public text: the shared base of Algorithm 1."""
    for index in (None, *range(len(config.nodes))):
        name = base_file(config, index)
        if store.has(name):
            continue
        options = student_options(config, index)
        student = make_student(options, public.vocab, derive_seed(config.run.seed, "base", name))
        if student.longest is not None and student.longest < config.probe.length:
            raise InputError(
                f"student.length must be at least probe.length = {config.probe.length}, got {student.longest}"
            )
        if config.base is not None:
            report(f"training the base model on public text ({config.base.steps} steps)")
            seed = derive_seed(config.run.seed, "base text", name)
            student.finetune(public.tokens, steps=config.base.steps, seed=seed, rate=config.base.rate)
        student.save(store.path / name)
