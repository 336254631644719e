"""The study of what few numbers could teach, on a tiny model: its ways, and what its table says."""

from __future__ import annotations

import csv
import math
import sys
from typing import TYPE_CHECKING

import pytest
import torch

from benchmarks.privacy_limits import LEAST_GAIN, Span, main
from fpld.privacy import noise_for
from tests.audit.test_audit import SMALL
from tests.federation.conftest import config_file

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["config_file"]


def test_the_study_has_a_row_for_each_way(config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = config_file.read_text().replace('kind = "ngram"\norder = 2\nbuckets = 256\nbatch = 128', SMALL)
    config_file.write_text(tiny.replace("contexts = 480", "contexts = 640"))
    options = "--nodes north --epsilons 1 --steps 3 --windows 16 --units 3"
    out = tmp_path / "out"
    monkeypatch.setattr(sys, "argv", ["limits", "--preset", str(config_file), "--out", str(out), *options.split()])
    main()
    with (out / "privacy-limits.csv").open() as file:
        rows = list(csv.DictReader(file))
    ways = [row["way"] for row in rows]
    others = ["all", "norms", "adapters 1", "adapters 4", "random 5 x 5", "random 33 x 33"]
    assert ways == [*others, "public", "public", "public", "span"]
    assert [int(row["numbers"]) for row in rows][-4:] == [200, 1000, 8192, 40]  # of 40 public units
    noise = noise_for(1.0, 1e-5, rate=1.0, steps=1)
    for row in rows:
        assert float(row["gain"]) > 0
        assert (row["dropped"] == "True") == (float(row["gain"]) < LEAST_GAIN)
        assert 0 < float(row["signal"]) <= 1
        ratio = float(row["noise/signal at 1"])
        assert ratio * float(row["signal"]) == pytest.approx(noise * math.sqrt(int(row["numbers"])) / int(row["units"]))
        assert float(row["units for equal norms"]) == pytest.approx(ratio * int(row["units"]))


def test_a_gradient_within_the_span_is_its_coordinates() -> None:
    generator = torch.Generator().manual_seed(0)
    gradients = [{"w": torch.randn(4, 5, generator=generator), "b": torch.randn(4, generator=generator)} for _ in "abc"]
    span = Span(gradients, tokens=10)
    start = {"w": torch.ones(4, 5), "b": torch.zeros(4)}
    weights = {name: part.clone() for name, part in start.items()}
    span.place(span.coordinates(gradients[1]), start, weights)
    for name, part in gradients[1].items():
        assert torch.allclose(weights[name] - start[name], part, atol=1e-5)
