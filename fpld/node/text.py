"""The text of a node: held out and tokenized at the node."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fpld import data
from fpld.errors import InputError
from fpld.seeds import derive_seed

if TYPE_CHECKING:
    from fpld.data import Document, Tokenizer
    from fpld.node.spec import NodeSpec
    from fpld.types import Arrays


@dataclass(frozen=True, eq=False, slots=True)
class NodeText:
    """The tokens of a node's training and held-out text, and the bytes of text that each stands for.

    `lengths` are the tokens of each training document; documents that belong together have equal `groups`.
    """

    train: np.ndarray[Any, np.dtype[np.int32]]
    lengths: np.ndarray[Any, np.dtype[np.int64]]
    groups: np.ndarray[Any, np.dtype[np.int64]]
    heldout: np.ndarray[Any, np.dtype[np.int32]]
    train_bytes: int
    heldout_bytes: int

    @property
    def arrays(self) -> Arrays:
        """Return the arrays of the file with a node's training text."""
        return {"tokens": self.train, "lengths": self.lengths, "groups": self.groups}


def node_text(part: NodeSpec, documents: list[Document], tokenizer: Tokenizer) -> NodeText:
    """Hold out and tokenize a node's documents, as much of them as its part asks for."""
    try:
        train, held = data.hold_out(documents, fraction=part.heldout, seed=derive_seed(part.seed, "hold", part.index))
    except InputError as error:
        raise InputError(f"node {part.name!r}: {error}") from None
    train = first_documents(train, part.limit)
    each = [data.encode_documents([document], tokenizer) for document in train]
    tokens = np.concatenate(each)
    held_tokens = data.encode_documents(first_documents(held, 8 * part.heldout_tokens), tokenizer)
    for what, side in (("training", tokens), ("held-out", held_tokens)):
        if len(side) <= part.length:
            raise InputError(
                f"node {part.name!r}: its {what} text has {len(side)} tokens, fewer than one context of "
                f"{part.length}: give it more text"
            )
    held_tokens = held_tokens[: part.heldout_tokens]
    # The parts of a single document belong together.
    names = [document.group or document.name for document in train] if len(documents) > 1 else [""] * len(train)
    groups = np.unique(names, return_inverse=True)[1].astype(np.int64)
    lengths = np.array([len(document) for document in each], np.int64)
    sizes = tokenizer.text_bytes(tokens), tokenizer.text_bytes(held_tokens)
    return NodeText(tokens, lengths, groups, held_tokens, *sizes)


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
