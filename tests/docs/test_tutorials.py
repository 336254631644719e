"""The tutorials run as they stand, each in an empty folder, and leave what they say."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from fpld.engines.flower.launch.processes import free_port

DOCS = Path(__file__).parents[2] / "docs"
RUN = runpy.run_path(str(DOCS / "run_page.py"))["run"]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform == "win32" or shutil.which("bash") is None, reason="the pages are for bash"),
]


# The page's own sizes take half a minute of two idle cores; a third of the steps shows that every line runs.
SHORTER = (("contexts = 12288", "contexts = 4096"), ("steps = 300", "steps = 100"), ("steps = 200", "steps = 80"))


def losses(run: Path) -> dict[str, float]:
    """Return the losses of a run by method."""
    return {row["method"]: row["heldout_loss"] for row in json.loads((run / "result.json").read_text())}


def follow(page: str, folder: Path, *changes: tuple[str, str]) -> str:
    """Do what a page says; return what the terminal showed."""
    text = (DOCS / f"{page}.md").read_text("utf-8")
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    done = RUN(text, folder, timeout=1800, capture=True)
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-1000:]
    shown: str = done.stdout
    return shown


@pytest.mark.long
def test_a_federation_of_your_own_text(tmp_path: Path) -> None:
    shown = follow("tutorials/own-text", tmp_path, *SHORTER)
    found = losses(tmp_path / "runs/mine")
    assert found["fpld"] < found["base"]
    assert "My fellow citizens" in shown
    assert (tmp_path / "my-model/model.safetensors").exists()
    assert (tmp_path / "runs/mine/report/report.html").exists()
    chats = losses(tmp_path / "runs/chats")
    assert chats["fpld"] < chats["base"]
    document = next((tmp_path / "chats/north").iterdir()).read_text().splitlines()[0]
    assert [message["role"] for message in json.loads(document)["messages"]] == ["user", "assistant"]


@pytest.mark.long
def test_a_pretrained_model(tmp_path: Path) -> None:
    follow("tutorials/pretrained", tmp_path, ("range(200)", "range(80)"), ("steps = 60", "steps = 30"))
    found = losses(tmp_path / "runs/adapted")
    assert found["fpld"] < found["base"]
    assert (tmp_path / "merged/model.safetensors").exists()
    assert (tmp_path / "adapter/adapter_model.safetensors").exists()


def test_your_models_differ(tmp_path: Path) -> None:
    shorter = (("contexts = 4096", "contexts = 1024"), ("steps = 100", "steps = 40"), ("steps = 60", "steps = 30"))
    shown = follow("tutorials/your-models-differ", tmp_path, *shorter)
    found = losses(tmp_path / "runs/differ")
    assert found["fpld"] < found["base"]
    assert {"own: east", "own: south"} < set(found)
    assert "bits_per_byte" in shown


def test_a_codec_of_your_own(tmp_path: Path) -> None:
    follow("tutorials/codec", tmp_path)
    found = losses(tmp_path / "runs/top")
    assert found["float32 logits"] < found["fpld"] < found["base"]


def test_a_rule_of_your_own(tmp_path: Path) -> None:
    page = (DOCS / "extending.md").read_text("utf-8")
    (tmp_path / "mine.py").write_text(
        re.findall(r"```python\n(.*?)```", page.partition("\n## A rule\n")[2], re.DOTALL)[0]
    )
    follow("extending", tmp_path)
    found = losses(tmp_path / "runs/mine")
    assert found["fpld"] < found["base"]


@pytest.mark.waits
def test_across_machines(tmp_path: Path) -> None:
    shown = follow("tutorials/across-machines", tmp_path, ("127.0.0.1:8000", f"127.0.0.1:{free_port()}"))
    trace = (tmp_path / "runs/one/trace.jsonl").read_text().splitlines()
    lines: list[dict[str, Any]] = [json.loads(line) for line in trace]
    assert [line["nodes"] for line in lines] == [["north", "south"]] * 2
    assert '"kind": "frame"' in shown
    assert not (tmp_path / "runs/one/private").exists()
