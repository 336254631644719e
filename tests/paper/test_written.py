"""What contexts that the nodes write do to Theorem 1, by simulation: docs/paper.md, "Written contexts".

A student that is linear in the features of a context is fitted to labels by least squares. Node i has contexts of its
own distribution P_i and its own conditional p_i; what the student is for is the text of all, P* with the conditional
that belongs to it. A label is p_i plus noise. Public contexts come from Q and have the mean of all nodes' labels;
written ones come from P_i and have that of node i alone. Labels are as many either way.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest

NODES = 5
CONTEXTS = 400  # that there are
FEATURES = 12
VOCAB = 6
LABELS = 20_000  # that all nodes send together
TRIALS = 24


class World(NamedTuple):
    """Distributions of contexts of each node [K, X] and of public text [X], conditionals [K, X, V], features [X, d]."""

    private: np.ndarray
    public: np.ndarray
    conditionals: np.ndarray
    features: np.ndarray

    @property
    def everywhere(self) -> np.ndarray:
        """Return P* [X]."""
        return np.asarray(self.private.mean(axis=0))

    @property
    def truth(self) -> np.ndarray:
        """Return the conditional of P* [X, V]: the nodes' own, weighted by how likely the context is theirs."""
        joint = (self.private[:, :, None] * self.conditionals).mean(axis=0)
        return np.asarray(joint / self.everywhere[:, None])

    @property
    def rho(self) -> float:
        """Return the paper's rho of the public text: the largest ratio of P* to Q."""
        return float((self.everywhere / self.public).max())


def make_world(rng: np.random.Generator, *, apart: float, shift: float) -> World:
    """Return nodes that differ by `apart` in text and conditionals, and public text that differs by `shift`."""
    features = rng.normal(size=(CONTEXTS, FEATURES)) / np.sqrt(FEATURES)
    directions = rng.normal(size=(NODES + 1, FEATURES))
    tilts = features @ directions.T  # [X, K + 1]
    private = np.exp(apart * tilts[:, :NODES]).T
    public = np.exp(shift * tilts[:, NODES])
    shared = features @ rng.normal(size=(FEATURES, VOCAB))
    own = features @ rng.normal(size=(NODES, FEATURES, VOCAB))
    logits = shared + 2 * apart * own
    conditionals = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    return World(private / private.sum(axis=1, keepdims=True), public / public.sum(), conditionals, features)


def risk(world: World, rng: np.random.Generator, *, written: bool, noise: float) -> float:
    """Return how far a fitted student is beyond the best one of its class on P*, in squared error."""
    count = LABELS // NODES
    if written:
        places = np.concatenate([rng.choice(CONTEXTS, count, p=p) for p in world.private])
        labels = world.conditionals[np.repeat(np.arange(NODES), count), places]
        labels = labels + noise * rng.normal(size=labels.shape)
    else:
        places = rng.choice(CONTEXTS, count, p=world.public)
        labels = world.conditionals[:, places] + noise * rng.normal(size=(NODES, count, VOCAB))
        labels = labels.mean(axis=0)
    fitted = np.linalg.lstsq(world.features[places], labels, rcond=None)[0]
    weights = np.sqrt(world.everywhere)[:, None]
    best = np.linalg.lstsq(weights * world.features, weights * world.truth, rcond=None)[0]

    def error(matrix: np.ndarray) -> float:
        return float((world.everywhere[:, None] * (world.features @ matrix - world.truth) ** 2).sum())

    return error(fitted) - error(best)


def mean_risks(seed: int, *, apart: float, shift: float, noise: float) -> tuple[float, float, float]:
    """Return the mean risk with public and with written contexts, and the standard error of their difference."""
    rng = np.random.default_rng(seed)
    pairs = []
    for _ in range(TRIALS):
        world = make_world(rng, apart=apart, shift=shift)
        pairs.append([risk(world, rng, written=written, noise=noise) for written in (False, True)])
    table = np.array(pairs)
    public, own = table.mean(axis=0)
    return public, own, float((table[:, 0] - table[:, 1]).std(ddof=1) / np.sqrt(TRIALS))


def test_nodes_that_agree_on_their_public_text_lose_nothing() -> None:
    """With rho = 1 and equal nodes K-fold contexts of single labels are worth as much as the mean of K labels.

    Four standard errors: a false alarm in fewer than 1 of 10,000 seeds.
    """
    public, own, error = mean_risks(0, apart=0.0, shift=0.0, noise=1.0)
    assert abs(public - own) < 4 * error
    assert 0.5 < public / own < 2


@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_nodes_that_differ_gain_by_writing(noise: float) -> None:
    """The further public text is from the nodes' (rho), the more written contexts gain; and the right node labels."""
    near = mean_risks(1, apart=1.0, shift=0.5, noise=noise)
    far = mean_risks(1, apart=1.0, shift=2.0, noise=noise)
    for public, own, error in (near, far):
        assert public - own > 4 * error
    assert far[0] / far[1] > near[0] / near[1]
