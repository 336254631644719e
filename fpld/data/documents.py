"""Documents, and how they are dealt to nodes and held out: every document is used exactly once.

Three ways of dealing: by label (the natural split), i.i.d., and Dirichlet over labels, where a small alpha gives nodes
that differ much. Held-out text is chosen by group, so that near-duplicates stay on one side. With a limit on the bytes
it is a sample of the documents that is used, and `TextUse` says what was left out.

Documents are in a list, or in `DocumentColumns` where there may be millions: every function here takes both.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fpld.errors import InputError
from fpld.units import show_count

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fpld.types import Array

    Shards = dict[str, Sequence["Document"]]

MAX_EXCESS = 2.5  # times the share to hold out: a single document that brings it beyond this is split
DOCUMENT_PARTS = 20  # into which a single document is cut, so that some can be held out
_LINE_END = re.compile(r"\n(?=\w)")
_BLANK = re.compile(r" (?=\w)")


@dataclass(frozen=True, slots=True)
class Document:
    """One text with its name, the label that natural splits use, and its group.

    Documents of one `group` are near-duplicates or belong together (the messages of one year): `hold_out`
    keeps them on the same side. An empty group means that the document stands alone. The text of a `chat` is the JSON
    of a conversation (`fpld.data.chat`), and is never cut.

    The text of a document of `fpld.data.stored` is in its file, and read when it is asked for.
    """

    name: str
    text: str
    label: str = ""
    group: str = ""
    chat: bool = False

    @property
    def size(self) -> int:
        """Return the length of the text in bytes of UTF-8."""
        return len(self.text.encode())

    @property
    def blank(self) -> bool:
        """Return whether the text has nothing but white space."""
        return not self.text.strip()

    def start(self, most: int) -> Document:
        """Return the start of the document in at most `most` bytes, up to the end of a paragraph, a line or a word."""
        if self.chat:
            return self if self.size <= most else Document(self.name, "", self.label, self.group, chat=True)
        return Document(self.name, text_start(self.text, most), self.label, self.group)

    def split(self, most: int) -> tuple[Document, Document]:
        """Return the start of the document in at most `most` bytes, and all that follows it."""
        start = self.start(most)
        return start, Document(self.name, self.text[len(start.text) :], self.label, self.group, self.chat)

    def cut(self, parts: int) -> list[Document]:
        """Return the document in at most `parts` of about the same length, cut at empty lines, lines or blanks."""
        if self.chat:
            return [self]
        text = self.text
        for separator in ("\n\n", "\n", " "):
            if text.strip().count(separator) >= parts - 1 or separator == " ":
                break
        places = [0]
        for number in range(1, parts):
            place = text.find(separator, max(number * len(text) // parts - 1, places[-1])) + len(separator)
            if place >= len(separator) and text[place:].strip() and text[places[-1] : place].strip():
                places.append(place)
        pieces = [text[start:stop] for start, stop in zip(places, [*places[1:], len(text)], strict=True)]
        return [Document(f"{self.name}#{index}", piece, self.label) for index, piece in enumerate(pieces, 1)]


class DocumentColumns(Sequence[Document]):
    """Documents of which columns of numbers are in memory; each is made an object when it is asked for."""

    @property
    @abstractmethod
    def sizes(self) -> Array:
        """Return the bytes of each document."""

    @property
    @abstractmethod
    def ranks(self) -> Array:
        """Return a number for each document, 0..n-1: its place if all were sorted by file and place in the file."""

    @property
    @abstractmethod
    def kinds(self) -> set[bool]:
        """Return which values `chat` has."""

    @abstractmethod
    def pick(self, places: Array, changed: Mapping[int, Document]) -> DocumentColumns:
        """Return the documents at some places, in that order; those in `changed` instead of what is there."""


@dataclass(frozen=True, slots=True)
class TextUse:
    """How much of a text is used: bytes that were there, bytes used, and of these the bytes held out.

    `key` names the setting that limits it. Of the held-out text, evaluation takes `data.heldout_tokens` tokens. The
    tokens of the used text, and those of the held-out one, are known once it is tokenized.
    """

    name: str
    documents: int
    bytes: int
    used: int
    heldout: int
    key: str
    tokens: int | None = None
    heldout_tokens: int | None = None

    @property
    def size(self) -> str:
        """Return how much text there is, in words."""
        return f"{show_count(self.documents, 'document')}, {show_count(self.bytes, 'byte')}"

    @property
    def left_out(self) -> str:
        """Return what is left out and why, as a sentence; empty if nothing is."""
        if self.used >= self.bytes:
            return ""
        scale = 1e6 if self.bytes >= 1e6 else 1e3
        unit = "MB" if self.bytes >= 1e6 else "kB"
        return f"{self.name}: {self.used / scale:.1f} of {self.bytes / scale:.1f} {unit} used ({self.key})"

    @property
    def heldout_fraction(self) -> float:
        """Return the share of the used tokens that is held out, as it came out; of the bytes until they are known."""
        return self.heldout_tokens / self.tokens if self.tokens and self.heldout_tokens else self.heldout / self.used

    @property
    def heldout_share(self) -> str:
        """Return the share that is held out, in words.

        >>> TextUse("north", 3, 1000, 1000, 150, "data.limit").heldout_share
        '15.0% of the bytes'
        """
        return f"{self.heldout_fraction:.1%} of the {'tokens' if self.tokens else 'bytes'}"


def document_sizes(documents: Sequence[Document]) -> Array:
    """Return the bytes of each document."""
    if isinstance(documents, DocumentColumns):
        return documents.sizes
    return np.fromiter((document.size for document in documents), np.int64, len(documents))


def total_size(documents: Sequence[Document]) -> int:
    """Return the bytes of some documents."""
    return int(document_sizes(documents).sum())


def document_groups(documents: Sequence[Document]) -> Array:
    """Return a number for each document, equal for those of one group, in the order of the groups' names."""
    if isinstance(documents, DocumentColumns):
        return documents.ranks
    names = [_group(document) for document in documents]
    numbers = {name: number for number, name in enumerate(sorted(set(names)))}
    return np.array([numbers[name] for name in names], np.int64)


def document_kinds(documents: Sequence[Document]) -> set[bool]:
    """Return which values `chat` has in some documents."""
    if isinstance(documents, DocumentColumns):
        return documents.kinds
    return {document.chat for document in documents}


def pick_documents(
    documents: Sequence[Document], places: Array, changed: Mapping[int, Document] | None = None
) -> Sequence[Document]:
    """Return the documents at some places, in that order; those in `changed` instead of what is there."""
    changed = changed or {}
    if isinstance(documents, DocumentColumns):
        return documents.pick(places, changed)
    return [changed[place] if place in changed else documents[place] for place in places.tolist()]


def of_label(documents: Sequence[Document], label: str, *, others: bool = False) -> Sequence[Document]:
    """Return the documents with a label; with `others` those that have another one."""
    inside = np.fromiter(((document.label == label) != others for document in documents), bool, len(documents))
    return pick_documents(documents, np.flatnonzero(inside))


def sample_documents(documents: Sequence[Document], most: int | None, *, seed: int) -> Sequence[Document]:
    """Return all documents, or a random choice of them that holds at most `most` bytes, in their order.

    The last document that is drawn is cut, at a paragraph if it has one near, to what is left of `most`.
    """
    sizes = document_sizes(documents)
    if most is None or sizes.sum() <= most:
        return documents
    order = np.random.default_rng(seed).permutation(len(documents))
    ends = np.cumsum(sizes[order])
    whole = int(np.searchsorted(ends, most, "right"))  # documents, before the one that is cut
    places = np.sort(order[:whole])
    if not isinstance(documents, DocumentColumns):
        places = np.array([place for place in places.tolist() if not documents[place].blank], np.int64)
    last = int(order[whole])
    cut = documents[last].start(most - int(ends[whole - 1]) if whole else most)
    if not cut.blank:
        places = np.insert(places, np.searchsorted(places, last), last)
    if not len(places):
        raise InputError(f"a limit of {most} bytes leaves no text: raise it")
    return pick_documents(documents, places, {last: cut})


def text_start(text: str, most: int) -> str:
    r"""Return the start of a text in at most `most` bytes, up to the end of a paragraph, a line or a word.

    >>> text_start("one\n\ntwo\n\nsix", 12)
    'one\n\ntwo\n\n'
    """
    start = text.encode()[:most].decode("utf-8", "ignore")
    for separator in ("\n\n", "\n", " "):
        place = start.rfind(separator) + len(separator)
        if place > len(start) // 2:
            return start[:place]
    return start


def cut_at_lines(text: str, least: int) -> list[str]:
    r"""Cut a long text into pieces of at least `least` characters, each but the first from a line end on.

    Only a line end before a letter or a digit will do. A byte-level BPE takes it as a word by itself, whatever stands
    before it: so the tokens of the pieces are those of the text.

    >>> cut_at_lines("one\n\ntwo\nsix ten", 2)
    ['one\n', '\ntwo', '\nsix ten']
    """
    pieces = []
    start = 0
    while len(text) - start > 2 * least:
        match = _LINE_END.search(text, start + least)
        if match is None:
            break
        pieces.append(text[start : match.start()])
        start = match.start()
    return [*pieces, text[start:]]


def cut_place(text: str, low: int, high: int) -> int:
    r"""Return the first place from `low` to below `high` where a text is best cut, or `high`.

    >>> text = "one two\n\nsix"
    >>> cut_place(text, 2, 10)
    8
    """
    match = _LINE_END.search(text, low, high) or _BLANK.search(text, low, high)
    return high if match is None else match.start()


def by_label(documents: Sequence[Document], *, nodes: Sequence[str] | None = None) -> Shards:
    """Make a node of each label (folder, era, specialty).

    Parameters
    ----------
    nodes
        The labels that become nodes, in this order; others are left out. By default all, sorted.
    """
    labelled = _places_by_label(documents)
    if nodes is None:
        if not labelled:
            raise InputError("documents must hold at least one document to split, got none")
        nodes = sorted(labelled)
    _check_names(nodes)
    for node in nodes:
        if node not in labelled:
            raise InputError(f"node {node!r} has no documents: the labels are {', '.join(sorted(labelled)) or 'none'}")
    return {node: pick_documents(documents, labelled[node]) for node in nodes}


def _places_by_label(documents: Sequence[Document]) -> dict[str, Array]:
    """Return the places of the documents of each label, in their order."""
    numbers: dict[str, int] = {}
    owners = (numbers.setdefault(document.label, len(numbers)) for document in documents)
    column = np.fromiter(owners, np.int64, len(documents))
    bounds = np.cumsum(np.bincount(column, minlength=1))[:-1]
    return dict(zip(numbers, np.split(np.argsort(column, kind="stable"), bounds), strict=False))


def iid(documents: Sequence[Document], nodes: Sequence[str], *, seed: int) -> Shards:
    """Deal shuffled documents in equal numbers (as near as whole documents allow)."""
    _check_names(nodes)
    order = np.random.default_rng(seed).permutation(len(documents))
    shards = {node: pick_documents(documents, order[k :: len(nodes)]) for k, node in enumerate(nodes)}
    return _checked(
        shards, f"there are {show_count(len(documents), 'document')} for {len(nodes)} nodes: use fewer nodes"
    )


def dirichlet(documents: Sequence[Document], nodes: Sequence[str], *, alpha: float, seed: int) -> Shards:
    """Deal the documents of each label in shares drawn from Dirichlet(alpha, ..., alpha) over the nodes.

    Large alpha comes near an i.i.d. split; as alpha goes to 0 each label falls to a single node.
    """
    _check_names(nodes)
    if not (np.isfinite(alpha) and alpha > 0):
        raise InputError(f"alpha must be a positive number, got {alpha}")
    generator = np.random.default_rng(seed)
    dealt: dict[str, list[Array]] = {node: [np.empty(0, np.int64)] for node in nodes}
    if len(documents):
        for _, members in sorted(_places_by_label(documents).items()):
            shares = generator.dirichlet(np.full(len(nodes), alpha))
            # NumPy underflows to 0/0 at a tiny alpha; in the limit all documents of the label go to one node.
            if not np.isfinite(shares).all():
                shares = np.eye(len(nodes))[generator.integers(len(nodes))]
            cuts = np.rint(np.cumsum(shares)[:-1] * len(members)).astype(int)
            order = generator.permutation(len(members))
            for node, part in zip(nodes, np.split(order, cuts), strict=True):
                dealt[node].append(members[part])
    shards = {node: pick_documents(documents, np.concatenate(places)) for node, places in dealt.items()}
    return _checked(shards, "use fewer nodes, a larger alpha or another seed")


def hold_out(
    documents: Sequence[Document], *, fraction: float, seed: int
) -> tuple[Sequence[Document], Sequence[Document]]:
    """Split into (training, held-out) documents by whole groups, in their order.

    Groups are drawn at random until they hold `fraction` of the bytes, since tokens are not known yet; both sides get
    at least one group. The draw depends on the groups and the seed, not on the order of the documents. A single
    document is cut into parts. A document alone in its group that would bring the share beyond `MAX_EXCESS` times
    `fraction` is split at a paragraph, and its end is held out.
    """
    if not 0 < fraction < 1:
        raise InputError(f"fraction must lie between 0 and 1, got {fraction}")
    if len(documents) == 1:
        documents = cut_document(documents[0])
    groups = document_groups(documents)
    members = np.bincount(groups)
    if len(members) < 2:
        raise InputError(
            f"holding out needs at least two groups of documents, got {len(members)}: cut the text into more documents"
        )
    sizes = np.zeros(len(members), np.int64)
    np.add.at(sizes, groups, document_sizes(documents))
    wanted = fraction * int(sizes.sum())
    held = np.zeros(len(members), bool)
    taken = 0
    for count, group in enumerate(np.random.default_rng(seed).permutation(len(members))[:-1]):
        if count and taken >= wanted:
            break
        size = int(sizes[group])
        if taken + size > MAX_EXCESS * wanted and members[group] == 1:
            place = int(np.flatnonzero(groups == group)[0])
            start, end = _split(documents[place], round(wanted - taken))
            if end is not None:
                inside = held[groups]
                training = pick_documents(documents, np.flatnonzero(~inside), {place: start})
                inside[place] = True
                return training, pick_documents(documents, np.flatnonzero(inside), {place: end})
        held[group] = True
        taken += size
    inside = held[groups]
    return pick_documents(documents, np.flatnonzero(~inside)), pick_documents(documents, np.flatnonzero(inside))


def _split(document: Document, held: int) -> tuple[Document, Document | None]:
    """Split a document so that its end has about `held` bytes; the end is None where one side would be blank."""
    start, end = document.split(document.size - held)
    return (document, None) if start.blank or end.blank else (start, end)


def cut_document(document: Document, parts: int = DOCUMENT_PARTS) -> list[Document]:
    r"""Cut a document into at most `parts` of about the same length: at empty lines, or at lines, or at blanks.

    >>> from fpld.data import Document
    >>> [part.text for part in cut_document(Document("notes", "one\n\ntwo\n\nsix"), 3)]
    ['one\n\n', 'two\n\n', 'six']
    """
    return document.cut(parts)


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
