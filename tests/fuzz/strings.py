"""Fuzzers of labels over strings: probe sets of places, alphabets, maps, tokenizers, and plans with a label space."""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING, Any

import numpy as np

from fpld.data import AlphabetSize, ByteTokenizer, PlaceProbe, ReaderLimits, TokenStrings, load_probe
from fpld.data.label_space import ONE, Alphabet, TokenMap, space_digest
from fpld.data.tokenizers import PretrainedTokenizer
from fpld.errors import FpldError, InputError, ProtocolError
from fpld.node.labels import LabelReader, NodeReaders
from fpld.protocol import Task
from fpld.storage.arrays import dump_arrays, parse_arrays
from tests.data.spellings import TEXT, bpe, sentencepiece
from tests.fuzz.target import Target, disturbed, mutated
from tests.helpers import make_plan

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Once = Callable[[np.random.Generator], int]


def _probe(strings: dict[str, TokenStrings]) -> PlaceProbe:
    readers = [ReaderLimits(name, each, 64) for name, each in strings.items()]
    return PlaceProbe.draw([TEXT], readers, contexts=40, length=4, size=AlphabetSize(280, 6), seed=0)


def places(folder: Path) -> Once:
    """Files of places, changed anywhere: refused, or the same probe set."""
    probe = _probe({"bpe": TokenStrings(bpe(270)), "bytes": TokenStrings(ByteTokenizer())})
    path = folder / "probe.json"
    probe.save(path)
    data = path.read_bytes()
    serial = json.loads(data)

    def once(rng: np.random.Generator) -> int:
        hostile = mutated(data, rng)
        if rng.random() < 0.7:
            hostile = json.dumps(disturbed(serial, rng)).encode()
        path.write_bytes(hostile)
        with contextlib.suppress(InputError):
            assert load_probe(path).digest == probe.digest
        return 1

    return once


def alphabets(_folder: Path) -> Once:
    """Alphabets with symbols left out, added, doubled or in another order: refused, or closed under prefixes."""
    sound = _probe({"bytes": TokenStrings(ByteTokenizer())}).alphabet

    def once(rng: np.random.Generator) -> int:
        symbols = list(sound.symbols)
        counts = list(sound.counts)
        for _ in range(int(rng.integers(1, 4))):
            place = int(rng.integers(len(symbols)))
            what = int(rng.integers(6))
            if what == 0:
                del symbols[place], counts[place]
            elif what == 1:
                symbols[place] = rng.bytes(int(rng.integers(0, 70)))
            elif what == 2:
                symbols.insert(place, symbols[place] + rng.bytes(1))
                counts.insert(place, 1)
            elif what == 3:
                symbols.reverse()
            elif what == 4:
                counts[place] = int(rng.choice([-1, 2**32, 2**62]))
            else:
                symbols.sort()
        with contextlib.suppress(InputError):
            alphabet = Alphabet(tuple(symbols), tuple(counts))
            text = rng.bytes(3)
            symbol = alphabet.symbols[alphabet.symbol(text)]
            assert text.startswith(symbol)
            assert not any(text.startswith(other) and len(other) > len(symbol) for other in alphabet.symbols)
        return 1

    return once


def maps(_folder: Path) -> Once:
    """Maps with entries changed: refused, or they keep the sum of every distribution."""
    strings = TokenStrings(bpe(270))
    space = _probe({"bpe": strings}).read(strings).space
    columns = {"tokens": space.tokens, "symbols": space.symbols, "shares": space.shares}
    p = np.random.default_rng(0).dirichlet(np.ones(space.vocab), 2)

    def once(rng: np.random.Generator) -> int:
        changed = {name: column.copy() for name, column in columns.items()}
        sizes = {"vocab": space.vocab, "size": space.size}
        for _ in range(int(rng.integers(1, 4))):
            name = str(rng.choice(list(changed)))
            column = changed[name]
            what = int(rng.integers(6))
            if what == 0 and column.size:
                column.flat[int(rng.integers(column.size))] = rng.choice([-1, 0, 1, ONE, ONE + 1, 2**31 - 1, -(2**31)])
            elif what == 1:
                changed[name] = rng.permutation(column)
            elif what == 2:
                changed[name] = column[: int(rng.integers(column.size + 1))]
            elif what == 3:
                changed[name] = column.astype(rng.choice(["int64", "float32", "uint32"]))
            elif what == 4:
                changed[name] = column[None]
            else:
                sizes[str(rng.choice(list(sizes)))] = int(rng.choice([0, 1, 2**17]))
        with contextlib.suppress(InputError):
            made = TokenMap(sizes["vocab"], sizes["size"], changed["tokens"], changed["symbols"], changed["shares"])
            if made.vocab == space.vocab:
                np.testing.assert_allclose(made.apply(p).sum(1), 1)
        return 1

    return once


def tokenizers(_folder: Path) -> Once:
    """Tokenizers of packages with their JSON disturbed: refused, or they give back a text byte by byte."""
    sound = [json.loads(each.library_json()) for each in (sentencepiece(300), bpe(270))]

    def once(rng: np.random.Generator) -> int:
        value = disturbed(sound[int(rng.integers(2))], rng)
        with contextlib.suppress(FpldError):
            strings = TokenStrings(PretrainedTokenizer(json.dumps(value)))
            spelled = strings.spell(" the house")
            assert b"".join(strings.strings[token] for token in spelled.tokens) == b" the house"
        return 1

    return once


def spaces(folder: Path) -> Once:
    """Tasks with a label space, disturbed: refused, or the node finds that its maps are others."""
    strings = TokenStrings(bpe(270))
    probe = _probe({"bpe": strings})
    path = folder / "tokenizer.json"
    strings.tokenizer.save(path)
    reader = LabelReader.open(probe, path, strings.tokenizer.vocab)
    assert reader.reading is not None
    readers = NodeReaders(reader, reader)
    right = space_digest(reader.reading.space, reader.reading.space)
    readers.check(right)
    data = Task(make_plan(space=right), "samples").to_bytes()
    arrays, metadata = parse_arrays(data, "task")
    head = json.loads(metadata["task"])

    def once(rng: np.random.Generator) -> int:
        hostile = mutated(data, rng)
        if rng.random() < 0.7:
            plan: Any = head["plan"]
            digest = (
                mutated(bytes.fromhex(plan["space"]), rng).hex() if rng.random() < 0.5 else disturbed(right.hex(), rng)
            )
            changed = {**head, "plan": {**plan, "space": digest}} if rng.random() < 0.6 else disturbed(head, rng)
            hostile = dump_arrays(arrays, {**metadata, "task": json.dumps(changed)})
        with contextlib.suppress(InputError, ProtocolError):
            space = Task.from_bytes(hostile).plan.space
            readers.check(space)
            assert space == right
        return 1

    return once


TARGETS = [
    Target("places", "files", 0.5, places),
    Target("alphabets", "alphabets", 0.3, alphabets),
    Target("maps", "maps", 0.3, maps),
    Target("tokenizers", "tokenizers", 0.5, tokenizers),
    Target("spaces", "tasks", 0.5, spaces),
]
