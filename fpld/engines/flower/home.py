"""A node at home: its file `node.toml`, its keys, its text, and the folder where it keeps what must survive."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Field, model_validator

from fpld import config as configuration
from fpld import data
from fpld.config import Count, Name, Section
from fpld.engines.flower.identity import AUTH_KEY, MAC_KEY, make_node_keys, parse_public, run_secret
from fpld.engines.flower.ledger import Ledger
from fpld.engines.flower.spending import epsilon_so_far
from fpld.errors import FpldError, InputError
from fpld.federation.check import Finding
from fpld.storage.files import read_utf8, write_atomic

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from fpld.data import Document

ADDRESS = r"^[A-Za-z0-9.\-]+:[0-9]{1,5}$"
NODE_FILE = "node.toml"
HELD_OUT = 0.15  # the share of documents that a check holds out; a run says its own
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
_NODE_TOML = """\
# A node of a federation. Start it with: fpld node {file}
name = {name!r}

# Where the aggregator is, and who it is: from its federation.toml.
address = {address!r}
aggregator = {aggregator!r}
ca = "ca.pem"

# The private text: a file or a folder. It stays here.
{source}

# What the site insists on (leave out what does not matter):
# probe = "SHA-256 of the probe set that may be asked"
# tokenizer = "SHA-256 of the tokenizer that may be used"
# most_bytes = 1000000      # the most that a frame may hold
# most_total_bytes = 10000000   # the most that all answers together may hold, over all runs ever (ledger.jsonl)
# most_rounds = 20              # the most rounds that are ever answered
# most_evaluations = 40         # the most students whose loss on the held-out text is ever told
# most_probe_sets = 1           # the most probe sets that are ever answered (fresh contexts: one a round)
# codecs = ["predictive"]       # the codecs that may be asked for
# most_epsilon = 3.0            # the most that all runs together may spend of a document's privacy: private runs only
# delta = 1e-5                  # at which delta
# unit = "document"             # of what: a document, or a "window" of tokens
# show_own_loss = true          # tell the aggregator the loss of this site's own models too, for the report
# most_memory = 8000000000      # bytes of memory that the work may take: beyond it the work is ended, and said
# port = 9094               # the port that Flower uses on this machine itself (default: one that is free)
"""


class Terms(Section):
    """On which terms a site takes part: its name, and what it insists on."""

    name: Name
    probe: Digest | None = None
    tokenizer: Digest | None = None
    most_bytes: Count | None = None
    most_total_bytes: Count | None = None
    most_rounds: Count | None = None
    most_evaluations: Count | None = None
    most_probe_sets: Count | None = None
    codecs: list[str] | None = None
    most_memory: Count | None = None
    show_own_loss: bool = False
    most_epsilon: configuration.Positive | None = None
    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    unit: Literal["window", "document"] = "document"


@dataclass(frozen=True, slots=True)
class Home:
    """What is the node's own: its terms, its folder, its text, and its secret in a run (a session).

    Make one from `node.toml` with `open_home`, or your own.
    """

    terms: Terms
    folder: Path
    documents: Callable[[], list[Document]]
    secret: Callable[[bytes], bytes]


class NodeFile(Terms):
    """`node.toml`: the terms, where the aggregator is and who it is, and where the text is."""

    address: Annotated[str, Field(pattern=ADDRESS)]
    aggregator: str
    ca: str = "ca.pem"
    data: str | None = None
    corpus: configuration.Corpus | None = None
    label: str | None = None
    field: str = "text"
    port: Annotated[int, Field(ge=1, le=65535)] | None = None

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.data is None) == (self.corpus is None):
            raise ValueError("needs either data, a path, or corpus")
        return self

    @classmethod
    def read(cls, path: Path) -> NodeFile:
        """Read a node's file; its own paths are relative to it."""
        return configuration.parse_toml(cls, read_utf8(path), str(path))


class Invitation(Section):
    """`federation.toml`: what the aggregator gives to the nodes. Nothing in it is secret."""

    address: Annotated[str, Field(pattern=ADDRESS)]
    aggregator: str
    ca: str

    @classmethod
    def read(cls, path: Path) -> Invitation:
        """Read the file that `fpld certs` wrote."""
        return configuration.parse_toml(cls, read_utf8(path), str(path))


def init_node(folder: Path, name: str, invitation: Invitation, source: str) -> Path:
    """Make a node's folder: keys, the aggregator's certificate, and the node's file; return the public keys' file."""
    if (folder / NODE_FILE).exists():
        raise InputError(f"{folder / NODE_FILE} exists already: choose another folder, or edit it")
    parse_public(invitation.aggregator)
    text = _NODE_TOML.format(
        file=folder / NODE_FILE,
        name=name,
        address=invitation.address,
        aggregator=invitation.aggregator,
        source=source,
    )
    configuration.parse_toml(NodeFile, text, "node.toml")
    public = make_node_keys(folder, name)
    write_atomic(folder / "ca.pem", invitation.ca.encode())
    write_atomic(folder / NODE_FILE, text.encode())
    return public


def open_home(path: Path) -> Home:
    """Return the home that a node's file describes."""
    file, folder = NodeFile.read(path), path.resolve().parent
    aggregator = parse_public(file.aggregator)

    def documents() -> list[Document]:
        if file.corpus is None:
            return data.read_documents(folder / str(file.data), field=file.field)
        found = data.corpus(file.corpus)
        if file.label is None:
            return found
        labelled = [document for document in found if document.label == file.label]
        if not labelled:
            labels = ", ".join(sorted({document.label for document in found}))
            raise InputError(f"label must be one of {labels} in the corpus {file.corpus}, got {file.label!r}")
        return labelled

    return Home(
        terms=file,
        folder=folder,
        documents=documents,
        secret=lambda session: run_secret(folder / MAC_KEY, aggregator, session, file.name),
    )


def check_home(path: Path) -> list[Finding]:
    """Return what is wrong with a node's file, its keys and its text, and what is worth knowing."""
    try:
        file, home = NodeFile.read(path), open_home(path)
    except FpldError as error:
        return [Finding(NODE_FILE, str(error))]
    found = [
        Finding(key, f"{home.folder / name} does not exist: `fpld init-node` makes it")
        for key, name in (("ca", file.ca), ("keys", AUTH_KEY), ("keys", MAC_KEY))
        if not (home.folder / name).exists()
    ]
    key = "data" if file.corpus is None else "corpus"
    try:
        documents = home.documents()
        data.hold_out(documents, fraction=HELD_OUT, seed=0)
    except (FpldError, OSError) as error:
        return [*found, Finding(key, str(error))]
    size = sum(document.size for document in documents)
    found.append(Finding(key, f"{len(documents)} documents, {size:,} bytes", wrong=False))
    if file.most_epsilon is not None:
        found.append(_spent(file, home.folder))
    return found


def _spent(terms: Terms, folder: Path) -> Finding:
    """Say what of a site's privacy is spent."""
    try:
        found = epsilon_so_far(Ledger(folder).entries, terms)
    except FpldError as error:
        return Finding("most_epsilon", str(error))
    says = (
        f"an epsilon of {found:.3g} of {terms.most_epsilon:g} is spent for each {terms.unit}, at delta {terms.delta:g}"
    )
    return Finding("most_epsilon", says, wrong=False)
