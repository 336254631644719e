"""The configuration as a whole: what its tables must be to each other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Self

from pydantic import Field, model_validator

from fpld import registry
from fpld.config.sections import (
    BaselinesSection,
    BudgetSection,
    CodecSection,
    CombineSection,
    DataSection,
    EngineSection,
    FlowerSection,
    NodeSection,
    PrivacySection,
    ProbeSection,
    RunSection,
    Section,
    Student,
    TokenizerSection,
    TrainSection,
)
from fpld.registry import codecs
from fpld.students.configs import HuggingFaceConfig

if TYPE_CHECKING:
    from collections.abc import Iterator

AVERAGING = ("fedavg", "fedavg-1bit", "flora")  # baselines that average weights


class Config(Section):
    """A whole configuration."""

    run: RunSection = RunSection()
    data: DataSection = DataSection()
    probe: ProbeSection
    tokenizer: TokenizerSection = TokenizerSection()
    nodes: Annotated[list[NodeSection], Field(min_length=1)]
    budget: BudgetSection = BudgetSection()
    codec: CodecSection = CodecSection()
    combine: CombineSection = CombineSection()
    student: Student
    base: TrainSection | None = None
    local: TrainSection
    distill: TrainSection
    privacy: PrivacySection | None = None
    baselines: BaselinesSection = BaselinesSection()
    engine: EngineSection = EngineSection()
    flower: FlowerSection | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        found = list(self._contradictions())
        if found:
            raise ValueError("; ".join(found))
        return self

    def _contradictions(self) -> Iterator[str]:
        """Yield every way in which sections do not fit each other, each naming the key to change."""
        names = [node.name for node in self.nodes]
        if len(set(names)) != len(names):
            yield "nodes: names must differ"
        if self.run.quorum is not None and self.run.quorum > len(names):
            yield f"run.quorum must be at most the number of nodes, {len(names)}, got {self.run.quorum}"
        if self.probe.fresh and self.codec.against == "own":
            yield "probe.fresh must be false when codec.against is 'own': refinement keeps its contexts"
        if self.combine.trim is not None and not registry.rules.get(self.combine.rule).traits.trims:
            yield f"combine.trim must be left out with the rule {self.combine.rule!r}: it is for 'trimmed'"
        averaging = [name for name in self.baselines.methods if name in AVERAGING]
        if self.combine.broadcast == "logits" and averaging:
            yield f"baselines.methods: {averaging[0]!r} averages weights, and combine.broadcast = 'logits' sends none"
        if any(node.student for node in self.nodes) and averaging:
            yield f"baselines.methods: {averaging[0]!r} averages weights, and nodes have students of their own"
        if any(node.taught for node in self.nodes) and self.base is None:
            yield "base.steps must be given: a node's model is taught before the first round"
        if any(node.effort != 1 for node in self.nodes) and self.privacy is not None:
            yield "nodes.effort must be left out with [privacy]: a promise counts the steps of [local]"
        if "flora" in self.baselines.methods and not getattr(self.student.settings, "lora", 0):
            yield "baselines.methods: 'flora' stacks adapters, and student.lora has none"
        steps, asked = self.local.steps * self.run.rounds, self.baselines.rounds or []
        if any(steps % rounds for rounds in asked):
            yield f"baselines.rounds must divide the nodes' {steps} local steps, got {asked}"
        if self.codec.against == "own" and not codecs.get(self.codec.name).traits.refines:
            yield (
                f"codec.against must be 'nothing' for the codec {self.codec.name!r}, which codes no residuals to a "
                "reconstruction: set codec.name to 'uniform' for refinement"
            )
        if self.tokenizer.kind == "huggingface" and not self.model_path:
            yield "tokenizer.path or student.path must name a model when tokenizer.kind is 'huggingface'"

    @property
    def model_path(self) -> str:
        """Return the path or name of the pretrained model whose tokenizer is used, or nothing."""
        settings = self.student.settings
        return self.tokenizer.path or (settings.path if isinstance(settings, HuggingFaceConfig) else "")
