"""A small real federation: three sites with texts of their own, bytes as tokens, n-gram students; a second or two."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

if TYPE_CHECKING:
    from pathlib import Path

WORDS = {
    "public": "the a of to and in is was for on with as by at from it we they",
    "north": "snow ice wind cold the of and fir wolf bear frost to in lake north",
    "east": "sun sand the of and dune palm to in heat camel east well salt date",
    "south": "rain river the of and tree frog to in vine south parrot mud leaf",
}

CONFIG = """
[run]
rounds = 3
seed = 5

[data]
path = "{folder}/texts"
heldout = 0.25
heldout_tokens = 600

[probe]
source = "public"
contexts = 480
length = 16

[tokenizer]
kind = "bytes"

[[nodes]]
name = "north"
bits = 1.5

[[nodes]]
name = "east"
bits = 4.0

[[nodes]]
name = "south"
bits = 4.0

[student]
kind = "ngram"
order = 2
buckets = 256
batch = 128

[base]
steps = 20

[local]
steps = 25

[distill]
steps = 60

[engine]
workers = 0
"""


def write_texts(place: Path) -> None:
    """Write the texts of the sites, and the public one, below a folder."""
    for label, words in WORDS.items():
        folder = place / "texts" / label
        folder.mkdir(parents=True)
        rng = np.random.default_rng(len(label))
        for part in range(6):
            (folder / f"{part}.txt").write_text(" ".join(rng.choice(words.split(), 250)))


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    """A configuration file beside the texts that it names."""
    write_texts(tmp_path)
    file = tmp_path / "config.toml"
    file.write_text(CONFIG.format(folder=tmp_path))
    return file
