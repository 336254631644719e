"""Golden bytes: the format of every codec's payload, tied to the version of the wire.

A change of these bytes is a new version: give it the next number, here, in `fpld.protocol.wire` and in docs/wire.md. A
row of `VERSIONS` is never changed; those of a codec that was removed stay.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from fpld import encode
from fpld.codecs import make_prior
from fpld.codecs.samples.decoder import SamplesReader
from fpld.protocol import wire
from fpld.registry import codecs
from tests.codecs import wire_samples
from tests.helpers import make_plan

if TYPE_CHECKING:
    from fpld import Plan

PAGE = (Path(__file__).parents[2] / "docs/wire.md").read_text()

# The digest of a codec's payloads below, by version of the wire.
VERSIONS = {
    (2, "uniform"): "2fa517f82a065bdebaa87292c7b503f9397a64323085146d1442c2574d043a40",
    (2, "float32"): "cef933ea1c61fcd253e19fa788e41b54e80b11c6233fa85ceb291ed6cda9c000",
    (2, "predictive"): "9df54dac1472ab038fe6bf03f309f8f72c9b68d18d46f6c50a7aa70d2e0c741b",
    (2, "predictive-strict"): "cd4e673b1ec40baf8abf0cd605fa53b64d0f8fc7916b6eea4b7674a73fae3ae2",
    (3, "uniform"): "2fa517f82a065bdebaa87292c7b503f9397a64323085146d1442c2574d043a40",
    (3, "float32"): "cef933ea1c61fcd253e19fa788e41b54e80b11c6233fa85ceb291ed6cda9c000",
    (3, "predictive"): "9df54dac1472ab038fe6bf03f309f8f72c9b68d18d46f6c50a7aa70d2e0c741b",
    (3, "predictive-strict"): "cd4e673b1ec40baf8abf0cd605fa53b64d0f8fc7916b6eea4b7674a73fae3ae2",
    (3, "samples"): "2e565266c205a819fb9299b31053a9fd53bf0bcd698218afe11c6e751e80fbbb",
    (4, "uniform"): "2fa517f82a065bdebaa87292c7b503f9397a64323085146d1442c2574d043a40",
    (4, "float32"): "cef933ea1c61fcd253e19fa788e41b54e80b11c6233fa85ceb291ed6cda9c000",
    (4, "predictive"): "9df54dac1472ab038fe6bf03f309f8f72c9b68d18d46f6c50a7aa70d2e0c741b",
    (4, "predictive-strict"): "cd4e673b1ec40baf8abf0cd605fa53b64d0f8fc7916b6eea4b7674a73fae3ae2",
    (4, "samples"): "55f4ebe53d34b4a3e757a6690bebf3b42e1b76be347ed261631a4f9c2fe18698",
    (5, "uniform"): "2fa517f82a065bdebaa87292c7b503f9397a64323085146d1442c2574d043a40",
    (5, "float32"): "cef933ea1c61fcd253e19fa788e41b54e80b11c6233fa85ceb291ed6cda9c000",
    (5, "predictive"): "9df54dac1472ab038fe6bf03f309f8f72c9b68d18d46f6c50a7aa70d2e0c741b",
    (5, "predictive-strict"): "cd4e673b1ec40baf8abf0cd605fa53b64d0f8fc7916b6eea4b7674a73fae3ae2",
    (5, "samples"): "55f4ebe53d34b4a3e757a6690bebf3b42e1b76be347ed261631a4f9c2fe18698",
}

# Codec, contexts, vocabulary, bits per context, other fields of the plan, and the payload (a long one: its SHA-256).
# The prior is of that multiple of the logits: 0 for equal probabilities, below it for one that is far off.
GOLDEN: dict[str, tuple[str, int, int, float, dict[str, Any], str]] = {
    "uniform, clip": ("uniform", 2, 10, 25.0, {"clip": 3.0}, "1b00584db3f9"),
    "uniform, ranges": ("uniform", 2, 10, 58.0, {}, "51beb03d513eb03daa02dba200d5"),
    "uniform, stratified": ("uniform", 2, 10, 25.0, {"clip": 3.0, "slot": 2, "slots": 5}, "580a58648cd5"),
    "float32": ("float32", 1, 2, 64.0, {}, "000040c000004040"),
    "predictive, prior, small": (
        "predictive",
        4,
        8,
        60.0,
        {"prior": 0.0},
        "010c1048d17505c4ca5de96c4c2604f6286e1603352bf8ed4d9d3b821dbf",
    ),
    "predictive, prior, large": (
        "predictive",
        300,
        8,
        60.0,
        {"prior": 0.0},
        "d060deee069083112baa712738d9da2b1cd8404b131276cc5314b71b8ede4460",
    ),
    "predictive": ("predictive", 4, 8, 60.0, {}, "002012781274219c0a610a0391b7f54a1df41620a688dab2dbce7a54d0e7"),
    "predictive, dithered": (
        "predictive",
        4,
        8,
        60.0,
        {"slot": 1, "slots": 4},
        "022512094264f019f09ef23af221d81ef0e066b1aa560bf435fda8af7bc0",
    ),
    "samples": ("samples", 4, 8, 60.0, {"prior": 0.0}, "38113b9ad33807c038f9ba5ad50d59e85a6381049667e94c628484c5df51"),
    "samples, escapes": (
        "samples",
        2,
        40,
        120.0,
        {"prior": -2.0},
        "f7131ab9c83c0804927234424f574ab813cfd319bc8bcaf71664d7dfa0",
    ),
    "samples, stratified": (
        "samples",
        4,
        8,
        60.0,
        {"prior": 0.0, "slot": 2, "slots": 5},
        "2d1133b2d13807c038dd8dc4b1e5376fb950f6e4b7f180b0e2fe93d483c9",
    ),
    "samples, two steps": (
        "samples",
        100,
        6,
        80.0,
        {"prior": -2.0},
        "e27e1b407e99c8151bcb773be30124943e9b1f2f2603568752a304c48ea40512",
    ),
}


def scene(name: str) -> tuple[np.ndarray, Plan]:
    _, contexts, vocab, bits, fields, _ = GOLDEN[name]
    logits = np.linspace(-3, 3, contexts * vocab).reshape(contexts, vocab)
    prior = make_prior(fields["prior"] * logits) if "prior" in fields else None
    plan = make_plan(**{"clip": None, **fields, "contexts": contexts, "vocab": vocab, "bits": bits, "prior": prior})
    return logits, plan


def payload(name: str) -> bytes:
    return encode(codecs.get(GOLDEN[name][0]), *scene(name))


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_payload(name: str) -> None:
    found = payload(name)
    golden = GOLDEN[name][-1]
    assert (found.hex() if len(found) < 100 else hashlib.sha256(found).hexdigest()) == golden


@pytest.mark.parametrize("name", [name for name, row in GOLDEN.items() if row[0] == "samples"])
def test_sampled_labels_are_what_the_docs_say(name: str) -> None:
    """Against a decoder that has nothing but docs/wire.md; one row has escapes, one two steps."""
    data = payload(name)
    (_, plan) = scene(name)
    (sparse,) = SamplesReader(data, plan).sparse()
    found = np.zeros(plan.shape)
    found[np.repeat(np.arange(plan.contexts), np.diff(sparse.starts)), sparse.tokens] = sparse.changes
    symbols = wire_samples.symbols(data, plan)
    taus = 2.0 ** ((wire_samples.steps(data, plan) - 6144) / 256)
    assert len(set(taus)) == (2 if name == "samples, two steps" else 1)
    assert np.count_nonzero(symbols) > plan.contexts
    assert np.allclose(found, taus[:, None] * symbols, rtol=1e-6)
    assert wire_samples.possible(symbols, data, plan)


def test_every_codec_has_golden_bytes() -> None:
    assert {row[0] for row in GOLDEN.values()} == set(codecs.names())


@pytest.mark.parametrize("codec", sorted({row[0] for row in GOLDEN.values()}))
def test_the_version_of_the_wire_goes_up_with_golden_bytes(codec: str) -> None:
    """Bytes or version without the other: this fails. A new codec is one more row of the present version."""
    digest = hashlib.sha256()
    for name in sorted(name for name, row in GOLDEN.items() if row[0] == codec):
        data = payload(name)
        digest.update(len(data).to_bytes(8, "little") + data)
    assert max(version for version, _ in VERSIONS) == wire.VERSION
    assert VERSIONS[wire.VERSION, codec] == digest.hexdigest()


def test_the_docs_say_which_version_and_which_bytes() -> None:
    assert PAGE.startswith(f"# The wire format, version {wire.VERSION}\n")
    listed = re.findall(r"^\| (\d+) \| ([a-z0-9-]+) \| `([0-9a-f]{64})` \|$", PAGE, re.MULTILINE)
    present = {
        (version, codec): digest
        for (version, codec), digest in VERSIONS.items()
        if version == wire.VERSION and codec in codecs.names()
    }
    assert {(int(version), codec): digest for version, codec, digest in listed} == present
