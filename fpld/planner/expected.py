"""Forecast the held-out loss of a federation's student, with a range, from runs that are kept.

A student goes some *share* of the way from the base model to the mixture of the nodes' models: 0 is the base, 1 the
mixture. What is sent decides how far it gets:

    share = level - (breadth / m + (steps + labels / m) / (bits - overhead)) / gap - S / distillation steps
    share = level - breadth / m / gap - U 4^-bits - S / distillation steps          (updates of weights)

The first bracket is the model of `fpld.planner.contexts`, fitted to single students of the demonstration. S and U come
from single students too (`docs/notes.md`). Only the *level* is learnt from kept runs (`gains.json`): one for each thing
that may be sent, as the mean over texts. Texts differ by more than chance, and their spread gives the range: Student's
t for one more text, 90 %. It is that of labels on public text, or of what models write (`text` and `updates`): this
depends on how much nodes differ, and spreads more.

`check_texts` leaves out one text at a time and predicts it from the others. In nats the gain is the share of the gap
between base and mixture. The gap is told, or measured in a finished run, or that of the kept runs if the model and its
training are theirs.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cache
from importlib import resources
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fpld import validation
from fpld.errors import InputError
from fpld.planner.contexts import DEMONSTRATION_NODES, LossModel, demonstration_model
from fpld.units import show_count

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from fpld.types import Floats

WAYS = ("labels", "own", "text", "updates")
"""What nodes send: labels on public text, the same where models differ, text with labels on it, updates of weights."""
GAINS = "gains.json"
_FAMILIES = {"labels": "public", "own": "public", "text": "written", "updates": "written"}
DEMONSTRATION_GAP = 0.55  # nats from base to mixture of the students that the constants were measured with
STEP_POINTS = ((360, 3.564), (1000, 3.498))
"""Steps of distillation and held-out loss, 600 local steps (docs/notes.md, Rounds and steps)."""
UPDATE_POINTS = ((2.0, 3.485), (3.0, 3.451))
"""Bits of a weight and held-out loss of the student (docs/notes.md, Updates in few bits)."""
UPDATE_GAP = 3.975 - 3.432  # base and mixture of those students
LEAST_UPDATE_BITS = 2.0
"""Updates in fewer bits make teachers that are worse than their average (docs/notes.md)."""
COVERAGE = 0.9
_QUANTILES = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812)  # Student's t, two-sided 90 %
_REACH = 2.0  # times outside the budgets of kept runs, beyond which a forecast is marked


class KeptGain(NamedTuple):
    """What a kept run showed.

    Parameters
    ----------
    result, text
        The file of the result, and the name of its text: runs on one text count as one.
    sends
        One of `WAYS`.
    nodes, contexts, bits
        Nodes, contexts of each, public and written, and its bits: of a context, or of a weight. Unequal bits count by
        the mean of their noise.
    steps
        Of distillation, of a model that began with random weights; None for a pretrained one.
    gap
        Nats from the base to the mixture.
    share
        The student's share of the way.
    usual
        Whether model, base and local training are those of the preset `rivals`.
    """

    result: str
    text: str
    sends: str
    nodes: int
    contexts: int
    bits: float
    steps: int | None
    gap: float
    share: float
    usual: bool


class Range(NamedTuple):
    """An expected value, and what it lies between in nine of ten cases."""

    value: float
    low: float
    high: float

    @classmethod
    def about(cls, value: float, half: float) -> Range:
        """Return the range `value` +- `half`."""
        return cls(value, value - half, value + half)


@dataclass(frozen=True, slots=True)
class Learning:
    """What is known of a federation's learning, beside what is sent.

    Parameters
    ----------
    steps
        Of distillation in a round; None for a pretrained model, or if it is not known.
    own_models
        Whether nodes have models of their own.
    usual
        Whether model, base and local training are those of the preset `rivals`: then kept runs know the gap.
    base, mixture
        Held-out loss of the base model, and of the mixture of the nodes' models, if they are known.
    caveats
        Sentences on what of the configuration no kept run has.
    """

    steps: int | None = None
    own_models: bool = False
    usual: bool = False
    base: float | None = None
    mixture: float | None = None
    caveats: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, loss in (("base", self.base), ("mixture", self.mixture)):
            if loss is not None:
                validation.real(name, loss, above=0.0)
        if self.base is not None and self.mixture is not None and not self.mixture < self.base:
            raise InputError(f"mixture must be below the base's {self.base:g}, got {self.mixture:g}")


NOTHING_KNOWN = Learning()
"""What is known of a federation without a configuration."""


class Expectation(NamedTuple):
    """A forecast of the student: its share of the way, the gain and loss in nats where they can be said.

    `texts` is how many kept texts it is learnt from. `doubts` are sentences on what they do not cover.
    """

    share: Range
    gain: Range | None
    loss: Range | None
    texts: int
    doubts: tuple[str, ...]

    @property
    def short(self) -> str:
        """Return the loss, else the gain, else the share, with its range."""
        if self.loss is not None:
            return f"{self.loss.low:.2f} .. {self.loss.high:.2f} nats"
        if self.gain is not None:
            return f"base - {self.gain.low:.2f} .. {self.gain.high:.2f} nats"
        return f"{_percent(self.share)} of the way from base to mixture"

    def __str__(self) -> str:
        texts = f"90 % range, by {show_count(self.texts, 'kept text')}"
        if self.gain is not None:
            return f"{self.short} ({_percent(self.share)} of the way from base to mixture; {texts})"
        return f"{self.short} ({texts}; in nats with --base and --mixture, or from a finished run)"


class Level(NamedTuple):
    """The mean over texts of what shares would be without the terms of the budget, and the number of texts."""

    mean: float
    texts: int


class Spread(NamedTuple):
    """How much texts differ around their mean: standard deviation, and its degrees of freedom."""

    deviation: float
    freedom: int

    def half_width(self, texts: int) -> float:
        """Return half the width of the range of one more text, beside a mean of so many."""
        return student_t(self.freedom) * self.deviation * math.sqrt(1 + 1 / texts)


@dataclass(frozen=True, slots=True)
class Levels:
    """What kept runs teach: the level of each way, the spread of texts around it, the gap of the usual model."""

    levels: dict[str, Level]
    spreads: dict[str, Spread]
    gap: Range | None

    def share(self, sends: str, shortfall: float) -> Range:
        """Return the share of a way at a budget that costs `shortfall` of it."""
        level = self.levels[sends]
        half = self.spreads[_FAMILIES[sends]].half_width(level.texts)
        return _not_below_zero(Range.about(level.mean - shortfall, half))


def student_t(freedom: int) -> float:
    """Return the 95 % quantile of Student's t; beyond ten degrees of freedom that of ten, which is larger."""
    return _QUANTILES[min(freedom, len(_QUANTILES)) - 1]


@cache
def kept_gains() -> tuple[KeptGain, ...]:
    """Read the runs that the package was made with (`python -m benchmarks.planner --write`)."""
    text = resources.files("fpld.planner").joinpath(GAINS).read_text("utf-8")
    return tuple(KeptGain(**row) for row in json.loads(text))


@cache
def kept_levels() -> Levels:
    """Return what all kept runs teach."""
    return fit_levels(kept_gains())


def fit_levels(rows: Sequence[KeptGain]) -> Levels:
    """Fit levels, spreads and gap to runs.

    A level is the mean over texts, however many runs a text has. The spread of labels is that of all runs around it, so
    it also has what the terms of the budget miss. What models write deviates alike in `text` and in `updates`, by as
    much as the nodes of a text differ: there a text counts once. Of a single text there is no spread: the range is then
    unbounded.
    """
    levels: dict[str, Level] = {}
    deviations: dict[str, list[tuple[str, float]]] = {family: [] for family in _FAMILIES.values()}
    freedom = dict.fromkeys(deviations, 0)
    for sends in dict.fromkeys(row.sends for row in rows):
        runs = [(row.text, row.share + _row_shortfall(row)) for row in rows if row.sends == sends]
        by_text = _means(runs)
        mean = fmean(by_text)
        levels[sends] = Level(mean, len(by_text))
        if len(by_text) > 1:
            deviations[_FAMILIES[sends]] += [(text, value - mean) for text, value in runs]
            freedom[_FAMILIES[sends]] += len(runs) - 1
    spreads = {
        "public": _spread([value for _, value in deviations["public"]], freedom["public"]),
        "written": _spread(by_text := _means(deviations["written"]), len(by_text) - 1),
    }
    gaps = _means((row.text, row.gap) for row in rows if row.usual)
    return Levels(levels, spreads, _spread_range(gaps))


class TextCheck(NamedTuple):
    """A kept run, and what was predicted for it from runs on other texts."""

    run: KeptGain
    expected: Range
    gap: Range | None

    @property
    def inside(self) -> bool | None:
        """Return whether the share lies in the range; None if one other text is too few for a range."""
        return self.expected.low <= self.run.share <= self.expected.high if math.isfinite(self.expected.high) else None


def check_texts(rows: Sequence[KeptGain]) -> list[TextCheck]:
    """Predict every run from those on other texts alone; a way that no other text has is left out."""
    checks = []
    for text in dict.fromkeys(row.text for row in rows):
        others = fit_levels([row for row in rows if row.text != text])
        for row in rows:
            if row.text == text and row.sends in others.levels:
                gap = others.gap if row.usual else None
                checks.append(TextCheck(row, others.share(row.sends, _row_shortfall(row)), gap))
    return checks


def expect(
    sends: str, *, contexts: float, bits: Floats, learning: Learning, weights: Floats | None = None
) -> Expectation | None:
    """Return what is expected of a student; None if no kept run tells it: of too few bits, or of models that write.

    Parameters
    ----------
    sends
        `labels`, `text` or `updates`.
    contexts, bits
        Contexts of a node, public and written, and the bits of each node: of a context, or of a weight.
    weights
        How much the noise of each node's labels counts; all alike by default.
    """
    if learning.own_models and sends != "labels":
        return None
    way = "own" if learning.own_models else sends
    levels = kept_levels()
    shortfall = _shortfall(way, contexts, bits, len(bits), learning.steps, weights)
    if shortfall is None or shortfall >= levels.levels[way].mean:
        return None
    share = levels.share(way, shortfall)
    gap = _gap(learning, levels)
    gain = None if gap is None else _product(share, gap)
    base = learning.base
    loss = None if gain is None or base is None else Range(base - gain.value, base - gain.high, base - gain.low)
    return Expectation(share, gain, loss, levels.levels[way].texts, _doubts(way, contexts, bits, learning))


def equal_noise_bits(bits: Floats, weights: Floats | None = None) -> float:
    """Return the equal bits of a context at which the mean of labels is as noisy as with these.

    >>> round(equal_noise_bits(np.array([24.0, 24.0, 44.0, 44.0, 44.0])), 2)
    32.75
    """
    overhead = demonstration_model().overhead
    return float(overhead + 1 / np.average(1 / (bits - overhead), weights=weights))


def _row_shortfall(row: KeptGain) -> float:
    shortfall = _shortfall(row.sends, row.contexts, np.array([row.bits]), row.nodes, row.steps)
    if shortfall is None:
        raise InputError(f"{row.result}: no forecast at {row.bits:g} bits")
    return shortfall


def _shortfall(
    sends: str, contexts: float, bits: Floats, nodes: int, steps: int | None, weights: Floats | None = None
) -> float | None:
    """Return by how much a budget lowers the share; None if it is too small."""
    model: LossModel = demonstration_model().with_nodes(nodes, DEMONSTRATION_NODES)
    training = 0.0 if steps is None else _step_cost() / steps
    if sends == "updates":
        if float(bits.min()) < LEAST_UPDATE_BITS:
            return None
        noise = _update_cost() * float(np.mean(4.0**-bits))
        return training + noise + model.breadth / contexts / DEMONSTRATION_GAP
    if float(bits.min()) <= model.overhead:
        return None
    return training + (model.loss(contexts, equal_noise_bits(bits, weights)) - model.floor) / DEMONSTRATION_GAP


@cache
def _step_cost() -> float:
    (few, high), (many, low) = STEP_POINTS
    return (high - low) / DEMONSTRATION_GAP / (1 / few - 1 / many)


@cache
def _update_cost() -> float:
    (few, high), (many, low) = UPDATE_POINTS
    return float((high - low) / UPDATE_GAP / (4.0**-few - 4.0**-many))


def _gap(learning: Learning, levels: Levels) -> Range | None:
    if learning.base is not None and learning.mixture is not None:
        return Range.about(learning.base - learning.mixture, 0.0)
    return levels.gap if learning.usual else None


def _doubts(sends: str, contexts: float, bits: Floats, learning: Learning) -> tuple[str, ...]:
    """Return sentences on what kept runs do not cover."""
    kept = [row for row in kept_gains() if row.sends == sends]
    who = f"kept runs that send {_NAMES[sends]}"
    doubts = []
    for what, value, known in (
        ("contexts", contexts, [row.contexts for row in kept]),
        (
            f"bits of each {'weight' if sends == 'updates' else 'context'}",
            float(bits.mean()),
            [row.bits for row in kept],
        ),
    ):
        least = min(known)
        most = max(known)
        if not least / _REACH <= value <= most * _REACH:
            span = f"{least:,.0f}" if least == most else f"{least:,.0f} to {most:,.0f}"
            doubts.append(f"{who} had {span} {what}")
    if learning.steps is None and not any(row.steps is None for row in kept):
        doubts.append(f"{who} had no pretrained model")
    return tuple(doubts)


_NAMES = {"labels": "labels", "own": "labels of models that differ", "text": "text", "updates": "updates"}


def _spread(values: list[float], freedom: int) -> Spread:
    """Return the spread of values around their mean; an infinite one if nothing tells it."""
    squares = sum(value * value for value in values)
    return Spread(math.sqrt(squares / freedom) if freedom > 0 else math.inf, max(freedom, 1))


def _means(pairs: Iterable[tuple[str, float]]) -> list[float]:
    """Return the mean of each text's values."""
    values: dict[str, list[float]] = {}
    for text, value in pairs:
        values.setdefault(text, []).append(value)
    return [fmean(each) for each in values.values()]


def _spread_range(values: list[float]) -> Range | None:
    """Return the range of one more value; None of fewer than two."""
    if len(values) < 2:
        return None
    spread = float(np.std(values, ddof=1))
    return Range.about(fmean(values), student_t(len(values) - 1) * spread * math.sqrt(1 + 1 / len(values)))


def _product(share: Range, gap: Range) -> Range:
    """Return the range of a product of independent values, to first order."""
    value = share.value * gap.value
    below = math.hypot((share.value - share.low) * gap.value, share.value * (gap.value - gap.low))
    above = math.hypot((share.high - share.value) * gap.value, share.value * (gap.high - gap.value))
    return Range(value, max(value - below, 0.0), value + above)


def _not_below_zero(share: Range) -> Range:
    """Return a share that is no worse than the base's."""
    return Range(max(share.value, 0.0), max(share.low, 0.0), max(share.high, 0.0))


def _percent(share: Range) -> str:
    return f"{100 * share.low:.0f} to {100 * share.high:.0f} %"
