"""Where the planner's numbers come from besides the command line: a configuration, or a finished run."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tomlkit
from tomlkit.exceptions import TOMLKitError

from fpld import config as configuration
from fpld.budget.estimators import distortion_weights, label_weights
from fpld.budget.limits import senders
from fpld.budget.policy import ROOM
from fpld.errors import InputError
from fpld.planner.forecast import Forecast
from fpld.planner.known import Known
from fpld.report.runs import read_run
from fpld.storage.files import read_json
from fpld.units import show_rate, show_size

if TYPE_CHECKING:
    from fpld.budget.limits import Sender
    from fpld.config import Config
    from fpld.report.runs import Line
    from fpld.types import Floats

_BYTE_VOCAB = 256
_NOTHING = 1e-9  # a clip level that adds nothing


@dataclass(frozen=True, slots=True)
class Source:
    """What was read: the configuration and its text, what it says to the planner, and whence that is known."""

    config: Config
    text: str
    known: Known
    total: float | None
    note: str = ""


def read(place: str, *, contexts: int | None = None, vocab: int | None = None) -> Source:
    """Read a configuration file, a preset, or the folder of a run; sizes that are given replace those read."""
    folder = Path(place)
    if not folder.is_dir():
        return _from_config(*configuration.load(place), contexts, vocab)
    if not (folder / "config.toml").is_file():
        raise InputError(f"{folder} holds no run (no config.toml): give a run's folder, a TOML file or a preset")
    config, text = configuration.load(folder / "config.toml")
    if (folder / "probe.json").is_file():
        probe = read_json(folder / "probe.json", "fpld-probe-1")
        vocab = vocab or probe.get("vocab")
    source = _from_config(config, text, contexts, vocab)
    sites = len(source.known.sites)
    lines = [line for line in read_run(folder).trace if len(line.nodes) == len(line.bits_allotted) == sites]
    if not lines:
        return replace(source, note=f"{folder.name} has no round with all nodes yet: nothing to learn from")
    known = learn(source.known, lines[-1])
    if not (known.sparse or known.theory) and known.curves is None:
        return replace(source, known=known, note=f"{folder.name} measured no loss curves")
    what = "noise" if known.sparse else "clip levels" if known.theory else "loss curves"
    which = ": what gives the bound found there" if known.theory else ""
    note = f"{what} as measured in round {lines[-1].round} of {folder.name}{which}"
    return replace(source, known=known, note=note)


def learn(known: Known, line: Line) -> Known:
    """Set clip levels and c_p so that the planner's bracket, at the bits that a round had, is the one found there.

    A run knows the noise of what it decoded, so its bracket is measured. The levels' proportions are those of the
    estimated weights, or of each site's own noise, or of what was configured.
    """
    known = replace(known, sites=tuple(map(_learn_useful, known.sites, _used(known, line))))
    if known.sparse:
        return _learn_labels(known, line)
    if not known.theory:
        curves = line.curves if line.curves and len(line.curves) == len(known.sites) else None
        return replace(known, curves=None if curves is None else tuple(curves))
    estimated = line.node_weights if line.node_weights is not None else _weights(known, line)
    if estimated is not None:
        known = replace(
            known, sites=tuple(replace(s, weight=float(w)) for s, w in zip(known.sites, estimated, strict=True))
        )
    lower, upper = line.bandwidth_lower or 0.0, line.bandwidth_upper or 0.0
    c_p = min(2 * lower / upper, 1.0) if upper > 0 else None
    known = replace(known, c_p=c_p)
    if not any(site.ranged for site in known.sites):
        return known  # the levels are on the wire, and known
    bits = np.maximum(np.array(line.bits_allotted) * known.vocab, known.floors())
    fixed, unit = (_found(_with_ranges(known, scale), bits) for scale in (_NOTHING, 1.0))
    share = (upper - fixed) / (unit - fixed)
    return _with_ranges(known, math.sqrt(share)) if share > 0 else known


def _used(known: Known, line: Line) -> list[tuple[float, float]]:
    """Return the bits per context that each site was allotted, and those that it sent."""
    pairs = zip(line.bits_allotted, line.bits_sent, strict=True)
    return [(known.vocab * allotted, known.vocab * sent) for allotted, sent in pairs]


def _learn_useful(site: Sender, bits: tuple[float, float]) -> Sender:
    """Set the bits beyond which the codec has no use for more, if the site left a part of its own unused."""
    allotted, sent = bits
    return replace(site, useful=ROOM * sent) if 0 < ROOM * sent < allotted else site


def _learn_labels(known: Known, line: Line) -> Known:
    """Set weights so that the planner's noise, at the bits that a round had, is that of the labels there."""
    noise = [value for value in line.noise if value is not None]
    if len(noise) == len(known.sites):
        weights = label_weights(known.vocab * np.array(noise), known.vocab * np.array(line.bits_allotted))
        sites = tuple(replace(site, weight=float(w)) for site, w in zip(known.sites, weights, strict=True))
        known = replace(known, sites=sites)
    if not line.node_downlink_bytes:
        return known
    rest = replace(known, student=1.0).downlink or 0
    return replace(known, student=float(max(max(line.node_downlink_bytes) - rest + 1, 1)))


def write(source: Source, plan: Forecast) -> str:
    """Return the source's configuration with the plan's bits at every node, and all else as it was.

    Bits are written out, so that the run does what was planned; shares and estimates have nothing left to decide.
    """
    try:
        document: Any = tomlkit.parse(source.text)
    except TOMLKitError as error:
        raise InputError(f"the configuration cannot be edited: {error}") from None
    forecasts = zip(plan.known.sites, plan.bits_per_coordinate, plan.bytes_sent, plan.seconds, strict=True)
    for node, (site, bits, count, seconds) in zip(document["nodes"], forecasts, strict=True):
        for limit in ("uplink", "context_bits"):
            node.pop(limit, None)
        node["bits"] = float(bits)
        if site.rate is not None:
            node["bits"].comment(f"{show_size(count)} a round, {seconds:.1f} s over {show_rate(site.rate)}")
        if site.clip is not None and not site.ranged:
            node["clip"] = float(site.clip)
    for key in ("total", "context_total", "estimator", "warmup", "forget", "deadline"):
        document.get("budget", {}).pop(key, None)
    document.setdefault("run", tomlkit.table())["rounds"] = plan.known.rounds
    document["probe"]["contexts"] = plan.known.contexts
    if source.config.tokenizer.kind == "bpe" and source.config.tokenizer.vocab != plan.known.vocab:
        document.setdefault("tokenizer", tomlkit.table())["vocab"] = plan.known.vocab
    text = f"# Planned by fpld plan: {plan.policy} allocation.\n{tomlkit.dumps(document)}"
    configuration.parse(text, "the planned configuration")
    return text


def _from_config(config: Config, text: str, contexts: int | None, vocab: int | None) -> Source:
    vocab = vocab or _vocab(config)
    contexts = contexts or config.probe.contexts
    sites = senders(config.nodes, vocab)
    deadline = config.budget.deadline if any(site.rate is not None for site in sites) else None
    known = Known(
        sites,
        contexts,
        vocab,
        deadline,
        config.run.rounds,
        codec=config.codec.name,
        stratified=config.codec.dither == "stratified",
        student=_weights_sent(config, vocab),
    )
    return Source(config, text, known, config.budget.bits(vocab))


def _weights_sent(config: Config, vocab: int) -> float | None:
    """Return the bytes of the student's weights, if they are sent and their number is known before the run."""
    if config.combine.broadcast != "weights":
        return None
    bytes_each = config.combine.weight_bits / 8
    return bytes_each * replace(config.student.settings, vocab=vocab).parameters or None


def _vocab(config: Config) -> int:
    if config.tokenizer.kind == "huggingface":
        raise InputError("--vocab must be given: the configuration takes the tokenizer of a pretrained model")
    return config.tokenizer.vocab if config.tokenizer.kind == "bpe" else _BYTE_VOCAB


def _with_ranges(known: Known, scale: float) -> Known:
    """Let the ranges that contexts state amount to clip levels in proportion to the roots of the weights."""
    levels = [scale * math.sqrt(site.allocation_weight) if site.ranged else site.clip for site in known.sites]
    return replace(known, sites=tuple(replace(s, clip=level) for s, level in zip(known.sites, levels, strict=True)))


def _weights(known: Known, line: Line) -> list[float] | None:
    """Read the sites' weights off the noise of what they sent, if all have sent and no clip says them."""
    noise = [value for value in line.noise if value is not None]
    if len(noise) < len(known.sites) or min(noise) <= 0 or not all(site.ranged for site in known.sites):
        return None
    bits = known.vocab * known.paper_bits(np.array(line.bits_allotted) * known.vocab)
    return [float(weight) for weight in distortion_weights(noise, bits, known.vocab)]


def _found(known: Known, bits: Floats) -> float:
    upper = Forecast(known, "", bits).upper
    return 0.0 if upper is None else upper.bandwidth
