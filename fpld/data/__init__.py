"""Turn private text into node shards, and public text into a tokenizer and a probe set.

`readers` and `corpora` read documents, `documents` deals them to nodes and holds some out, `tokenizers` turns them into
tokens, `probe` draws the public contexts on which all nodes are compared. Nothing here needs torch; what needs the
`text` extra imports it when it is first used.
"""

from fpld.data.corpora import corpus
from fpld.data.documents import Document, by_label, dirichlet, hold_out, iid
from fpld.data.fetch import fetch
from fpld.data.probe import ProbeSet
from fpld.data.readers import read_documents
from fpld.data.tokenizers import BpeTokenizer, ByteTokenizer, Tokenizer, bits_per_byte, encode_documents, load_tokenizer

__all__ = [
    "BpeTokenizer",
    "ByteTokenizer",
    "Document",
    "ProbeSet",
    "Tokenizer",
    "bits_per_byte",
    "by_label",
    "corpus",
    "dirichlet",
    "encode_documents",
    "fetch",
    "hold_out",
    "iid",
    "load_tokenizer",
    "read_documents",
]
