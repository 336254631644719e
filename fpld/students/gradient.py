"""Students in PyTorch: training on text, distillation and DP-SGD by AdamW with warm-up and decay.

A minibatch may be computed a few sequences at a time, which holds fewer logits in memory and gives the same gradient.
DP-SGD takes the gradient of one unit at a time, clips its norm over all parameters, and adds noise to the sum.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from itertools import chain
from typing import NamedTuple, Self

import numpy as np

from fpld.errors import InputError, MissingExtraError
from fpld.privacy import Mechanism, PrivateText, RandomSource
from fpld.privacy.sampling import PADDING
from fpld.progress import LoopProgress
from fpld.students.base import Distillation, Predictor, PrivateTraining, Student, TailAverage, tail_mean
from fpld.target import Target
from fpld.validation import check_count, check_sequences

try:
    import torch
    import torch.nn.functional as F  # noqa: N812  # its usual name
    from torch import Tensor, nn
except ImportError as error:
    raise MissingExtraError("a student in PyTorch", "torch") from error

from fpld.students.losses import ModelTeacher, Teacher, has_spare_core, make_teacher, prefetched


class Minibatch(NamedTuple):
    """Sequences of a distillation by their numbers [B], and where windows of the public text begin [B], if any."""

    rows: np.ndarray
    starts: np.ndarray | None


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

    def _rate_factor(self, name: str) -> float:  # noqa: ARG002  # a kind of student may tell parameters apart
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
        """Return the device and the precision, for people to read."""
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
        """Return a predictor of these sequences on the student's device, valid until the student changes."""
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
        rng = np.random.default_rng(seed)
        batch = self.config.batch
        progress = LoopProgress("training", steps, tokens=batch * self.window)

        def step() -> float:
            return self._text_step(tokens, self._draw_starts(tokens, rng, batch), 1.0)

        return self._train(step, progress, rate or self.config.rate)

    def _finetune_privately(self, how: PrivateTraining) -> float:
        text = how.text
        mechanism = how.mechanism
        loss = math.log(self.vocab)

        def step() -> float:
            nonlocal loss
            losses = self._private_step(text, mechanism, how.random)
            # Under Poisson sampling a step may have no unit: it then repeats the last loss.
            loss = float(np.mean(losses)) if losses else loss
            return loss

        windows = mechanism.rate * float(np.minimum(np.diff(text.starts), mechanism.windows).sum())
        progress = LoopProgress("private training", how.steps, tokens=round(windows * self.window))
        return self._train(step, progress, how.rate or self.config.rate)

    def _private_step(self, text: PrivateText, mechanism: Mechanism, random: RandomSource) -> list[float]:
        """Set the gradients to a noisy mean of clipped ones; return the loss of each unit that took part."""
        weights = list(self._trained().values())
        total = [torch.zeros_like(weight) for weight in weights]
        losses = []
        for windows in text.draw(mechanism.rate, mechanism.windows, random):
            for weight in weights:
                weight.grad = None
            losses.append(self._unit_gradient(windows))
            add_clipped(total, [weight.grad for weight in weights], mechanism.clip)
        # Divided by the expected number of units: the actual one would tell who took part.
        expected = mechanism.rate * text.units
        for weight, some in zip(weights, total, strict=True):
            noise = torch.from_numpy(random.normals(some.numel()).astype(np.float32)).view_as(some)
            weight.grad = some.add_(noise.to(some.device), alpha=mechanism.noise * mechanism.clip).div_(expected)
        return losses

    def _unit_gradient(self, windows: np.ndarray) -> float:
        """Add the gradient of the mean cross entropy over the tokens of windows [B, T+1], which may be padded."""
        count = int((windows[:, 1:] != PADDING).sum())
        loss = 0.0
        for start in range(0, len(windows), self.micro):
            ids = self._ids(windows[start : start + self.micro])
            logits = self._network(ids[:, :-1].clamp(min=0)).flatten(0, 1).float()
            nats = F.cross_entropy(logits, ids[:, 1:].flatten(), ignore_index=PADDING, reduction="sum") / count
            nats.backward()  # type: ignore[no-untyped-call]
            loss += float(nats.detach())
        return loss

    def _distill(self, sequences: np.ndarray, target: Target, reference: Student | None, how: Distillation) -> float:
        return self._learn(sequences, make_teacher(target, sequences, reference, self.device), how)

    def _distill_from_models(
        self, sequences: np.ndarray, states: Sequence[Mapping[str, np.ndarray]], shares: np.ndarray, how: Distillation
    ) -> float:
        return self._learn(sequences, ModelTeacher(self.copy(), states, shares, sequences), how)

    def _learn(self, sequences: np.ndarray, teacher: Teacher, how: Distillation) -> float:
        """Take the steps of a distillation; where a core is free, it computes the next targets meanwhile."""
        batch = how.batch or self.config.batch
        minibatches = list(self._minibatches(len(sequences), batch, how))
        upcoming = iter(minibatches)
        blocks = teacher.blocks(rows[part] for rows, _ in minibatches for part in self._parts(batch))
        progress = LoopProgress("distillation", how.steps, tokens=batch * sequences.shape[1])
        with ExitStack() as stack:
            if self.device.type == "cpu" and has_spare_core():
                blocks = stack.enter_context(closing(prefetched(blocks, torch.get_num_threads())))
            lessons = chain.from_iterable(blocks)

            def loss(rows: np.ndarray) -> Tensor:
                lesson = next(lessons)
                return self._target_loss(sequences[rows], lesson.t) - lesson.constant

            def step() -> float:
                rows, starts = next(upcoming)
                value = self._accumulate(lambda part: loss(rows[part]), batch)
                if how.public is None or starts is None:
                    return value
                return value + self._text_step(how.public, starts, how.public_weight)

            return self._train(step, progress, how.rate or self.config.distill_rate, how.average)

    def _minibatches(self, count: int, batch: int, how: Distillation) -> Iterator[Minibatch]:
        """Draw the minibatches of a distillation: every sequence is used once before any is used twice."""
        rng = np.random.default_rng(how.seed)
        order = np.empty(0, np.int64)
        for _ in range(how.steps):
            while len(order) < batch:
                order = np.concatenate([order, rng.permutation(count)])
            starts = None if how.public is None else self._draw_starts(how.public, rng, batch)
            yield Minibatch(order[:batch], starts)
            order = order[batch:]

    def _draw_starts(self, tokens: np.ndarray, rng: np.random.Generator, batch: int) -> np.ndarray:
        """Draw where the windows of a minibatch of text begin."""
        return rng.integers(len(tokens) - self.window, size=batch)

    def _text_step(self, tokens: np.ndarray, starts: np.ndarray, weight: float) -> float:
        """Add the gradient of `weight` times the cross entropy of windows that start at these places [B]."""
        windows = tokens[starts[:, None] + np.arange(self.window + 1)]  # [B, T+1]

        def loss(part: slice) -> Tensor:
            return weight * self._token_loss(self._ids(windows[part]))

        return self._accumulate(loss, len(starts))

    def _accumulate(self, loss: Callable[[slice], Tensor], batch: int) -> float:
        """Sum the gradients of a minibatch of `batch` sequences, `micro` at a time."""
        total = 0.0
        for part in self._parts(batch):
            value: Tensor = loss(part) * ((part.stop - part.start) / batch)
            value.backward()  # type: ignore[no-untyped-call]
            total += float(value.detach())
        return total

    def _parts(self, batch: int) -> list[slice]:
        """Return the parts of a minibatch that are computed at a time."""
        return [slice(start, min(start + self.micro, batch)) for start in range(0, batch, self.micro)]

    def _train(self, step: Callable[[], float], progress: LoopProgress, rate: float, average: float = 0.0) -> float:
        """Take AdamW steps; the optimizer starts anew with each call, so the parameters are all the state."""
        steps = progress.total
        weights = list(self._trained().values())
        groups = [
            {
                "params": [p],
                "scale": self._rate_factor(name),
                "weight_decay": self.config.weight_decay if p.ndim > 1 else 0.0,
            }
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
            progress.add(loss=losses[-1])
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
    pairs = [(some, part.float()) for some, part in zip(total, gradient, strict=True) if part is not None]
    norm = float(torch.stack([part.norm() for _, part in pairs]).double().norm()) if pairs else 0.0
    if math.isfinite(norm):
        scale = min(1.0, clip / norm) if norm > 0 else 0.0
        for some, part in pairs:
            some.add_(part, alpha=scale)


def schedule(step: int, steps: int) -> float:
    """Return the factor of the learning rate: linearly up over the first tenth, then down to a fiftieth."""
    warmup = max(1, steps // 10)
    if step < warmup:
        return (step + 1) / warmup
    return 1.0 - 0.98 * (step + 1 - warmup) / (steps - warmup)


def use_threads(count: int) -> None:
    """Set PyTorch to `count` threads in this process; the bits of a result depend on it."""
    check_count("count", count, 1)
    torch.set_num_threads(count)


def pick_device(device: str) -> torch.device:
    """Return the device by name; "auto" takes a GPU where there is one."""
    if device not in ("auto", "cpu", "cuda"):
        raise InputError(f"device must be 'auto', 'cpu' or 'cuda', got {device!r}")
    available = torch.cuda.is_available()
    if device == "cuda" and not available:
        raise InputError("device must be 'cpu' or 'auto' here, got 'cuda', but PyTorch finds no GPU")
    return torch.device("cuda" if available and device != "cpu" else "cpu")
