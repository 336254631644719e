"""DP-SGD in few numbers: directions, what a unit may add, what is added to hide it, and what public text decides."""

from __future__ import annotations

import copy
import math
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from scipy import stats

from fpld.errors import InputError
from fpld.privacy import Mechanism, PrivateText, RandomSource
from fpld.privacy.accounting import SIGNAL_SHARE
from fpld.students.base import PublicText
from fpld.students.configs import MIN_PUBLIC_SEQUENCES
from fpld.students.gradient import GradientStudent
from fpld.students.noisy import UnitGradient, noisy_mean
from fpld.students.subspace import MAX_SIDE, Directions, Subspace, eigen_directions, public_subspace, public_units
from tests.students.test_conformance import TABLE, V, text
from tests.students.test_private import private_text

if TYPE_CHECKING:
    from torch import Tensor

ALARM = 1e-6
PUBLIC = text(5, 64 * 10).reshape(64, 10)
NUMBERS = 300


@pytest.fixture(scope="module", params=["transformer", "huggingface-lora"])
def made(request: pytest.FixtureRequest) -> tuple[GradientStudent, Subspace]:
    student = TABLE[request.param].make(3)
    assert isinstance(student, GradientStudent)
    return student, public_subspace(lambda unit: student._of_unit(unit)[1], PublicText(PUBLIC, NUMBERS), 2)


def gradient_in(student: GradientStudent, subspace: Subspace, windows: np.ndarray) -> UnitGradient:
    loss, parts = student._of_unit(windows)
    return UnitGradient(loss, subspace.coordinates(parts))


def zeros(subspace: Subspace) -> list[Tensor]:
    return [torch.zeros_like(part) for part in subspace.squares.values()]


def random_coordinates(subspace: Subspace) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(len(part), generator=generator) for part in subspace.squares.values()]


def test_coordinates_of_the_tensor_with_some_coordinates_are_those(made: tuple[GradientStudent, Subspace]) -> None:
    student, subspace = made
    assert sum(len(part) for part in subspace.squares.values()) == NUMBERS
    x = random_coordinates(subspace)
    for own, (name, part) in zip(x, subspace.directions.items(), strict=True):
        tensor = part.tensor(own, student._trained()[name])
        assert tensor.shape == student._trained()[name].shape
        assert torch.allclose(part.coordinates(tensor), own, atol=1e-5)
        # Directions are orthonormal, so that the norm of a gradient's coordinates is at most its own.
        assert float(tensor.norm()) == pytest.approx(float(own.norm()), rel=1e-5)


def test_coordinates_of_a_gradient_are_derivatives_of_the_loss(made: tuple[GradientStudent, Subspace]) -> None:
    student = copy.deepcopy(made[0])
    subspace = made[1]
    windows = private_text().windows[:5]
    start = {name: weight.detach().clone() for name, weight in student._trained().items()}
    x = random_coordinates(subspace)
    length = math.sqrt(sum(float(own.square().sum()) for own in x))
    along = [own / length for own in x]
    gradient = gradient_in(student, subspace, windows).parts
    slope = sum(float((own * part).sum()) for own, part in zip(along, gradient, strict=True))
    step = 3e-2
    losses = []
    for sign in (-1, 1):
        subspace.place([sign * step * own for own in along], start, student._trained())
        losses.append(student._unit_gradient(windows))
    assert (losses[1] - losses[0]) / (2 * step) == pytest.approx(slope, rel=0.05, abs=2e-4)


def test_the_trained_numbers_are_those_in_which_public_gradients_are_largest(
    made: tuple[GradientStudent, Subspace],
) -> None:
    student, subspace = made
    every = public_subspace(lambda unit: student._of_unit(unit)[1], PublicText(PUBLIC, student.parameters), 2)
    squares = torch.cat(list(every.squares.values()))
    assert len(squares) == student.parameters
    kept = torch.cat(list(subspace.squares.values()))
    assert float(kept.min()) >= float(squares.sort(descending=True).values[NUMBERS])
    assert float(kept.sum()) == pytest.approx(float(squares.sort(descending=True).values[:NUMBERS].sum()), rel=1e-5)
    # All coordinates are a rotation of the gradient.
    gradient = student._of_unit(PUBLIC[:3])[1]
    whole = math.sqrt(sum(float(part.square().sum()) for part in gradient.values()))
    turned = math.sqrt(sum(float(part.square().sum()) for part in every.coordinates(gradient)))
    assert turned == pytest.approx(whole, rel=1e-4)


def test_a_unit_moves_the_sum_by_at_most_the_clip(made: tuple[GradientStudent, Subspace]) -> None:
    """With the unit and with it blank, all else equal: what sensitivity means."""
    student, subspace = made
    units = private_text()
    clip = 0.02

    def total(part: PrivateText) -> np.ndarray:
        mean = noisy_mean(
            part,
            Mechanism(0.0, 1.0, clip, 100),
            RandomSource.seeded(0),
            lambda windows: gradient_in(student, subspace, windows),
            zeros(subspace),
        )
        sums: np.ndarray = torch.cat(mean.parts).numpy() * part.units
        return sums

    whole = total(units)
    for unit in (0, units.units - 1):
        rows = np.r_[0 : units.starts[unit], units.starts[unit + 1] : len(units.windows)]
        rest = PrivateText(units.windows[rows], np.append(0, np.cumsum(np.delete(np.diff(units.starts), unit))))
        assert 0.5 * clip < np.linalg.norm(whole - total(rest)) <= clip * (1 + 1e-4)


def test_noise_is_gaussian_in_every_number(made: tuple[GradientStudent, Subspace]) -> None:
    student, subspace = made
    units = private_text()
    noise = 3.0
    clip = 0.5
    found = []
    for level in (0.0, noise):
        mean = noisy_mean(
            units,
            Mechanism(level, 1.0, clip, 4),
            RandomSource.seeded(8),
            lambda windows: gradient_in(student, subspace, windows),
            zeros(subspace),
        )
        assert len(mean.losses) == units.units  # at a rate of 1 every unit takes part
        found.append(torch.cat(mean.parts).double().numpy())
    added = (found[1] - found[0]) / (noise * clip / units.units)
    assert stats.kstest(added, "norm").pvalue > ALARM
    assert ALARM < stats.chi2.cdf(np.sum(added**2), added.size) < 1 - ALARM


@pytest.mark.filterwarnings("ignore")  # the library's own
def test_a_step_is_that_of_opacus() -> None:
    """The clipped sum of a linear model with a mean over each unit, and its mean over the units."""
    from opacus import GradSampleModule
    from opacus.optimizers import DPOptimizer

    generator = torch.Generator().manual_seed(2)
    model = torch.nn.Linear(5, 3)
    inputs = torch.randn(8, 5, generator=generator)
    wanted = torch.randn(8, 3, generator=generator)
    clip = 0.8
    library = GradSampleModule(copy.deepcopy(model))
    optimizer = DPOptimizer(
        torch.optim.SGD(library.parameters(), lr=0.0), noise_multiplier=0.0, max_grad_norm=clip, expected_batch_size=8
    )
    ((library(inputs) - wanted) ** 2).sum(1).mean().backward()
    optimizer.pre_step()

    def gradient(windows: np.ndarray) -> UnitGradient:
        row = int(windows[0, 0])
        loss = ((model(inputs[row]) - wanted[row]) ** 2).sum()
        return UnitGradient(float(loss.detach()), torch.autograd.grad(loss, list(model.parameters())))

    units = PrivateText(np.arange(8)[:, None], np.arange(9))
    mean = noisy_mean(units, Mechanism(0.0, 1.0, clip, 1), RandomSource.seeded(0), gradient, list(model.parameters()))
    for ours, weight in zip(mean.parts, library.parameters(), strict=True):
        assert weight.grad is not None
        assert torch.allclose(ours, weight.grad, rtol=1e-4, atol=1e-7)


def test_a_step_is_smaller_where_noise_hides_the_gradient() -> None:
    squares = torch.tensor([1.0, 0.1, 0.01])
    subspace = Subspace({"w": Directions()}, {"w": squares}, tokens=50)
    (free,) = subspace.scales(Mechanism(0.0, 1.0, 10.0, 4), units=100, steps=4)
    assert torch.allclose(free, 1 / (50 * squares))
    # The step of Newton's method times Wiener's factor s / (s + v), for the share s = SIGNAL_SHARE f of the square.
    mechanism = Mechanism(2.0, 1.0, 10.0, 4)
    (some,) = subspace.scales(mechanism, units=1000, steps=4)
    v = (2.0 * 10.0 / 1000) ** 2 / 4
    assert torch.allclose(some, free * SIGNAL_SHARE * squares / (SIGNAL_SHARE * squares + v))
    # Where gradients are clipped to half of their norm the step makes up for it, and for its noise.
    half = Mechanism(2.0, 1.0, subspace.norm / 2, 4)
    (clipped,) = subspace.scales(half, units=1000, steps=4)
    (whole,) = subspace.scales(Mechanism(2.0, 1.0, subspace.norm, 4), units=1000, steps=4)
    assert torch.allclose(clipped, 2 * whole)


@pytest.mark.parametrize("kind", ["transformer", "huggingface-lora"])
def test_training_learns_and_follows_from_its_draws(kind: str) -> None:
    student = TABLE[kind].make(3)
    before = student.state()
    loss = student.loss(text(0, 600), 12)[0]
    other = student.copy()
    for each in (student, other):
        each.finetune_privately(
            private_text(),
            Mechanism(1e-3, 1.0, 1.0, 4),
            steps=4,
            random=RandomSource.seeded(4),
            rate=0.3,
            average=0.5,
            public=PublicText(PUBLIC, NUMBERS),
        )
    assert student.loss(text(0, 600), 12)[0] < loss
    state = student.state()
    assert all(np.array_equal(a, b) for a, b in zip(state.values(), other.state().values(), strict=True))
    assert any(not np.array_equal(state[name], before[name]) for name in state)


def test_too_little_public_text_and_too_many_numbers_are_refused() -> None:
    student = TABLE["transformer"].make(3)
    mechanism = Mechanism(1.0, 1.0, 1.0, 4)
    for public, message in (
        (PublicText(PUBLIC[: MIN_PUBLIC_SEQUENCES - 1], 10), "probe.contexts must make at least 32 sequences"),
        (PublicText(PUBLIC, 10**7), f"privacy.numbers must be at most {student.parameters}"),
        (PublicText(PUBLIC + V, 10), "sequences must hold token ids of 0 to 23"),
    ):
        with pytest.raises(InputError, match=message):
            student.finetune_privately(private_text(), mechanism, steps=1, random=RandomSource.seeded(0), public=public)
    with pytest.raises(InputError, match="average must be a share of the steps"):
        student.finetune_privately(private_text(), mechanism, steps=1, random=RandomSource.seeded(0), average=1.5)
    assert [len(unit) for unit in public_units(PUBLIC, 8)] == [2] * 32


def test_a_matrix_with_a_long_side_stays_as_it_is() -> None:
    generator = torch.Generator().manual_seed(0)
    long = torch.randn(MAX_SIDE + 1, 2, generator=generator)
    assert eigen_directions([{"embedding": long, "inner": long[:3]}]).keys() == {"inner"}
    with pytest.raises(InputError, match=r"privacy\.trained must be 'all'"):
        eigen_directions([{"embedding": long}])
