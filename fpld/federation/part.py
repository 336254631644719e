"""A node's part in a run: one record, the same on one machine and over a network."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, ValidationError

from fpld.config import Count, Name, PrivacySection, Section, TrainSection
from fpld.errors import ProtocolError
from fpld.federation.bases import base_file
from fpld.federation.private import Promise
from fpld.federation.probes import PROBE, PUBLIC

if TYPE_CHECKING:
    from fpld.config import Config

FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9.-]{0,99}$")]


class Files(Section):
    """Names of the files that a node needs, in the one folder where such files are; never a path.

    On one machine that is the run's folder. Over a network the name is the SHA-256 of the content: a node keeps what
    it has got once, and asks only for what it lacks. `public` is the text that rounds with contexts of their own draw
    them from; without it all rounds have those of `probe`.
    """

    probe: FileName
    tokenizer: FileName
    base: FileName
    student: FileName
    public: FileName | None = None

    def names(self) -> set[str]:
        """Return the names."""
        return {name for name in (self.probe, self.tokenizer, self.base, self.student, self.public) if name}


class Part(Section):
    """What a node is asked to do in all rounds: how to train, on how much of its text, with which files."""

    name: Name
    index: Annotated[int, Field(ge=0, lt=2**32)]
    seed: Annotated[int, Field(ge=0, lt=2**63)]
    rounds: Count
    local: TrainSection
    distill: TrainSection
    length: Count
    heldout: Annotated[float, Field(gt=0, lt=1)]
    heldout_tokens: Count
    limit: Count
    files: Files
    privacy: PrivacySection | None = None

    @property
    def promise(self) -> Promise | None:
        """Return what the node promises about its text, if anything."""
        return None if self.privacy is None else Promise(self.privacy, self.rounds * self.local.steps)

    @property
    def differs(self) -> bool:
        """Return whether the node has a model of its own beside the aggregator's student."""
        return self.files.base != self.files.student

    @classmethod
    def parse(cls, value: Any) -> Part:
        """Check what came from the aggregator."""
        try:
            return cls.model_validate(value)
        except ValidationError as error:
            places = ", ".join(".".join(map(str, item["loc"])) for item in error.errors())
            raise ProtocolError(f"a node's part must be whole and sound, but these are not: {places}") from None

    def training(self, section: TrainSection, round: int) -> dict[str, Any]:
        """Return steps and the learning rate of a round."""
        return {"steps": section.steps, "rate": section.rate_in(round, self.rounds)}


def parts(config: Config) -> list[Part]:
    """Return the part of each node; its files are those of the run's folder."""
    return [make_part(config, index) for index in range(len(config.nodes))]


def make_part(config: Config, index: int) -> Part:
    """Return the part of one node."""
    node = config.nodes[index]
    return Part(
        name=node.name,
        index=index,
        seed=config.run.seed,
        rounds=config.run.rounds,
        local=config.local.times(node.effort),
        distill=config.distill,
        length=config.probe.length,
        heldout=config.data.heldout,
        heldout_tokens=config.data.heldout_tokens,
        limit=config.data.limit,
        privacy=config.privacy,
        files=Files(
            probe=PROBE,
            tokenizer="tokenizer.json",
            base=base_file(config, index),
            student=base_file(config, None),
            public=PUBLIC if config.probe.fresh else None,
        ),
    )
