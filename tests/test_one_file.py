"""examples/one_file.py: its labels are unbiased, and its student gains what the package's gains in the same run."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from fpld.cli import main

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parent.parent
one_file = SimpleNamespace(**runpy.run_path(str(ROOT / "examples/one_file.py"), run_name="one_file"))

COMMON = "a is was for on with as by at from it we they he she not but all"
WORDS = {
    "north": "snow ice wind cold the of and fir wolf bear frost to in lake north",
    "east": "sun sand the of and dune palm to in heat camel east well salt date",
    "south": "rain river the of and tree frog to in vine south parrot mud leaf",
}
SETTINGS = one_file.Settings(
    layers=1,
    width=32,
    heads=2,
    length=16,
    batch=8,
    base_steps=100,
    local_steps=60,
    distill_steps=80,
    rounds=2,
    bits=24.0,
)
CONFIG = """
[run]
rounds = {s.rounds}
seed = {seed}
continuations = 0
[data]
path = "{folder}/texts"
heldout = 0.3
heldout_tokens = 4097
[probe]
source = "public"
contexts = 2048
length = {s.length}
[tokenizer]
kind = "bytes"
[codec]
name = "samples"
[combine]
rule = "mixture"
[student]
kind = "transformer"
layers = {s.layers}
width = {s.width}
heads = {s.heads}
length = {s.length}
batch = {s.batch}
[base]
steps = {s.base_steps}
rate = {s.rate}
[local]
steps = {s.local_steps}
rate = {s.rate}
[distill]
steps = {s.distill_steps}
rate = {s.rate}
[baselines]
methods = []
[engine]
workers = 0
""" + "".join(f'[[nodes]]\nname = "{name}"\ncontext_bits = {SETTINGS.bits}\n' for name in WORDS)


class Labels(NamedTuple):
    """A node's predictions p and the student's pi, both [m, V], and the draws u that both ends know."""

    p: np.ndarray
    pi: np.ndarray
    u: np.ndarray


class Gains(NamedTuple):
    """By how much the loss of each student is below that of the base model, in nats per byte."""

    package: float
    example: float


@pytest.fixture
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def make_labels(m: int) -> Labels:
    """Peaked predictions in 16 contexts, over and over, and the draws of the second of three nodes."""
    rng = np.random.default_rng(0)
    logits = torch.from_numpy(rng.normal(0, 3, (16, one_file.V)))
    other = logits + torch.from_numpy(rng.normal(0, 1, logits.shape))
    rows = np.arange(m) % 16
    return Labels(other.softmax(-1).numpy()[rows], logits.softmax(-1).numpy()[rows], one_file.draw(m, 1, 3, [7, 1]))


@pytest.mark.parametrize("bits", [4.0, 12.0, 40.0])
def test_labels_come_back_and_fill_their_budget(bits: float) -> None:
    labels = make_labels(1024)
    payload = one_file.encode(*labels, bits)
    assert 0.9 * bits < 8 * len(payload) / 1024 <= bits
    tau = 2 ** (-payload[0] / 16)
    expected = tau * np.floor((labels.p - labels.pi) / tau + labels.u)
    np.testing.assert_allclose(one_file.decode(payload, labels.pi, labels.u), expected, rtol=1e-6)


def test_labels_are_unbiased() -> None:
    """Each of four sums of errors is normal, of mean zero and a variance that is computed.

    |z| < 5 fails by chance with 5.7e-7, so one of four with at most 2.3e-6.
    """
    labels = make_labels(8192)
    payload = one_file.encode(*labels, 12.0)
    tau = 2 ** (-payload[0] / 16)
    change = labels.p - labels.pi
    error = one_file.decode(payload, labels.pi, labels.u) - change
    fraction = change / tau - np.floor(change / tau)
    variance = tau**2 * fraction * (1 - fraction)
    # They would show shrinkage, a shift, an error that goes by the prior, and one that goes by the size of the change.
    for weight in (np.sign(change), np.ones_like(change), np.log(labels.pi), change):
        z = (weight * error).sum() / np.sqrt((weight**2 * variance).sum())
        assert abs(z) < 5.0


def write_texts(folder: Path, seed: int) -> None:
    """Write the sites' texts, and a public one in which their words are rare."""
    rng = np.random.default_rng(seed)
    for label, words in {**WORDS, "public": " ".join([*WORDS.values(), *6 * [COMMON]])}.items():
        (folder / label).mkdir(parents=True)
        for part in range(8):
            (folder / label / f"{part}.txt").write_text(" ".join(rng.choice(words.split(), 600)))


def run_both(folder: Path, seed: int) -> Gains:
    """Run a federation with the package, and with the example from its base model, tokens and probe contexts on.

    Draws and minibatches differ: each has its own.
    """
    write_texts(folder / "texts", seed)
    (folder / "config.toml").write_text(CONFIG.format(s=SETTINGS, seed=seed, folder=folder))
    run = folder / "run"
    assert main(["run", str(folder / "config.toml"), "--out", str(run), "--json"]) == 0
    losses = {row["method"]: row["heldout_loss"] for row in json.loads((run / "result.json").read_text())}

    base = {name: torch.from_numpy(weight) for name, weight in load_file(run / "base-0.safetensors").items()}
    nodes = range(len(WORDS))
    texts = [load_file(run / f"private/text/{i}.safetensors")["tokens"].astype(np.int64) for i in nodes]
    tokens = load_file(run / "private/heldout.safetensors")
    heldout = [tokens[str(i)].astype(np.int64) for i in nodes]
    probe = np.array(json.loads((run / "probe.json").read_text())["sequences"])
    # The same model: the base has the same loss by both.
    assert one_file.heldout_loss(base, heldout, SETTINGS) == pytest.approx(losses["base"], abs=1e-4)
    rounds = list(one_file.federate(base, texts, probe, SETTINGS, seed))
    assert all(size <= probe.size * SETTINGS.bits / 8 for _, sent in rounds for size in sent)
    student, _ = rounds[-1]
    return Gains(losses["base"] - losses["fpld"], losses["base"] - one_file.heldout_loss(student, heldout, SETTINGS))


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_student_gains_what_that_of_the_package_does(tmp_path: Path) -> None:
    """Over seeds 0 to 15 the gains were 0.705 and 0.703 nats; the difference was -0.003, its deviation 0.010.

    A mean of three then has a standard error of 0.006. The bound is four of them: a false alarm in 6e-5.
    """
    gains = [run_both(tmp_path / str(seed), seed) for seed in range(3)]
    difference = np.mean([each.example - each.package for each in gains])
    assert abs(difference) < 0.024
    assert min(each.package for each in gains) > 0.5
