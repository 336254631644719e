"""A model seen through its map: its logits, its gradient, and what it learns over strings beside over tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from fpld.codecs import encode, make_prior
from fpld.codecs.samples.codec import SAMPLES
from fpld.codecs.samples.probabilities import prior_probabilities
from fpld.data import AlphabetSize, ByteTokenizer, PlaceProbe, ReaderLimits, TokenStrings
from fpld.errors import InputError
from fpld.numerics import softmax
from fpld.students.configs import TransformerConfig
from fpld.students.places import PlaceStudent
from fpld.students.transformer import Transformer
from fpld.target import Target
from tests.data.spellings import TEXT, bpe
from tests.helpers import make_plan

if TYPE_CHECKING:
    from fpld.types import Array

STRINGS = TokenStrings(bpe(300))
OTHER = TokenStrings(ByteTokenizer())
LENGTH = 8


def probe_of(*strings: TokenStrings, symbols: int = 420) -> PlaceProbe:
    readers = [ReaderLimits("a model", each, 64) for each in strings]
    return PlaceProbe.draw([TEXT], readers, contexts=320, length=LENGTH, size=AlphabetSize(symbols, 12), seed=1)


def model_of(strings: TokenStrings, seed: int = 0) -> Transformer:
    config = TransformerConfig(
        vocab=len(strings.strings), layers=1, width=32, heads=2, length=64, batch=16, rate=3e-3, distill_rate=3e-3
    )
    return Transformer(config, seed=seed)


def test_its_logits_are_those_of_the_map() -> None:
    probe = probe_of(STRINGS, OTHER)
    reading = probe.read(STRINGS)
    model = model_of(STRINGS)
    seen = PlaceStudent(model, reading)
    logits = model.logits(reading.tokens).reshape(*reading.tokens.shape, -1)
    rows = np.arange(len(reading.tokens))[:, None]
    expected = reading.space.apply(softmax(logits[rows, reading.ends].reshape(probe.contexts, -1)))
    own = seen.logits(probe.sequences)
    assert own.shape == (probe.contexts, probe.vocab)
    np.testing.assert_allclose(np.exp(own), expected, atol=2e-6)
    np.testing.assert_allclose(np.exp(own.astype(np.float64)).sum(1), 1, atol=1e-5)
    np.testing.assert_array_equal(seen.copy().logits(probe.sequences[3:5]), seen.logits(probe.sequences)[24:40])


def decoded(logits: Array, prior: Array, round: int) -> Array:
    """Return what a receiver has of a model: the prior's probabilities and sampled labels of 60 bits a context."""
    plan = make_plan(
        contexts=len(logits), vocab=logits.shape[1], bits=60.0, clip=None, prior=make_prior(prior), round=round
    )
    payload = encode(SAMPLES, logits.astype(np.float32), plan)
    assert plan.prior is not None
    p = prior_probabilities(plan.prior.block(range(len(logits)))).astype(np.float64)
    first = 0
    for part in SAMPLES.reader(payload, plan).sparse():
        counts = np.diff(part.starts)
        p[first + np.repeat(np.arange(len(counts)), counts), part.tokens] += part.changes
        first += len(counts)
    assert first == len(logits)
    return p


def test_models_of_one_tokenizer_give_equal_labels_in_both_spaces() -> None:
    """Labels over strings are on average the map of those over tokens: every frequent symbol within 4.5 errors.

    The chance of a false alarm is below 1e-3: a normal tail of 7e-6 for each of at most 100 symbols.
    """
    # With one tokenizer all its boundaries are places.
    probe = probe_of(STRINGS)
    reading = probe.read(STRINGS)
    assert (np.diff(reading.ends, axis=1) == 1).all()
    model, student = model_of(STRINGS), model_of(STRINGS, seed=7)
    model.finetune(STRINGS.tokenizer.encode(TEXT), steps=40, seed=0)
    student.finetune(STRINGS.tokenizer.encode(TEXT), steps=5, seed=1)
    rows = np.arange(len(reading.tokens))[:, None]
    tokens = [
        each.logits(reading.tokens).reshape(*reading.tokens.shape, -1)[rows, reading.ends].reshape(probe.contexts, -1)
        for each in (model, student)
    ]
    symbols = [PlaceStudent(each, reading).logits(probe.sequences) for each in (model, student)]
    rounds = range(1, 9)
    over_tokens = np.concatenate([reading.space.apply(decoded(tokens[0], tokens[1], round)) for round in rounds])
    over_strings = np.concatenate([decoded(symbols[0], symbols[1], round) for round in rounds])
    exact = np.exp(symbols[0].astype(np.float64)).mean(0)
    frequent = exact > 0.004
    assert 20 < frequent.sum() <= 100

    def z(one: Array, other: Array) -> Array:
        errors = [each[:, frequent].std(0) / len(each) ** 0.5 for each in (one, other)]
        apart: Array = np.abs(one.mean(0) - other.mean(0))[frequent] / np.hypot(*errors)
        return apart

    assert z(over_tokens, over_strings).max() < 4.5
    # Labels that say no more than the student are told apart.
    of_the_student = np.tile(np.exp(symbols[1].astype(np.float64)), (len(rounds), 1))
    assert z(of_the_student, over_strings).max() > 9


def test_the_gradient_by_blocks_is_that_of_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    probe = probe_of(STRINGS, OTHER)
    model = model_of(STRINGS)
    seen = PlaceStudent(model, probe.read(STRINGS))
    t = torch.rand(4, LENGTH, probe.vocab, generator=torch.Generator().manual_seed(0)) - 0.2
    t /= t.sum(-1, keepdim=True)
    weights = list(model._trained().values())
    loss = seen._target_loss(probe.sequences[:4], t)
    gradients = torch.autograd.grad(loss, weights)
    monkeypatch.setattr(model, "read_out_parts", lambda sequences: (model.predict(sequences), None))
    whole = seen._target_loss(probe.sequences[:4], t)
    assert float(loss.detach()) == pytest.approx(float(whole.detach()), rel=1e-5)
    for one, other in zip(gradients, torch.autograd.grad(whole, weights), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


def test_distilling_over_strings_comes_near_to_distilling_over_tokens() -> None:
    """At the same text, a student over strings makes up three quarters of what one over tokens does."""
    tokens = STRINGS.tokenizer.encode(TEXT)
    teacher = model_of(STRINGS, seed=3)
    teacher.finetune(tokens, steps=120, seed=0)
    probe = probe_of(STRINGS)
    reading = probe.read(STRINGS)
    base = model_of(STRINGS, seed=4)
    over_tokens = base.copy()
    sequences = reading.tokens[:, : int(reading.ends.max()) + 1]
    over_tokens.distill(sequences, teacher.logits(sequences), steps=60, seed=5)
    over_strings = base.copy()
    seen = PlaceStudent(over_strings, reading)
    target = PlaceStudent(teacher, reading).logits(probe.sequences)
    seen.distill(probe.sequences, Target.dense(target), steps=60, seed=5)
    held = tokens[:2000]
    losses = [float(np.mean(model.token_nats(held, 32))) for model in (base, over_tokens, over_strings)]
    assert losses[0] - losses[2] > 0.75 * (losses[0] - losses[1]) > 0.5


def test_what_does_not_fit_is_refused() -> None:
    probe = probe_of(STRINGS, OTHER)
    reading = probe.read(STRINGS)
    with pytest.raises(InputError, match="the map must be from"):
        PlaceStudent(model_of(OTHER), reading)
    short = TransformerConfig(vocab=300, layers=1, width=16, heads=2, length=4)
    with pytest.raises(InputError, match=r"student\.length"):
        PlaceStudent(Transformer(short, seed=0), reading)
    seen = PlaceStudent(model_of(STRINGS), reading)
    with pytest.raises(InputError, match="rows of the probe set"):
        seen.logits(probe.sequences + 1)
    with pytest.raises(InputError, match="rows of 8 positions"):
        seen.logits(probe.sequences[:, :3])
