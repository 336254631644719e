"""How long symbols should be, and what short tokens do: a student taught over tokens and over strings.

    python -m benchmarks.strings

trains two small transformers on a public text, with 1,024 tokens and with 2,048 of another text, and a teacher from the
first on the messages of 1850-1899. Both are distilled from the teacher's exact labels on 16,384 contexts, and evaluated
in bits per byte on the last six of these messages. A line for each alphabet; `--steps 150` are those of distillation.
`marked`: a token that is shorter than the symbols which begin with it goes to the symbol that it is itself.
"""

from __future__ import annotations

import argparse
import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fpld.data import AlphabetSize, BpeTokenizer, PlaceProbe, ReaderLimits, TokenStrings, corpus
from fpld.data.label_space import ONE, TokenMap
from fpld.students.configs import TransformerConfig
from fpld.students.devices import use_threads
from fpld.students.places import PlaceStudent
from fpld.students.transformer import Transformer

if TYPE_CHECKING:
    from fpld.data import Document
    from fpld.data.places import Reading

CONTEXTS = 16384
PLACES = 32
WINDOW = 64
LENGTH = 96
HELDOUT_TOKENS = 12000


class Case(NamedTuple):
    """An alphabet, and whose student learns over it."""

    student: str
    symbols: int
    symbol_bytes: int
    marked: bool = False


CASES = (
    Case("A", 257, 1),
    Case("A", 2048, 3),
    Case("A", 2048, 12),
    Case("B", 257, 1),
    Case("B", 2048, 2),
    Case("B", 2048, 3),
    Case("B", 2048, 3, marked=True),
    Case("B", 2048, 5),
    Case("B", 2048, 12),
)


class Scene:
    """Tokenizers A and B, a model of each on the public text, and a teacher with the tokens of A."""

    def __init__(self) -> None:
        documents = corpus("sotu")
        self.public = [document.text for document in documents if document.label == "1940-1969"]
        era = [document for document in documents if document.label == "1850-1899"]
        tokenizers = {
            "A": BpeTokenizer.train(self.public, vocab=1024),
            "B": BpeTokenizer.train([document.text for document in era], vocab=2048),
        }
        self.strings = {name: TokenStrings(tokenizer) for name, tokenizer in tokenizers.items()}
        self.heldout = {name: self.encode(name, texts(era[-6:]))[:HELDOUT_TOKENS] for name in tokenizers}
        self.models = {name: self._base(name) for name in tokenizers}
        self.teacher = self.models["A"].copy()
        self.teacher.finetune(self.encode("A", texts(era[:-6])), steps=300, seed=1)

    def encode(self, name: str, documents: list[str]) -> np.ndarray:
        """Return documents as one stream of tokens."""
        return np.concatenate([self.strings[name].tokenizer.encode(text + "\n\n") for text in documents])

    def _base(self, name: str) -> Transformer:
        vocab = len(self.strings[name].strings)
        config = TransformerConfig(
            vocab=vocab, layers=2, width=96, heads=4, length=LENGTH, batch=24, rate=3e-3, distill_rate=2e-3
        )
        model = Transformer(config, seed=1)
        model.finetune(self.encode(name, self.public), steps=250, seed=0)
        return model

    def bits_per_byte(self, model: Transformer, name: str) -> float:
        """Return a model's loss on the teacher's held-out text."""
        tokens = self.heldout[name]
        nats, _ = model.loss(tokens, WINDOW)
        return nats / math.log(2) / self.strings[name].tokenizer.text_bytes(tokens[1:])

    def probe(self, symbols: int, symbol_bytes: int) -> PlaceProbe:
        """Draw places that both tokenizers share."""
        readers = [ReaderLimits(name, strings, LENGTH) for name, strings in self.strings.items()]
        size = AlphabetSize(symbols, symbol_bytes)
        return PlaceProbe.draw(self.public, readers, contexts=CONTEXTS, length=PLACES, size=size, seed=0)

    def over_tokens(self, steps: int) -> float:
        """Distil the student with the teacher's tokens over these."""
        reading = self.probe(512, 12).read(self.strings["A"])
        sequences = reading.tokens[:, :PLACES]
        student = self.models["A"].copy()
        student.distill(sequences, self.teacher.logits(sequences), steps=steps, seed=3)
        return self.bits_per_byte(student, "A")

    def over_strings(self, case: Case, steps: int) -> float:
        """Distil a student over the symbols of an alphabet."""
        probe = self.probe(case.symbols, case.symbol_bytes)
        readings = {name: probe.read(strings) for name, strings in self.strings.items()}
        if case.marked:
            readings = {name: self._marked(probe, name, reading) for name, reading in readings.items()}
        labels = PlaceStudent(self.teacher, readings["A"]).logits(probe.sequences)
        student = self.models[case.student].copy()
        PlaceStudent(student, readings[case.student]).distill(probe.sequences, labels, steps=steps, seed=3)
        return self.bits_per_byte(student, case.student)

    def _marked(self, probe: PlaceProbe, name: str, reading: Reading) -> Reading:
        symbols = np.array([probe.alphabet.symbol(string) for string in self.strings[name].strings], np.int32)
        tokens = np.arange(len(symbols), dtype=np.int32)
        space = TokenMap(len(symbols), probe.vocab, tokens, symbols, np.full(len(symbols), ONE, np.int32))
        return type(reading)(reading.tokens, reading.ends, space, reading.first_places)


def texts(documents: list[Document]) -> list[str]:
    """Return the texts of documents."""
    return [document.text for document in documents]


def main() -> None:
    """Print a line for each alphabet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150)
    steps = parser.parse_args().steps
    use_threads(1)
    scene = Scene()
    for name, model in scene.models.items():
        print(f"{name} before: {scene.bits_per_byte(model, name):.4f}", flush=True)
    print(f"teacher: {scene.bits_per_byte(scene.teacher, 'A'):.4f}")
    print(f"A over tokens: {scene.over_tokens(steps):.4f}", flush=True)
    for case in CASES:
        print(*(f"{key} {value}" for key, value in case._asdict().items()), end=": ")
        print(f"{scene.over_strings(case, steps):.4f}", flush=True)


if __name__ == "__main__":
    main()
