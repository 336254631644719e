"""Text generation: one token after the other, drawn from the student's prediction."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fpld.data.tokenizers import SEPARATOR
from fpld.validation import check_count, check_tokens, check_weight

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fpld.data import Tokenizer
    from fpld.students.base import Student


def continuation(
    student: Student, tokenizer: Tokenizer, prompt: str, *, tokens: int, seed: int, temperature: float, top: int = 0
) -> str:
    """Generate a text that follows a prompt; without one, it begins as a document does. See `generate`."""
    start = tokenizer.encode(prompt or SEPARATOR)
    drawn = list(generate(student, start, tokens=tokens, seed=seed, temperature=temperature, top=top))
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
