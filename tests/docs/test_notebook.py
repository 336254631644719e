"""The notebook of the examples runs from its first cell to its last in a kernel of its own."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parent.parent.parent
nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")


def outputs(notebook: Any) -> Iterator[Any]:
    for cell in notebook.cells:
        yield from cell.get("outputs", [])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the kernel's own libraries
def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = nbformat.read(ROOT / "examples/fpld.ipynb", as_version=4)
    assert not list(outputs(notebook))  # it is kept without results
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = [each.get("data", {}) for each in outputs(notebook)]
    assert sum("image/png" in data for data in shown) == 1
    results = [data["text/plain"] for data in shown if "text/plain" in data]
    assert any("Run(" in text and "done, 3 of 3 rounds" in text for text in results)
    (table,) = (text for text in results if "FedDF" in text)
    losses = {name: float(loss) for name, loss in re.findall(r"(FedDF|feddf|base) +([0-9.]+)", table)}
    # The notebook's own baseline is the package's, but for the seed of its minibatches.
    assert abs(losses["FedDF"] - losses["feddf"]) < 0.1 * (losses["base"] - losses["feddf"])


def test_a_baseline_of_ones_own_is_short_and_words_are_those_of_the_docs() -> None:
    text = "\n".join(cell["source"] for cell in nbformat.read(ROOT / "examples/fpld.ipynb", as_version=4).cells)
    function = re.search(r"^def feddf.*?(?=\n\n\n)", text, re.MULTILINE | re.DOTALL)
    assert function is not None
    assert len(function[0].splitlines()) <= 15
    assert not re.search(r"\bsites?\b", text)
