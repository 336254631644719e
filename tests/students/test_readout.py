"""Losses through a read-out, by blocks: value and gradient are those of PyTorch's own functions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

if TYPE_CHECKING:
    from torch import Generator, Tensor

torch = pytest.importorskip("torch")

from torch.nn import functional  # noqa: E402

from fpld.students import losses as readout  # noqa: E402
from fpld.students import transformer  # noqa: E402
from fpld.students.configs import TransformerConfig  # noqa: E402

N = 11
C = 6
V = 19
CONFIG = TransformerConfig(vocab=40, width=16, heads=2, layers=1, length=8, batch=4)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readout, "BLOCK_CONTEXTS", 5)
    monkeypatch.setattr(readout, "_CACHED_CONTEXTS", 2)


def draw() -> tuple[Tensor, Tensor, Generator]:
    generator = torch.Generator().manual_seed(3)
    features = torch.randn(N, C, generator=generator, requires_grad=True)
    return features, torch.randn(V, C, generator=generator), generator


def check(wanted: list[Tensor], own: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(own, expected)
    gradients = [torch.autograd.grad(3.0 * loss, wanted) for loss in (own, expected)]
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-5, atol=1e-6)


trained_or_not = pytest.mark.parametrize("trained", [False, True])


@trained_or_not
def test_the_loss_of_tokens_is_their_cross_entropy(trained: bool) -> None:
    features, weight, generator = draw()
    wanted = [features, weight.requires_grad_()] if trained else [features]
    tokens = torch.randint(0, V, (N,), generator=generator)
    own = readout.token_loss(features, weight, tokens)
    check(wanted, own, functional.cross_entropy(features @ weight.T, tokens))


@trained_or_not
def test_the_loss_to_targets_is_linear_in_them(trained: bool) -> None:
    features, weight, generator = draw()
    wanted = [features, weight.requires_grad_()] if trained else [features]
    targets = torch.randn(N, V, generator=generator)  # negative ones too, and of any sum
    own = readout.target_loss(features, weight, targets.clone())
    check(wanted, own, -(targets * functional.log_softmax(features @ weight.T, -1)).sum() / N)


def test_large_logits_do_not_overflow() -> None:
    features, weight, _ = draw()
    own = readout.token_loss(features, 1e3 * weight, torch.zeros(N, dtype=torch.int64))
    assert own.isfinite()
    assert torch.autograd.grad(own, features)[0].isfinite().all()


def test_a_transformer_learns_the_same_with_losses_by_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = np.random.default_rng(0).integers(0, 40, 400).astype(np.int32)
    sequences = tokens[:32].reshape(4, 8)
    states = []
    losses = []
    for large in (41, 40):
        monkeypatch.setattr(transformer, "LARGE_VOCAB", large)
        student = transformer.Transformer(CONFIG, seed=0)
        student.finetune(tokens, steps=5, seed=1)
        states.append(student.state())
        losses.append(float(student._target_loss(sequences, torch.full((4, 8, 40), 1 / 40)).detach()))
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    for name, value in states[0].items():
        np.testing.assert_allclose(states[1][name], value, rtol=0, atol=1e-3)
