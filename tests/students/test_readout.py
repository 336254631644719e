"""Losses through a frozen read-out: value and gradient are those of PyTorch's own functions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from torch import Generator, Tensor

torch = pytest.importorskip("torch")

from torch.nn import functional  # noqa: E402

from fpld.students import readout  # noqa: E402

N, C, V = 11, 6, 19


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readout, "CONTEXTS", 5)
    monkeypatch.setattr(readout, "_ROWS", 2)


def draw() -> tuple[Tensor, Tensor, Generator]:
    generator = torch.Generator().manual_seed(3)
    features = torch.randn(N, C, generator=generator, requires_grad=True)
    return features, torch.randn(V, C, generator=generator), generator


def check(features: Tensor, own: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(own, expected)
    gradients = [torch.autograd.grad(3.0 * loss, features)[0] for loss in (own, expected)]
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-5, atol=1e-6)


def test_the_loss_of_tokens_is_their_cross_entropy() -> None:
    features, weight, generator = draw()
    tokens = torch.randint(0, V, (N,), generator=generator)
    own = readout.token_loss(features, weight, tokens)
    check(features, own, functional.cross_entropy(features @ weight.T, tokens))


def test_the_loss_to_targets_is_linear_in_them() -> None:
    features, weight, generator = draw()
    targets = torch.randn(N, V, generator=generator)  # negative ones too, and of any sum
    own = readout.target_loss(features, weight, targets.clone())
    check(features, own, -(targets * functional.log_softmax(features @ weight.T, -1)).sum() / N)


def test_large_logits_do_not_overflow() -> None:
    features, weight, _ = draw()
    own = readout.token_loss(features, 1e3 * weight, torch.zeros(N, dtype=torch.int64))
    assert own.isfinite()
    assert torch.autograd.grad(own, features)[0].isfinite().all()
