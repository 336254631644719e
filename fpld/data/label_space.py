"""The label space of models whose tokenizers differ: strings that all of them can speak of.

Two models with one tokenizer are compared token by token. With tokenizers of their own they share no token ids, and the
tokens that they share as strings do not mean the same: "hospital" may be one token here, and "hos" and "pital" there.
What they share is the text. So a label is not about the next token, but about the next *bytes*.

*Symbols.* An `Alphabet` is a set of byte strings, closed under prefixes, with the empty one and all single bytes. The
symbol of a text is the longest of them that the text begins with. So symbols cut all texts into cells, and every text
is in one of them. The strings are the most frequent beginnings of what follows a place of the public text: whole words
with the blank behind them where words are frequent, the first bytes of the others. V becomes the number of symbols.

*Places.* Labels are asked for where every tokenizer has a boundary: at the ends of most words, and within those that
all cut there. m becomes the number of places (`fpld.data.places`).

*Maps.* A token that is longer than its symbol, or whose symbol has no extension, says which symbol comes next. So the
probabilities of a model's V_i tokens become those of the symbols by a sparse linear map A_i, with one entry for such a
token. A *short* token ("ho" where "hos" and "hot" are symbols) leaves open which of several symbols comes. Its
probability is shared out over them, in the proportions in which they follow that token at the places of the probe set,
with the frequencies of the whole public text where it was seen too rarely. Shares are integers of 1/65536: both ends
compute equal maps, and A p adds up to one exactly as p does. Tokens that stand for no text go to the empty symbol.

A map is a function of probe set and tokenizer, so it is not sent. The plan of a round has the digest of the maps of
node and student, and a node whose own differ refuses the task. With one tokenizer for all, the space is that of its
tokens, and its map the identity: nothing of this module is used then.
"""

from __future__ import annotations

import functools
import hashlib
import json
import struct
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fpld.data.encoding import utf8
from fpld.data.tokenizers import BpeTokenizer, ByteTokenizer, from_printable
from fpld.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import numpy.typing as npt

    from fpld.data.tokenizers import Tokenizer

ONE = 1 << 16
"""The integer that stands for a whole token in a map."""
MAX_SYMBOLS = 1 << 16
MAX_SYMBOL_BYTES = 64
PUBLIC_COUNTS = 4
"""How often a short token counts as seen in the proportions of the whole public text."""

_BYTES = 256
_METASPACE = "\u2581"  # the mark that SentencePiece writes for a blank
# Blanks, line ends, accents and other scripts: a tokenizer that does not give these back loses text.
_SAMPLE = "a bc  d\ne\tf, \u00e9\u4e2d\U0001d11e 12 Z"
_LOSSLESS = ("NFC",)  # normalizers that leave composed text as it is; every passage is compared besides


class Spelling(NamedTuple):
    """The tokens [n] of a text, and where each ends in its bytes [n]."""

    tokens: npt.NDArray[np.int32]
    ends: npt.NDArray[np.int64]


class TokenStrings:
    """A tokenizer whose tokens are byte strings that, one after the other, are the text.

    Raises
    ------
    InputError
        If the tokenizer loses bytes of a text, with the reason.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.strings = token_strings(tokenizer)
        self._lengths = np.array([len(string) for string in self.strings], np.int64)
        written = self._joined(tokenizer.encode(_SAMPLE))
        self.adds_blank = written == b" " + utf8(_SAMPLE)
        if not self.adds_blank and written != utf8(_SAMPLE):
            raise InputError(
                f"the tokenizer does not give back all bytes of a text: {_SAMPLE!r} becomes {written!r}; take one with "
                "bytes as its smallest tokens, such as a byte-level BPE"
            )

    def spell(self, text: str) -> Spelling:
        """Return the tokens of a text that begins with a blank; raise InputError if they are not the text."""
        # Where the tokenizer puts a blank before a text, it is the text's own.
        tokens = self.tokenizer.encode(text[1:] if self.adds_blank and text.startswith(" ") else text)
        if self._joined(tokens) != utf8(text):
            raise InputError(f"the tokenizer does not give back the text {text[:40]!r}...: its normalizer changes it")
        return Spelling(tokens, self.ends(tokens))

    def ends(self, tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
        """Return where each token [n] ends, in bytes."""
        return np.cumsum(self._lengths[tokens])

    def _joined(self, tokens: npt.NDArray[np.int32]) -> bytes:
        return b"".join(self.strings[token] for token in tokens.tolist())


def token_strings(tokenizer: Tokenizer) -> list[bytes]:
    """Return the bytes that each token id stands for; none for special tokens and ids without a token.

    Raises
    ------
    InputError
        If tokens do not stand for bytes of the text, with the reason.
    """
    if isinstance(tokenizer, ByteTokenizer):
        return [bytes([byte]) for byte in range(_BYTES)]
    if isinstance(tokenizer, BpeTokenizer):
        return list(tokenizer.token_bytes)
    try:
        value = json.loads(tokenizer.library_json())
        return _library_strings(value, tokenizer.vocab)
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise InputError(f"the tokenizer's JSON must list its tokens, but {error!r}") from None


def _library_strings(value: dict[str, Any], vocab: int) -> list[bytes]:
    model = value["model"]
    for part in _parts(value.get("normalizer"), "normalizers"):
        if part["type"] not in _LOSSLESS and not _marks_blanks(part):
            raise InputError(
                f"the tokenizer normalises text ({part['type']}), so bytes are lost that other models see: take a "
                "model whose tokenizer keeps the text as it is"
            )
    if model.get("type") not in ("BPE", "Unigram"):
        raise InputError(
            f"the tokenizer is of kind {model.get('type')!r}, whose tokens are not parts of the text's bytes: take a "
            "byte-level BPE, or SentencePiece with byte fallback"
        )
    ids = model["vocab"] if isinstance(model["vocab"], dict) else {pair[0]: i for i, pair in enumerate(model["vocab"])}
    byte_level = any(
        part.get("type") == "ByteLevel"
        for part in (
            *_parts(value.get("pre_tokenizer"), "pretokenizers"),
            *_parts(value.get("decoder"), "decoders"),
        )
    )
    marks = {f"<0x{byte:02X}>": bytes([byte]) for byte in range(_BYTES)}
    if not byte_level and not (model.get("byte_fallback") and marks.keys() <= ids.keys()):
        raise InputError(
            "the tokenizer has no byte fallback: text that it does not know becomes one unknown token; take a "
            "byte-level BPE, or SentencePiece with byte fallback"
        )
    strings = [b""] * vocab
    added = value.get("added_tokens") or []
    if min(*ids.values(), *(token["id"] for token in added), 0) < 0:
        raise ValueError("ids must not be negative")
    for name, index in ids.items():
        if byte_level:
            strings[index] = from_printable(name)
        else:
            strings[index] = marks[name] if name in marks else utf8(name.replace(_METASPACE, " "))
    for token in added:
        strings[token["id"]] = b"" if token["special"] else utf8(token["content"])
    if model.get("unk_token") in ids:
        strings[ids[model["unk_token"]]] = b""
    return strings


def _parts(value: dict[str, Any] | None, key: str) -> list[dict[str, Any]]:
    """Return the parts of a normalizer, pre-tokenizer or decoder, which may be a sequence of some."""
    if value is None:
        return []
    return [part for each in value[key] for part in _parts(each, key)] if value["type"] == "Sequence" else [value]


def _marks_blanks(part: dict[str, Any]) -> bool:
    """Return whether a normalizer only writes SentencePiece's mark for blanks, or before the text."""
    if part["type"] == "Prepend":
        return bool(part["prepend"] == _METASPACE)
    return bool(part["type"] == "Replace" and part["pattern"] == {"String": " "} and part["content"] == _METASPACE)


@dataclass(frozen=True, slots=True)
class Alphabet:
    """Strings in the order of their bytes, closed under prefixes, and how often each is the symbol of a public place.

    >>> alphabet = Alphabet.collect([b" hot ", b" hot ", b" hos", b" hos"], symbols=260)
    >>> [alphabet.symbols[alphabet.symbol(text)] for text in (b" hot day", b" horse", b"ice", b"")]
    [b' ho', b' ho', b'i', b'']
    """

    symbols: tuple[bytes, ...]
    counts: tuple[int, ...]

    def __post_init__(self) -> None:
        symbols = self.symbols
        if not _BYTES < len(symbols) <= MAX_SYMBOLS or len(self.counts) != len(symbols):
            raise InputError(
                f"an alphabet must have 257 to {MAX_SYMBOLS} symbols with a count each, got {len(symbols)}"
            )
        if any(len(symbol) > MAX_SYMBOL_BYTES for symbol in symbols):
            raise InputError(f"a symbol must have at most {MAX_SYMBOL_BYTES} bytes")
        if any(one >= other for one, other in pairwise(symbols)):
            raise InputError("the symbols of an alphabet must rise in the order of their bytes")
        all_symbols = set(symbols)
        if b"" not in all_symbols or sum(len(symbol) == 1 for symbol in symbols) != _BYTES:
            raise InputError("an alphabet must have the empty symbol and all single bytes")
        if any(symbol[:-1] not in all_symbols for symbol in symbols):
            raise InputError("an alphabet must have every prefix of its symbols")
        if any(not 0 <= count < 2**32 for count in self.counts):
            raise InputError("the counts of an alphabet must be from 0 to 2^32 - 1")

    @classmethod
    def collect(cls, continuations: Iterable[bytes], *, symbols: int) -> Alphabet:
        """Return the alphabet of at most so many symbols that are the most frequent beginnings of these texts."""
        if not _BYTES < symbols <= MAX_SYMBOLS:
            raise InputError(f"symbols must be from 257 to {MAX_SYMBOLS}, got {symbols}")
        texts = Counter(continuations)
        beginnings: Counter[bytes] = Counter()
        for text, count in texts.items():
            for stop in range(2, min(len(text), MAX_SYMBOL_BYTES) + 1):
                beginnings[text[:stop]] += count
        # A prefix is at least as frequent as what it begins: with shorter ones first the set is closed.
        ordered = sorted(beginnings, key=lambda text: (-beginnings[text], len(text), text))
        chosen = {b"", *(bytes([byte]) for byte in range(_BYTES)), *ordered[: symbols - _BYTES - 1]}
        alphabet = cls(tuple(sorted(chosen)), (0,) * len(chosen))
        counts = [0] * len(chosen)
        for text, count in texts.items():
            counts[alphabet.symbol(text)] += count
        return cls(alphabet.symbols, tuple(counts))

    def __len__(self) -> int:
        return len(self.symbols)

    def symbol(self, text: bytes) -> int:
        """Return the number of the longest symbol that a text begins with."""
        index, longest = _index(self.symbols)
        for stop in range(min(len(text), longest), 0, -1):
            number = index.get(text[:stop])
            if number is not None:
                return number
        return index[b""]

    def extensions(self, symbol: int) -> range:
        """Return the symbols that begin with a symbol, itself first."""
        # In the order of their bytes they stand behind it.
        stop = symbol + 1
        while stop < len(self.symbols) and self.symbols[stop].startswith(self.symbols[symbol]):
            stop += 1
        return range(symbol, stop)


@functools.lru_cache(maxsize=4)
def _index(symbols: tuple[bytes, ...]) -> tuple[dict[bytes, int], int]:
    """Return the number of each symbol, and the length of the longest."""
    return {symbol: number for number, symbol in enumerate(symbols)}, max(map(len, symbols))


@dataclass(frozen=True, eq=False, slots=True)
class TokenMap:
    """The map A from V_i tokens to V symbols, as entries in the order of the tokens.

    Entry e adds `shares[e]` / 65536 of the probability of `tokens[e]` to `symbols[e]`. The shares of a token add up to
    65536.
    """

    vocab: int
    size: int
    tokens: npt.NDArray[np.int32]
    symbols: npt.NDArray[np.int32]
    shares: npt.NDArray[np.int32]

    def __post_init__(self) -> None:
        columns = (self.tokens, self.symbols, self.shares)
        if any(column.ndim != 1 or column.dtype != np.int32 or column.size != self.tokens.size for column in columns):
            raise InputError("a map must have int32 tokens, symbols and shares, as many of each")
        if self.tokens.size == 0 or (np.diff(self.tokens) < 0).any():
            raise InputError("the entries of a map must be in the order of the tokens")
        for what, column, most in (("tokens", self.tokens, self.vocab), ("symbols", self.symbols, self.size)):
            if column.min() < 0 or column.max() >= most:
                raise InputError(f"the {what} of a map must be numbers below {most}")
        if self.shares.min() < 1 or self.shares.max() > ONE:
            raise InputError(f"the shares of a map must be from 1 to {ONE}")
        if (np.bincount(self.tokens, self.shares, self.vocab) != ONE).any():
            raise InputError(f"the shares of each token of a map must add up to {ONE}")

    @classmethod
    def make(cls, strings: Sequence[bytes], alphabet: Alphabet, observed: Mapping[int, Mapping[int, int]]) -> TokenMap:
        """Return the map of tokens with these bytes.

        Parameters
        ----------
        strings
            The bytes of each token; none for a token that stands for no text.
        alphabet
            The symbols.
        observed
            How often each symbol came where a token came, by token.
        """
        entries: list[tuple[int, int, int]] = []
        for token, string in enumerate(strings):
            symbol = alphabet.symbol(string)
            extensions = alphabet.extensions(symbol)
            if not string or len(string) > len(alphabet.symbols[symbol]) or len(extensions) == 1:
                entries.append((token, symbol, ONE))
                continue
            shares = _shares([alphabet.counts[each] for each in extensions], extensions, observed.get(token, {}))
            entries += [(token, each, share) for each, share in zip(extensions, shares, strict=True) if share]
        columns = np.array(entries, np.int32).T
        return cls(len(strings), len(alphabet), *(np.ascontiguousarray(column) for column in columns))

    @property
    def digest(self) -> bytes:
        """Return the SHA-256 of the map (32 bytes)."""
        hashed = hashlib.sha256(struct.pack("<II", self.vocab, self.size))
        for column in (self.tokens, self.symbols, self.shares):
            hashed.update(column.astype("<i4").tobytes())
        return hashed.digest()

    def apply(self, p: npt.NDArray[np.floating[Any]]) -> npt.NDArray[np.float64]:
        """Return A p [n, V] of probabilities of tokens p [n, V_i]: the reference for the students' own way."""
        out = np.zeros((len(p), self.size))
        np.add.at(out.T, self.symbols, (p[:, self.tokens] * (self.shares / ONE)).T)
        return out


def _shares(public: Sequence[int], extensions: range, observed: Mapping[int, int]) -> list[int]:
    """Share 65536 out over symbols by how often they came after a token, in integers alone."""
    # Every symbol counts once more than it came in the public text, or one that never came could not be predicted.
    total = sum(public) + len(public)
    seen = [observed.get(each, 0) for each in extensions]
    weights = [here * total + PUBLIC_COUNTS * (count + 1) for here, count in zip(seen, public, strict=True)]
    whole = sum(weights)
    shares = [ONE * weight // whole for weight in weights]
    rest = [ONE * weight % whole for weight in weights]
    # What rounding down leaves goes to the largest remainders, the first of equal ones.
    for place in sorted(range(len(shares)), key=lambda place: (-rest[place], place))[: ONE - sum(shares)]:
        shares[place] += 1
    return shares


def space_digest(node: TokenMap, student: TokenMap) -> bytes:
    """Return the digest of the maps of a node and of the student (32 bytes), as a plan has it."""
    return hashlib.sha256(b"fpld space 1" + node.digest + student.digest).digest()
