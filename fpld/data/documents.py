"""Documents, and how they are dealt to nodes and held out: every document is used exactly once.

Three ways of dealing: by label (the natural split), i.i.d., and Dirichlet over labels, where a small alpha gives nodes
that differ much. Held-out text is chosen by group, so that near-duplicates stay on one side.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fpld.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    Shards = dict[str, list["Document"]]

DOCUMENT_PARTS = 20  # into which a single document is cut, so that some can be held out


@dataclass(frozen=True, slots=True)
class Document:
    """One text with its name, the label that natural splits use, and its group.

    Documents of one `group` are near-duplicates or belong together (the messages of one year): `hold_out`
    keeps them on the same side. An empty group means that the document stands alone.
    """

    name: str
    text: str
    label: str = ""
    group: str = ""

    @property
    def size(self) -> int:
        """Return the length of the text in bytes of UTF-8."""
        return len(self.text.encode())


def by_label(documents: Sequence[Document], *, nodes: Sequence[str] | None = None) -> Shards:
    """Make a node of each label (folder, era, specialty).

    Parameters
    ----------
    nodes
        The labels that become nodes, in this order; others are left out. By default all, sorted.
    """
    labelled: defaultdict[str, list[Document]] = defaultdict(list)
    for document in documents:
        labelled[document.label].append(document)
    if nodes is None:
        if not labelled:
            raise InputError("documents must hold at least one document to split, got none")
        return {label: labelled[label] for label in sorted(labelled)}
    _check_names(nodes)
    for node in nodes:
        if node not in labelled:
            raise InputError(f"node {node!r} has no documents: the labels are {', '.join(sorted(labelled)) or 'none'}")
    return {node: labelled[node] for node in nodes}


def iid(documents: Sequence[Document], nodes: Sequence[str], *, seed: int) -> Shards:
    """Deal shuffled documents in equal numbers (as near as whole documents allow)."""
    _check_names(nodes)
    order = np.random.default_rng(seed).permutation(len(documents))
    shards = {node: [documents[i] for i in order[k :: len(nodes)]] for k, node in enumerate(nodes)}
    return _checked(shards, f"there are {len(documents)} documents for {len(nodes)} nodes: use fewer nodes")


def dirichlet(documents: Sequence[Document], nodes: Sequence[str], *, alpha: float, seed: int) -> Shards:
    """Deal the documents of each label in shares drawn from Dirichlet(alpha, ..., alpha) over the nodes.

    Large alpha comes near an i.i.d. split; as alpha goes to 0 each label falls to a single node.
    """
    _check_names(nodes)
    if not (np.isfinite(alpha) and alpha > 0):
        raise InputError(f"alpha must be a positive number, got {alpha}")
    generator = np.random.default_rng(seed)
    shards: Shards = {node: [] for node in nodes}
    if documents:
        for members in by_label(documents).values():
            shares = generator.dirichlet(np.full(len(nodes), alpha))
            # NumPy underflows to 0/0 at a tiny alpha; in the limit all documents of the label go to one node.
            if not np.isfinite(shares).all():
                shares = np.eye(len(nodes))[generator.integers(len(nodes))]
            cuts = np.rint(np.cumsum(shares)[:-1] * len(members)).astype(int)
            order = generator.permutation(len(members))
            for node, part in zip(nodes, np.split(order, cuts), strict=True):
                shards[node].extend(members[i] for i in part)
    return _checked(shards, "use fewer nodes, a larger alpha or another seed")


def hold_out(documents: Sequence[Document], *, fraction: float, seed: int) -> tuple[list[Document], list[Document]]:
    """Split into (training, held-out) documents by whole groups, in their order.

    Groups are drawn at random until they hold `fraction` of the bytes; both sides get at least one group.
    The draw depends on the groups and the seed, not on the order of the documents. A single document is cut into parts.
    """
    if not 0 < fraction < 1:
        raise InputError(f"fraction must lie between 0 and 1, got {fraction}")
    if len(documents) == 1:
        documents = cut_document(documents[0])
    sizes: defaultdict[str, int] = defaultdict(int)
    for document in documents:
        sizes[_group(document)] += document.size
    names = sorted(sizes)
    if len(names) < 2:
        raise InputError(
            f"holding out needs at least two groups of documents, got {len(names)}: cut the text into more documents"
        )
    wanted = fraction * sum(sizes.values())
    held: set[str] = set()
    taken = 0
    for index in np.random.default_rng(seed).permutation(len(names))[:-1]:
        if held and taken >= wanted:
            break
        held.add(names[index])
        taken += sizes[names[index]]
    training = [document for document in documents if _group(document) not in held]
    return training, [document for document in documents if _group(document) in held]


def cut_document(document: Document, parts: int = DOCUMENT_PARTS) -> list[Document]:
    r"""Cut a document into at most `parts` of about the same length: at empty lines, or at lines, or at blanks.

    >>> from fpld.data import Document
    >>> [part.text for part in cut_document(Document("notes", "one\n\ntwo\n\nsix"), 3)]
    ['one\n\n', 'two\n\n', 'six']
    """
    text = document.text
    for separator in ("\n\n", "\n", " "):
        if text.strip().count(separator) >= parts - 1 or separator == " ":
            break
    places = [0]
    for number in range(1, parts):
        place = text.find(separator, max(number * len(text) // parts - 1, places[-1])) + len(separator)
        if place >= len(separator) and text[place:].strip() and text[places[-1] : place].strip():
            places.append(place)
    pieces = [text[start:stop] for start, stop in zip(places, [*places[1:], len(text)], strict=True)]
    return [Document(f"{document.name}#{index}", piece, document.label) for index, piece in enumerate(pieces, 1)]


def _group(document: Document) -> str:
    # The prefixes distinguish a group called "x" from a document of no group called "x".
    return f"group:{document.group}" if document.group else f"name:{document.name}"


def _check_names(nodes: Sequence[str]) -> None:
    if isinstance(nodes, str) or not nodes or len(set(nodes)) != len(nodes):
        raise InputError(f"nodes must be one or more different names, got {nodes!r}")


def _checked(shards: Shards, advice: str) -> Shards:
    empty = [node for node, members in shards.items() if not members]
    if empty:
        raise InputError(f"the split leaves node {', '.join(map(repr, empty))} without documents: {advice}")
    return shards
