"""Labels over strings in a deployment: a site whose tokenizer is another one from the second round on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from fpld.storage.run_folder import TOKENIZER, numbered
from tests.engines.flower.conftest import Deployment
from tests.federation.test_strings import other_tokenizer

if TYPE_CHECKING:
    from pathlib import Path

    from flwr.app import Message

STRINGS = [
    ("rounds = 3", "rounds = 2\nquorum = 2\ncontinuations = 0"),
    ("contexts = 480\nlength = 16", "contexts = 160\nlength = 8"),
    ("[student]", '[labels]\nover = "strings"\nsymbols = 300\nsymbol_bytes = 8\n\n[student]'),
    (
        'kind = "ngram"\norder = 2\nbuckets = 256\nbatch = 128',
        'kind = "transformer"\nlayers = 1\nwidth = 16\nheads = 2\nlength = 64',
    ),
    ('name = "east"', 'name = "east"\ntokenizer = {kind = "bpe", vocab = 270}'),
    ("[baselines]", '[codec]\nname = "samples"\n\n[combine]\nrule = "mixture"\n\n[baselines]'),
    ("steps = 60", "steps = 10"),
]


@pytest.mark.slow
def test_a_site_whose_tokenizer_has_changed_sends_no_labels(tmp_path: Path) -> None:
    deployment = Deployment(tmp_path, STRINGS)
    grid = deployment.grid()
    changed: list[Path] = []

    def tamper(file: Path, reply: Message) -> Message:
        own = tmp_path / "flower" / numbered(TOKENIZER, 1)
        if (
            file.parent.name == "east"
            and not reply.has_error()
            and reply.metadata.message_type == "train"
            and not changed
        ):
            kept = [path for path in (file.parent / "files").iterdir() if path.read_bytes() == own.read_bytes()]
            other_tokenizer(kept[0])
            changed.extend(kept)
        return reply

    grid.tamper = tamper
    deployment.serve(grid)
    assert len(changed) == 1
    first, second = deployment.trace()
    assert first["nodes"] == ["north", "east", "south"]
    assert second["nodes"] == ["north", "south"]
    assert "are not those of the plan" in (tmp_path / "nodes/east/log.txt").read_text()
