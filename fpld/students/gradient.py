"""Students in PyTorch: training on text, distillation and DP-SGD by AdamW with warm-up and decay.

A minibatch may be computed a few sequences at a time, which holds fewer logits in memory and gives the same gradient.
The steps of training may be in bfloat16 or float16 over weights in float32 (autocast); predictions never are.
DP-SGD takes a noisy mean of the clipped gradients of units, of all parameters or in few numbers of them
(`fpld.students.subspace`), in float32 always.
"""

import logging
import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from itertools import chain
from typing import Any, NamedTuple, Self

import numpy as np

from fpld.data.token_stream import draw_places, read_ids
from fpld.errors import MissingExtraError, ParameterError
from fpld.privacy import Mechanism, PrivateText, RandomSource
from fpld.privacy.sampling import PADDING
from fpld.progress import LoopProgress
from fpld.students.base import Distillation, Predictor, PrivateTraining, PublicText, Student, TailAverage, tail_mean
from fpld.students.configs import Compute
from fpld.target import Target
from fpld.validation import check_sequences

try:
    import torch
    import torch.nn.functional as F  # noqa: N812  # its usual name
    from torch import Tensor, nn
except ImportError as error:
    raise MissingExtraError("a student in PyTorch", "torch") from error

from fpld.students.devices import largest_that_fits, pick_device, pick_precision
from fpld.students.losses import ModelTeacher, Teacher, has_spare_core, make_teacher, prefetched
from fpld.students.noisy import UnitGradient, noisy_mean
from fpld.students.processes import Group, train_together, whole
from fpld.students.subspace import NEWTON_SHARE, public_subspace

log = logging.getLogger(__name__)


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
    has_devices = True
    _network: nn.Module
    device: torch.device
    _compute = Compute(dtype="float32")
    _fitting: int | None = None  # sequences at a time that fit into memory, where they were tried
    _scaler: torch.amp.GradScaler  # of the training that runs
    _group = Group()  # of processes that train the student together
    _sharded = False  # whether each of them holds only a share of the weights

    @property
    @abstractmethod
    def micro(self) -> int:
        """Return how many sequences of a minibatch are done at a time, where the machine's `Compute` does not say."""

    @property
    def at_once(self) -> int:
        """Return how many sequences of a minibatch are done at a time."""
        if self._compute.at_once == "auto":
            return self._fitting or self.config.batch
        return self._compute.at_once or self.micro

    @property
    def precision(self) -> torch.dtype:
        """Return the precision of the steps of training."""
        return pick_precision(self._compute.dtype, self.device)

    def compute_with(self, compute: Compute) -> Self:
        """Train with a machine's precision, memory, processes and number of sequences at a time; in place."""
        self._compute = compute
        if compute.sharded:
            self._check_sharding(compute)
        if compute.memory is not None and self.device.type == "cuda":
            total = torch.cuda.get_device_properties(self.device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(compute.memory / total, 1.0), self.device)
        return self

    def _check_sharding(self, compute: Compute) -> None:  # noqa: ARG002  # for kinds that can
        """Raise ParameterError if processes cannot divide the weights among themselves."""
        raise ParameterError("shard", f"must be false for a student of kind {self.kind!r}: each process has all of it")

    def join(self, group: Group, device: torch.device, *, shard: bool) -> Self:
        """Be one of the processes that train a student together; in place. `shard`: hold a share of the weights."""
        self._group = group
        if shard:
            self._shard(device)
            self._sharded = True
            self.device = device
            return self
        return self.to(device.type)

    def _shard(self, device: torch.device) -> None:
        """Leave a share of the weights to this process."""
        raise NotImplementedError

    def _rate_factor(self, name: str) -> float:  # noqa: ARG002  # a kind of student may tell parameters apart
        """Return the factor of a parameter's learning rate."""
        return 1.0

    @property
    def window(self) -> int:
        """Return the length of a training window."""
        return int(self.config.length)

    def to(self, device: str) -> Self:
        """Move to a device ("auto", "cpu", "cuda" or "mps") in place; a file is always loaded to the CPU."""
        self.device = pick_device(device)
        self._network.to(self.device)
        return self

    @property
    def place(self) -> str:
        """Return the device and the precision, for people to read."""
        weights = getattr(self.config, "dtype", "float32")
        steps = str(self.precision).removeprefix("torch.")
        mixed = f", trained in {steps}" if self.precision != torch.float32 else ""
        return f"on {self.device.type} in {weights}{mixed}"

    def copy(self) -> Self:
        """Return a student with the same parameters, on the same device, that shares none of them."""
        return super().copy().to(self.device.type).compute_with(self._compute)

    def state(self) -> dict[str, np.ndarray]:
        """Return a copy of the parameters that are trained, float32, by name."""
        return {name: whole(weight.detach()).cpu().numpy().copy() for name, weight in self._trained().items()}

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

    def read_out_parts(self, sequences: np.ndarray) -> tuple[Tensor, Tensor | None]:
        """Return the last hidden states [B, T, C] of sequences and the read-out [V, C] that makes logits of them.

        Where a model is not such, return its logits [B, T, V], and None.
        """
        return self.predict(sequences), None

    def _token_loss(self, ids: Tensor, learnt: Tensor | None = None) -> Tensor:
        """Return the mean cross entropy of windows [B, T+1]: of all tokens, or of those that are learnt [B*T]."""
        logits, following = some_tokens(self._network(ids[:, :-1]), ids, learnt)
        return F.cross_entropy(logits.float(), following)

    def _target_loss(self, sequences: np.ndarray, t: Tensor) -> Tensor:
        """Return the mean cross entropy of sequences [B, T] to targets [B, T, V]."""
        return -(t * F.log_softmax(self.predict(sequences), dim=-1)).sum() / sequences.size

    def curvature(self, sequences: np.ndarray) -> dict[str, float]:
        """Return the mean empirical Fisher information of each trained tensor, by the gradient of each sequence."""
        windows = check_sequences(sequences, self.vocab, self.longest)
        weights = self._trained()
        found = dict.fromkeys(weights, 0.0)
        for window in windows:
            loss = self._token_loss(self._ids(window[None]))
            gradients = torch.autograd.grad(loss, list(weights.values()), allow_unused=True)
            for name, gradient in zip(weights, gradients, strict=True):
                if gradient is not None:
                    found[name] += float(gradient.float().square().mean()) / len(windows)
        return found

    def _finetune(self, tokens: np.ndarray, steps: int, seed: int, rate: float | None) -> float:
        if self.in_processes:
            return self.train_in_processes(self, "_finetune", (tokens, steps, seed, rate), self.config.batch)
        rng = np.random.default_rng(seed)
        batch = self.config.batch
        self._fit_memory(batch, self._token_trial)
        progress = LoopProgress("training", steps, tokens=batch * self.window)

        def step() -> float:
            return self._text_step(tokens, self._draw_starts(tokens, rng, batch), 1.0)

        return self._train(step, progress, rate or self.config.rate)

    def _finetune_privately(self, how: PrivateTraining) -> float:
        windows = how.mechanism.rate * float(np.minimum(np.diff(how.text.starts), how.mechanism.windows).sum())
        progress = LoopProgress("private training", how.steps, tokens=round(windows * self.window))
        if how.public is not None:
            return self._train_in_subspace(how, how.public, progress)
        loss = math.log(self.vocab)

        def step() -> float:
            nonlocal loss
            losses = self._private_step(how.text, how.mechanism, how.random)
            # Under Poisson sampling a step may have no unit: it then repeats the last loss.
            loss = float(np.mean(losses)) if losses else loss
            return loss

        return self._train(step, progress, how.rate or self.config.rate, how.average, mixed=False)

    def _private_step(self, text: PrivateText, mechanism: Mechanism, random: RandomSource) -> list[float]:
        """Set the gradients to a noisy mean of clipped ones; return the loss of each unit that took part."""
        weights = list(self._trained().values())

        def gradient(windows: np.ndarray) -> UnitGradient:
            loss, gradients = self._of_unit(windows)
            return UnitGradient(loss, list(gradients.values()))

        mean = noisy_mean(text, mechanism, random, gradient, weights)
        for weight, part in zip(weights, mean.parts, strict=True):
            weight.grad = part.to(weight.dtype)
        return mean.losses

    def _train_in_subspace(self, how: PrivateTraining, public: PublicText, progress: LoopProgress) -> float:
        """Take steps of DP-SGD in the numbers that public text chooses, from the parameters as they are."""
        weights = self._trained()
        start = {name: weight.detach().clone() for name, weight in weights.items()}
        subspace = public_subspace(lambda windows: self._of_unit(windows)[1], public, how.mechanism.windows)
        scales = subspace.scales(how.mechanism, how.text.units, how.steps)
        x = [torch.zeros_like(scale) for scale in scales]
        tail = TailAverage(x, how.steps, how.average)
        losses = []

        def gradient(windows: np.ndarray) -> UnitGradient:
            loss, gradients = self._of_unit(windows)
            return UnitGradient(loss, subspace.coordinates(gradients))

        for index in range(how.steps):
            mean = noisy_mean(how.text, how.mechanism, how.random, gradient, x)
            for own, part, scale in zip(x, mean.parts, scales, strict=True):
                own.sub_(part * scale, alpha=how.rate or NEWTON_SHARE)
            subspace.place(x, start, weights)
            tail.add(index)
            losses.append(float(np.mean(mean.losses)) if mean.losses else math.log(self.vocab))
            progress.add(loss=losses[-1])
        tail.finish()
        subspace.place(x, start, weights)
        return tail_mean(losses)

    def _of_unit(self, windows: np.ndarray) -> tuple[float, dict[str, Tensor]]:
        """Return the mean loss over the tokens of a unit's windows, and its gradient by tensor."""
        weights = self._trained()
        for weight in weights.values():
            weight.grad = None
        loss = self._unit_gradient(windows)
        return loss, {name: torch.zeros_like(w) if w.grad is None else w.grad for name, w in weights.items()}

    def _unit_gradient(self, windows: np.ndarray) -> float:
        """Add the gradient of the mean cross entropy over the tokens of windows [B, T+1], which may be padded."""
        count = max(int((windows[:, 1:] >= 0).sum()), 1)  # without padding, and what is only read
        loss = 0.0
        for start in range(0, len(windows), self.at_once):
            some = windows[start : start + self.at_once]
            following = self._ids(some[:, 1:]).clamp(min=PADDING).flatten()
            logits = self._network(self._ids(read_ids(some[:, :-1]))).flatten(0, 1).float()
            nats = F.cross_entropy(logits, following, ignore_index=PADDING, reduction="sum") / count
            nats.backward()  # type: ignore[no-untyped-call]
            loss += float(nats.detach())
        return loss

    def train_in_processes(self, student: Student, method: str, arguments: tuple[Any, ...], batch: int | None) -> float:
        """Run a training of this student, or of one that is made of it, in several processes."""
        device = pick_device(self._compute.device) if self._compute.sharded else self.device
        return train_together(student, method, arguments, batch or self.config.batch, self._compute, device)

    @property
    def in_processes(self) -> bool:
        """Return whether trainings run in several processes, of which this is none."""
        return self._compute.processes > 1

    def _distill(self, sequences: np.ndarray, target: Target, reference: Student | None, how: Distillation) -> float:
        if self.in_processes:
            return self.train_in_processes(self, "_distill", (sequences, target, reference, how), how.batch)
        return self.learn(
            sequences, make_teacher(target, sequences, reference, self.device), how, self._target_loss, self.vocab
        )

    def _distill_from_models(
        self, sequences: np.ndarray, states: Sequence[Mapping[str, np.ndarray]], shares: np.ndarray, how: Distillation
    ) -> float:
        if self.in_processes:
            if self._compute.shard:
                raise ParameterError("shard", "must be false where a student learns from models: each is held whole")
            arguments = (sequences, states, shares, how)
            return self.train_in_processes(self, "_distill_from_models", arguments, how.batch)
        teacher = ModelTeacher(self.copy(), states, shares, sequences)
        return self.learn(sequences, teacher, how, self._target_loss, self.vocab)

    def learn(
        self,
        sequences: np.ndarray,
        teacher: Teacher,
        how: Distillation,
        target_loss: Callable[[np.ndarray, Tensor], Tensor],
        width: int,
    ) -> float:
        """Take the steps of a distillation; where a core is free, it computes the next targets meanwhile.

        `target_loss` returns the mean cross entropy of some sequences to their targets [B, T, width].
        """
        batch = how.batch or self.config.batch
        self._fit_memory(batch, lambda count: self._target_trial(count, sequences, target_loss, width))
        minibatches = list(self._minibatches(len(sequences), batch, how))
        upcoming = iter(minibatches)
        blocks = teacher.blocks(rows[part] for rows, _ in minibatches for part in self._parts(batch))
        progress = LoopProgress("distillation", how.steps, tokens=batch * sequences.shape[1])
        with ExitStack() as stack:
            # With shares of the weights a prediction is a work of all processes, in one order.
            if self.device.type == "cpu" and has_spare_core() and not self._sharded:
                blocks = stack.enter_context(closing(prefetched(blocks, torch.get_num_threads())))
            lessons = chain.from_iterable(blocks)

            def loss(rows: np.ndarray) -> Tensor:
                lesson = next(lessons)  # in float32, outside of the autocast
                with self._autocast():
                    return target_loss(sequences[rows], lesson.t) - lesson.constant

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
        return draw_places(
            tokens, lambda count: rng.integers(len(tokens) - self.window, size=count), batch, self.window + 1
        )

    def _text_step(self, tokens: np.ndarray, starts: np.ndarray, weight: float) -> float:
        """Add the gradient of `weight` times the cross entropy of windows that start at these places [B]."""
        windows = tokens[starts[:, None] + np.arange(self.window + 1)]  # [B, T+1]
        if windows.min() < 0:
            return self._answers_step(windows, weight)

        def loss(part: slice) -> Tensor:
            with self._autocast():
                return weight * self._token_loss(self._ids(windows[part]))

        return self._accumulate(loss, len(starts))

    def _answers_step(self, windows: np.ndarray, weight: float) -> float:
        """Do as `_text_step` for windows in which some tokens are only read: the mean is over the others."""
        ids = read_ids(windows)
        learnt = windows[:, 1:] >= 0
        mean = learnt.sum() / len(windows)

        def loss(part: slice) -> Tensor:
            # The mean over a part becomes its share of the minibatch's mean, whatever the number of its answers.
            share = float(learnt[part].sum() / (mean * len(learnt[part])))
            chosen = torch.from_numpy(learnt[part].ravel()).to(self.device)
            with self._autocast():
                return weight * share * self._token_loss(self._ids(ids[part]), chosen)

        return self._accumulate(loss, len(windows))

    def _accumulate(self, loss: Callable[[slice], Tensor], batch: int) -> float:
        """Sum the gradients of a minibatch of `batch` sequences, `at_once` at a time."""
        total = 0.0
        for part in self._parts(batch):
            value: Tensor = loss(part) * ((part.stop - part.start) / batch)
            self._scaler.scale(value).backward()  # type: ignore[no-untyped-call]
            total += float(value.detach())
        return total

    def _autocast(self) -> torch.autocast:
        """Return the context in which the layers of a training step are computed."""
        precision = self.precision
        return torch.autocast(self.device.type, precision, enabled=precision != torch.float32)

    def _fit_memory(self, batch: int, trial: Callable[[int], Tensor]) -> None:
        """Find how many sequences fit into memory at a time, if the machine's `Compute` asks for it.

        `trial` returns the loss of so many sequences. A trial holds what a step does: activations, gradients, moments.
        """
        if self._compute.at_once != "auto":
            return
        own = len(self._group.share(batch))
        self._fitting = self._group.smallest(largest_that_fits(lambda count: self._try_step(trial, count), own))
        if self._fitting < own:
            log.info("%d of the %d windows of a minibatch fit into memory at a time", self._fitting, own)

    def _try_step(self, trial: Callable[[int], Tensor], count: int) -> None:
        weights = list(self._trained().values())
        try:
            moments = [torch.empty_like(weight) for weight in weights for _ in range(2)]
            with self._autocast():
                loss = trial(count)
            loss.backward()  # type: ignore[no-untyped-call]
            del moments
        finally:
            for weight in weights:
                weight.grad = None

    def _token_trial(self, count: int) -> Tensor:
        return self._token_loss(torch.zeros((count, self.window + 1), dtype=torch.int64, device=self.device))

    def _target_trial(
        self, count: int, sequences: np.ndarray, target_loss: Callable[[np.ndarray, Tensor], Tensor], width: int
    ) -> Tensor:
        some = sequences[np.arange(count) % len(sequences)]
        return target_loss(some, torch.zeros((*some.shape, width), device=self.device))

    def _parts(self, batch: int) -> list[slice]:
        """Return the parts of a minibatch that this process computes at a time."""
        own = self._group.share(batch)
        return [slice(start, min(start + self.at_once, own.stop)) for start in own[:: self.at_once]]

    def _train(
        self,
        step: Callable[[], float],
        progress: LoopProgress,
        rate: float,
        average: float = 0.0,
        *,
        mixed: bool = True,
    ) -> float:
        """Take AdamW steps; the optimizer starts anew with each call, so the parameters are all the state.

        `mixed` says that the steps follow `precision`: those of private training are in float32 always.
        """
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
        # float16 has no small numbers: its losses are scaled, and a step whose gradients overflow is left out.
        self._scaler = torch.amp.GradScaler(self.device.type, enabled=mixed and self.precision == torch.float16)
        tail = TailAverage([weight.detach() for weight in weights], steps, average)
        losses = []
        for index in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = rate * group["scale"] * schedule(index, steps)
            optimizer.zero_grad()
            losses.append(self._group.add_up(step(), weights))
            self._scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(weights, self.config.clip)
            self._scaler.step(optimizer)
            self._scaler.update()
            tail.add(index)
            progress.add(loss=losses[-1])
        tail.finish()
        return tail_mean(losses)


def some_tokens(values: Tensor, ids: Tensor, learnt: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return values [B, T, C] and the ids that follow them in windows [B, T+1] by rows: all, or those learnt [B*T]."""
    rows = values.flatten(0, 1)
    following = ids[:, 1:].flatten()
    return (rows, following) if learnt is None else (rows[learnt], following[learnt])


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


def schedule(step: int, steps: int) -> float:
    """Return the factor of the learning rate: linearly up over the first tenth, then down to a fiftieth."""
    warmup = max(1, steps // 10)
    if step < warmup:
        return (step + 1) / warmup
    return 1.0 - 0.98 * (step + 1 - warmup) / (steps - warmup)
