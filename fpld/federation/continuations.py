"""A few lines by the student of each round: how it goes on from short pieces of the public text.

They are for people to read, in the trace and on the pages. Prompts and draws follow from the run's seed and are the
same in all rounds, so that only the student differs; no other draw and no result depends on them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fpld.seeds import derive_seed
from fpld.students.generate import continuation

if TYPE_CHECKING:
    from fpld.data import Tokenizer
    from fpld.students import Student

WORDS = 5  # of a prompt, at most
TOKENS = 40  # of a continuation
TEMPERATURE = 0.8
_WINDOW = 64  # tokens of public text that a prompt is cut from


def prompts(public: np.ndarray[Any, Any], tokenizer: Tokenizer, *, count: int, seed: int) -> list[str]:
    """Return the beginnings of lines, or else of words, at random places of a public text."""
    rng = np.random.default_rng(derive_seed(seed, "continuations"))
    starts = rng.integers(max(len(public) - _WINDOW, 1), size=count)
    return [_beginning(tokenizer.decode(public[start : start + _WINDOW])) for start in starts]


def _beginning(text: str) -> str:
    r"""Return the first words of a piece of text that may begin within a word, and end within one.

    >>> _beginning("itizens of the House.\nThe state of the Union is strong, my fel")
    'The state of the Union'
    >>> _beginning("untrymen and the Senate")
    'and the'
    """
    for line in text.splitlines()[1:]:
        words = line.split()
        if len(words) > WORDS:
            return " ".join(words[:WORDS])
    return " ".join(text.split()[1:-1][:WORDS]) or text


def write_continuations(student: Student, tokenizer: Tokenizer, texts: list[str], *, seed: int) -> list[dict[str, str]]:
    """Return each prompt and how the student goes on from it."""
    return [
        {
            "prompt": text,
            "text": continuation(student, tokenizer, text, tokens=TOKENS, seed=each, temperature=TEMPERATURE),
        }
        for text, each in ((text, derive_seed(seed, "continuations", i)) for i, text in enumerate(texts))
    ]
