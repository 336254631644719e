"""Text generation: one token after the other, drawn from the student's prediction."""

from __future__ import annotations

from itertools import takewhile
from typing import TYPE_CHECKING

import numpy as np

from fpld.data.encoding import separator
from fpld.numerics import softmax
from fpld.progress import LoopProgress
from fpld.validation import check_count, check_positive, check_tokens, check_weight

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fpld.data import Tokenizer
    from fpld.students.base import Student

_SEQUENCES_AT_ONCE = 512


def continuation(
    student: Student, tokenizer: Tokenizer, prompt: str, *, tokens: int, seed: int, temperature: float, top: int = 0
) -> str:
    """Generate a text that follows a prompt; without one, it begins as a document does. See `generate`.

    It has at most so many tokens: it ends where the student writes the end-of-text token of the tokenizer.
    """
    start = tokenizer.encode(prompt or separator(tokenizer))
    end = getattr(tokenizer, "end_of_text", None)
    every = generate(student, start, tokens=tokens, seed=seed, temperature=temperature, top=top)
    drawn = list(takewhile(lambda token: token != end, every))
    # Decoded together with the prompt: many tokenizers drop a blank at the beginning of a text.
    return tokenizer.decode(np.append(start, np.array(drawn, start.dtype)))[len(tokenizer.decode(start)) :]


def generate(
    student: Student, prompt: np.ndarray, *, tokens: int, seed: int, temperature: float = 1.0, top: int = 0
) -> Iterator[int]:
    """Yield `tokens` ids that follow a prompt [n]; the student sees as many of the last ones as it can.

    Parameters
    ----------
    temperature
        Divides the logits; at 0 the most likely token is taken.
    top
        With `top` > 0 only that many of the most likely tokens are drawn from.
    """
    check_count("tokens", tokens, 1)
    check_count("seed", seed, 0)
    check_count("top", top, 0)
    check_weight("temperature", temperature)
    context = check_tokens(prompt, student.vocab, 1, name="prompt")
    return _tokens(student, context, tokens, np.random.default_rng(seed), temperature, top)


def write_sequences(
    student: Student, first: np.ndarray, length: int, *, seed: int, temperature: float = 1.0
) -> np.ndarray:
    """Let a student write sequences [S, T] of `length` tokens, each after its first one.

    >>> from fpld.students import NGram, NGramConfig
    >>> write_sequences(NGram(NGramConfig(vocab=8)), np.array([3, 5]), 4, seed=0).shape
    (2, 4)
    """
    check_count("length", length, 1)
    check_count("seed", seed, 0)
    check_positive("temperature", temperature)
    beginnings = check_tokens(first, student.vocab, 1, name="first")
    rng = np.random.default_rng(seed)
    out = np.empty((len(beginnings), length), np.int32)
    out[:, 0] = beginnings
    progress = LoopProgress("writing text", len(out), "sequence", tokens=length)
    for start in range(0, len(out), _SEQUENCES_AT_ONCE):
        some = out[start : start + _SEQUENCES_AT_ONCE]
        following = student.next_logits()
        for t in range(length - 1):
            some[:, t + 1] = _draw_each(following(some[:, t]), rng, temperature)
        progress.add(len(some))
    return out


def _draw_each(logits: np.ndarray, rng: np.random.Generator, temperature: float) -> np.ndarray:
    """Draw a token from each row of logits [B, V]."""
    cumulated = np.cumsum(softmax(logits / np.float32(temperature)), axis=1, dtype=np.float64)
    thresholds = rng.random(len(logits)) * cumulated[:, -1]
    tokens = (cumulated <= thresholds[:, None]).sum(axis=1)
    drawn: np.ndarray = np.minimum(tokens, logits.shape[1] - 1)
    return drawn


def _tokens(
    student: Student, context: np.ndarray, tokens: int, rng: np.random.Generator, temperature: float, top: int
) -> Iterator[int]:
    longest = student.longest if student.longest is not None else student.window
    for _ in range(tokens):
        context = context[-longest:]
        chosen = _draw(student.logits(context[None])[-1].astype(np.float64), rng, temperature, top)
        context = np.append(context, np.int32(chosen))
        yield chosen


def _draw(logits: np.ndarray, rng: np.random.Generator, temperature: float, top: int) -> int:
    if temperature == 0:
        return int(logits.argmax())
    if 0 < top < len(logits):
        logits = np.where(logits >= np.partition(logits, -top)[-top], logits, -np.inf)
    # The largest of logits plus Gumbel noise is a draw from their softmax.
    return int((logits / temperature + rng.gumbel(size=len(logits))).argmax())
