"""From a configuration to what a run needs on disk: tokenizer, probe set, tokens of each node, base models."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fpld import data
from fpld.errors import InputError
from fpld.federation.bases import make_bases
from fpld.federation.probes import PROBE, PUBLIC
from fpld.federation.texts import first_documents, read_corpus, write_texts
from fpld.pace import before, lasting
from fpld.seeds import derive_seed
from fpld.storage.seals import check_seals, is_sealed, seal

if TYPE_CHECKING:
    import numpy as np

    from fpld.config import Config
    from fpld.data import Document, Tokenizer
    from fpld.storage.folder import RunFolder

log = logging.getLogger(__name__)


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
    check_seals(store)
    if not is_sealed(store, "prepared.json"):
        log.info("reading texts")
        with before("the base model"), lasting("preparing texts, tokenizer and probe set"):
            documents = read_corpus(config)
            write_texts(config, documents, _write_public(config, documents, store), store)
    public, known = _read_public(config, store), store.read_json("prepared.json")
    size = known.get("bytes_per_token") if isinstance(known, dict) else None
    if not isinstance(size, float) or not 0 < size < math.inf:
        raise InputError(f"{store.path / 'prepared.json'} must say bytes_per_token, got {size!r}: start the run anew")
    return Prepared(public.probe, public.tokens, size)


def prepare_public(config: Config, store: RunFolder) -> Public:
    """Make what the aggregator needs when the nodes' texts are elsewhere: tokenizer, probe set, base models."""
    check_seals(store)
    if not is_sealed(store, PROBE):
        log.info("reading the public text")
        with before("the base model"), lasting("preparing texts, tokenizer and probe set"):
            _write_public(config, read_corpus(config), store)
    return _read_public(config, store)


def _write_public(config: Config, documents: list[Document], store: RunFolder) -> Tokenizer:
    """Make tokenizer and probe set of the public text."""
    public = _public_documents(config, documents)
    made, file = _tokenizer(config, public), store.path / "tokenizer.json"
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
    seal(store, "tokenizer.json", PUBLIC, PROBE)
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
    labelled = [document for document in documents if document.label == config.probe.source]
    found = labelled or data.read_documents(config.probe.source, field=config.data.field)
    return first_documents(found, config.probe.limit)


def _tokenizer(config: Config, public: list[Document]) -> Tokenizer:
    if config.tokenizer.kind == "bytes":
        return data.ByteTokenizer()
    if config.tokenizer.kind == "bpe":
        size = sum(document.size for document in public) / 1e6
        log.info("training the tokenizer on public text (%.1f MB)", size)
        return data.BpeTokenizer.train([document.text for document in public], vocab=config.tokenizer.vocab)
    from fpld.students.huggingface import model_tokenizer

    path = config.model_path
    log.info("reading the tokenizer of %s (a model by name is fetched and converted the first time)", path)
    return model_tokenizer(path)
