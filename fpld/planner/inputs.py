"""The inputs of a plan, and where they are read from.

`PlanInputs` holds what an operator knows before a run: the sites with their links, a deadline, the probe set. Besides
the command line, `read_plan_source` takes them from a configuration, a preset, or the folder of a run. The last closed
round of a run also shows how noisy each site's labels are: `calibrate_inputs` sets the constants of the planner so that
its forecast at the bits of that round is what was measured. `planned_configuration` writes a plan back as TOML.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import tomlkit
from tomlkit.exceptions import TOMLKitError

from fpld import config as configuration
from fpld import validation
from fpld.budget.estimators import distortion_weights, label_weights
from fpld.budget.limits import LIMIT_KINDS, Limits, Uplinks, senders
from fpld.budget.policy import ROOM
from fpld.codecs.uniform.layout import make_layout
from fpld.codecs.updates import affordable_bits, update_bytes
from fpld.data.places import load_probe
from fpld.errors import BudgetError, InputError
from fpld.node.spec import base_file
from fpld.paper.quantize import paper_bits, wire_quantizer
from fpld.planner.expected import NOTHING_KNOWN, Learning
from fpld.planner.forecast import Forecast
from fpld.protocol.shared_prior import estimate_notes_bytes
from fpld.protocol.updates import count_weights, update_limits
from fpld.protocol.wire import OVERHEAD_BYTES
from fpld.protocol.written import least_bits
from fpld.registry import codecs
from fpld.report.run import read_run_data
from fpld.storage.run_folder import CONFIG, PROBE
from fpld.students import read_state
from fpld.students.configs import HuggingFaceConfig
from fpld.students.shapes import MODELS, NAMED_MODELS, read_shape
from fpld.units import show_rate, show_size

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fpld.budget.limits import Sender
    from fpld.config import Config
    from fpld.federation.record import RoundRecord
    from fpld.report.run import MethodResult
    from fpld.students.shapes import ModelShape
    from fpld.types import Floats

Channel = Literal["wire", "paper"]
_BYTE_VOCAB = 256
_USUAL = "rivals"  # the preset whose model, base and local training kept runs have
DISCLOSURES = ("labels", "text", "updates")
_NEGLIGIBLE_CLIP = 1e-9  # a clip level whose noise adds nothing


@dataclass(frozen=True, slots=True)
class Updates:
    """What nodes send in the place of labels: updates of so many weights, in at most `bits` each."""

    weights: int
    bits: float

    def __post_init__(self) -> None:
        update_bytes(self.weights, self.bits)  # checks both


@dataclass(frozen=True, slots=True)
class PlanInputs:
    """What is known before a run.

    Parameters
    ----------
    sites
        The sites with their links, caps, clip levels and weights.
    contexts, vocab
        Public probe contexts of a round, and entries of the vocabulary.
    written
        Contexts that each site's model writes in a round; a site's bits are for these too.
    updates
        Updates of weights that sites send in the place of labels. A site's bits are then those of its payload for each
        weight. Its cap is still in bits per context, public and written: it is one in bytes.
    deadline
        Seconds that the uplinks of a round may take.
    samples
        Private samples of a site, for the data term of Theorem 4.
    c_p
        The constant of the condition (ND); by default that of the flattest distribution.
    channel
        `wire` counts whole symbols, headers and ranges; `paper` is the idealised channel of the simulator.
    stratified
        Whether the sites' dither is stratified. Sites that agree then do better than Theorem 2 allows independent ones.
    student
        Bytes of the weights that a node gets in a round; None if they are not sent, or not known before the run.
    model_weights
        Weights of the student that an update has; None if they are not known before the run.
    curves
        Level and rate of each site's loss curve as measured in a run: log loss = level - rate sqrt(bits per context).
    learning
        What is known of the student's learning, for the expected loss; None where no kept run tells it.
    may_send
        What may leave the nodes, of `labels`, `text` and `updates`; None: what the plan sends.
    barred
        What the configuration excludes of these, each with its reason.
    """

    sites: tuple[Sender, ...]
    contexts: int
    vocab: int
    deadline: float | None = None
    rounds: int = 1
    samples: float = math.inf
    c_p: float | None = None
    codec: str = "uniform"
    channel: Channel = "wire"
    stratified: bool = True
    student: float | None = None
    curves: tuple[tuple[float, float], ...] | None = None
    written: int = 0
    updates: Updates | None = None
    model_weights: int | None = None
    learning: Learning | None = NOTHING_KNOWN
    may_send: tuple[str, ...] | None = None
    barred: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        if not self.sites:
            raise InputError("at least one node must be given")
        names = [site.name for site in self.sites]
        if len(set(names)) < len(names):
            raise InputError(f"names of nodes must differ, got {', '.join(names)}")
        validation.integer("contexts", self.contexts, least=1)
        validation.integer("vocab", self.vocab, least=2)
        validation.integer("rounds", self.rounds, least=1)
        if self.deadline is not None:
            validation.real("deadline", self.deadline, above=0.0)
        if not self.samples > 0:
            raise InputError(f"samples must be greater than 0, got {self.samples:g}")
        codecs.get(self.codec)
        if self.student is not None:
            validation.real("student", self.student, above=0.0)
        for name in self.may_send or ():
            if name not in DISCLOSURES:
                raise InputError(f"may_send must be of {', '.join(DISCLOSURES)}, got {name!r}")

    @property
    def sparse(self) -> bool:
        """Return whether labels are sampled: their noise falls as 1/bits, and the paper's bounds do not cover them."""
        return self.updates is None and codecs.get(self.codec).traits.sparse

    @property
    def theory(self) -> bool:
        """Return whether the paper's bounds cover what is sent."""
        return self.updates is None and self.codec == "uniform"

    @property
    def bit_unit(self) -> str:
        """Return what a plan's bits are for: a probe context, or a weight."""
        return "context" if self.updates is None else "weight"

    @property
    def units(self) -> int:
        """Return how many of them a site has in a round."""
        return self.all_contexts if self.updates is None else self.updates.weights

    @property
    def coordinates(self) -> int:
        """Return the coordinates of one: the vocabulary, or a weight alone."""
        return self.vocab if self.updates is None else 1

    @property
    def downlink(self) -> int | None:
        """Return the bytes that a node gets in a round, weights and prior notes; None if the weights are not known."""
        return None if self.student is None else round(self.student) + self.prior_notes

    @property
    def prior_notes(self) -> int:
        """Return the bytes of a round's prior notes."""
        if self.updates is not None or not codecs.get(self.codec).traits.prior:
            return 0
        return estimate_notes_bytes(self.contexts, self.vocab, coarse=self.written > 0)

    @property
    def all_contexts(self) -> int:
        """Return the contexts of a site in a round, public and written."""
        return self.contexts + self.written

    @property
    def weights(self) -> Floats:
        """Return the weight of each site."""
        return np.array([site.allocation_weight for site in self.sites])

    @property
    def clips(self) -> Floats | None:
        """Return the clip level of each site; None if one is not known, or the bounds do not cover the codec."""
        if not self.theory:
            return None
        levels = [site.clip_level for site in self.sites]
        return None if None in levels else np.array(levels, np.float64)

    @property
    def trace_constant(self) -> float:
        """Return c_p; by default that of the flattest distribution, 1 - 1/V."""
        return 1 - 1 / self.vocab if self.c_p is None else self.c_p

    @property
    def uplinks(self) -> Uplinks:
        """Return the uplinks of a round; the paper's channel has no frames and accepts any number of bits."""
        if self.updates is not None:
            return Uplinks(self.sites, self.all_contexts, self.vocab, self.deadline, None, OVERHEAD_BYTES)
        codec, overhead = (self.codec, OVERHEAD_BYTES) if self.channel == "wire" else (None, 0)
        text = least_bits(self.written)
        return Uplinks(self.sites, self.all_contexts, self.vocab, self.deadline, codec, overhead, text)

    @property
    def limit_kinds(self) -> tuple[str, ...]:
        """Return what can limit a site, in the order of `limits().most`."""
        return LIMIT_KINDS if self.updates is None else (*LIMIT_KINDS[:2], "updates")

    def limits(self) -> Limits:
        """Return the most bits of each site by each kind of limit, and the least that can be sent."""
        if self.updates is None:
            return self.uplinks.limits()
        return update_limits(self.uplinks, self.updates.weights, self.updates.bits)

    def caps(self) -> Floats:
        """Return the most bits of each site; raise BudgetError if one cannot reach its floor."""
        if self.updates is None:
            return self.uplinks.feasible().caps
        limits = self.limits()
        short = int((limits.floors - limits.caps).argmax())
        if limits.caps[short] < limits.floors[short]:
            weights = self.updates.weights
            raise BudgetError(
                f"node {self.sites[short].name!r} may send {weights * limits.caps[short] / 8:.0f} bytes a round, an "
                f"update of {weights} weights takes at least {update_bytes(weights, 1)}"
            )
        return limits.caps

    def floors(self) -> Floats:
        """Return the least bits that the codec works with; the paper's channel accepts any."""
        return self.limits().floors

    def weight_bits(self, bits: Floats) -> list[float]:
        """Return the bits of each weight in updates whose payloads, header and scales included, take so many."""
        if self.updates is None:
            raise InputError("nodes send labels, which have no bits per weight")
        weights = self.updates.weights
        return [affordable_bits(weights, math.floor(b * weights / 8), self.updates.bits) for b in bits.tolist()]

    def bytes_sent(self, bits: Floats) -> list[int]:
        """Return the bytes of each site in a round: the payload, and on the wire header and checksum."""
        uplinks = self.uplinks
        if self.updates is not None:
            return [math.floor(b * self.updates.weights / 8) + uplinks.overhead for b in bits.tolist()]
        plans = [uplinks.plan(site, float(b)) for site, b in zip(self.sites, bits, strict=True)]
        return [plan.budget_bytes + uplinks.overhead for plan in plans]

    def paper_bits(self, bits: Floats) -> Floats:
        """Return the bits per coordinate at which the paper's channel is as noisy as the wire is at `bits`."""
        if self.channel == "paper" or self.codec != "uniform":
            return bits / self.vocab
        return np.array([self._site_paper_bits(site, float(b)) for site, b in zip(self.sites, bits, strict=True)])

    def _site_paper_bits(self, site: Sender, bits: float) -> float:
        # A context takes whole bytes: a share of the contexts has one byte more than the others. The corresponding
        # bits of the paper are those of the mean variance, and a variance falls as 2^(-2 bits).
        whole, share = divmod((bits - self.uplinks.range_bits(site)) / 8, 1.0)
        equivalents = [
            float(paper_bits(wire_quantizer(1.0, make_layout(self.vocab, int(whole) + more).levels()), 1.0))
            for more in ((0, 1) if share else (0,))
        ]
        weights = [1 - share, share][: len(equivalents)]
        return -math.log2(np.average(np.exp2(-2 * np.array(equivalents)), weights=weights)) / 2


@dataclass(frozen=True, slots=True)
class PlanSource:
    """Inputs of a plan with the configuration they come from; `total` is its budget in bits per context.

    `note` says what was learnt from a run, or why nothing was.
    """

    config: Config
    text: str
    inputs: PlanInputs
    total: float | None
    note: str = ""


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Sizes that take the place of a configuration's: contexts, V, and the weights of the student that are sent."""

    contexts: int | None = None
    vocab: int | None = None
    weights: int | None = None


def read_plan_source(
    place: str | Config, *, contexts: int | None = None, vocab: int | None = None, weights: int | None = None
) -> PlanSource:
    """Read a configuration, its file, a preset or the folder of a run; the sizes given override its own.

    `weights` are those of the student that are sent.
    """
    sizes = _Sizes(contexts, vocab, weights)
    if isinstance(place, configuration.Config) or not Path(place).is_dir():
        return _from_config(*configuration.read_config(place), sizes)
    folder = Path(place)
    if not (folder / CONFIG).is_file():
        raise InputError(f"{folder} holds no run (no config.toml): give a run's folder, a TOML file or a preset")
    config, text = configuration.read_config(folder / CONFIG)
    if sizes.vocab is None and (folder / PROBE).is_file():
        sizes = replace(sizes, vocab=load_probe(folder / PROBE).vocab)
    if sizes.weights is None and (folder / base_file(config, None)).is_file():
        sizes = replace(sizes, weights=count_weights(read_state(folder / base_file(config, None))))
    source = _from_config(config, text, sizes)
    sites = len(source.inputs.sites)
    data = read_run_data(folder)
    source = replace(source, inputs=_with_losses(source.inputs, data.results))
    complete = [each for each in data.trace if len(each.nodes) == len(each.bits_allotted) == sites]
    if not complete:
        return replace(source, note=f"{folder.name} has no round with all nodes yet: nothing to learn from")
    inputs = calibrate_inputs(source.inputs, complete[-1])
    if inputs.updates is not None:
        return replace(source, inputs=inputs)
    if not (inputs.sparse or inputs.theory) and inputs.curves is None:
        return replace(source, inputs=inputs, note=f"{folder.name} measured no loss curves")
    what = "noise" if inputs.sparse else "clip levels" if inputs.theory else "loss curves"
    which = ": what gives the bound found there" if inputs.theory else ""
    note = f"{what} as measured in round {complete[-1].round} of {folder.name}{which}"
    return replace(source, inputs=inputs, note=note)


def _with_losses(inputs: PlanInputs, results: Iterable[MethodResult]) -> PlanInputs:
    """Set the losses of base and mixture that a finished run measured."""
    losses = {row.method: row.heldout_loss for row in results}
    base = losses.get("base")
    mixture = losses.get("ensemble")
    if inputs.learning is None or base is None:
        return inputs
    known = mixture is not None and mixture < base
    return replace(inputs, learning=replace(inputs.learning, base=base, mixture=mixture if known else None))


def calibrate_inputs(inputs: PlanInputs, record: RoundRecord) -> PlanInputs:
    """Return the inputs with constants at which the forecast for a round's bits is what the round measured.

    The aggregator knows the noise of what it decoded. With sampled labels that gives the sites' weights, with measured
    loss curves the curves. With the paper's codec, clip levels and c_p are chosen so that the bracket is the round's.
    The proportions of the levels are those of the estimated weights, else of each site's noise, else as configured.
    """
    if inputs.updates is not None:
        return _with_student(inputs, record)
    inputs = replace(inputs, sites=tuple(map(_with_useful_bits, inputs.sites, _context_bits(inputs, record))))
    if inputs.sparse:
        return _calibrate_labels(inputs, record)
    if not inputs.theory:
        curves = tuple((pair[0], pair[1]) for pair in record.curves or [] if len(pair) == 2)
        return replace(inputs, curves=curves if len(curves) == len(inputs.sites) else None)
    weights = record.node_weights if record.node_weights is not None else _noise_weights(inputs, record)
    if weights is not None:
        inputs = _with_weights(inputs, weights)
    lower = record.bandwidth_lower or 0.0
    upper = record.bandwidth_upper or 0.0
    inputs = replace(inputs, c_p=min(2 * lower / upper, 1.0) if upper > 0 else None)
    if not any(site.ranged for site in inputs.sites):
        return inputs  # Every clip level is configured.
    # The bandwidth term is linear in the square of the unknown levels' common scale: two values give the line.
    bits = np.maximum(np.array(record.bits_allotted) * inputs.vocab, inputs.floors())
    fixed, unit = (_bandwidth_bound(_with_ranges(inputs, scale), bits) for scale in (_NEGLIGIBLE_CLIP, 1.0))
    share = (upper - fixed) / (unit - fixed)
    return _with_ranges(inputs, math.sqrt(share)) if share > 0 else inputs


def _context_bits(inputs: PlanInputs, record: RoundRecord) -> list[tuple[float, float]]:
    """Return the bits per context that each site was allotted, and those that it sent."""
    pairs = zip(record.bits_allotted, record.bits_sent, strict=True)
    return [(inputs.vocab * allotted, inputs.vocab * sent) for allotted, sent in pairs]


def _with_useful_bits(site: Sender, bits: tuple[float, float]) -> Sender:
    """Limit a site that left a part of its allotment unused to the bits that the codec has a use for."""
    allotted, sent = bits
    return replace(site, useful=ROOM * sent) if 0 < ROOM * sent < allotted else site


def _calibrate_labels(inputs: PlanInputs, record: RoundRecord) -> PlanInputs:
    """Set the weights at which the noise of sampled labels is the round's, and the bytes of the student."""
    noise = [value for value in record.noise if value is not None]
    if len(noise) == len(inputs.sites):
        weights = label_weights(inputs.vocab * np.array(noise), inputs.vocab * np.array(record.bits_allotted))
        inputs = _with_weights(inputs, weights)
    return _with_student(inputs, record)


def _with_student(inputs: PlanInputs, record: RoundRecord) -> PlanInputs:
    """Set the bytes of the student's weights to those that the round sent."""
    if not record.node_downlink_bytes:
        return inputs
    rest = replace(inputs, student=1.0).downlink or 0
    return replace(inputs, student=float(max(max(record.node_downlink_bytes) - rest + 1, 1)))


def _with_weights(inputs: PlanInputs, weights: Iterable[float]) -> PlanInputs:
    pairs = zip(inputs.sites, weights, strict=True)
    return replace(inputs, sites=tuple(replace(site, weight=float(weight)) for site, weight in pairs))


def planned_configuration(source: PlanSource, plan: Forecast) -> str:
    """Return the source's configuration as TOML with the plan's bits at every node; all else is unchanged.

    Bits are written out, so the run does what was planned: keys of shares and estimates are removed.
    """
    try:
        document: Any = tomlkit.parse(source.text)
    except TOMLKitError as error:
        raise InputError(f"the configuration cannot be edited: {error}") from None
    forecasts = zip(plan.inputs.sites, plan.bits, plan.bytes_sent, plan.seconds, strict=True)
    for node, (site, bits, count, seconds) in zip(document["nodes"], forecasts, strict=True):
        for limit in ("uplink", "bits", "context_bits"):
            node.pop(limit, None)
        node["context_bits"] = float(bits) if plan.inputs.updates is None else _capacity_bits(plan.inputs, count)
        if site.rate is not None:
            node["context_bits"].comment(f"{show_size(count)} a round, {seconds:.1f} s over {show_rate(site.rate)}")
        if site.clip is not None and not site.ranged:
            node["clip"] = float(site.clip)
    for key in ("total", "context_total", "estimator", "warmup", "forget", "deadline"):
        document.get("budget", {}).pop(key, None)
    document.setdefault("run", tomlkit.table())["rounds"] = plan.inputs.rounds
    document["probe"]["contexts"] = plan.inputs.contexts
    tokenizer = source.config.tokenizer
    # V of labels over strings is that of the alphabet.
    if tokenizer.kind == "bpe" and tokenizer.vocab != plan.inputs.vocab and not source.config.over_strings:
        document.setdefault("tokenizer", tomlkit.table())["vocab"] = plan.inputs.vocab
    text = f"# Planned by fpld plan: {plan.policy} allocation.\n{tomlkit.dumps(document)}"
    configuration.parse_config(text, "the planned configuration")
    return text


def _capacity_bits(inputs: PlanInputs, size: int) -> float:
    """Return the limit, in bits per context, of a site whose frame with an update has `size` bytes."""
    return math.nextafter(8 * (size - inputs.uplinks.overhead) / inputs.all_contexts, math.inf)


def _from_config(config: Config, text: str, sizes: _Sizes) -> PlanSource:
    shape = _model_shape(config)
    tokens = _tokens(config, shape)
    vocab = sizes.vocab or _label_vocab(config, tokens)
    contexts = sizes.contexts or config.probe.contexts
    sites = senders(config.nodes, vocab)
    deadline = config.budget.deadline if any(site.rate is not None for site in sites) else None
    inputs = PlanInputs(
        sites,
        contexts,
        vocab,
        deadline,
        config.run.rounds,
        codec=config.codec.name,
        stratified=config.codec.dither == "stratified",
        written=config.contexts_by_model,
        learning=None if config.privacy is not None else read_learning(config),  # no kept run has privacy
        barred=_barred_ways(config),
    )
    weights = sizes.weights or _count_weights(config, vocab if tokens is None else tokens, shape)
    if weights:
        inputs = replace(inputs, model_weights=weights)
    if config.combine.broadcast == "weights" and weights:
        inputs = replace(inputs, student=config.combine.weight_bits / 8 * weights)
    total = config.budget.bits(vocab)
    if config.update_bits is not None:
        if not weights:
            raise InputError("--student must be given: how many weights the configuration's student has is not known")
        inputs = replace(inputs, updates=Updates(weights, config.update_bits))
        if total is not None:
            total = min(total * inputs.all_contexts / inputs.units, float(inputs.limits().caps.sum()))
    return PlanSource(config, text, inputs, total)


def read_learning(config: Config) -> Learning:
    """Return what a configuration says of the student's learning, but for its privacy."""
    usual, _ = configuration.read_config(_USUAL)
    pretrained = isinstance(config.student.settings, HuggingFaceConfig)
    own_models = any(node.differs for node in config.nodes)
    caveats = []
    if config.over_strings:
        caveats.append("no kept run has labels over strings")
    if config.run.rounds > 1:
        caveats.append(f"kept runs have one round, this one {config.run.rounds}")
    if config.combine.rule != "mixture":
        caveats.append(f"kept runs have the rule 'mixture', this one {config.combine.rule!r}")
    return Learning(
        steps=None if pretrained else config.distill.steps * config.run.rounds,
        own_models=own_models,
        usual=not own_models and not caveats and _trained_alike(config, usual),
        caveats=tuple(caveats),
    )


def _trained_alike(config: Config, other: Config) -> bool:
    """Return whether two configurations have one model, vocabulary, base and local training."""
    pairs = (
        (config.student, other.student),
        (config.tokenizer, other.tokenizer),
        (config.base, other.base),
        (config.local, other.local),
    )
    return all(mine == others for mine, others in pairs)


def _barred_ways(config: Config) -> tuple[tuple[str, str], ...]:
    """Return what nodes of a configuration cannot send, with the reason that its check gives."""
    ways: dict[str, dict[str, Any]] = {
        "labels": {"send": None, "written": None},
        "text": {"send": None, "written": {"contexts": config.written.contexts if config.written else 1}},
        "updates": {"send": {"updates": 2.0}},
    }
    barred = []
    for name, keys in ways.items():
        try:
            configuration.read_config(config, overrides={**keys, "baselines": {"methods": []}})
        except InputError as error:
            barred.append((name, str(error).replace("the configuration: ", "")))
    return tuple(barred)


def _count_weights(config: Config, tokens: int, shape: ModelShape | None) -> int:
    """Return how many weights of the student are sent; 0 if that is not known before the run."""
    settings = config.student.settings
    if not isinstance(settings, HuggingFaceConfig):
        return int(replace(settings, vocab=tokens).parameters)
    if shape is None:
        return 0
    return shape.adapters(settings.lora, settings.lora_layers) if settings.lora else shape.parameters


def _model_shape(config: Config) -> ModelShape | None:
    """Return the sizes of the configuration's pretrained model: one by name, or in a folder that is there."""
    path = config.model_path
    if path in NAMED_MODELS:
        return MODELS[NAMED_MODELS[path]]
    return read_shape(Path(path)) if path and (Path(path) / "config.json").is_file() else None


def _tokens(config: Config, shape: ModelShape | None) -> int | None:
    """Return how many tokens the shared tokenizer has; None if that is not known before the run."""
    if config.tokenizer.kind == "huggingface":
        return None if shape is None else shape.vocab
    return config.tokenizer.vocab if config.tokenizer.kind == "bpe" else _BYTE_VOCAB


def _label_vocab(config: Config, tokens: int | None) -> int:
    """Return V, the size of the label space: tokens, or the symbols of the alphabet of strings."""
    if config.labels is not None and config.over_strings:
        return config.labels.symbols
    if tokens is None:
        raise InputError("--vocab must be given: the configuration takes the tokenizer of a pretrained model")
    return tokens


def _with_ranges(inputs: PlanInputs, scale: float) -> PlanInputs:
    """Set clip levels in proportion to the roots of the weights where contexts state their ranges."""
    levels = [scale * math.sqrt(site.allocation_weight) if site.ranged else site.clip for site in inputs.sites]
    return replace(inputs, sites=tuple(replace(s, clip=level) for s, level in zip(inputs.sites, levels, strict=True)))


def _noise_weights(inputs: PlanInputs, record: RoundRecord) -> list[float] | None:
    """Return the sites' weights by the noise of what they sent; None if a site sent nothing or has a clip level."""
    noise = [value for value in record.noise if value is not None]
    if len(noise) < len(inputs.sites) or min(noise) <= 0 or not all(site.ranged for site in inputs.sites):
        return None
    bits = inputs.vocab * inputs.paper_bits(np.array(record.bits_allotted) * inputs.vocab)
    return [float(weight) for weight in distortion_weights(noise, bits, inputs.vocab)]


def _bandwidth_bound(inputs: PlanInputs, bits: Floats) -> float:
    upper = Forecast(inputs, "", bits).upper
    return 0.0 if upper is None else upper.bandwidth
