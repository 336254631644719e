"""What nodes answer in letters, by strict models: a wrong answer is that node's refusal, and no one else's trouble."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import Field, ValidationError, model_validator

from fpld._check import printable
from fpld.config import Section
from fpld.engines.flower.discretion import LONGEST
from fpld.errors import ProtocolError
from fpld.federation.engine import Heldout, Refusal

MOST_BYTES = 1 << 17  # of an answer in a letter
MOST_LOSS = 100.0  # nats per token: no text is as hard for any model that says anything at all
Size = Annotated[int, Field(gt=0, lt=2**40)]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Answer(Section):
    """A node's answer: nothing is converted, nothing else may be in it."""

    @classmethod
    def parse(cls, body: dict[str, Any], **expected: object) -> Self:
        """Check a letter's body; fields that are known beforehand must be as expected."""
        try:
            found = cls.model_validate(body)
        except ValidationError as error:
            item = error.errors(include_url=False)[0]
            place = printable(".".join(map(str, item["loc"])), 40)
            raise ProtocolError(f"its answer's {place}: {item['msg']}, got {printable(item['input'], 40)}") from None
        for name, value in expected.items():
            if getattr(found, name) != value:
                raise ProtocolError(f"its answer is to another question: {name} must be {value}")
        return found


class Joined(Answer):
    """Who a node is, which wire it speaks, which student of the run it has, and which of the run's files it lacks.

    `instance` is drawn anew each time that the site's process starts.
    """

    kind: Literal["joined"]
    name: Annotated[str, Field(max_length=64)]
    challenge: Digest
    wire: Annotated[int, Field(ge=0, lt=2**16)]
    student: Digest | None
    instance: Annotated[str, Field(pattern=r"^[0-9a-f]{0,64}$")] = ""
    missing: Annotated[list[Digest], Field(max_length=1000)]


class Evaluated(Answer):
    """A student's loss in nats per token on a node's held-out text, and the size of that text.

    With the site's permission also the losses of its own models: `fpld.federation.own`. A site that promises privacy
    tells none of these. `failed` is the sentence that says why there is no loss, where there should be one.
    """

    kind: Literal["evaluated"]
    round: Annotated[int, Field(ge=0, lt=2**32)]
    loss: Annotated[float, Field(ge=0, le=MOST_LOSS, allow_inf_nan=False)] | None = None
    tokens: Size | None = None
    bytes: Size | None = None
    own: Annotated[float, Field(ge=0, le=MOST_LOSS, allow_inf_nan=False)] | None = None
    alone: Annotated[float, Field(ge=0, le=MOST_LOSS, allow_inf_nan=False)] | None = None
    failed: Annotated[str, Field(max_length=LONGEST)] | None = None

    @model_validator(mode="after")
    def _all_or_none(self) -> Self:
        """Refuse a loss without the size of its text, or a size without a loss."""
        if len({value is None for value in (self.loss, self.tokens, self.bytes)}) > 1:
            raise ValueError("loss, tokens and bytes come together, or not at all")
        return self


class Loss(NamedTuple):
    """What is kept of a node's answer."""

    loss: float | None
    tokens: int | None
    bytes: int | None
    own: float | None
    alone: float | None


@dataclass(slots=True)
class Worth:
    """What nodes say a student is worth, as it comes in."""

    nodes: int
    found: dict[int, Loss] = field(default_factory=dict)
    refused: list[Refusal] = field(default_factory=list)

    def add(self, node: int, answer: Evaluated) -> None:
        """Take a node's answer."""
        self.found[node] = Loss(answer.loss, answer.tokens, answer.bytes, answer.own, answer.alone)

    @property
    def own(self) -> dict[int, dict[str, float | None]]:
        """Return the losses of the nodes' own models, where they tell them."""
        return {node: {"own": answer.own, "alone": answer.alone} for node, answer in self.found.items()}

    @property
    def heldout(self) -> Heldout:
        """Return the losses of all, by node."""
        losses = [self.found[node].loss if node in self.found else None for node in range(self.nodes)]
        tokens = sum(answer.tokens or 0 for answer in self.found.values())
        size = sum(answer.bytes or 0 for answer in self.found.values())
        return Heldout(losses, size / tokens if tokens else None, self.refused)
