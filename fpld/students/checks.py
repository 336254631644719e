"""Validation of a student's arguments: counts, rates, texts, probe sets, targets; and of a training's loss."""

from __future__ import annotations

import math

import numpy as np

from fpld.errors import InputError


class ParameterError(InputError):
    """A parameter has a value that cannot be used: `key` is its name, `problem` what it must be."""

    def __init__(self, key: str, problem: str) -> None:
        super().__init__(key, problem)
        self.key = key
        self.problem = problem

    def __str__(self) -> str:
        return f"{self.key} {self.problem}"


def check_count(name: str, value: int, least: int) -> None:
    """Raise ParameterError unless a value is an integer of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise ParameterError(name, f"must be an integer of at least {least}, got {value!r}")


def check_positive(name: str, value: float) -> None:
    """Raise ParameterError unless a value is a positive finite number."""
    if not 0 < value < math.inf:
        raise ParameterError(name, f"must be a positive number, got {value!r}")


def check_weight(name: str, value: float) -> None:
    """Raise ParameterError unless a value is a finite number of at least 0."""
    if not 0 <= value < math.inf:
        raise ParameterError(name, f"must be a number of at least 0, got {value!r}")


def check_vocab(vocab: int) -> None:
    """Raise ParameterError unless a vocabulary has at least 2 tokens, or 0: its size is not known yet."""
    if vocab != 0:
        check_count("vocab", vocab, 2)


def check_training(steps: int, seed: int, rate: float | None) -> None:
    """Raise ParameterError for a step count, a seed or a learning rate that cannot be used."""
    check_count("steps", steps, 1)
    check_count("seed", seed, 0)
    if rate is not None and not 0 < rate < np.inf:
        raise ParameterError("rate", f"must be a positive number, or None for the student's own, got {rate!r}")


def check_finite(loss: float) -> float:
    """Return the loss of a training; raise InputError if it is not finite, since the student cannot be used then."""
    if not np.isfinite(loss):
        raise InputError(f"rate must be lower: training diverged, with a loss of {loss}; load the last state")
    return loss


def _check_ids(name: str, ids: np.ndarray, vocab: int, ndim: int) -> np.ndarray:
    ids = np.asarray(ids)
    if ids.ndim != ndim or not np.issubdtype(ids.dtype, np.integer):
        raise InputError(f"{name} must be integers with {ndim} dimension(s), got {ids.dtype} with shape {ids.shape}")
    if ids.size and (ids.min() < 0 or ids.max() >= vocab):
        raise InputError(
            f"{name} must hold token ids of 0 to {vocab - 1}, got {ids.min()} to {ids.max()}; "
            "use the tokenizer that this student's vocabulary comes from"
        )
    return ids.astype(np.int32, copy=False)


def check_tokens(tokens: np.ndarray, vocab: int, least: int, *, name: str = "tokens") -> np.ndarray:
    """Return a text as int32 [n], or raise InputError when it is no text of at least `least` tokens."""
    tokens = _check_ids(name, tokens, vocab, 1)
    if len(tokens) < least:
        raise InputError(f"{name} must hold at least {least} tokens, a window and one more, got {len(tokens)}")
    return tokens


def check_sequences(sequences: np.ndarray, vocab: int, longest: int | None) -> np.ndarray:
    """Return a probe set as int32 [S, T], or raise InputError when the student cannot evaluate it."""
    sequences = _check_ids("sequences", sequences, vocab, 2)
    if sequences.size == 0:
        raise InputError(f"sequences must hold at least one context, got shape {sequences.shape}")
    if longest is not None and sequences.shape[1] > longest:
        raise InputError(f"sequences must be at most {longest} tokens long, got {sequences.shape[1]}")
    return sequences
