"""What all students in PyTorch share: minibatches of text, distillation, AdamW with warm-up and decay, devices.

A minibatch may be done a few sequences at a time, which holds fewer logits in memory and gives the same gradient.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Self

import numpy as np

from fpld.errors import InputError, MissingExtraError
from fpld.students.base import Progress, Student, check_count, tail_mean

try:
    import torch
    import torch.nn.functional as F  # noqa: N812  # its usual name
    from torch import Tensor, nn
except ImportError as error:
    raise MissingExtraError("a student in PyTorch", "torch") from error


class GradientStudent(Student):
    """A student that is a network from token ids [B, T] to the logits [B, T, V] of the tokens that follow.

    `_network` and `device` are set by the kind of student; its configuration has `length`, `batch`, `rate`,
    `distill_rate`, `weight_decay` and `clip`. The parameters that take a gradient are the student's state.
    """

    _network: nn.Module
    device: torch.device

    @property
    @abstractmethod
    def micro(self) -> int:
        """Return how many sequences of a minibatch are done at a time."""

    @property
    def window(self) -> int:
        """Return the length of a training window."""
        return int(self.config.length)

    def to(self, device: str) -> Self:
        """Move to a device ("auto", "cpu" or "cuda") in place; a file is always loaded to the CPU."""
        self.device = pick_device(device)
        self._network.to(self.device)
        return self

    def state(self) -> dict[str, np.ndarray]:
        """Return a copy of the parameters that are trained, float32, by name."""
        return {name: weight.detach().cpu().numpy().copy() for name, weight in self._trained().items()}

    def _trained(self) -> dict[str, nn.Parameter]:
        return {name: weight for name, weight in self._network.named_parameters() if weight.requires_grad}

    @torch.no_grad()
    def _set_state(self, state: Mapping[str, np.ndarray]) -> None:
        for name, weight in self._trained().items():
            weight.copy_(torch.tensor(state[name]))

    @torch.inference_mode()
    def _block(self, sequences: np.ndarray) -> np.ndarray:
        out: np.ndarray = self._network(self._ids(sequences)).float().cpu().numpy()
        return out.reshape(-1, self.vocab)

    def _ids(self, ids: np.ndarray) -> Tensor:
        return torch.from_numpy(ids.astype(np.int64)).to(self.device)

    def _finetune(
        self, tokens: np.ndarray, steps: int, seed: int, rate: float | None, progress: Progress | None
    ) -> float:
        rng = np.random.default_rng(seed)
        return self._train(lambda: self._text_step(tokens, rng, 1.0), steps, rate or self.config.rate, progress)

    def _distill(
        self,
        sequences: np.ndarray,
        targets: np.ndarray,
        steps: int,
        seed: int,
        rate: float | None,
        public: np.ndarray | None,
        public_weight: float,
        progress: Progress | None,
    ) -> float:
        rng, batch = np.random.default_rng(seed), self.config.batch
        order = np.empty(0, np.int64)
        soft = Targets(targets, self.device)

        def divergence(rows: np.ndarray) -> Tensor:
            return self._divergence(sequences[rows], *soft.take(rows))

        def step() -> float:
            nonlocal order
            while len(order) < batch:  # every sequence once before any twice
                order = np.concatenate([order, rng.permutation(len(sequences))])
            chosen, order = order[:batch], order[batch:]
            value = self._accumulate(lambda part: divergence(chosen[part]))
            return value if public is None else value + self._text_step(public, rng, public_weight)

        return self._train(step, steps, rate or self.config.distill_rate, progress)

    def _text_step(self, tokens: np.ndarray, rng: np.random.Generator, weight: float) -> float:
        """Add the gradient of `weight` times the cross entropy of windows that start at random places."""
        starts = rng.integers(len(tokens) - self.window, size=self.config.batch)
        windows = tokens[starts[:, None] + np.arange(self.window + 1)]  # [B, T+1]

        def loss(part: slice) -> Tensor:
            ids = self._ids(windows[part])
            logits = self._network(ids[:, :-1]).flatten(0, 1).float()
            return weight * F.cross_entropy(logits, ids[:, 1:].flatten())

        return self._accumulate(loss)

    def _divergence(self, sequences: np.ndarray, p: Tensor, entropy: float) -> Tensor:
        """Return the mean over contexts of KL(p || student), with probabilities p [B, T, V] and their mean entropy."""
        log_q = F.log_softmax(self._network(self._ids(sequences)).float(), dim=-1)
        return -(p * log_q).sum() / sequences.size - entropy

    def _accumulate(self, loss: Callable[[slice], Tensor]) -> float:
        """Sum the gradients of a minibatch, `micro` sequences at a time."""
        batch, total = self.config.batch, 0.0
        for start in range(0, batch, self.micro):
            part = slice(start, min(start + self.micro, batch))
            value: Tensor = loss(part) * ((part.stop - part.start) / batch)
            value.backward()  # type: ignore[no-untyped-call]
            total += float(value.detach())
        return total

    def _train(self, step: Callable[[], float], steps: int, rate: float, progress: Progress | None) -> float:
        """Take AdamW steps; the optimizer starts anew with each call, so the parameters are all the state."""
        weights = list(self._trained().values())
        groups = [
            {"params": [p for p in weights if p.ndim > 1], "weight_decay": self.config.weight_decay},
            {"params": [p for p in weights if p.ndim <= 1], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.98), fused=True)
        losses = []
        for index in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = rate * schedule(index, steps)
            optimizer.zero_grad()
            losses.append(step())
            nn.utils.clip_grad_norm_(weights, self.config.clip)
            optimizer.step()
            if progress is not None:
                progress(index + 1, steps, losses[-1])
        return tail_mean(losses)


class Targets:
    """Target logits [S, T, V] as probabilities; what a softmax sums over a context is summed once and kept."""

    def __init__(self, logits: np.ndarray, device: torch.device) -> None:
        self._logits, self._device = logits, device
        self._scale = np.full(logits.shape[:2], np.nan, np.float32)  # log of the sum of exponentials
        self._entropy = np.empty(logits.shape[:2], np.float32)

    @torch.no_grad()
    def take(self, rows: np.ndarray) -> tuple[Tensor, float]:
        """Return the probabilities of some sequences, and their mean entropy over contexts."""
        logits = torch.from_numpy(self._logits[rows]).to(self._device)
        new = np.isnan(self._scale[rows]).any()
        if new:
            self._scale[rows] = logits.logsumexp(dim=-1).cpu().numpy()
        log_p = logits - torch.from_numpy(self._scale[rows]).to(self._device)[..., None]
        p = log_p.exp()
        if new:
            self._entropy[rows] = -(p * log_p).sum(dim=-1).cpu().numpy()
        return p, float(self._entropy[rows].mean())


def schedule(step: int, steps: int) -> float:
    """Return the factor of the learning rate: up over the first tenth, then linearly down to a fiftieth."""
    warmup = max(1, steps // 10)
    if step < warmup:
        return (step + 1) / warmup
    return 1.0 - 0.98 * (step + 1 - warmup) / (steps - warmup)


def use_threads(count: int) -> None:
    """Let PyTorch use `count` threads in this process; one per node is fastest, and bits depend on it."""
    check_count("count", count, 1)
    torch.set_num_threads(count)


def pick_device(device: str) -> torch.device:
    """Return the device by name; "auto" takes a GPU where there is one."""
    if device not in ("auto", "cpu", "cuda"):
        raise InputError(f"device must be 'auto', 'cpu' or 'cuda', got {device!r}")
    there = torch.cuda.is_available()
    if device == "cuda" and not there:
        raise InputError("device must be 'cpu' or 'auto' here, got 'cuda', but PyTorch finds no GPU")
    return torch.device("cuda" if there and device != "cpu" else "cpu")
