"""Schemas of what nodes answer in signed messages: strict, so that a wrong answer is refused for that node alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import Field, ValidationError, model_validator

from fpld.config.sections import Section
from fpld.errors import ProtocolError
from fpld.federation.record import Heldout, Incident
from fpld.validation import printable

MAX_ANSWER_BYTES = 1 << 17
MAX_REASON_CHARACTERS = 100  # of why a site has no loss: one of the sentences in `site.disclosure`
MAX_LOSS = 100.0  # nats per token; the uniform distribution over any vocabulary is far below
Size = Annotated[int, Field(gt=0, lt=2**40)]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class AnswerSchema(Section):
    """A node's answer: no value is converted, and no other field is allowed."""

    @classmethod
    def parse(cls, body: dict[str, Any], **expected: object) -> Self:
        """Check the body of a signed message; the fields in `expected` must have these values."""
        try:
            answer = cls.model_validate(body)
        except ValidationError as error:
            item = error.errors(include_url=False)[0]
            place = printable(".".join(map(str, item["loc"])), 40)
            raise ProtocolError(f"its answer's {place}: {item['msg']}, got {printable(item['input'], 40)}") from None
        for name, value in expected.items():
            if getattr(answer, name) != value:
                raise ProtocolError(f"its answer is to another question: {name} must be {value}")
        return answer


class Joined(AnswerSchema):
    """A node's name and wire version, the student of the run that it has, and the files of the run that it lacks.

    `instance` is drawn anew whenever the site's process starts.
    """

    kind: Literal["joined"]
    name: Annotated[str, Field(max_length=64)]
    challenge: Digest
    wire: Annotated[int, Field(ge=0, lt=2**16)]
    student: Digest | None
    instance: Annotated[str, Field(pattern=r"^[0-9a-f]{0,64}$")] = ""
    missing: Annotated[list[Digest], Field(max_length=1000)]


class Evaluated(AnswerSchema):
    """A student's loss in nats per token on a node's held-out text, and the size of that text.

    With the site's permission also the losses of its own models (`fpld.node.training`). A site with private
    training sends none of these. `failed` says why there is no loss where there should be one.
    """

    kind: Literal["evaluated"]
    round: Annotated[int, Field(ge=0, lt=2**32)]
    loss: Annotated[float, Field(ge=0, le=MAX_LOSS, allow_inf_nan=False)] | None = None
    tokens: Size | None = None
    bytes: Size | None = None
    own: Annotated[float, Field(ge=0, le=MAX_LOSS, allow_inf_nan=False)] | None = None
    alone: Annotated[float, Field(ge=0, le=MAX_LOSS, allow_inf_nan=False)] | None = None
    failed: Annotated[str, Field(max_length=MAX_REASON_CHARACTERS)] | None = None

    @model_validator(mode="after")
    def _all_or_none(self) -> Self:
        """Refuse a loss without the size of its text, or a size without a loss."""
        if len({value is None for value in (self.loss, self.tokens, self.bytes)}) > 1:
            raise ValueError("loss, tokens and bytes come together, or not at all")
        return self


class NodeLoss(NamedTuple):
    """What is kept of a node's evaluation: a fraction of the memory of an `Evaluated`."""

    loss: float | None
    tokens: int | None
    bytes: int | None
    own: float | None
    alone: float | None


@dataclass(slots=True)
class EvaluationReplies:
    """The nodes' losses of a student, as they come in."""

    nodes: int
    losses: dict[int, NodeLoss] = field(default_factory=dict)
    refused: list[Incident] = field(default_factory=list)

    def add(self, node: int, answer: Evaluated) -> None:
        """Add a node's evaluation."""
        self.losses[node] = NodeLoss(answer.loss, answer.tokens, answer.bytes, answer.own, answer.alone)

    @property
    def own(self) -> dict[int, dict[str, float | None]]:
        """Return the losses of the nodes' own models, where they send them."""
        return {node: {"own": answer.own, "alone": answer.alone} for node, answer in self.losses.items()}

    @property
    def heldout(self) -> Heldout:
        """Return the losses by node, and the bytes per token of all held-out texts."""
        losses = [self.losses[node].loss if node in self.losses else None for node in range(self.nodes)]
        tokens = sum(answer.tokens or 0 for answer in self.losses.values())
        size = sum(answer.bytes or 0 for answer in self.losses.values())
        return Heldout(losses, size / tokens if tokens else None, self.refused)
