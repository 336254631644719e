"""The tokens of a site's text: one copy for all runs, said where it is, and removed when asked."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np

from fpld.cli import main
from fpld.data.token_stream import open_text
from fpld.engines.flower.site.folder import site_lock
from tests.engines.flower.conftest import Deployment

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_runs_share_one_copy_that_is_cleared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    deployment = Deployment(tmp_path, [("rounds = 3", "rounds = 1")])
    deployment.serve(deployment.grid())
    file = deployment.node_files[0]
    home = file.parent
    (text,) = home.glob("runs/*/text.safetensors")
    tokens = open_text(text).tokens
    packs = list((home / "texts").rglob("*.u*"))
    assert sum(pack.stat().st_size for pack in packs) >= len(tokens)
    assert text.stat().st_size < len(tokens)  # the run's folder has no copy
    assert str(home / "texts") in (home / "log.txt").read_text()
    assert main(["check", str(file)]) == 0
    assert "fpld node clear" in " ".join(capsys.readouterr().out.split())
    with site_lock(home, "north"):
        assert main(["node", "clear", str(file)]) == 2
    assert np.asarray(tokens).size
    capsys.readouterr()
    assert main(["node", "clear", str(file), "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["runs"] == 1
    assert row["bytes"] > len(tokens)
    left = {path.name for path in home.rglob("*") if path.is_file()}
    assert not left & {"text.safetensors", "heldout.safetensors", *(pack.name for pack in packs)}
    assert "ledger.jsonl" in left
