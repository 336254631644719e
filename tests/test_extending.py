"""docs/extending.md runs as it stands, is short, and what it registers can be used by name."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import numpy as np
import pytest

from fpld import InputError, registry, seal, unseal
from fpld.registry import Registry
from tests.helpers import make_plan

ROOT = Path(__file__).parent.parent


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    for table in (registry.allocators, registry.rules, registry.codecs):
        monkeypatch.setattr(table, "_loaded", dict(table._loaded))


@pytest.mark.usefixtures("fresh")
def test_example_of_the_docs(tmp_path: Path) -> None:
    code = re.findall(r"```python\n(.*?)```", (ROOT / "docs/extending.md").read_text(), re.DOTALL)[0]
    assert len(code.splitlines()) < 50
    file = tmp_path / "extension.py"
    file.write_text(code)
    runpy.run_path(str(file))
    values = np.array([[1.0, 2.0], [3.0, 8.0], [4.0, 3.0]])
    assert registry.rules.get("midrange")(values, np.zeros_like(values)).tolist() == [2.5, 5.0]
    codec, plan = registry.codecs.get("sign"), make_plan()
    logits = np.random.default_rng(0).normal(size=plan.shape)
    frame = seal(codec.encode(logits, plan), plan, codec.code)
    decoded = codec.decode(unseal(frame, plan, codec.code), plan)
    assert np.array_equal(np.sign(decoded.values), np.sign(logits))


def test_entry_points_of_other_packages_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real installed distribution: a module and its metadata on the path."""
    (tmp_path / "other_package.py").write_text("def evenly(values, variance):\n    return values.mean(axis=0)\n")
    info = tmp_path / "other_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[fpld.rules]\nevenly = other_package:evenly\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    rules: Registry[object] = Registry("rule", "fpld.rules", {})
    assert rules.names() == ["evenly"]
    assert callable(rules.get("evenly"))


@pytest.mark.usefixtures("fresh")
def test_unknown_and_taken_names_are_refused() -> None:
    with pytest.raises(InputError, match="allocator must be one of inverse, optimal, square-root, uniform, got 'best'"):
        registry.allocators.get("best")
    with pytest.raises(InputError, match="'mean' exists already"):
        registry.rules.register("mean", lambda values, _: values[0])
