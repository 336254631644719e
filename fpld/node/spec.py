"""The specification of a node in a run: one record, the same on one machine and over a network."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, SerializerFunctionWrapHandler, ValidationError, model_serializer

from fpld.config.sections import Count, Name, PrivacySection, Section, TrainSection, WrittenSection
from fpld.errors import ProtocolError
from fpld.node.training import PrivacyBudget
from fpld.storage.run_folder import PROBE, PUBLIC, TOKENIZER, numbered

if TYPE_CHECKING:
    from pathlib import Path

    from fpld.config import Config
    from fpld.config.sections import TokenizerSection
    from fpld.students.configs import StudentChoice

FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9.-]{0,99}$")]


class NodeFiles(Section):
    """Names of the files that a node needs, in the one folder where such files are; never a path.

    On one machine that is the run's folder. Over a network the name is the SHA-256 of the content: a node keeps what
    it has got once, and asks only for what it lacks. `public` is the text that rounds with contexts of their own draw
    them from; without it all rounds have those of `probe`. `student_tokenizer` is that of the aggregator's student, if
    the node's model has another one.
    """

    probe: FileName
    tokenizer: FileName
    base: FileName
    student: FileName
    public: FileName | None = None
    student_tokenizer: FileName | None = None

    def names(self) -> set[str]:
        """Return the names."""
        return set(self.model_dump().values()) - {None}

    @property
    def shared_tokenizer(self) -> str:
        """Return the tokenizer of the aggregator's student."""
        return self.student_tokenizer or self.tokenizer

    @model_serializer(mode="wrap")
    def _serialize(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        # A file that earlier versions do not know of is left out where there is none.
        values: dict[str, Any] = serialize(self)
        return {name: value for name, value in values.items() if value is not None or name != "student_tokenizer"}


class NodeSpec(Section):
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
    limit: Count | None = None
    files: NodeFiles
    privacy: PrivacySection | None = None
    written: WrittenSection | None = None
    margin: Annotated[float, Field(gt=0, lt=0.01)] = 2e-5

    def privacy_budget(self, files: Path) -> PrivacyBudget | None:
        """Return the guarantee about the node's text over all rounds, if there is one; `files` is their folder."""
        if self.privacy is None:
            return None
        return PrivacyBudget(self.privacy, self.rounds * self.local.steps, files / self.files.probe)

    @property
    def differs(self) -> bool:
        """Return whether the node has a model of its own beside the aggregator's student."""
        return self.files.base != self.files.student

    @classmethod
    def parse(cls, value: Any) -> NodeSpec:
        """Check what came from the aggregator."""
        try:
            return cls.model_validate(value)
        except ValidationError as error:
            places = ", ".join(".".join(map(str, item["loc"])) for item in error.errors())
            raise ProtocolError(
                f"a node's specification must be whole and sound, but these fields are not: {places}"
            ) from None

    def training(self, section: TrainSection, round: int) -> dict[str, Any]:
        """Return steps and the learning rate of a round."""
        return {"steps": section.steps, "rate": section.rate_in(round, self.rounds)}


def node_specs(config: Config) -> list[NodeSpec]:
    """Return the specification of each node; its files are those of the run's folder."""
    return [make_node_spec(config, index) for index in range(len(config.nodes))]


def make_node_spec(config: Config, index: int) -> NodeSpec:
    """Return the specification of one node."""
    node = config.nodes[index]
    return NodeSpec(
        name=node.name,
        index=index,
        seed=config.run.seed,
        rounds=config.run.rounds,
        local=config.local.scaled(node.effort),
        distill=config.distill,
        length=config.probe.length,
        heldout=config.data.heldout,
        heldout_tokens=config.data.heldout_tokens,
        limit=config.data.limit,
        privacy=config.privacy,
        # With updates, the models that the aggregator rebuilds write in the nodes' place.
        written=written_in_force(config.written, config.privacy, config.probe.length)
        if config.update_bits is None
        else None,
        margin=config.probe.margin,
        files=NodeFiles(
            probe=PROBE,
            tokenizer=numbered(TOKENIZER, tokenizer_number(config, index)),
            base=base_file(config, index),
            student=base_file(config, None),
            public=PUBLIC if config.probe.fresh else None,
            student_tokenizer=TOKENIZER if tokenizer_number(config, index) else None,
        ),
    )


def written_in_force(
    written: WrittenSection | None, privacy: PrivacySection | None, length: int
) -> WrittenSection | None:
    """Return the terms of written text, whose check against the private text is off with differential privacy.

    There the text must follow from the private model and public tokens alone, and which sequences are written anew
    depends on the private text. A run longer than a sequence of `length` tokens is in none.
    """
    if written is None or privacy is None or not written.private_run:
        return written
    return written.model_copy(update={"private_run": length + 1})


@dataclass(frozen=True, slots=True)
class BaseSpec:
    """How a base model is made: what it is, and how it is trained. Nodes for whom both are the same share one."""

    student: StudentChoice
    taught: bool = False
    effort: float = 1.0
    tokenizer: int = 0

    @classmethod
    def of(cls, config: Config, index: int | None) -> BaseSpec:
        """Return the base model of a node (None: of the aggregator's student)."""
        node = None if index is None else config.nodes[index]
        if node is None or not node.differs:
            return cls(config.student)
        return cls(node.student or config.student, node.taught, node.effort, tokenizer_number(config, index))


def tokenizer_choices(config: Config) -> list[TokenizerSection]:
    """Return the tokenizers of a run, each once: the shared one, which is that of the student, and those of nodes."""
    different = [config.tokenizer_choice(None)]
    for index, node in enumerate(config.nodes):
        if node.tokenizer is not None and (choice := config.tokenizer_choice(index)) not in different:
            different.append(choice)
    return different


def tokenizer_number(config: Config, index: int | None) -> int:
    """Return which of the run's tokenizers a node has; 0 is the shared one."""
    if index is None or config.nodes[index].tokenizer is None:
        return 0
    return tokenizer_choices(config).index(config.tokenizer_choice(index))


def base_file(config: Config, index: int | None) -> str:
    """Name the file with the base model that a node starts from."""
    different: list[BaseSpec] = []
    for i in (None, *range(len(config.nodes))):
        base = BaseSpec.of(config, i)
        if base not in different:
            different.append(base)
    return f"base-{different.index(BaseSpec.of(config, index))}.safetensors"
