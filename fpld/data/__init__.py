"""Turn private text into node shards, and public text into a tokenizer and a probe set.

`readers` and `corpora` read documents, `stored` leaves those of a large text in their files, `documents` deals them to
nodes and holds some out, `tokenizers` and `encoding` turn them into tokens. `token_cache` keeps the tokens of a large
text, and `token_stream` reads them. `probe` draws the public contexts on which all nodes are compared. Where their
tokenizers differ, `places` draws them, and `label_space` says in which strings they are compared. Nothing here needs
torch; what needs the `text` extra imports it when it is first used.
"""

from fpld.data.corpora import corpus
from fpld.data.documents import Document, TextUse, by_label, dirichlet, hold_out, iid, sample_documents, total_size
from fpld.data.encoding import encode_documents
from fpld.data.fetch import fetch
from fpld.data.hub import text_folder
from fpld.data.label_space import TokenStrings
from fpld.data.places import AlphabetSize, PlaceProbe, ReaderLimits, load_probe
from fpld.data.probe import ProbeSet
from fpld.data.stored import read_documents
from fpld.data.tokenizers import BpeTokenizer, ByteTokenizer, Tokenizer, bits_per_byte, load_tokenizer

__all__ = [
    "AlphabetSize",
    "BpeTokenizer",
    "ByteTokenizer",
    "Document",
    "PlaceProbe",
    "ProbeSet",
    "ReaderLimits",
    "TextUse",
    "TokenStrings",
    "Tokenizer",
    "bits_per_byte",
    "by_label",
    "corpus",
    "dirichlet",
    "encode_documents",
    "fetch",
    "hold_out",
    "iid",
    "load_probe",
    "load_tokenizer",
    "read_documents",
    "sample_documents",
    "text_folder",
    "total_size",
]
