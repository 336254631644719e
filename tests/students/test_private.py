"""Private steps: what each unit may add, and what is added to hide it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812  # its usual name
from scipy import stats

from fpld.errors import InputError
from fpld.privacy import Mechanism, PrivateText, RandomSource, cut_text
from fpld.students.gradient import GradientStudent
from fpld.students.noisy import add_clipped
from tests.students.test_conformance import TABLE, text

if TYPE_CHECKING:
    from fpld.students.base import Student

ALARM = 1e-6
KINDS = [name for name in TABLE if name != "ngram"]


def private_text(window: int = 12) -> PrivateText:
    """Make six documents of different lengths, the last of less than a window."""
    lengths = [200, 100, 150, 90, 60, 7]
    return cut_text(text(0, sum(lengths)), lengths, range(6), window)


@pytest.fixture(params=KINDS)
def student(request: pytest.FixtureRequest) -> GradientStudent:
    found: Student = TABLE[request.param].make(3)
    assert isinstance(found, GradientStudent)
    return found


def gradient(student: GradientStudent) -> np.ndarray:
    parts = [weight.grad for weight in student._trained().values()]
    return np.concatenate([part.numpy().ravel() for part in parts if part is not None])


def by_hand(student: GradientStudent, windows: np.ndarray) -> np.ndarray:
    """Return the gradient of the mean loss over the tokens of a unit's windows, through autograd.grad."""
    ids = torch.from_numpy(windows.astype(np.int64))
    logits = student._network(ids[:, :-1].clamp(min=0)).float()
    chosen = F.log_softmax(logits, -1).gather(-1, ids[:, 1:, None].clamp(min=0))[..., 0]
    loss = -chosen[ids[:, 1:] >= 0].mean()
    found = torch.autograd.grad(loss, list(student._trained().values()))
    return np.concatenate([part.detach().numpy().ravel() for part in found])


@pytest.mark.parametrize("clip", [0.05, 100.0])
def test_a_step_is_the_mean_of_clipped_gradients(student: GradientStudent, clip: float) -> None:
    units = private_text()
    student._private_step(units, Mechanism(0.0, 1.0, clip, 100), RandomSource.seeded(0))
    found = gradient(student)
    expected = np.zeros_like(gradient(student))
    for unit in range(units.units):
        own = by_hand(student, units.windows[units.starts[unit] : units.starts[unit + 1]])
        expected += own * min(1.0, clip / np.linalg.norm(own)) / units.units
    np.testing.assert_allclose(found, expected, atol=2e-6 * abs(expected).max() + 1e-8, rtol=1e-3)


def test_a_unit_moves_the_sum_by_at_most_the_clip(student: GradientStudent) -> None:
    """With the unit and with it blank, all else equal: what sensitivity means."""
    units = private_text()
    clip = 0.02
    mechanism = Mechanism(0.0, 1.0, clip, 100)
    student._private_step(units, mechanism, RandomSource.seeded(0))
    whole = gradient(student) * units.units
    for unit in (0, units.units - 1):
        rows = np.r_[0 : units.starts[unit], units.starts[unit + 1] : len(units.windows)]
        counts = np.delete(np.diff(units.starts), unit)
        rest = PrivateText(units.windows[rows], np.append(0, np.cumsum(counts)))
        student._private_step(rest, mechanism, RandomSource.seeded(0))
        moved = np.linalg.norm(whole - gradient(student) * rest.units)
        assert 0.5 * clip < moved <= clip * (1 + 1e-4)


def test_noise_is_gaussian_with_the_stated_deviation(student: GradientStudent) -> None:
    """What is added to every coordinate has deviation noise * clip / expected units, and no mean."""
    units = private_text()
    noise = 3.0
    clip = 0.5
    rate = 0.5
    found = []
    for level in (0.0, noise):
        student._private_step(units, Mechanism(level, rate, clip, 4), RandomSource.seeded(8))
        found.append(gradient(student).astype(np.float64))
    added = (found[1] - found[0]) / (noise * clip / (rate * units.units))
    assert stats.kstest(added, "norm").pvalue > ALARM
    assert stats.chi2.sf(np.sum(added**2), added.size) > ALARM
    assert stats.chi2.cdf(np.sum(added**2), added.size) > ALARM


def test_an_empty_step_is_noise_alone(student: GradientStudent) -> None:
    units = private_text()
    losses = student._private_step(units, Mechanism(1.0, 1e-12, 1.0, 4), RandomSource.seeded(0))
    assert losses == []
    assert np.isfinite(gradient(student)).all()
    assert gradient(student).std() > 0
    loss = student.finetune_privately(
        units, Mechanism(0.1, 1e-9, 1.0, 4), steps=2, random=RandomSource.seeded(0), rate=1e-4
    )
    assert np.isfinite(loss)


@pytest.mark.slow
def test_private_training_learns_and_follows_from_its_draws(student: GradientStudent) -> None:
    units = private_text()
    mechanism = Mechanism(0.01, 0.7, 1.0, 8)
    before = student.loss(text(0, 600), 12)[0]
    copy = student.copy()
    for each in (student, copy):
        each.finetune_privately(units, mechanism, steps=25, random=RandomSource.seeded(4))
    assert student.loss(text(0, 600), 12)[0] < before
    assert all(np.array_equal(a, b) for a, b in zip(student.state().values(), copy.state().values(), strict=True))


def test_a_gradient_that_is_not_finite_adds_nothing() -> None:
    total = [torch.zeros(2)]
    for bad in (float("nan"), float("inf")):
        add_clipped(total, [torch.tensor([bad, 1.0])], 1.0)
    assert total[0].tolist() == [0.0, 0.0]
    add_clipped(total, [torch.tensor([3.0, 4.0])], 1.0)
    assert total[0].tolist() == pytest.approx([0.6, 0.8])


def test_a_student_without_gradients_of_units_says_so() -> None:
    ngram = TABLE["ngram"].make(0)
    with pytest.raises(InputError, match="'ngram' has no gradients of single units"):
        ngram.finetune_privately(private_text(), Mechanism(1.0, 0.5, 1.0, 8), steps=1, random=RandomSource.seeded(0))
