"""An n-gram softmax-linear model in NumPy: the paper's parametric family, quick to train.

The logits of a context are linear in the parameters: a bias and, for each order k, the row of a table that
the last k tokens choose,

    logits(x_1..x_t) = bias + sum over k of table[k, hash(x_{t-k+1}..x_t)].

A context shorter than k is padded with an id that no token has. Contexts of order 1 have rows of their own
where `buckets` exceeds the vocabulary; longer ones are hashed, in integers: the same row on every machine.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from fpld.data.token_stream import draw_places, read_ids
from fpld.errors import InputError
from fpld.numerics import softmax
from fpld.progress import LoopProgress
from fpld.students.base import Distillation, Student, TailAverage, tail_mean
from fpld.target import Target
from fpld.validation import MAX_BATCH, check_count, check_positive, check_vocab

_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio, odd: spreads neighbours over all high bits
MAX_PARAMETERS = 1 << 28


@dataclass(frozen=True)
class NGramConfig:
    """The size of an n-gram model and how it is trained: Adagrad on minibatches of `batch` contexts."""

    vocab: int = 0
    order: int = 3
    """How many last tokens are looked at."""
    buckets: int = 2048
    """Rows of each order's table."""
    batch: int = 256
    """Contexts in a minibatch."""
    rate: float = 2.0
    """Learning rate of training on text."""
    distill_rate: float = 2.0
    """Learning rate of distillation."""

    def __post_init__(self) -> None:
        check_vocab(self.vocab)
        for name in ("order", "buckets"):
            check_count(name, getattr(self, name), 1)
        check_count("batch", self.batch, 1, MAX_BATCH)
        for name in ("rate", "distill_rate"):
            check_positive(name, getattr(self, name))
        if self.parameters > MAX_PARAMETERS:
            raise InputError(f"order * buckets * vocab must be at most {MAX_PARAMETERS}, got {self.parameters}")

    @property
    def parameters(self) -> int:
        """Return the number of parameters."""
        return (1 + self.order * self.buckets) * self.vocab


class NGram(Student):
    """A softmax-linear model of hashed n-gram contexts, zero at the start: every token equally likely.

    >>> student = NGram(NGramConfig(vocab=4, buckets=16))
    >>> text = np.tile(np.arange(4, dtype=np.int32), 50)
    >>> student.finetune(text, steps=50, seed=0) < 0.1
    True
    >>> student.logits(np.array([[0, 1, 2]], np.int32)).argmax(axis=1)
    array([1, 2, 3])
    """

    kind = "ngram"
    Config = NGramConfig
    config: NGramConfig

    def __init__(self, config: NGramConfig, *, seed: int = 0, device: str = "cpu") -> None:
        """Make a student; nothing is drawn, and all is computed on the CPU."""
        check_count("vocab", config.vocab, 2)
        check_count("seed", seed, 0)
        if device not in ("cpu", "auto"):
            raise InputError(f"device must be 'cpu' or 'auto' for an n-gram model, which is in NumPy, got {device!r}")
        self.config = config
        self.bias = np.zeros(config.vocab, np.float32)
        self.table = np.zeros((config.order, config.buckets, config.vocab), np.float32)

    @property
    def window(self) -> int:
        """Return the order: the number of tokens that a prediction depends on."""
        return self.config.order

    @property
    def longest(self) -> int | None:
        """Return None: sequences of any length can be evaluated."""
        return None

    def _block(self, sequences: np.ndarray) -> np.ndarray:
        return self._logits(self._rows(sequences).reshape(-1, self.config.order))

    def _rows(self, sequences: np.ndarray) -> np.ndarray:
        """Return for every position of sequences [S, T] its row in the table of each order: [S, T, order]."""
        count, length = sequences.shape
        order = self.config.order
        buckets = np.uint64(self.config.buckets)
        padded = np.full((count, order + length), self.config.vocab, np.uint64)
        padded[:, order:] = sequences
        rows = np.empty((count, length, order), np.int64)
        key = np.zeros((count, length), np.uint64)
        for k in range(order):
            key = key * np.uint64(self.config.vocab + 1) + padded[:, order - k : order - k + length]
            rows[:, :, k] = key % buckets if k == 0 else ((key * _MULTIPLIER) >> np.uint64(32)) % buckets
        return rows

    def _logits(self, rows: np.ndarray) -> np.ndarray:
        """Return the logits [n, V] of contexts by their rows [n, order]."""
        out = self.bias + self.table[0, rows[:, 0]]
        for k in range(1, self.config.order):
            out += self.table[k, rows[:, k]]
        return np.asarray(out)

    def _finetune(self, tokens: np.ndarray, steps: int, seed: int, rate: float | None) -> float:
        rng = np.random.default_rng(seed)

        def batch() -> Batch:
            return self._text_batch(tokens, rng, self.config.batch, 1.0)

        progress = LoopProgress("training", steps, tokens=self.config.batch)
        return self._train([batch], progress, rate or self.config.rate)

    def _distill(self, sequences: np.ndarray, target: Target, reference: Student | None, how: Distillation) -> float:
        rng = np.random.default_rng(how.seed)
        size = how.batch or self.config.batch
        rows = self._rows(sequences).reshape(-1, self.config.order)

        draw = context_sampler(self, reference, sequences, rows, size)

        def probe_batch() -> Batch:
            chosen, reference_logits = draw(rng)
            p, log_p = target.rows(chosen, reference_logits)
            return Batch(rows[chosen], p, -float(np.sum(p * log_p, dtype=np.float64)) / len(chosen), 1.0)

        batches = [probe_batch]
        if how.public is not None:
            text = how.public
            batches.append(lambda: self._text_batch(text, rng, size, how.public_weight))
        progress = LoopProgress("distillation", how.steps, tokens=size)
        return self._train(batches, progress, how.rate or self.config.distill_rate, how.average)

    def _text_batch(self, tokens: np.ndarray, rng: np.random.Generator, size: int, weight: float) -> "Batch":
        """Draw positions of a text: their contexts, and the tokens that follow as one-hot rows."""
        order = self.config.order
        chosen = draw_places(tokens, lambda count: rng.integers(len(tokens) - 1, size=count), size, 2)
        places = chosen[:, None] + np.arange(1 - order, 2)  # the context's tokens, and the one that follows
        read = read_ids(tokens[np.maximum(places, 0)])
        windows = np.where(places >= 0, read, self.vocab)  # before the text: as in `_rows`
        p = np.zeros((size, self.vocab), np.float32)
        p[np.arange(size), windows[:, -1]] = 1.0
        return Batch(self._rows(windows[:, :-1])[:, -1], p, 0.0, weight)

    def _train(
        self, batches: list[Callable[[], "Batch"]], progress: LoopProgress, rate: float, average: float = 0.0
    ) -> float:
        """Take Adagrad steps; its sums start anew with each call, so the parameters are all the state."""
        steps = progress.total
        bias_sum = np.zeros(1, np.float32)
        table_sum = np.zeros(self.table.shape[:2], np.float32)
        tail = TailAverage([self.bias, self.table], steps, average)
        losses = []
        for step in range(steps):
            drawn = [batch() for batch in batches]
            rows = np.concatenate([batch.rows for batch in drawn])
            q = softmax(self._logits(rows), np.float32)
            gradient = np.empty_like(q)
            value = 0.0
            start = 0
            for batch in drawn:
                part = slice(start, start + len(batch.rows))
                value += batch.weight * batch.divergence(q[part])
                np.subtract(q[part], batch.p, out=gradient[part])
                gradient[part] *= batch.weight
                start = part.stop
            # The rate decays linearly, so that the last steps average over the noise of the minibatches.
            self._step(rows, gradient, rate * (1.0 - step / steps), bias_sum, table_sum)
            losses.append(value)
            tail.add(step)
            progress.add(loss=value)
        tail.finish()
        return tail_mean(losses)

    def _step(
        self, rows: np.ndarray, gradient: np.ndarray, rate: float, bias_sum: np.ndarray, table_sum: np.ndarray
    ) -> None:
        """Move the bias, and each table row that occurs, by its summed gradient [n, V]; rows [n, order]."""
        adagrad_step(self.bias[None], bias_sum, gradient.sum(axis=0, keepdims=True), np.zeros(1, np.int64), rate)
        for k in range(self.config.order):
            order = np.argsort(rows[:, k], kind="stable")
            chosen, first = np.unique(rows[order, k], return_index=True)
            total = np.add.reduceat(gradient[order], first, axis=0)  # [unique rows, V]
            adagrad_step(self.table[k], table_sum[k], total, chosen, rate)


def adagrad_step(table: np.ndarray, sums: np.ndarray, gradient: np.ndarray, chosen: np.ndarray, rate: float) -> None:
    """Take an Adagrad step on the chosen rows of a table [n, V], in place.

    A row has one scale, its sum of squared gradient norms, not one for each entry: a token that never follows
    would otherwise move as far as one that always does.
    """
    sums[chosen] += np.square(gradient).sum(axis=1)
    table[chosen] -= (rate / (np.sqrt(sums[chosen]) + 1e-6))[:, None] * gradient


@dataclass(frozen=True)
class Batch:
    """A minibatch: contexts by their rows [n, order], the target p [n, V], the constant of its loss, and its weight."""

    rows: np.ndarray
    p: np.ndarray
    constant: float
    weight: float

    def divergence(self, q: np.ndarray) -> float:
        """Return the mean over the contexts of the cross entropy of q to p, in nats, less the constant."""
        log_q = np.log(np.maximum(q, np.finfo(np.float32).tiny))
        return -float(np.sum(self.p * log_q, dtype=np.float64)) / len(q) - self.constant


def context_sampler(
    student: NGram, reference: Student | None, sequences: np.ndarray, rows: np.ndarray, size: int
) -> Callable[[np.random.Generator], tuple[np.ndarray, np.ndarray | None]]:
    """Return a function that draws about `size` contexts, with the logits of the reference for them if there is one.

    Single contexts are drawn if there is no reference, or an n-gram model of the same tables. Any other kind of model
    predicts whole sequences, so whole sequences are drawn.
    """
    if reference is None or (isinstance(reference, NGram) and reference.config == student.config):

        def some(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray | None]:
            chosen = rng.integers(len(rows), size=size)
            return chosen, None if reference is None else reference._logits(rows[chosen])

        return some
    predictor = reference.predictor(sequences)
    count, length = sequences.shape

    def whole(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray | None]:
        chosen = rng.integers(count, size=max(1, size // length))
        return (chosen[:, None] * length + np.arange(length)).ravel(), predictor.logits(chosen)

    return whole
