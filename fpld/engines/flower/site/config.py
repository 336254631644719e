"""A site's folder: `node.toml` with its terms, its keys, its text, and what must survive between messages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal, Self, get_args

from pydantic import Field, model_validator

from fpld import config as configuration
from fpld import data
from fpld.config import Count, Name, Section
from fpld.config.config import Finding
from fpld.engines.flower.credentials import AUTH_KEY, MAC_KEY, make_node_keys, parse_public_key, run_secret
from fpld.engines.flower.site.ledger import Ledger, spent_epsilon
from fpld.errors import FpldError, InputError
from fpld.storage.files import read_utf8, write_atomic
from fpld.storage.run_folder import NODE_FILE

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from fpld.data import Document

ADDRESS = r"^[A-Za-z0-9.\-]+:[0-9]{1,5}$"
HELDOUT_FRACTION = 0.15  # of the documents, in a check; a run has its own
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Disclosure = Literal["labels", "text", "updates"]
DISCLOSURES: tuple[Disclosure, ...] = get_args(Disclosure)
"""What may leave a site, from least to most (`fpld.engines.flower.site.disclosure`)."""
_NODE_TOML = """\
# A node of a federation. Start it with: fpld node {file}
name = {name!r}

# Where the aggregator is, and who it is: from its federation.toml.
address = {address!r}
aggregator = {aggregator!r}
ca = "ca.pem"

# The private text: a file or a folder. It stays here.
{source}

# What may leave: "labels" on public text; "text" that the site's model writes, with labels; "updates" of its weights.
# A run that asks for more is refused before any training (docs/privacy.md says what each tells about the text).
may_send = ["labels"]
# private_run = 8           # written text has no run of this many tokens of the private text; 0: nothing is written

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
    """The terms on which a site takes part: its name, and its limits."""

    name: Name
    may_send: list[Disclosure] = Field(default=["labels"], min_length=1)
    private_run: Annotated[int, Field(ge=0)] = 8
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
class Site:
    """A site: its terms, its folder, a function that reads its text, and one that derives its secret in a run.

    `open_site` makes one from `node.toml`; an app of your own may make it from anything else.
    """

    terms: Terms
    folder: Path
    documents: Callable[[], list[Document]]
    secret: Callable[[bytes], bytes]


class NodeFile(Terms):
    """`node.toml`: the terms, address and public key of the aggregator, and where the text is."""

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
        """Read a node's file. Paths in it are relative to its folder."""
        return configuration.parse_toml(cls, read_utf8(path), str(path))


class Invitation(Section):
    """`federation.toml`, which the aggregator gives to the sites. Nothing in it is secret."""

    address: Annotated[str, Field(pattern=ADDRESS)]
    aggregator: str
    ca: str

    @classmethod
    def read(cls, path: Path) -> Invitation:
        """Read the file that `fpld certs` wrote."""
        return configuration.parse_toml(cls, read_utf8(path), str(path))


def init_node(folder: Path, name: str, invitation: Invitation, source: str) -> Path:
    """Make a site's folder with keys, the aggregator's certificate and `node.toml`; return the file of public keys."""
    if (folder / NODE_FILE).exists():
        raise InputError(f"{folder / NODE_FILE} exists already: choose another folder, or edit it")
    parse_public_key(invitation.aggregator)
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


def open_site(path: Path) -> Site:
    """Return the site that a `node.toml` describes."""
    file = NodeFile.read(path)
    folder = path.resolve().parent
    aggregator = parse_public_key(file.aggregator)

    def documents() -> list[Document]:
        if file.corpus is None:
            return data.read_documents(folder / str(file.data), field=file.field)
        corpus = data.corpus(file.corpus)
        if file.label is None:
            return corpus
        labelled = [document for document in corpus if document.label == file.label]
        if not labelled:
            labels = ", ".join(sorted({document.label for document in corpus}))
            raise InputError(f"label must be one of {labels} in the corpus {file.corpus}, got {file.label!r}")
        return labelled

    return Site(
        terms=file,
        folder=folder,
        documents=documents,
        secret=lambda session: run_secret(folder / MAC_KEY, aggregator, session, file.name),
    )


def check_site(path: Path) -> list[Finding]:
    """Check a site's file, keys and text; return what is wrong, and its size."""
    try:
        file = NodeFile.read(path)
        site = open_site(path)
    except FpldError as error:
        return [Finding(NODE_FILE, str(error))]
    findings = [
        Finding(key, f"{site.folder / name} does not exist: `fpld init-node` makes it")
        for key, name in (("ca", file.ca), ("keys", AUTH_KEY), ("keys", MAC_KEY))
        if not (site.folder / name).exists()
    ]
    key = "data" if file.corpus is None else "corpus"
    try:
        documents = site.documents()
        data.hold_out(documents, fraction=HELDOUT_FRACTION, seed=0)
    except (FpldError, OSError) as error:
        return [*findings, Finding(key, str(error))]
    size = sum(document.size for document in documents)
    findings.append(Finding(key, f"{len(documents)} documents, {size:,} bytes", wrong=False))
    findings.append(Finding("may_send", describe_may_send(file), wrong=False))
    if file.most_epsilon is not None:
        findings.append(_check_epsilon_left(file, site.folder))
    return findings


def describe_may_send(terms: Terms) -> str:
    """Return what may leave a site, in words."""
    names = ", ".join(terms.may_send)
    if "text" not in terms.may_send:
        return names
    check = f"no run of {terms.private_run} private tokens" if terms.private_run else "none is written"
    return f"{names}; text: {check} (private_run)"


def _check_epsilon_left(terms: Terms, folder: Path) -> Finding:
    """Report how much of a site's epsilon is spent."""
    try:
        epsilon = spent_epsilon(Ledger(folder).entries, terms)
    except FpldError as error:
        return Finding("most_epsilon", str(error))
    text = f"an epsilon of {epsilon:.3g} of {terms.most_epsilon:g} is spent for each {terms.unit}"
    return Finding("most_epsilon", f"{text}, at delta {terms.delta:g}", wrong=False)
