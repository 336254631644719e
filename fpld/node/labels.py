"""What a model says of a probe set: over its tokens, or over strings through its map (`fpld.data.label_space`).

Over shared tokens a probe set is read by the model itself: the map is the identity. Over strings a model is seen as a
`PlaceStudent`, made from the model, the probe set and the model's tokenizer. A node checks by the digest in the plan
that its maps are the aggregator's, before it trains.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from fpld.data import load_tokenizer
from fpld.data.label_space import TokenStrings, space_digest
from fpld.data.places import PlaceProbe, load_probe
from fpld.errors import InputError, ProtocolError

if TYPE_CHECKING:
    from pathlib import Path

    from fpld.data import ProbeSet
    from fpld.data.places import Reading
    from fpld.node.spec import NodeSpec
    from fpld.students import Student


class LabelReader(NamedTuple):
    """How models with one tokenizer read a probe set; None over shared tokens."""

    reading: Reading | None = None

    @classmethod
    def open(cls, probe: ProbeSet | PlaceProbe, tokenizer: Path, vocab: int) -> LabelReader:
        """Return the reader of models with the tokenizer in a file and `vocab` tokens."""
        if not isinstance(probe, PlaceProbe):
            return cls()
        return cls(probe.read(TokenStrings(load_tokenizer(tokenizer, vocab=vocab))))

    def view(self, model: Student) -> Student:
        """Return a model as the student of the probe set; over shared tokens that is the model itself."""
        if self.reading is None:
            return model
        from fpld.students.gradient import GradientStudent
        from fpld.students.places import PlaceStudent

        if not isinstance(model, GradientStudent):
            raise InputError(
                f"student.kind must be 'transformer' or 'huggingface' with labels over strings, got {model.kind!r}: it "
                "cannot learn through a map"
            )
        return PlaceStudent(model, self.reading)


class ProbeFiles(NamedTuple):
    """The files by which a worker of the aggregator sees the student as the probe set asks it, over strings."""

    probe: Path
    tokenizer: Path

    def view(self, model: Student) -> Student:
        """Return a model with this tokenizer as the student of the probe set."""
        return LabelReader.open(load_probe(self.probe), self.tokenizer, model.vocab).view(model)


class NodeReaders(NamedTuple):
    """The readers of a node: of its own model, and of the aggregator's student."""

    own: LabelReader
    shared: LabelReader

    @classmethod
    def open(
        cls, spec: NodeSpec, files: Path, probe: ProbeSet | PlaceProbe, own: Student, shared: Student | None
    ) -> NodeReaders:
        """Return the readers of a node's probe set, whose files are in a folder."""
        named = spec.files
        first = LabelReader.open(probe, files / named.tokenizer, own.vocab)
        if shared is None or (named.shared_tokenizer == named.tokenizer and shared.vocab == own.vocab):
            return cls(first, first)
        return cls(first, LabelReader.open(probe, files / named.shared_tokenizer, shared.vocab))

    def check(self, space: bytes) -> None:
        """Refuse a plan whose maps are not those of this node."""
        if self.own.reading is None or self.shared.reading is None:
            if space:
                raise ProtocolError("the plan has a label space over strings, and the probe set is one of tokens")
            return
        if space_digest(self.own.reading.space, self.shared.reading.space) != space:
            raise ProtocolError(
                "this node's maps from tokens to strings are not those of the plan: its tokenizer or that of the "
                "student is not the one that the run began with"
            )
