"""The probe set of models whose tokenizers differ: places in public text where all of them have a boundary.

A place is where a token of every tokenizer ends. A passage begins with the blank before a word and has T places; the
context of a place is the passage up to it. Row s*T + t of the labels is about what follows place t of passage s, in
symbols of an `Alphabet` (`fpld.data.label_space`).

Passages that a tokenizer changes are left out when the set is drawn. So each model gets the same bytes as tokens of its
own: `PlaceProbe.read` returns them, with the model's map to the symbols.
"""

from __future__ import annotations

import functools
import hashlib
import re
import struct
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fpld.data.encoding import utf8
from fpld.data.label_space import Alphabet, TokenMap, TokenStrings
from fpld.data.probe import ProbeSet
from fpld.data.token_stream import open_text
from fpld.errors import InputError
from fpld.seeds import derive_seed
from fpld.storage.files import canonical_json, read_json, read_utf8, write_atomic
from fpld.validation import printable

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray


PLACES_FORMAT = "fpld-places-1"

_WORD = re.compile(r"(?<=\S) (?=\S)")  # the one blank between two words
_MAX_PASSAGE_BYTES = 1 << 16
_SAMPLE_BLOCKS = 200  # blocks of public text that `fpld check` lets a tokenizer read
_SAMPLE_LENGTH = 4  # places of its passages: a block has 80 words
_BLOCK_PASSAGES = 16  # passages of a block, which are drawn together


class ReaderLimits(NamedTuple):
    """A tokenizer that must be able to read a probe set, whose it is, and the most tokens of a context."""

    name: str
    strings: TokenStrings
    most_tokens: int


class AlphabetSize(NamedTuple):
    """How large an alphabet is to be: symbols, and bytes of a symbol, at most."""

    symbols: int
    symbol_bytes: int


@dataclass(frozen=True, eq=False)
class Reading:
    """A probe set as the tokens of one tokenizer.

    Row s of `tokens` [S, L] is passage s, filled up with token 0 behind its end. `ends` [S, T] are the positions of the
    last token before each place. `space` is the map from the tokens to the symbols.
    """

    tokens: NDArray[np.int32]
    ends: NDArray[np.int64]
    space: TokenMap
    first_places: NDArray[np.int32]

    def rows(self, places: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
        """Return the numbers of the passages of some sequences of places [B, T]."""
        rows = np.searchsorted(self.first_places, np.asarray(places)[:, 0])
        if (rows == len(self.first_places)).any() or (self.first_places[rows] != places[:, 0]).any():
            raise InputError("sequences must be rows of the probe set's positions")
        return rows.astype(np.int64)


@dataclass(frozen=True, eq=False)
class PlaceProbe:
    """Public passages, `offsets` [S, T] of the places in the bytes of each, and the alphabet of the labels.

    `symbol_bytes` limits how much of what follows a place is looked at; it never goes beyond the next blank.
    """

    passages: tuple[str, ...]
    offsets: NDArray[np.int32]
    alphabet: Alphabet
    symbol_bytes: int

    def __post_init__(self) -> None:
        offsets = np.asarray(self.offsets)
        if offsets.ndim != 2 or offsets.size == 0 or len(offsets) != len(self.passages):
            raise InputError(f"offsets must be [S, T] for {len(self.passages)} passages, got shape {offsets.shape}")
        if not np.issubdtype(offsets.dtype, np.integer) or (np.diff(offsets, axis=1) <= 0).any():
            raise InputError("offsets must be integers that rise within each passage")
        sizes = np.array([len(utf8(passage)) for passage in self.passages])
        if (sizes > _MAX_PASSAGE_BYTES).any():
            raise InputError(f"a passage must have at most {_MAX_PASSAGE_BYTES} bytes")
        if (offsets[:, 0] < 1).any() or (offsets[:, -1] >= sizes).any():
            raise InputError("offsets must lie within their passages")
        if not 1 <= self.symbol_bytes <= _MAX_PASSAGE_BYTES:
            raise InputError(f"symbol_bytes must be at least 1, got {self.symbol_bytes}")
        frozen = offsets.astype(np.int32)
        frozen.flags.writeable = False
        object.__setattr__(self, "offsets", frozen)

    @classmethod
    def draw(
        cls,
        texts: Iterable[str],
        readers: Sequence[ReaderLimits],
        *,
        contexts: int,
        length: int,
        size: AlphabetSize,
        seed: int,
    ) -> PlaceProbe:
        """Draw at least `contexts` places of public texts, in whole passages of `length`, that all readers can read.

        Raises
        ------
        InputError
            If the texts have too few of them; it names the reader that most passages were left out for.
        """
        if length < 1 or contexts < 1:
            raise InputError(f"contexts and length must be at least 1, got {contexts} and {length}")
        blocks = [block for text in texts for block in _blocks(text, length)]
        wanted = -(-contexts // length)
        unread: Counter[str] = Counter()
        kept: list[tuple[int, str, list[int]]] = []
        for number in np.random.default_rng(seed).permutation(len(blocks)).tolist():
            kept += [(number, *passage) for passage in _passages(blocks[number], length, readers, unread)]
            if len(kept) >= wanted:
                break
        if len(kept) < wanted:
            worst = "".join(f"; {count} could not be read by {name}" for name, count in unread.most_common(1))
            raise InputError(
                f"contexts={contexts} is more than the public text offers: {wanted} passages of {length} positions "
                f"were asked for, and all models can read {len(kept)}{worst}"
            )
        # In text order; a stable sort keeps that of the passages of a block.
        chosen = sorted(kept[:wanted], key=lambda passage: passage[0])
        followed = [
            _continuation(utf8(text), offset, size.symbol_bytes) for _, text, offsets in chosen for offset in offsets
        ]
        return cls(
            tuple(text for _, text, _ in chosen),
            np.array([offsets for *_, offsets in chosen], np.int32),
            Alphabet.collect(followed, symbols=size.symbols),
            size.symbol_bytes,
        )

    @property
    def vocab(self) -> int:
        """Return V, the number of symbols."""
        return len(self.alphabet)

    @functools.cached_property
    def sequences(self) -> NDArray[np.int32]:
        """Return the places [S, T] as offsets in all passages together: each names a context."""
        sizes = [len(utf8(passage)) for passage in self.passages]
        starts = np.cumsum([0, *sizes[:-1]])
        places: NDArray[np.int32] = (self.offsets + starts[:, None]).astype(np.int32)
        return places

    @property
    def contexts(self) -> int:
        """Return m = S * T."""
        return int(self.offsets.size)

    @property
    def following(self) -> NDArray[np.int64]:
        """Return the symbol that follows each context [m]; -1 at the end of a passage, as a `ProbeSet` has it.

        What comes before a passage's first place is not the symbol behind the last place of the passage before it.
        """
        unknown = np.full((len(self.passages), 1), -1)
        return np.concatenate([self._symbols[:, :-1], unknown], axis=1).ravel()

    @functools.cached_property
    def _symbols(self) -> NDArray[np.int64]:
        """The symbol behind each place [S, T]."""
        symbols = []
        for passage, offsets in zip(self.passages, self.offsets.tolist(), strict=True):
            data = utf8(passage)
            symbols += [self.alphabet.symbol(_continuation(data, offset, self.symbol_bytes)) for offset in offsets]
        return np.array(symbols, np.int64).reshape(self.offsets.shape)

    def read(self, strings: TokenStrings) -> Reading:
        """Return the passages as tokens, and the map from these to the symbols.

        Raises
        ------
        InputError
            If the tokenizer changes a passage or has no boundary at one of its places.
        """
        spelled = [strings.spell(passage) for passage in self.passages]
        ends = np.stack([_positions(spelling.ends, row) for spelling, row in zip(spelled, self.offsets, strict=True)])
        tokens = np.zeros((len(spelled), int(ends.max()) + 1), np.int32)
        observed: defaultdict[int, Counter[int]] = defaultdict(Counter)
        for row, spelling in enumerate(spelled):
            some = spelling.tokens[: tokens.shape[1]]
            tokens[row, : len(some)] = some
            for token, symbol in zip(spelling.tokens[ends[row] + 1].tolist(), self._symbols[row].tolist(), strict=True):
                observed[token][symbol] += 1
        space = TokenMap.make(strings.strings, self.alphabet, observed)
        return Reading(tokens, ends, space, np.ascontiguousarray(self.sequences[:, 0]))

    @functools.cached_property
    def digest(self) -> str:
        """Return the SHA-256 over passages, places and alphabet, each with its length (little-endian)."""
        hashed = hashlib.sha256(PLACES_FORMAT.encode("ascii"))
        hashed.update(struct.pack("<QQQQ", *self.offsets.shape, self.vocab, self.symbol_bytes))
        for text in (*map(utf8, self.passages), *self.alphabet.symbols):
            hashed.update(struct.pack("<Q", len(text)) + text)
        hashed.update(self.offsets.astype("<i4").tobytes(order="C"))
        hashed.update(np.array(self.alphabet.counts, "<u4").tobytes())
        return hashed.hexdigest()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the probe set as JSON, with its digest."""
        serial = {
            "format": PLACES_FORMAT,
            "symbol_bytes": self.symbol_bytes,
            "symbols": [symbol.hex() for symbol in self.alphabet.symbols],
            "counts": list(self.alphabet.counts),
            "passages": list(self.passages),
            "offsets": self.offsets.tolist(),
            "digest": self.digest,
        }
        write_atomic(Path(path), canonical_json(serial))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> PlaceProbe:
        """Read a probe set that `save` wrote, and check it whole."""
        file = Path(path)
        serial = read_json(file, PLACES_FORMAT)
        try:
            probe = _parse(serial)
            digest = serial["digest"]
        except InputError as error:
            raise InputError(f"{file} is not a sound probe set of positions: {error}") from None
        except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
            raise InputError(
                f"{file} is not a whole probe set of positions ({printable(error)}): write it again"
            ) from None
        if digest != probe.digest:
            raise InputError(f"{file} is damaged: its digest must be {printable(digest)}, it is {probe.digest}")
        return probe


def _parse(serial: Mapping[str, Any]) -> PlaceProbe:
    passages = serial["passages"]
    counts = serial["counts"]
    size = serial["symbol_bytes"]
    offsets = np.array(serial["offsets"])
    if not isinstance(passages, list) or not all(isinstance(passage, str) for passage in passages):
        raise InputError("passages must be texts")
    if not isinstance(counts, list) or not all(type(count) is int for count in (*counts, size)):
        raise InputError("counts and symbol_bytes must be integers")
    alphabet = Alphabet(tuple(bytes.fromhex(symbol) for symbol in serial["symbols"]), tuple(counts))
    return PlaceProbe(tuple(passages), offsets, alphabet, size)


def _blocks(text: str, length: int) -> Iterator[str]:
    """Cut a text before the blanks of words into blocks of some passages."""
    blanks = [match.start() for match in _WORD.finditer(text)]
    for first in range(0, len(blanks), _BLOCK_PASSAGES * (length + 1)):
        last = min(first + _BLOCK_PASSAGES * (length + 1), len(blanks) - 1)
        yield text[blanks[first] : blanks[last] + 1]


def _passages(
    block: str, length: int, readers: Sequence[ReaderLimits], unread: Counter[str]
) -> Iterator[tuple[str, list[int]]]:
    """Yield passages of a block, one behind the other, with `length` places each; count who cannot read some."""
    blanks = [match.start() for match in _WORD.finditer(block)]
    first = 0
    # Every place is behind a word or within one, so that `length` words have as many places or more.
    while first + length + 1 < len(blanks):
        window = block[blanks[first] : blanks[first + length + 1] + 1]
        most = len(utf8(window[: blanks[first + length] - blanks[first] + 1]))
        places: set[int] | None = None
        for reader in readers:
            try:
                ends = reader.strings.spell(window).ends[: reader.most_tokens]
            except InputError:
                ends = np.empty(0, np.int64)
            here = set(ends[ends < most].tolist())
            places = here if places is None else places & here
            if len(places) < length:
                unread[reader.name] += 1
                break
        if places is None or len(places) < length:
            first += length + 1
            continue
        offsets = sorted(places)[:length]
        last = len(utf8(window)[: offsets[-1]].decode("utf-8", "ignore"))
        # To the blank behind the word that is under way at the last place.
        stop = next(blank for blank in blanks if blank - blanks[first] > last)
        passage = block[blanks[first] : stop + 1]
        if all(_readable(reader, passage, offsets) for reader in readers):
            yield passage, offsets
        first = blanks.index(stop)


def unreadable_share(texts: Iterable[str], strings: TokenStrings) -> float:
    """Return which share of passages of public texts a tokenizer does not give back byte by byte, of a sample."""
    blocks = [block for text in texts for block in _blocks(text, _SAMPLE_LENGTH)]
    some = blocks[:: max(len(blocks) // _SAMPLE_BLOCKS, 1)]
    return sum(not _spells(strings, block) for block in some) / max(len(some), 1)


def _spells(strings: TokenStrings, text: str) -> bool:
    try:
        strings.spell(text)
    except InputError:
        return False
    return True


def _continuation(data: bytes, start: int, most: int) -> bytes:
    """Return what follows a place: to the first blank behind its first byte, and at most so many bytes."""
    stop = data.find(b" ", start + 1)
    return data[start : min(start + most, len(data) if stop < 0 else stop + 1)]


def _readable(reader: ReaderLimits, text: str, offsets: list[int]) -> bool:
    try:
        ends = _positions(reader.strings.spell(text).ends, np.array(offsets))
    except InputError:
        return False
    return int(ends[-1]) < reader.most_tokens


def _positions(ends: NDArray[np.int64], offsets: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
    """Return the positions of the tokens that end at some offsets; raise InputError if none does."""
    positions = np.searchsorted(ends, offsets)
    if (positions >= len(ends) - 1).any() or (ends[positions] != offsets).any():
        raise InputError("the tokenizer must have a boundary at every place of the probe set, and has none at some")
    return positions.astype(np.int64)


def load_probe(path: Path) -> ProbeSet | PlaceProbe:
    """Read a probe set of tokens or of places, and check its digest."""
    # Its reader parses the file, and says what is wrong.
    return PlaceProbe.load(path) if f'"{PLACES_FORMAT}"' in read_utf8(path) else ProbeSet.load(path)


def round_probe(first: Path, public: Path | None, seed: int, round: int) -> ProbeSet | PlaceProbe:
    """Return the probe set of a round: the one in the file `first`, or as many contexts drawn anew from `public`."""
    probe = load_probe(first)
    if public is None:
        return probe
    if isinstance(probe, PlaceProbe):
        raise InputError("the positions of a probe set are drawn once: there is no public text to draw others from")
    return probe.redraw(open_text(public).tokens, seed=derive_seed(seed, "probe", round))
