"""A node's training, private or not; and what of its promise a run has spent so far."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fpld.errors import InputError
from fpld.privacy import Chance, Mechanism, PrivateText, Spent, calibrated, cut_text, epsilon
from fpld.privacy.text import by_window
from fpld.storage.arrays import read_arrays
from fpld.storage.files import read_utf8, write_atomic

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from fpld.config import Config, PrivacySection
    from fpld.storage.folder import RunFolder
    from fpld.students import Student

SPENT = "privacy.json"


class Promise(NamedTuple):
    """What is promised of each unit of a node's text, over so many steps in all rounds together."""

    terms: PrivacySection
    steps: int


def promised(config: Config) -> Promise | None:
    """Return what a configuration promises for each node, if anything."""
    return None if config.privacy is None else Promise(config.privacy, config.run.rounds * config.local.steps)


def train(
    student: Student,
    texts: Sequence[Path],
    promise: Promise | None,
    *,
    steps: int,
    seed: int,
    rate: float | None,
    secret: bool = False,
) -> Spent | None:
    """Fine-tune a model on one text, or on several pooled; return what it has spent, if anything was promised."""
    if promise is None:
        tokens = np.concatenate([read_arrays(text)[0]["tokens"] for text in texts])
        student.finetune(tokens, steps=steps, seed=seed, rate=rate)
        return None
    text, mechanism = private_training(student, texts, promise)
    chance = Chance.secret() if secret else Chance.seeded(seed)
    student.finetune_privately(text, mechanism, steps=steps, chance=chance, rate=rate)
    return mechanism.spent(steps)


def private_training(student: Student, texts: Sequence[Path], promise: Promise) -> tuple[PrivateText, Mechanism]:
    """Return the units of texts, and the mechanism that keeps the promise about them."""
    terms = promise.terms
    text = _units(texts, student.window)
    if terms.unit == "window":
        text = by_window(text)
    return text, calibrated(
        text,
        epsilon=terms.epsilon,
        delta=terms.delta,
        clip=terms.clip,
        batch=terms.batch or student.config.batch,
        windows=terms.windows,
        steps=promise.steps,
    )


def _units(texts: Sequence[Path], window: int) -> PrivateText:
    """Cut texts into documents; those of different texts never belong together."""
    found: list[tuple[np.ndarray, ...]] = []
    first = 0
    for path in texts:
        arrays = read_arrays(path)[0]
        if not {"tokens", "lengths", "groups"} <= arrays.keys():
            raise InputError(f"{path} does not say where documents end: start the run anew")
        found.append((arrays["tokens"], arrays["lengths"], arrays["groups"] + first))
        first += int(arrays["groups"].max()) + 1
    tokens, lengths, groups = (np.concatenate(parts) for parts in zip(*found, strict=True))
    return cut_text(tokens, lengths, groups, window)


def note_spent(folder: Path, round: int, spent: Spent) -> None:
    """Write down what a node has spent in a round of this run; the same round again is spent once."""
    rounds = {each: value for each, value in _rounds(folder).items() if each != round} | {round: spent}
    rows = [{"round": each, **value._asdict()} for each, value in sorted(rounds.items())]
    write_atomic(folder / SPENT, (json.dumps(rows, indent=1) + "\n").encode())


def spent_in(folder: Path, delta: float) -> float | None:
    """Return the epsilon that a node has spent in a run, at a delta; nothing where training is not private."""
    rounds = _rounds(folder)
    return epsilon(rounds.values(), delta) if rounds else None


def write_spending(run: RunFolder, config: Config, nodes: Path) -> None:
    """Write what each node of a local run has spent: a row each, nothing where training is not private."""
    terms = config.privacy
    if terms is None:
        return
    rows = []
    for index, node in enumerate(config.nodes):
        spent = list(_rounds(nodes / str(index)).values())
        last = spent[-1] if spent else Spent(0.0, 0.0, 0)
        row = {"node": node.name, "unit": terms.unit, "noise": last.noise, "rate": last.rate}
        row |= {"steps": sum(each.steps for each in spent), "epsilon": epsilon(spent, terms.delta)}
        rows.append(row | {"promised": terms.epsilon, "delta": terms.delta})
    run.write_json(SPENT, rows)


def _rounds(folder: Path) -> dict[int, Spent]:
    path = folder / SPENT
    if not path.exists():
        return {}
    try:
        return {row["round"]: Spent(row["noise"], row["rate"], row["steps"]) for row in json.loads(read_utf8(path))}
    except (ValueError, TypeError, KeyError) as error:
        raise InputError(f"{path} is damaged ({error}): start the run anew") from None
