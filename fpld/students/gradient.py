"""What all students in PyTorch share: minibatches of text, distillation, AdamW with warm-up and decay, devices.

A minibatch may be done a few sequences at a time, which holds fewer logits in memory and gives the same gradient.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Self

import numpy as np

from fpld.errors import InputError, MissingExtraError
from fpld.pace import Pace
from fpld.privacy import Chance, Mechanism, PrivateText
from fpld.privacy.text import PADDING
from fpld.rules.target import Target
from fpld.students.base import Distillation, PrivateTraining, Student
from fpld.students.checks import check_count, check_sequences
from fpld.students.predictor import Predictor
from fpld.students.tails import TailAverage, tail_mean

try:
    import torch
    import torch.nn.functional as F  # noqa: N812  # its usual name
    from torch import Tensor, nn
except ImportError as error:
    raise MissingExtraError("a student in PyTorch", "torch") from error

from fpld.students.teachers import make_teacher


class GradientStudent(Student):
    """A student that is a network from token ids [B, T] to the logits [B, T, V] of the tokens that follow.

    `_network` and `device` are set by the kind of student; its configuration has `length`, `batch`, `rate`,
    `distill_rate`, `weight_decay` and `clip`. The parameters that take a gradient are the student's state.
    """

    private = True
    _network: nn.Module
    device: torch.device

    @property
    @abstractmethod
    def micro(self) -> int:
        """Return how many sequences of a minibatch are done at a time."""

    def _rate(self, name: str) -> float:  # noqa: ARG002  # a kind of student may tell parameters apart
        """Return the factor of a parameter's learning rate."""
        return 1.0

    @property
    def window(self) -> int:
        """Return the length of a training window."""
        return int(self.config.length)

    def to(self, device: str) -> Self:
        """Move to a device ("auto", "cpu" or "cuda") in place; a file is always loaded to the CPU."""
        self.device = pick_device(device)
        self._network.to(self.device)
        return self

    @property
    def place(self) -> str:
        """Return where and in which precision it is computed, for a person."""
        return f"on {self.device.type} in {getattr(self.config, 'dtype', 'float32')}"

    def copy(self) -> Self:
        """Return a student with the same parameters, on the same device, that shares none of them."""
        return super().copy().to(self.device.type)

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
        return as_rows(self.predict(sequences))

    def _ids(self, ids: np.ndarray) -> Tensor:
        return torch.from_numpy(ids.astype(np.int64)).to(self.device)

    def predictor(self, sequences: np.ndarray) -> Predictor:
        """Return what predicts these sequences as long as the student stays as it is, on its device."""
        return TensorPredictor(self, check_sequences(sequences, self.vocab, self.longest))

    def predict(self, sequences: np.ndarray) -> Tensor:
        """Return the logits [B, T, V] of the tokens that follow, on the student's device."""
        out: Tensor = self._network(self._ids(sequences)).float()
        return out

    def _token_loss(self, ids: Tensor) -> Tensor:
        """Return the mean cross entropy of windows [B, T+1]."""
        return F.cross_entropy(self._network(ids[:, :-1]).flatten(0, 1).float(), ids[:, 1:].flatten())

    def _target_loss(self, sequences: np.ndarray, t: Tensor) -> Tensor:
        """Return the mean cross entropy of sequences [B, T] to targets [B, T, V]."""
        return -(t * F.log_softmax(self.predict(sequences), dim=-1)).sum() / sequences.size

    def _finetune(self, tokens: np.ndarray, steps: int, seed: int, rate: float | None) -> float:
        rng, batch = np.random.default_rng(seed), self.config.batch
        pace = Pace("training", steps, tokens=batch * self.window)
        return self._train(lambda: self._text_step(tokens, rng, batch, 1.0), pace, rate or self.config.rate)

    def _finetune_privately(self, how: PrivateTraining) -> float:
        text, mechanism, loss = how.text, how.mechanism, math.log(self.vocab)

        def step() -> float:
            nonlocal loss
            losses = self._private_step(text, mechanism, how.chance)
            loss = float(np.mean(losses)) if losses else loss  # no unit may take part in a step
            return loss

        windows = mechanism.rate * float(np.minimum(np.diff(text.starts), mechanism.windows).sum())
        pace = Pace("private training", how.steps, tokens=round(windows * self.window))
        return self._train(step, pace, how.rate or self.config.rate)

    def _private_step(self, text: PrivateText, mechanism: Mechanism, chance: Chance) -> list[float]:
        """Set the gradients to a noisy mean of clipped ones; return the loss of each unit that took part."""
        weights = list(self._trained().values())
        total = [torch.zeros_like(weight) for weight in weights]
        losses = []
        for windows in text.draw(mechanism.rate, mechanism.windows, chance):
            for weight in weights:
                weight.grad = None
            losses.append(self._unit_gradient(windows))
            add_clipped(total, [weight.grad for weight in weights], mechanism.clip)
        expected = mechanism.rate * text.units  # not the number that took part, which would tell who did
        for weight, some in zip(weights, total, strict=True):
            noise = torch.from_numpy(chance.normals(some.numel()).astype(np.float32)).view_as(some)
            weight.grad = some.add_(noise.to(some.device), alpha=mechanism.noise * mechanism.clip).div_(expected)
        return losses

    def _unit_gradient(self, windows: np.ndarray) -> float:
        """Add the gradient of the mean cross entropy over the tokens of windows [B, T+1], which may be filled up."""
        count, loss = int((windows[:, 1:] != PADDING).sum()), 0.0
        for start in range(0, len(windows), self.micro):
            ids = self._ids(windows[start : start + self.micro])
            logits = self._network(ids[:, :-1].clamp(min=0)).flatten(0, 1).float()
            nats = F.cross_entropy(logits, ids[:, 1:].flatten(), ignore_index=PADDING, reduction="sum") / count
            nats.backward()  # type: ignore[no-untyped-call]
            loss += float(nats.detach())
        return loss

    def _distill(self, sequences: np.ndarray, target: Target, reference: Student | None, how: Distillation) -> float:
        rng, batch = np.random.default_rng(how.seed), how.batch or self.config.batch
        order = np.empty(0, np.int64)
        teacher = make_teacher(target, sequences, reference, self.device)

        def loss(rows: np.ndarray) -> Tensor:
            t, constant = teacher.take(rows)
            return self._target_loss(sequences[rows], t) - constant

        def step() -> float:
            nonlocal order
            while len(order) < batch:  # every sequence once before any twice
                order = np.concatenate([order, rng.permutation(len(sequences))])
            chosen, order = order[:batch], order[batch:]
            value = self._accumulate(lambda part: loss(chosen[part]), batch)
            return value if how.public is None else value + self._text_step(how.public, rng, batch, how.public_weight)

        pace = Pace("distillation", how.steps, tokens=batch * sequences.shape[1])
        return self._train(step, pace, how.rate or self.config.distill_rate, how.average)

    def _text_step(self, tokens: np.ndarray, rng: np.random.Generator, batch: int, weight: float) -> float:
        """Add the gradient of `weight` times the cross entropy of windows that start at random places."""
        starts = rng.integers(len(tokens) - self.window, size=batch)
        windows = tokens[starts[:, None] + np.arange(self.window + 1)]  # [B, T+1]

        def loss(part: slice) -> Tensor:
            return weight * self._token_loss(self._ids(windows[part]))

        return self._accumulate(loss, batch)

    def _accumulate(self, loss: Callable[[slice], Tensor], batch: int) -> float:
        """Sum the gradients of a minibatch of `batch` sequences, `micro` at a time."""
        total = 0.0
        for start in range(0, batch, self.micro):
            part = slice(start, min(start + self.micro, batch))
            value: Tensor = loss(part) * ((part.stop - part.start) / batch)
            value.backward()  # type: ignore[no-untyped-call]
            total += float(value.detach())
        return total

    def _train(self, step: Callable[[], float], pace: Pace, rate: float, average: float = 0.0) -> float:
        """Take AdamW steps; the optimizer starts anew with each call, so the parameters are all the state."""
        steps = pace.total
        weights = list(self._trained().values())
        groups = [
            {"params": [p], "scale": self._rate(name), "weight_decay": self.config.weight_decay if p.ndim > 1 else 0.0}
            for name, p in self._trained().items()
        ]
        optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.98), fused=True)
        tail = TailAverage([weight.detach() for weight in weights], steps, average)
        losses = []
        for index in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = rate * group["scale"] * schedule(index, steps)
            optimizer.zero_grad()
            losses.append(step())
            nn.utils.clip_grad_norm_(weights, self.config.clip)
            optimizer.step()
            tail.add(index)
            pace.add(loss=losses[-1])
        tail.finish()
        return tail_mean(losses)


class TensorPredictor(Predictor):
    """Predict with a student in PyTorch."""

    student: GradientStudent

    @torch.no_grad()
    def tensor(self, rows: np.ndarray) -> Tensor:
        """Return the logits [B, T, V] of some sequences, on the student's device."""
        return self.student.predict(self.sequences[rows])

    def logits(self, rows: np.ndarray) -> np.ndarray:
        """Return the logits [B*T, V] of some sequences."""
        return as_rows(self.tensor(rows))


def as_rows(logits: Tensor) -> np.ndarray:
    """Return logits [B, T, V] as [B*T, V]."""
    rows: np.ndarray = logits.flatten(0, 1).cpu().numpy()
    return rows


def add_clipped(total: list[Tensor], gradient: list[Tensor | None], clip: float) -> None:
    """Add a unit's gradient to a sum, scaled so that its norm over all parameters is at most `clip`.

    A gradient that is not finite adds nothing.
    """
    known = [(some, part.float()) for some, part in zip(total, gradient, strict=True) if part is not None]
    norm = float(torch.stack([part.norm() for _, part in known]).double().norm()) if known else 0.0
    if math.isfinite(norm):
        scale = min(1.0, clip / norm) if norm > 0 else 0.0
        for some, part in known:
            some.add_(part, alpha=scale)


def schedule(step: int, steps: int) -> float:
    """Return the factor of the learning rate: up over the first tenth, then linearly down to a fiftieth."""
    warmup = max(1, steps // 10)
    if step < warmup:
        return (step + 1) / warmup
    return 1.0 - 0.98 * (step + 1 - warmup) / (steps - warmup)


def use_threads(count: int) -> None:
    """Set PyTorch to `count` threads in this process; one per node is fastest, and bits depend on it."""
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
