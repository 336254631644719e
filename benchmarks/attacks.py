"""Attacks of malicious nodes: what each of them sends instead of its own labels, and what it sees.

Each is a function of what a node can know to the logits that it codes. `fpld.rules.guarded` is what should stop them;
`benchmarks.byzantine` measures what they do to a student.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fpld.codecs.samples.steps import LabelHeader

if TYPE_CHECKING:
    from collections.abc import Callable

    from fpld.types import Array

TOKEN = 17  # the one that a targeted attack is for
_TINY = 1e-6


class View(NamedTuple):
    """What an attacker knows: its own log-probabilities [n, V], and the honest nodes' mean probabilities [n, V]."""

    own: Array
    others: Array
    rng: np.random.Generator


@dataclass(frozen=True, slots=True)
class Attack:
    """An attack: the logits that are coded, the bytes made of the payload, and how many times its share it takes."""

    what: str
    logits: Callable[[View], Array]
    payload: Callable[[bytes], bytes] = bytes
    budget: float = 1.0


def flip(view: View) -> Array:
    """Turn the order of all tokens round: the sign of the logits."""
    return -view.own


def tenfold(view: View) -> Array:
    """Multiply the logits by ten: far too sure."""
    return 10 * view.own


def peak(view: View) -> Array:
    """Put everything on the node's own likeliest token."""
    return one_hot(view.own.argmax(axis=1), view.own.shape[1])


def random(view: View) -> Array:
    """Draw the logits."""
    return np.asarray(view.rng.normal(0, 3, view.own.shape))


def bias(view: View, share: float = 0.3) -> Array:
    """Move a share of all probability to one token."""
    chances = (1 - share) * np.exp(view.own)
    chances[:, TOKEN] += share
    return _logarithm(chances)


def loss_maximization(view: View) -> Array:
    """Put everything on the token that the honest nodes find least likely (LMA of arXiv 2402.12265)."""
    return one_hot(view.others.argmin(axis=1), view.others.shape[1])


def reverse(view: View) -> Array:
    """Hand the honest mean's probabilities out in reverse: the least likely token gets the largest (as CPA)."""
    order = view.others.argsort(axis=1)
    chances = np.empty_like(view.others)
    np.put_along_axis(chances, order, np.take_along_axis(view.others, order[:, ::-1], axis=1), axis=1)
    return _logarithm(chances)


def collude(view: View, share: float = 0.3) -> Array:
    """Send the honest mean, of which a share is moved to each token's neighbour: the same from all attackers."""
    return _logarithm((1 - share) * view.others + share * np.roll(view.others, 1, axis=1))


def swap(view: View) -> Array:
    """Exchange the honest mean's two likeliest tokens: a small change in every context, and hardly one in the mean."""
    order = view.others.argsort(axis=1)[:, -2:]
    chances = view.others.copy()
    np.put_along_axis(chances, order, np.take_along_axis(chances, order[:, ::-1], axis=1), axis=1)
    return _logarithm(chances)


def claim_noise(payload: bytes) -> bytes:
    """Claim that sampled labels are as noisy as may be claimed."""
    head = LabelHeader.from_bytes(payload)
    return head._replace(noise=2 * head.tau).to_bytes() + payload[head.size :]


def one_hot(tokens: Array, vocab: int) -> Array:
    """Return logits [n, V] with one token each."""
    found = np.full((len(tokens), vocab), -12.0)
    found[np.arange(len(tokens)), tokens] = 12.0
    return found


def _logarithm(chances: Array) -> Array:
    return np.asarray(np.log(np.maximum(chances, _TINY)))


ATTACKS: dict[str, Attack] = {
    "flip": Attack("the sign of the logits is turned", flip),
    "tenfold": Attack("logits times ten", tenfold),
    "peak": Attack("one-hot at the node's own likeliest token", peak),
    "random": Attack("random logits", random),
    "bias": Attack("0.3 of all probability on one token", bias),
    "slight-bias": Attack("0.05 of all probability on one token", lambda view: bias(view, 0.05)),
    "lma": Attack("one-hot at the token that honest nodes find least likely", loss_maximization),
    "reverse": Attack("the honest mean's probabilities in reverse order", reverse),
    "collude": Attack("both send the honest mean, 0.3 of it moved", collude),
    "swap": Attack("the honest mean with its two likeliest tokens exchanged", swap),
    "grab": Attack("logits times ten, and twice the share of the bits, at the honest nodes' cost", tenfold, budget=2.0),
    "false-variance": Attack("random logits, and a claim that all of it is noise", random, claim_noise),
}
