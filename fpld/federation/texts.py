"""The nodes' own texts: dealt on one machine, held out and tokenized wherever they are."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fpld import data
from fpld.errors import InputError
from fpld.federation.part import parts
from fpld.seeds import derive_seed
from fpld.storage.folder import HELDOUT, PRIVATE, text_file
from fpld.storage.seals import seal

if TYPE_CHECKING:
    from fpld.config import Config, NodeSection
    from fpld.data import Document, Tokenizer
    from fpld.federation.part import Part
    from fpld.storage.folder import Arrays, RunFolder

log = logging.getLogger(__name__)

_PRIVATE_README = b"""\
This folder holds the private texts of all nodes, as tokens: with tokenizer.json anyone can read them.
No command copies it. Leave it out when you pass the run's folder on; `fpld run --resume` and `fpld evaluate` without
--data need it. The models in ../fpld/nodes/ were trained on these texts, and are the nodes' own.
"""


@dataclass(frozen=True, eq=False, slots=True)
class NodeText:
    """A node's own text: tokens to train on, and tokens held out, with the bytes of text that each stands for.

    `lengths` are the tokens of each document of the former, and `groups` number the documents that belong together.
    """

    train: np.ndarray[Any, np.dtype[np.int32]]
    lengths: np.ndarray[Any, np.dtype[np.int64]]
    groups: np.ndarray[Any, np.dtype[np.int64]]
    heldout: np.ndarray[Any, np.dtype[np.int32]]
    train_bytes: int
    heldout_bytes: int

    @property
    def arrays(self) -> Arrays:
        """Return what the file of a node's training text holds."""
        return {"tokens": self.train, "lengths": self.lengths, "groups": self.groups}


def node_text(part: Part, documents: list[Document], tokenizer: Tokenizer) -> NodeText:
    """Hold out and tokenize a node's documents, as much of them as its part asks for."""
    try:
        train, held = data.hold_out(documents, fraction=part.heldout, seed=derive_seed(part.seed, "hold", part.index))
    except InputError as error:
        raise InputError(f"node {part.name!r}: {error}") from None
    train = first_documents(train, part.limit)
    each = [data.encode_documents([document], tokenizer) for document in train]
    tokens = np.concatenate(each)
    held_tokens = data.encode_documents(first_documents(held, 8 * part.heldout_tokens), tokenizer)
    for what, found in (("training", tokens), ("held-out", held_tokens)):
        if len(found) <= part.length:
            raise InputError(
                f"node {part.name!r}: its {what} text has {len(found)} tokens, fewer than one context of "
                f"{part.length}: give it more text"
            )
    held_tokens = held_tokens[: part.heldout_tokens]
    # A single document was cut into parts, and is one all the same.
    names = [document.group or document.name for document in train] if len(documents) > 1 else [""] * len(train)
    groups = np.unique(names, return_inverse=True)[1].astype(np.int64)
    lengths = np.array([len(document) for document in each], np.int64)
    sizes = tokenizer.text_bytes(tokens), tokenizer.text_bytes(held_tokens)
    return NodeText(tokens, lengths, groups, held_tokens, *sizes)


def write_texts(config: Config, documents: list[Document], tokenizer: Tokenizer, store: RunFolder) -> None:
    """Deal and tokenize the nodes' texts; the seal of `prepared.json` comes last and says that all is there."""
    dealt = deal(config, documents)
    texts = []
    for part in parts(config):
        log.info("tokenizing the text of %s", part.name)
        texts.append(node_text(part, dealt[part.name], tokenizer))
        store.write_arrays(text_file(part.index), texts[-1].arrays)
    store.write(f"{PRIVATE}/README.txt", _PRIVATE_README)
    store.write_arrays(HELDOUT, {str(index): text.heldout for index, text in enumerate(texts)})
    known = {
        "bytes_per_token": sum(text.heldout_bytes for text in texts) / sum(len(text.heldout) for text in texts),
        "private_bytes": sum(text.train_bytes for text in texts),
        "tokenizer": tokenizer.digest,
        "documents": {name: len(found) for name, found in dealt.items()},
    }
    store.write_json("prepared.json", known)
    seal(store, *(text_file(index) for index in range(len(texts))), HELDOUT, "prepared.json")


def read_corpus(config: Config) -> list[Document]:
    """Return all documents that the configuration names, public and private."""
    if config.data.corpus is not None:
        return data.corpus(config.data.corpus)
    return data.read_documents(config.data.path, field=config.data.field) if config.data.path is not None else []


def node_documents(config: Config, index: int) -> list[Document]:
    """Return the documents that a run on one machine deals to a node."""
    return deal(config, read_corpus(config))[config.nodes[index].name]


def first_documents(documents: list[Document], most: int) -> list[Document]:
    """Take documents from the start until they hold `most` bytes; always at least one."""
    kept: list[Document] = []
    size = 0
    for document in documents:
        if kept and size >= most:
            break
        kept.append(document)
        size += document.size
    return kept


def deal(config: Config, documents: list[Document]) -> dict[str, list[Document]]:
    """Deal documents to the nodes that have no data of their own."""
    own = {
        node.name: data.read_documents(node.data, field=node.field or config.data.field)
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
