"""A site's folder: `node.toml` with its terms, its keys, its text, and what must survive between messages."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, Self, get_args

from pydantic import Field, model_validator

from fpld import config as configuration
from fpld import data, students
from fpld.config import AtOnce, Count, Name, Processes, Section
from fpld.config.config import Finding
from fpld.data.stored import TEXT_CACHE
from fpld.data.token_cache import cached_bytes
from fpld.engines.flower.credentials import AUTH_KEY, MAC_KEY, make_node_keys, parse_public_key, run_secret
from fpld.engines.flower.site.ledger import Ledger, spent_epsilon
from fpld.errors import BudgetError, FpldError, InputError, MissingExtraError
from fpld.storage.files import read_utf8, write_atomic
from fpld.storage.run_folder import NODE_FILE
from fpld.students.configs import Compute, Device, Precision
from fpld.students.pretrained import MODELS
from fpld.validation import shown

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from fpld.data import Document

ADDRESS = r"^[A-Za-z0-9.\-]+:[0-9]{1,5}$"
SITE_LIMIT_KEY = "limit in node.toml"
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

# What may leave: "labels" on public text; "text" that the node's model writes, with labels; "updates" of its weights.
# A run that asks for more is refused before any training (docs/privacy.md says what each tells about the text).
may_send = ["labels"]
# private_run = 8           # written text has no run of this many tokens of the private text; 0: nothing is written

# How much of the text is used (default: all of it, or what the run asks for if that is less):
# limit = 50000000           # bytes, held-out text and all: a sample of the documents

# What the node computes with (defaults: a GPU where there is one, one thread):
# device = "cpu"            # or cuda, mps, auto
# threads = 4
# dtype = "float32"         # of the steps of training: or bfloat16, float16, auto
# at_once = "auto"          # windows of a minibatch that are computed at a time: a number, or as many as fit
# processes = 2             # of each training: one for each GPU
# shard = true              # each of them holds only a share of a pretrained model's weights

# What the node insists on (leave out what does not matter):
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
# show_own_loss = true          # tell the aggregator the loss of this node's own models too, for the report
# models = ["/srv/models/llama"]  # the pretrained models on this machine that a run may load (default: none)
# most_memory = 8000000000      # bytes that the work may take, of memory and of a GPU: beyond it the work is ended
# patches = ["installed_app"]   # of Flower at this node (docs/deploy.md); "none": code of a run is executed here
# port = 9094               # the port that Flower uses on this machine itself (default: one that is free)
"""


class Terms(Section):
    """The terms on which a site takes part: its name, and its limits."""

    name: Name
    limit: Count | None = None
    device: Device = "auto"
    threads: Count = 1
    dtype: Precision = "auto"
    at_once: AtOnce | None = None
    processes: Processes = 1
    shard: bool = False
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
    models: list[str] = Field(default=[])
    most_memory: Count | None = None
    show_own_loss: bool = False
    most_epsilon: configuration.Positive | None = None
    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    unit: Literal["window", "document"] = "document"

    @property
    def compute(self) -> Compute:
        """Return what the site computes with."""
        return Compute(
            self.device, self.threads, self.dtype, self.at_once, self.most_memory, self.processes, self.shard
        )


@dataclass(frozen=True, slots=True)
class Site:
    """A site: its terms, its folder, a function that reads its text, and one that derives its secret in a run.

    `open_site` makes one from `node.toml`; an app of your own may make it from anything else.
    """

    terms: Terms
    folder: Path
    documents: Callable[[], Sequence[Document]]
    secret: Callable[[bytes], bytes]

    @property
    def text_cache(self) -> Path:
        """Return the folder with the tokens of the site's text, which all runs share."""
        return self.folder / TEXT_CACHE


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
    patches: configuration.Patches = "auto"

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

    def documents() -> Sequence[Document]:
        if file.corpus is None:
            return data.read_documents(folder / str(file.data), field=file.field, cache=folder / TEXT_CACHE)
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


def check_models(site: Site, files: Iterable[Path]) -> None:
    """Refuse files of models that name a pretrained model on this machine which the site has not allowed.

    A name of `fpld.students.pretrained.MODELS` is allowed: it is one model, by its digest, and no folder of the site's.

    Raises
    ------
    BudgetError
        If `models` in `node.toml` does not have the path.
    """
    allowed = {(site.folder / path).resolve() for path in site.terms.models}
    for file in files:
        path = students.read_model_path(file) if file.exists() else None
        if path is None or path in MODELS or path in site.terms.models or Path(path).resolve() in allowed:
            continue
        raise BudgetError(
            f"the run's model is made of {shown(path)} on this machine, and this node's file allows no such folder "
            "(models)"
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
        sample = data.sample_documents(documents, file.limit, seed=0)
        data.hold_out(sample, fraction=HELDOUT_FRACTION, seed=0)
    except (FpldError, OSError) as error:
        return [*findings, Finding(key, str(error))]
    size = data.total_size(documents)
    use = data.TextUse(file.name, len(documents), size, data.total_size(sample), 0, SITE_LIMIT_KEY)
    more = f"; {use.left_out}" if use.left_out else ""
    findings.append(Finding(key, f"{use.size}{more}", wrong=False))
    findings.append(_describe_tokens(site.text_cache))
    findings += _check_device(file)
    findings.append(Finding("may_send", describe_may_send(file), wrong=False))
    insisted = (("probe", file.probe), ("tokenizer", file.tokenizer))
    findings += [Finding(key, f"only {digest}", wrong=False) for key, digest in insisted if digest is not None]
    if file.most_epsilon is not None:
        findings.append(_check_epsilon_left(file, site.folder))
    return findings


def _describe_tokens(folder: Path) -> Finding:
    """Report where the tokens of the text are, and how to remove them."""
    size = cached_bytes(folder)
    there = f"{size / 1e6:.1f} MB now" if size else "none now"
    return Finding("texts", f"tokens are kept in {folder} ({there}); `fpld node clear` removes them", wrong=False)


def _check_device(terms: Terms) -> list[Finding]:
    """Report where the site computes, and what stands idle; nothing where PyTorch is not installed."""
    try:
        from fpld.students.devices import describe_device

        return [Finding("device", describe_device(terms.device, 1, terms.threads, terms.processes), wrong=False)]
    except MissingExtraError:
        return []
    except InputError as error:
        return [Finding("device", str(error))]


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
