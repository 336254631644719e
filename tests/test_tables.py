"""The tables of README and docs are those of the kept results, and say what the text around them claims."""

from __future__ import annotations

import json
import math
import runpy
from pathlib import Path
from typing import Any

import pytest

from fpld.report.seeds import draw, summarize

DOCS = Path(__file__).parent.parent / "docs"
MADE = runpy.run_path(str(DOCS / "make_tables.py"))


@pytest.mark.parametrize("page", MADE["PAGES"], ids=lambda page: page.name)
def test_tables_are_those_of_the_kept_results(page: Path) -> None:
    text = page.read_text()
    assert "<!-- table " in text
    assert MADE["rendered"](text) == text, "run python docs/make_tables.py"


def rows(name: str) -> dict[str, dict[str, Any]]:
    kept = json.loads((DOCS / "results" / f"{name}.json").read_text())
    assert kept["seeds"] == [0, 1, 2]
    return {row["method"]: row for row in kept["rows"]}


@pytest.mark.parametrize("name", ["rivals", "hospitals", "wikipedia"])
def test_the_student_is_ahead_of_fedavg_at_its_best_by_two_standard_errors_for_a_twentieth_of_its_bytes(
    name: str,
) -> None:
    found = rows(name)
    assert {f"fedavg, {count} round{'s' * (count > 1)}" for count in (1, 2, 3, 4)} <= set(found)
    for rival in ("fedavg", "fedavg-1bit"):
        best = min((row for method, row in found.items() if method.startswith(f"{rival},")), key=_loss)
        assert best["behind"] > 2 * best["behind_se"] > 0
        if rival == "fedavg":
            assert found["fpld"]["uplink_bytes"] <= 0.05 * best["uplink_bytes"]
    for method, row in found.items():  # nobody is both better and cheaper, but for what cannot be sent
        if method.startswith("fedavg"):
            assert _loss(row) > _loss(found["fpld"]) or row["uplink_bytes"] > found["fpld"]["uplink_bytes"]
    way = found["base"]["heldout_loss"] - found["ensemble"]["heldout_loss"]
    assert found["base"]["heldout_loss"] - found["fpld"]["heldout_loss"] >= 0.75 * way


def test_sampled_labels_teach_more_than_other_codecs_at_every_budget() -> None:
    kept = json.loads((DOCS / "results" / "equal-bytes.json").read_text())
    assert {row["codec"] for row in kept["rows"]} == {"samples", "predictive", "uniform"}
    for row in kept["rows"]:
        if row["codec"] != "samples":
            assert row["behind"] > 2 * (row["behind_se"] or 0.0)


def test_students_at_equal_bytes_are_paired_by_seed(tmp_path: Path) -> None:
    losses = {"samples": (3.0, 3.2), "predictive": (3.1, 3.4)}
    lines = [
        f"seed-{seed},{codec},2.0,{seed},1999999,{1000 + seed},16.0,{loss}"
        for codec, own in losses.items()
        for seed, loss in enumerate(own)
    ]
    columns = "run,codec,megabytes,seed,uplink_bytes,contexts,context_bits,heldout_loss"
    (tmp_path / "labels.csv").write_text("\n".join([columns, *lines]))
    found = MADE["take_students"](tmp_path)
    first, second = found["rows"]
    assert (found["seeds"], first["codec"], second["codec"]) == ([0, 1], "samples", "predictive")
    assert (second["heldout_loss"], second["heldout_se"]) == pytest.approx((3.25, 0.15))
    assert (second["behind"], second["behind_se"]) == pytest.approx((0.15, 0.05))
    assert MADE["student_lines"](found["rows"])[3] == "| 2 MB | `predictive` | 1,001 | 3.250 ± 0.150 | +0.150 ± 0.050 |"


def _loss(row: dict[str, Any]) -> float:
    return float(row["heldout_loss"])


def result(losses: dict[str, float]) -> list[dict[str, Any]]:
    return [
        {"method": name, "heldout_loss": loss, "uplink_bytes": 10, "downlink_bytes": 20}
        for name, loss in losses.items()
    ]


def test_means_standard_errors_and_the_best_node() -> None:
    first = result({"base": 4.0, "alone: a": 3.9, "alone: b": 3.8, "fpld": 3.5})
    second = result({"base": 4.2, "alone: a": 3.6, "alone: b": 3.8, "fpld": 3.3, "only here": 1.0})
    found = {row["method"]: row for row in summarize([first, second])}
    assert set(found) == {"base", "best node alone", "fpld"}
    assert found["best node alone"]["heldout_loss"] == pytest.approx(3.7)
    assert found["best node alone"]["behind"] == pytest.approx(0.3)
    assert found["best node alone"]["behind_se"] == pytest.approx(0.0, abs=1e-12)
    assert found["base"]["behind_se"] == pytest.approx(0.2)
    assert (found["base"]["uplink_bytes"], found["base"]["downlink_bytes"]) == (10, 20)
    (alone,) = [row for row in summarize([first]) if row["method"] == "fpld"]
    assert math.isnan(alone["heldout_se"])


def test_the_figure_has_a_point_for_every_method_that_sends() -> None:
    from matplotlib.figure import Figure

    figure = Figure()
    draw(summarize([result({"base": 4.0, "fedavg, 1 round": 3.9, "fedavg, 2 rounds": 3.8, "fpld": 3.5})] * 2), figure)
    (axes,) = figure.axes
    assert set(axes.get_legend_handles_labels()[1]) == {"base", "fedavg", "fpld"}


def test_no_audit_shows_more_than_was_promised() -> None:
    kept = json.loads((DOCS / "results" / "audits.json").read_text())
    assert len(kept["rows"]) == 5
    assert all(row["epsilon_lower"] <= row["epsilon_upper"] <= 3 for row in kept["rows"])
