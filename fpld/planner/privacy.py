"""Say before any epsilon is spent what a guarantee of privacy leaves of a federation's gain.

The noise of DP-SGD is compared with the gradient that it hides, as norms over all trained numbers. At the best step
size, with curvature that is alike in all of them, a noisy step keeps 1 / (1 + ratio^2) of the gain of an exact one:
the gain of a step a (g + n) is a |g|^2 - a^2 (|g|^2 + |n|^2) / 2 on average, and largest at a = 1 / (1 + ratio^2).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from fpld import data, validation
from fpld.data.fetch import ARCHIVES, cache_folder
from fpld.errors import InputError
from fpld.federation.prepare import deal, read_corpus
from fpld.node.spec import make_node_spec
from fpld.node.text import split_text
from fpld.planner.expected import Learning, expect
from fpld.privacy import forecast_noise

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fpld.config import Config

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class PrivateTraining:
    """A private training at every node.

    Parameters
    ----------
    units
        Units of text at each node, by its name.
    numbers
        Trained numbers.
    steps
        Private steps in all rounds.
    batch
        Units that take part in a step on average; None: all.
    """

    units: dict[str, int]
    numbers: int
    steps: int
    batch: int | None
    delta: float


def private_training(config: Config, weights: int, *, units: int | None) -> PrivateTraining:
    """Return the private training of a configuration; its text says how many units nodes have, if none are given.

    Raises
    ------
    InputError
        If the units must be given: there is no text here, or units are windows, which only a tokenizer counts.
    """
    terms = config.privacy
    if terms is None:
        raise InputError("CONFIG must have [privacy] for --epsilon, or give --units, --numbers and --nodes without it")
    batch = terms.units(int(getattr(config.student.settings, "batch", 1)))
    numbers = min(terms.numbers, weights) if terms.trained == "subspace" else weights
    if units is not None:
        counts = {node.name: units for node in config.nodes}
    elif terms.unit == "window":
        raise InputError("--units must be given: windows are units, and only a run's tokenizer counts them")
    else:
        counts = count_documents(config)
    return PrivateTraining(counts, numbers, config.local_steps, batch, terms.delta)


def count_documents(config: Config) -> dict[str, int]:
    """Return how many documents each node trains on, those of a group as one; nothing is fetched.

    Raises
    ------
    InputError
        If the text is not on this machine.
    """
    name = config.data.corpus
    if name in ARCHIVES and not (cache_folder() / ARCHIVES[name].filename).exists():
        raise InputError(f"--units must be given: the corpus {name} is not here (`fpld data fetch {name}` brings it)")
    for path in (config.data.path, *(node.data for node in config.nodes)):
        if path is not None and not data.text_folder(path).exists():
            raise InputError(f"--units must be given: {path} is not on this machine")
    texts = deal(config, read_corpus(config))
    counts = {}
    for index, node in enumerate(config.nodes):
        split = split_text(make_node_spec(config, index), texts[node.name])
        counts[node.name] = 1 if split.single else len({each.group or each.name for each in split.train})
    return counts


def privacy_rows(training: PrivateTraining, epsilons: Sequence[float], gain: float | None) -> list[Row]:
    """Return a row for each guarantee and each number of units: the noise beside the gradient, and what is left.

    Parameters
    ----------
    gain
        What the federation gains without privacy, in nats; None if it is not known.
    """
    rows = []
    for epsilon in epsilons:
        found = {count: _noise(training, epsilon, count) for count in sorted(set(training.units.values()))}
        squares = [found[count].ratio ** 2 for count in training.units.values()]
        mean = math.sqrt(float(np.mean(squares)) / len(squares))  # of the nodes' mean: their noises are independent
        share = 1 / (1 + mean**2)
        for count, noise in found.items():
            names = [name for name, units in training.units.items() if units == count]
            rows.append({
                "epsilon": epsilon,
                "node": None if len(names) == len(training.units) else ", ".join(names),
                "units": count,
                "numbers": training.numbers,
                "nodes": len(training.units),
                "steps": training.steps,
                "batch": training.batch,
                "noise": noise.noise,
                "noise_norm": noise.norm,
                "noise_over_signal": noise.ratio,
                "over_nodes": mean,
                "units_needed": noise.units,
                "gain_share": share,
                "gain": None if gain is None else share * gain,
            })  # fmt: skip
    return rows


def expected_gain(learning: Learning, *, contexts: int, bits: Sequence[float]) -> float | None:
    """Return the nats that labels are expected to gain without privacy; None if base and mixture are not known."""
    expected = expect("labels", contexts=contexts, bits=np.array(bits), learning=replace(learning, usual=False))
    return None if expected is None or expected.gain is None else expected.gain.value


def _noise(training: PrivateTraining, epsilon: float, units: int) -> Any:
    validation.integer("units", units, least=1)
    if training.batch is not None and training.batch > units:
        raise InputError(f"batch must be at most a node's {units} units, got {training.batch}")
    return forecast_noise(
        epsilon,
        training.delta,
        units=units,
        numbers=training.numbers,
        steps=training.steps,
        sites=len(training.units),
        batch=training.batch,
    )
