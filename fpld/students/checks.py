"""What a student refuses: counts, texts, probe sets and targets that it cannot work on, a training that diverged."""

import numpy as np

from fpld.errors import InputError
from fpld.rules.target import Target, as_target


def check_count(name: str, value: int, least: int) -> None:
    """Refuse a value that is not an integer of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise InputError(f"{name} must be an integer of at least {least}, got {value!r}")


def check_vocab(vocab: int) -> None:
    """Refuse a vocabulary size that is neither at least 2 nor 0, which stands for one that is not known yet."""
    if vocab != 0:
        check_count("vocab", vocab, 2)


def check_training(steps: int, seed: int, rate: float | None) -> None:
    """Refuse step counts, seeds and learning rates that cannot be used."""
    check_count("steps", steps, 1)
    check_count("seed", seed, 0)
    if rate is not None and not 0 < rate < np.inf:
        raise InputError(f"rate must be a positive number, or None for the student's own, got {rate!r}")


def check_finite(loss: float) -> float:
    """Return the loss of a training that went well; a student that diverged must not be used any further."""
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


def check_target(value: Target | np.ndarray, sequences: np.ndarray, vocab: int) -> Target:
    """Return a target, or raise InputError when it does not fit the sequences."""
    target = as_target(value)
    if (target.contexts, target.vocab) != (sequences.size, vocab):
        raise InputError(
            f"target must have shape (contexts, vocab) = {(sequences.size, vocab)}, a context for each position of "
            f"sequences, got {(target.contexts, target.vocab)}"
        )
    return target
