"""The contract of a student: a language model that can be fine-tuned, asked for logits and distilled.

A student works on token ids. A text is a stream of them, `tokens` [n]; a probe set is `sequences` [S, T], in which
*every position is a context*: row s*T + t of the logits [S*T, V] is about the token that follows sequences[s, :t+1].
So one pass over a sequence answers T contexts.

A student is deterministic: the same calls with the same seeds give the same bits on the same machine (with one thread).
It keeps nothing between calls but its parameters, so `state()` is a checkpoint.
"""

from __future__ import annotations

import dataclasses
import json
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self, TypedDict, Unpack

import numpy as np

from fpld.data.token_stream import check_text
from fpld.errors import InputError, ParameterError
from fpld.numerics import log_sum_exp, softmax
from fpld.privacy.sampling import PADDING
from fpld.progress import LoopProgress
from fpld.storage.arrays import read_arrays, write_arrays
from fpld.target import Target, as_target
from fpld.validation import (
    check_count,
    check_finite,
    check_sequences,
    check_tokens,
    check_training,
    check_weight,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    import torch

    from fpld.data import Tokenizer
    from fpld.privacy import Mechanism, PrivateText, RandomSource
    from fpld.students.configs import Compute
    from fpld.students.processes import Group

VERSION = "1"
"""The version of the model files; a file of another version is refused."""

_BLOCK_VALUES = 1 << 20  # coordinates of a block of logits
_LEAST_BLOCK_ROWS = 512  # contexts of it, however large the vocabulary: a matrix product of fewer is slower
_FULL_BLOCK_ROWS = 4096  # and however small
SHARE_TOLERANCE = 1e-5
"""How far the sum of float32 shares may be from 1."""


class DistillOptions(TypedDict, total=False):
    """The optional settings of `Student.distill` and `Student.distill_from_models`."""

    rate: float | None
    batch: int | None
    average: float
    public: np.ndarray | None
    public_weight: float


@dataclasses.dataclass(frozen=True, eq=False)
class Distillation:
    """How a student is distilled.

    Parameters
    ----------
    steps, seed
        The number of minibatches, and the seed that draws them.
    rate, batch
        Replace the learning rate and the minibatch size of the student's configuration.
    average
        The share of the last steps over which the parameters are averaged at the end; 0 takes the last ones.
    public, public_weight
        With a weight above 0 each step adds that multiple of the cross entropy of a minibatch of the public text.
    """

    steps: int
    seed: int
    rate: float | None = None
    batch: int | None = None
    average: float = 0.0
    public: np.ndarray | None = None
    public_weight: float = 0.0

    def __post_init__(self) -> None:
        check_training(self.steps, self.seed, self.rate)
        if self.batch is not None:
            check_count("batch", self.batch, 1)
        if not 0 <= self.average <= 1:
            raise ParameterError("average", f"must be a share of the steps, from 0 to 1, got {self.average!r}")
        check_weight("public_weight", self.public_weight)
        if self.public_weight > 0 and self.public is None:
            raise ParameterError("public", "must be a text when public_weight > 0, got None; pass its tokens")


class PublicText(NamedTuple):
    """What `fpld.students.subspace` is made of: public sequences [S, T], and how many numbers are trained."""

    sequences: np.ndarray
    numbers: int


@dataclasses.dataclass(frozen=True, eq=False)
class PrivateTraining:
    """How a student is trained privately; the fields are the arguments of `Student.finetune_privately`."""

    text: PrivateText
    mechanism: Mechanism
    steps: int
    random: RandomSource
    rate: float | None = None
    average: float = 0.0
    public: PublicText | None = None


class Predictor:
    """Predict sequences [S, T] with a student that does not change meanwhile, a few at a time.

    The same sequences are predicted in every round or epoch: kinds of students with costly lower layers have a
    predictor that keeps hidden states.
    """

    def __init__(self, student: Student, sequences: np.ndarray) -> None:
        self.student = student
        self.sequences = sequences

    def logits(self, rows: np.ndarray) -> np.ndarray:
        """Return the logits [B*T, V] of the sequences with the numbers `rows` [B]."""
        return self.student.logits(self.sequences[rows])


class Student(ABC):
    """A language model over `vocab` token ids, with parameters that can be sent, averaged and stored.

    A new kind of student implements the abstract methods below and has a frozen dataclass as `Config`, with at least
    `vocab` (0 until it is known) and the number of `parameters`. Public methods validate; those with an underscore
    trust their arguments.
    """

    kind: ClassVar[str]
    private: ClassVar[bool] = False  # whether it can be trained privately
    has_devices: ClassVar[bool] = False  # whether it can be computed elsewhere than on the CPU
    Config: ClassVar[type[Any]]
    config: Any  # the frozen dataclass from which an equal student can be made

    @abstractmethod
    def __init__(self, config: Any, *, seed: int, device: str = "cpu") -> None:
        """Make a student; `seed` draws its first parameters, `device` is "cpu", "cuda", "mps" or "auto"."""

    @property
    @abstractmethod
    def window(self) -> int:
        """Return how many tokens of context training uses: `finetune` needs a text of window + 1 tokens."""

    @property
    @abstractmethod
    def longest(self) -> int | None:
        """Return the longest sequence that can be evaluated, or None where there is no limit."""

    def state(self) -> dict[str, np.ndarray]:
        """Return a copy of all parameters, float32, by name: every array that is an attribute."""
        return {name: value.copy() for name, value in vars(self).items() if isinstance(value, np.ndarray)}

    def _set_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Replace the parameters by some that `load_state` has checked."""
        vars(self).update({name: value.copy() for name, value in state.items()})

    @abstractmethod
    def _block(self, sequences: np.ndarray) -> np.ndarray:
        """Return the logits [S*T, V] of a few sequences [S, T], float32."""

    @abstractmethod
    def _finetune(self, tokens: np.ndarray, steps: int, seed: int, rate: float | None) -> float:
        """Train as `finetune` says, with arguments that it has checked."""

    @abstractmethod
    def _distill(self, sequences: np.ndarray, target: Target, reference: Student | None, how: Distillation) -> float:
        """Train as `distill` says; a relative target comes with a reference student, which does not change."""

    def _distill_from_models(
        self, sequences: np.ndarray, states: Sequence[Mapping[str, np.ndarray]], shares: np.ndarray, how: Distillation
    ) -> float:
        """Train as `distill_from_models` says, with arguments that it has checked.

        Here the target of all contexts is held as dense logits. Kinds of students with large vocabularies override
        this, and compute targets as they are needed.
        """
        target = np.zeros((*sequences.shape, self.vocab), np.float32)
        model = self.copy()
        for state, share in zip(states, shares.T, strict=True):
            rows = np.flatnonzero(share > 0)
            if rows.size:
                model._set_state(state)
                p = softmax(model._block(sequences[rows]), np.float32).reshape(len(rows), *target.shape[1:])
                target[rows] += share[rows, None, None].astype(np.float32) * p
        logits = np.log(np.maximum(target, np.finfo(np.float32).tiny)).reshape(-1, self.vocab)
        return self._distill(sequences, Target.trusted(logits), None, how)

    def _finetune_privately(self, how: PrivateTraining) -> float:  # noqa: ARG002  # for kinds that can
        """Train as `finetune_privately` says, with arguments that it has checked."""
        raise InputError(
            f"a student of kind {self.kind!r} has no gradients of single units, so it cannot be trained privately: "
            "take student.kind 'transformer' or 'huggingface', or leave [privacy] out"
        )

    def to(self, device: str) -> Self:  # noqa: ARG002  # kinds in NumPy are always on the CPU
        """Move to a device ("auto", "cpu", "cuda" or "mps") in place."""
        return self

    def compute_with(self, compute: Compute) -> Self:  # noqa: ARG002  # kinds in NumPy have one precision
        """Train with a machine's precision, memory and number of sequences at a time; in place."""
        return self

    def join(self, group: Group, device: torch.device, *, shard: bool) -> Self:  # noqa: ARG002  # for kinds that can
        """Be one of the processes that train a student together; in place. `shard`: hold a share of the weights."""
        return self

    @property
    def place(self) -> str:
        """Return the device and the precision, for people to read."""
        return "on cpu in float32"

    @property
    def vocab(self) -> int:
        """Return V, the number of token ids."""
        return int(self.config.vocab)

    @property
    def parameters(self) -> int:
        """Return the number of parameters, which is what FedAvg would send."""
        return int(self.config.parameters)

    def logit_blocks(self, sequences: np.ndarray, *, rows: int | None = None) -> Iterator[np.ndarray]:
        """Yield the rows of `logits` in order, by whole sequences: at most `rows` rows, or one sequence.

        By default a block has some 2^20 coordinates, which stay in the cache for whoever works on them next.
        """
        sequences = self._check_sequences(sequences)
        if rows is None:
            rows = min(max(_BLOCK_VALUES // self.vocab, _LEAST_BLOCK_ROWS), _FULL_BLOCK_ROWS)
        check_count("rows", rows, 1)
        return self._blocks(sequences, max(1, rows // sequences.shape[1]))

    def _blocks(self, sequences: np.ndarray, size: int) -> Iterator[np.ndarray]:
        progress = LoopProgress("computing logits", len(sequences), "sequence", tokens=sequences.shape[1])
        for start in range(0, len(sequences), size):
            some = sequences[start : start + size]
            yield self._block(some)
            progress.add(len(some))

    def predictor(self, sequences: np.ndarray) -> Predictor:
        """Return a predictor of these sequences, valid as long as the student does not change."""
        return Predictor(self, self._check_sequences(sequences))

    def logits(self, sequences: np.ndarray) -> np.ndarray:
        """Return the logits [S*T, V] for every position of the sequences [S, T], float32."""
        blocks = self.logit_blocks(sequences)
        count, length = np.shape(sequences)
        out = np.empty((count * length, self.vocab), np.float32)
        start = 0
        # Filled block by block, so that no second copy of all logits is held.
        for block in blocks:
            out[start : start + len(block)] = block
            start += len(block)
        return out

    def next_logits(self) -> Callable[[np.ndarray], np.ndarray]:
        """Return a function that takes the next tokens [B] of B sequences, and returns the logits [B, V] after them.

        It is called once for each position, from the first on. Kinds of students with a cache of earlier positions
        override this one, which computes them again.
        """
        prefix = np.empty((0, 0), np.int32)

        def following(tokens: np.ndarray) -> np.ndarray:
            nonlocal prefix
            column = np.asarray(tokens, np.int32)[:, None]
            prefix = np.concatenate([prefix, column], axis=1) if prefix.size else column
            length = prefix.shape[1]
            return np.concatenate([block[length - 1 :: length] for block in self.logit_blocks(prefix)])

        return following

    def loss(self, tokens: np.ndarray, length: int) -> tuple[float, int]:
        """Return (nats, count): the sum of `token_nats`, and how many they are."""
        nats = self.token_nats(tokens, length)
        return float(np.sum(nats, dtype=np.float64)), len(nats)

    def token_nats(self, tokens: np.ndarray, length: int) -> np.ndarray:
        """Return the cross entropy of each token but the first, in nats.

        The text is cut into windows of `length` tokens that see only themselves; the last may be shorter.
        """
        check_count("length", length, 1)
        tokens = check_tokens(tokens, self.vocab, length + 1)
        count = len(tokens) - 1
        whole = count // length * length
        nats: list[np.ndarray] = []
        for start, stop in ((0, whole), (whole, count)):
            if start < stop:
                width = length if start == 0 else stop - start
                nats += self._nats(tokens[start:stop].reshape(-1, width), tokens[start + 1 : stop + 1])
        return np.concatenate(nats)

    def _nats(self, sequences: np.ndarray, following: np.ndarray) -> Iterator[np.ndarray]:
        start = 0
        for block in self.logit_blocks(sequences):
            chosen = block[np.arange(len(block)), following[start : start + len(block)]]
            yield log_sum_exp(block) - chosen
            start += len(block)

    def curvature(self, sequences: np.ndarray) -> dict[str, float] | None:  # noqa: ARG002  # for kinds with gradients
        """Return how much a squared error in each tensor of the state matters, by name; None if a kind cannot tell.

        It is the mean over the tensor's weights of the empirical Fisher information on these sequences [S, T]: half of
        it times the sum of the squared errors is what a small error in that tensor costs in nats, but for a factor that
        all tensors share.
        """
        return None

    def finetune(self, tokens: np.ndarray, *, steps: int, seed: int, rate: float | None = None) -> float:
        """Train on a text for `steps` minibatches; return the mean loss of the last tenth, in nats.

        `rate` replaces the learning rate of the configuration.
        """
        check_training(steps, seed, rate)
        tokens = check_text(tokens, self.vocab, self.window + 1)
        return check_finite(self._finetune(tokens, steps, seed, rate))

    def finetune_privately(
        self,
        text: PrivateText,
        mechanism: Mechanism,
        *,
        steps: int,
        random: RandomSource,
        rate: float | None = None,
        average: float = 0.0,
        public: PublicText | None = None,
    ) -> float:
        """Train on a text by DP-SGD (`fpld.privacy`); return the mean loss of the last tenth of the steps, in nats.

        The parameters after it are differentially private, as `mechanism.spent(steps)` says. The loss is not.

        Parameters
        ----------
        average
            The share of the last steps over which the parameters are averaged at the end; 0 takes the last ones.
        public
            Train those numbers alone that this public text chooses (`fpld.students.subspace`), from the parameters as
            they are. The rate is then a share of the step of Newton's method. None: all parameters.
        """
        check_training(steps, 0, rate)
        if isinstance(text.windows, np.ndarray):  # those of a longer text are read, and checked, when they are drawn
            check_tokens(text.windows[text.windows != PADDING], self.vocab, 2)
        if not 0 <= average <= 1:
            raise ParameterError("average", f"must be a share of the steps, from 0 to 1, got {average!r}")
        if public is not None:
            check_sequences(public.sequences, self.vocab, self.longest)
        how = PrivateTraining(text, mechanism, steps, random, rate, average, public)
        return check_finite(self._finetune_privately(how))

    def distill(
        self,
        sequences: np.ndarray,
        target: Target | np.ndarray,
        *,
        steps: int,
        seed: int,
        reference: Student | None = None,
        **options: Unpack[DistillOptions],
    ) -> float:
        """Minimise the cross entropy -sum_v t_v log q_v to a target over a probe set, for `steps` minibatches.

        Parameters
        ----------
        sequences
            The probe set [S, T].
        target
            What to fit, with a context for each position of `sequences`; an array is dense logits [S*T, V].
        steps, seed, **options
            The fields of `Distillation`: rate, batch, average, public, public_weight.
        reference
            The student that a relative target refers to; by default this one as it is when the call begins.

        Returns
        -------
        float
            The mean over contexts and over the last tenth of the steps, with the weighted loss of the public text:
            of KL(t || student) for a dense target; for a relative one of the cross entropy less that of the
            reference, which starts at 0 and falls if the student is its own reference.
        """
        how = self._check_distillation(Distillation(steps, seed, **options))
        sequences = self._check_sequences(sequences)
        target = check_target(target, sequences, self.vocab)
        return check_finite(self._distill(sequences, target, self._check_reference(target, reference), how))

    def distill_from_models(
        self,
        sequences: np.ndarray,
        states: Sequence[Mapping[str, np.ndarray]],
        shares: np.ndarray,
        *,
        steps: int,
        seed: int,
        **options: Unpack[DistillOptions],
    ) -> float:
        """Minimise the cross entropy to a mixture of models of the student's own kind, for `steps` minibatches.

        The target of sequence s is t = sum_k shares[s, k] softmax(logits of model k). One copy of the student takes
        the weights of one model after the other, so that two models are in memory besides the weights themselves.

        Parameters
        ----------
        sequences
            The sequences [S, T] to be predicted.
        states
            The weights of the K models, as `state` returns them.
        shares
            The share [S, K] of each model in the target of each sequence: not negative, with rows that sum to 1.
        steps, seed, **options
            The fields of `Distillation`: rate, batch, average, public, public_weight.

        Returns
        -------
        float
            KL(t || student), the mean over contexts and over the last tenth of the steps, with the weighted loss of
            the public text.
        """
        how = self._check_distillation(Distillation(steps, seed, **options))
        sequences = check_sequences(sequences, self.vocab, self.longest)
        if not states:
            raise ParameterError("states", "must hold the weights of at least one model, got none")
        checked = [self._check_state(state, f"states[{k}]") for k, state in enumerate(states)]
        shares = check_shares(shares, (len(sequences), len(checked)))
        return check_finite(self._distill_from_models(sequences, checked, shares, how))

    def _check_sequences(self, sequences: np.ndarray) -> np.ndarray:
        """Return sequences [S, T] that this student can predict, or raise InputError."""
        return check_sequences(sequences, self.vocab, self.longest)

    def _check_distillation(self, how: Distillation) -> Distillation:
        """Return the settings with the public text checked, and without one that has no weight."""
        public = None
        if how.public is not None and how.public_weight > 0:
            public = check_text(how.public, self.vocab, self.window + 1, name="public")
        return dataclasses.replace(how, public=public)

    def _check_reference(self, target: Target, reference: Student | None) -> Student | None:
        if not target.relative:
            return None
        if reference is not None and reference.vocab != self.vocab:
            raise InputError(f"reference must have the vocabulary of the student, {self.vocab}, got {reference.vocab}")
        # A student that is its own reference is trained meanwhile: the target refers to what it was before.
        return self.copy() if reference is None or reference is self else reference

    def load_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Replace all parameters; they are checked first, so that a refusal changes nothing."""
        self._set_state(self._check_state(state, "state"))

    def _check_state(self, state: Mapping[str, np.ndarray], name: str) -> dict[str, np.ndarray]:
        """Return parameters in float32, or raise InputError when this student cannot have them."""
        expected = self.state()
        if state.keys() != expected.keys():
            raise InputError(f"{name} must hold the arrays {sorted(expected)}, got {sorted(state)}")
        for key, array in state.items():
            if np.shape(array) != expected[key].shape:
                raise InputError(f"{name}[{key!r}] must have shape {expected[key].shape}, got {np.shape(array)}")
            if not np.issubdtype(np.asarray(array).dtype, np.floating) or not np.isfinite(array).all():
                raise InputError(f"{name}[{key!r}] must hold finite floats; train or load it again")
        return {key: np.asarray(array, np.float32) for key, array in state.items()}

    def copy(self) -> Self:
        """Return a student with the same parameters that shares none of them."""
        other = type(self)(self.config, seed=0)
        other._set_state(self.state())
        return other

    def recipe(self) -> tuple[Callable[..., Student], tuple[Any, ...]]:
        """Return a function and its arguments that make an equal student in another process, on the CPU."""
        return _make, (type(self), self.config, self.state())

    def save(self, path: str | Path, **metadata: str) -> None:
        """Write the student to a safetensors file, with its configuration and any other metadata."""
        config = json.dumps(dataclasses.asdict(self.config), sort_keys=True)
        write_arrays(path, self.state(), {"kind": self.kind, "version": VERSION, "config": config, **metadata})

    def check_tokenizer(self, tokenizer: Tokenizer) -> None:  # noqa: B027  # most kinds have no tokenizer
        """Refuse a tokenizer that is not the one that the model was made with, if it has one."""

    def export(self, folder: Path, *, adapter: bool = False) -> None:  # noqa: ARG002  # for kinds that can
        """Write the model as `transformers` reads it: config.json and model.safetensors, or an adapter by itself."""
        raise InputError(
            f"a student of kind {self.kind!r} has no form that other libraries read: it can be used by "
            "`fpld generate` and `fpld evaluate`; set student.kind to 'transformer' or 'huggingface' to export one"
        )

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a student of this kind from a file; anything but a whole and sound one raises InputError."""
        return cls._load(path, {})

    @classmethod
    def _load(cls, path: str | Path, changes: Mapping[str, Any]) -> Self:
        """Read a student with some fields of its configuration replaced."""
        state, metadata = read_arrays(path)
        for key, value in (("kind", cls.kind), ("version", VERSION)):
            if metadata.get(key) != value:
                raise InputError(f"{path}: {key} must be {value!r}, got {metadata.get(key)!r}")
        try:
            config = cls.Config(**json.loads(metadata["config"]) | changes)
            # Checked before the student is made, so that a forged configuration cannot make us allocate memory.
            _check_size(config.parameters, sum(array.size for array in state.values()))
            student = cls(config, seed=0)
            student.load_state(state)
        except (InputError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise InputError(f"{path}: must hold a sound {cls.kind} student, but {error}") from error
        return student


def _make(kind: type[Student], config: Any, state: Mapping[str, np.ndarray]) -> Student:
    student = kind(config, seed=0)
    student.load_state(state)
    return student


def _check_size(expected: int, size: int) -> None:
    if expected != size:
        raise InputError(f"its configuration asks for {expected} parameters and it holds {size}")


def tail_mean(losses: list[float]) -> float:
    """Return the mean of the last tenth of the losses, which is less noisy than the last alone."""
    return float(np.mean(losses[-max(1, len(losses) // 10) :]))


class TailAverage:
    """Average parameters, arrays that training changes in place, over the last `share` of the steps.

    >>> weight = np.zeros(1)
    >>> tail = TailAverage([weight], steps=4, share=0.5)
    >>> for step in range(4):
    ...     weight += 1
    ...     tail.add(step)
    >>> tail.finish()
    >>> weight.tolist()
    [3.5]
    """

    def __init__(self, weights: Sequence[Any], steps: int, share: float) -> None:
        self._first = steps - max(1, round(share * steps)) if share > 0 else steps
        self._weights = weights if share > 0 else []
        self._means = [0 * weight for weight in self._weights]

    def add(self, step: int) -> None:
        """Take the parameters as they are after a step, if it is one of the last."""
        if step >= self._first:
            for mean, weight in zip(self._means, self._weights, strict=True):
                mean += (weight - mean) / (step - self._first + 1)

    def finish(self) -> None:
        """Replace the parameters by their averages."""
        for mean, weight in zip(self._means, self._weights, strict=True):
            weight[...] = mean


def check_target(value: Target | np.ndarray, sequences: np.ndarray, vocab: int) -> Target:
    """Return a target, or raise InputError when it does not fit the sequences."""
    target = as_target(value)
    if (target.contexts, target.vocab) != (sequences.size, vocab):
        raise InputError(
            f"target must have shape (contexts, vocab) = {(sequences.size, vocab)}, a context for each position of "
            f"sequences, got {(target.contexts, target.vocab)}"
        )
    return target


def check_shares(value: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """Return the shares [S, K] of models in the targets of sequences, or raise ParameterError."""
    shares = np.asarray(value)
    if shares.shape != shape or not np.issubdtype(shares.dtype, np.floating):
        raise ParameterError(
            "shares",
            f"must be floats of shape (sequences, models) = {shape}, got {shares.dtype} with shape {shares.shape}",
        )
    # NaN fails the comparison with 0, and infinity that of the sums.
    if not (shares >= 0).all():
        raise ParameterError("shares", f"must not be negative, got {shares.min()}")
    sums = shares.sum(axis=1, dtype=np.float64)
    wrong = np.abs(sums - 1) > SHARE_TOLERANCE
    if wrong.any():
        row = int(wrong.argmax())
        raise ParameterError("shares", f"must sum to 1 for each sequence, got {sums[row]} for sequence {row}")
    return shares
