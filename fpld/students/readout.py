"""Cross entropy through a large read-out: hidden states to a loss and its gradient, by blocks.

Of the logits [n, V] one block exists, which becomes the gradient in place: no array of a minibatch's logits is kept for
the backward pass, and the block stays where the processor reads it fast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable

CONTEXTS = 128  # whose logits are computed together: fewer make the product slower
_ROWS = 4  # whose logits are worked on together: they stay in the cache


def token_loss(features: Tensor, weight: Tensor, tokens: Tensor) -> Tensor:
    """Return the mean of -log q of the tokens [N] that follow, for hidden states [N, C] and a read-out [V, C]."""

    def finish(logits: Tensor, rows: slice) -> Tensor:
        following = tokens[rows, None]
        chosen = logits.gather(1, following)
        scale = _softmax(logits)
        logits.scatter_add_(1, following, torch.full_like(chosen, -1.0))
        return (scale - chosen).sum()

    return _loss(features, weight, finish)


def target_loss(features: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Return the mean of -sum_v t_v log q_v for targets [N, V], which need not add up to one."""

    def finish(logits: Tensor, rows: slice) -> Tensor:
        t = targets[rows]
        total = t.sum(1, keepdim=True)
        dot = torch.linalg.vecdot(t, logits)
        scale = _softmax(logits)
        logits.mul_(total).sub_(t)
        loss: Tensor = (total * scale).sum() - dot.sum()
        return loss

    return _loss(features, weight, finish)


def _loss(features: Tensor, weight: Tensor, finish: Callable[[Tensor, slice], Tensor]) -> Tensor:
    loss: Tensor = _ReadOut.apply(features, weight, finish)  # type: ignore[no-untyped-call]
    return loss


def _softmax(logits: Tensor) -> Tensor:
    """Turn logits [n, V] into probabilities in place; return the logarithms of their scales, [n, 1]."""
    most = logits.amax(1, keepdim=True)
    total = logits.sub_(most).exp_().sum(1, keepdim=True)
    logits.div_(total)
    return most + total.log()


class _ReadOut(torch.autograd.Function):
    """Compute loss and gradient together: `finish` returns a loss, and turns logits into its gradient in place."""

    @staticmethod
    def forward(ctx: Any, features: Tensor, weight: Tensor, finish: Callable[[Tensor, slice], Tensor]) -> Tensor:
        count, gradient = len(features), torch.empty_like(features)
        own = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None  # the read-out is trained too
        total = torch.zeros((), device=features.device)
        for start in range(0, count, CONTEXTS):
            stop = min(start + CONTEXTS, count)
            logits = torch.mm(features[start:stop], weight.t()).float()
            for first in range(start, stop, _ROWS):
                rows = slice(first, min(first + _ROWS, stop))
                total += finish(logits[rows.start - start : rows.stop - start], rows)
            torch.mm(logits.to(weight.dtype), weight, out=gradient[start:stop])
            if own is not None:
                own.addmm_(logits.t(), features[start:stop])
        ctx.save_for_backward(gradient, own)
        return total / count

    @staticmethod
    def backward(ctx: Any, *outer: Any) -> tuple[Tensor, Tensor | None, None]:
        gradient, own = ctx.saved_tensors
        scale = (outer[0] / len(gradient)).to(gradient.dtype)
        return gradient * scale, None if own is None else own * scale, None
