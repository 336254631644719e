"""What the aggregator asks of a node besides the task: how to train, on which part of its text, with which files."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, ValidationError

from fpld.config import Count, Name, Section, TrainSection
from fpld.errors import ProtocolError
from fpld.federation.prepare import base_file, student_options

if TYPE_CHECKING:
    from fpld.config import Config
    from fpld.storage.folder import RunFolder

Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Files(Section):
    """The files that a node needs, by their SHA-256; it keeps them, and asks only for what it lacks."""

    probe: Digest
    tokenizer: Digest
    base: Digest
    student: Digest

    def digests(self) -> set[str]:
        """Return the digests."""
        return {self.probe, self.tokenizer, self.base, self.student}


class Assignment(Section):
    """A node's part in a run. Paths are never in it: a node decides where it keeps things."""

    name: Name
    index: Annotated[int, Field(ge=0, lt=2**32)]
    seed: Annotated[int, Field(ge=0, lt=2**63)]
    rounds: Count
    kind: str
    student_kind: str
    local: TrainSection
    distill: TrainSection
    length: Count
    heldout: Annotated[float, Field(gt=0, lt=1)]
    heldout_tokens: Count
    limit: Count
    files: Files

    @classmethod
    def parse(cls, value: Any) -> Assignment:
        """Check what came in a letter."""
        try:
            return cls.model_validate(value)
        except ValidationError as error:
            places = ", ".join(".".join(map(str, item["loc"])) for item in error.errors())
            raise ProtocolError(f"an assignment must be whole and sound, but these are not: {places}") from None


def assignments(config: Config, run: RunFolder) -> tuple[list[Assignment], dict[str, bytes]]:
    """Return each node's assignment, and the files that they name, by digest."""
    contents: dict[str, bytes] = {}

    def file(name: str) -> str:
        data = (run.path / name).read_bytes()
        digest = hashlib.sha256(data).hexdigest()
        contents[digest] = data
        return digest

    given = [
        Assignment(
            name=node.name,
            index=index,
            seed=config.run.seed,
            rounds=config.run.rounds,
            kind=student_options(config, index).kind,
            student_kind=student_options(config, None).kind,
            local=config.local,
            distill=config.distill,
            length=config.probe.length,
            heldout=config.data.heldout,
            heldout_tokens=config.data.heldout_tokens,
            limit=config.data.limit,
            files=Files(
                probe=file("probe.json"),
                tokenizer=file("tokenizer.json"),
                base=file(base_file(config, index)),
                student=file(base_file(config, None)),
            ),
        )
        for index, node in enumerate(config.nodes)
    ]
    return given, contents
