"""The tables of README and docs are those of the kept results, and say what the text around them claims."""

from __future__ import annotations

import json
import math
import re
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from docs import kept_results, make_tables, table_lines
from fpld.report.seeds import draw_summary, summarize_seeds

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("page", make_tables.PAGES, ids=lambda page: page.name)
def test_tables_are_those_of_the_kept_results(page: Path) -> None:
    text = page.read_text()
    assert "<!-- table " in text
    assert make_tables.rendered(text) == text, "run make results"


@pytest.mark.parametrize(
    ("page", "typed"),
    [("results.md", {"2.0", "0.2", "0.02"}), ("paper.md", {"0.97", "0.128", "0.1", "0.2", "0.8", "2.5", "1.41"})],
)
def test_no_number_of_the_results_is_typed(page: str, typed: set[str]) -> None:
    """Outside the tables there are no measured numbers: nothing with a decimal point but settings and constants."""
    text = re.sub(r"<!-- table .*?<!-- end -->", "", (DOCS / page).read_text(), flags=re.DOTALL)
    assert set(re.findall(r"\d+\.\d+|\d+e-?\d+", text)) <= typed


@pytest.mark.parametrize("path", sorted((DOCS / "results").glob("*.json")), ids=lambda path: path.stem)
def test_every_kept_result_says_where_it_is_from(path: Path) -> None:
    kept = json.loads(path.read_text())
    parts: list[Any] = [[kept]] if "rows" in kept else list(kept.values())
    for each in chain.from_iterable(part if isinstance(part, list) else [part] for part in parts):
        assert each["command"]
        assert re.match(r"[0-9a-f]{7}", each["commit"])
        assert each.get("machine") or each["where"]
    if "rows" in kept:
        assert kept["seeds"]
        assert any(make_tables.source(kept, path.stem) in page.read_text() for page in make_tables.PAGES)


def test_one_more_kept_run_is_one_more_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in (DOCS / "results").glob("*.json"):
        (tmp_path / path.name).write_text(path.read_text())
    found = json.loads((DOCS / "results/wikipedia.json").read_text())
    (tmp_path / "uniform.json").write_text(json.dumps(found | {"command": "fpld run uniform"}))
    monkeypatch.setattr(kept_results, "KEPT", tmp_path)
    section = make_tables.rendered("<!-- table others -->\n<!-- end -->\n").partition("{#uniform}")[2]
    assert "| **fpld** |" in section
    assert "`fpld run uniform` at " in section


def test_a_run_of_one_seed_has_no_error_bar() -> None:
    nothing = math.nan
    row = {"method": "fpld", "heldout_loss": 3.0, "heldout_se": nothing, "behind": 0.0, "behind_se": nothing}
    (line,) = table_lines.run_lines([row | {"uplink_bytes": 2_000_000, "downlink_bytes": 0}])[2:]
    assert line == "| **fpld** | 3.000 |  | 2.00 MB | 0 |"


@pytest.mark.parametrize("name", ["texts", "texts-records", "texts-bytes"])
def test_texts_are_prepared_at_the_rate_of_the_library_and_stay_out_of_memory(name: str) -> None:
    found = kept_results.read(name)["rows"]
    assert all(row["cpu_ratio"] >= 0.8 for row in found if row["cpu_ratio"] is not None)
    assert all(max(row["peak_mb"], row["train_peak_mb"]) < 1500 for row in found)
    assert all(abs(row["growth_mb"]) < 30 for row in found)
    assert max(row["step_ms"] for row in found) < 1.5 * min(row["step_ms"] for row in found)


def rows(name: str) -> dict[str, dict[str, Any]]:
    kept = json.loads((DOCS / "results" / f"{name}.json").read_text())
    assert kept["seeds"] == [0, 1, 2]
    return {row["method"]: row for row in kept["rows"]}


@pytest.mark.parametrize("name", ["rivals", "hospitals-labels", "wikipedia-labels"])
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


@pytest.mark.parametrize("name", ["policies", "wikipedia", "hospitals"])
def test_text_and_labels_are_ahead_of_feddf_at_equal_bytes_and_updates_of_both(name: str) -> None:
    found = rows(name)
    fpld = found["fpld"]
    updates = found["updates, 3 bits"]
    assert fpld["uplink_bytes"] <= 2.1e6
    assert updates["uplink_bytes"] <= 2.1e6
    assert found["feddf, 3 bits"]["behind"] > 2 * found["feddf, 3 bits"]["behind_se"] > 0
    assert updates["behind"] < -2 * updates["behind_se"] < 0
    # Most of the way from the base to the mixture of the nodes' models, or beyond it.
    way = found["base"]["heldout_loss"] - found["ensemble"]["heldout_loss"]
    assert found["base"]["heldout_loss"] - updates["heldout_loss"] >= 0.92 * way
    for method, row in found.items():  # nobody is both better and cheaper
        if row["uplink_bytes"] and method != "fpld":
            assert _loss(row) > _loss(fpld) or row["uplink_bytes"] > fpld["uplink_bytes"] or method == "updates, 3 bits"


@pytest.mark.parametrize("name", ["huggingface", "heterogeneous-models"])
def test_the_student_is_ahead_of_base_and_best_node_by_two_standard_errors_of_seeds_and_of_windows(name: str) -> None:
    found = rows(name)
    for method in ("base", "best node alone"):
        assert found[method]["behind"] > 2 * found[method]["behind_se"] > 0
        assert found[method]["behind"] > 2 * found[method]["windows_se"] > 0
    assert found["fpld"]["uplink_bytes"] <= 2e6


def test_pretrained_and_small_models_the_student_leads_and_small_models_gain() -> None:
    kept = json.loads((DOCS / "results" / "huggingface-heterogeneous.json").read_text())["rows"]
    found = {row["method"]: row for row in kept}
    for method in ("base", "best node alone"):
        assert found[method]["behind"] > 2 * found[method]["windows_se"] > 0
    assert found["fpld"]["uplink_bytes"] <= 2e6
    longer = {name.partition(": ")[2]: row for name, row in found.items() if name.startswith("alone longer: ")}
    assert len(longer) == 3
    for node, row in longer.items():
        assert found[f"own: {node}"]["heldout_loss"] < row["heldout_loss"]


def test_every_node_has_a_better_model_after_the_federation() -> None:
    """On all nodes' texts, with every seed."""
    kept = json.loads((DOCS / "results" / "nodes.json").read_text())
    assert kept["seeds"] == [0, 1, 2]
    assert all(row["least_gain"] > 0 for row in kept["rows"])


def test_sampled_labels_teach_more_than_other_codecs_at_every_budget() -> None:
    kept = json.loads((DOCS / "results" / "equal-bytes.json").read_text())
    assert {row["codec"] for row in kept["rows"]} == {"samples", "predictive", "uniform"}
    for row in kept["rows"]:
        if row["codec"] != "samples":
            assert row["behind"] > 2 * (row["behind_se"] or 0.0)


def test_predictive_is_ahead_of_every_peer_at_every_budget() -> None:
    kept = json.loads((DOCS / "results" / "codecs.json").read_text())["rows"]
    ours = {(row["scene"], row["bits"]): row["kl"] for row in kept if row["codec"] == "predictive"}
    for row in kept:
        if not row["codec"].startswith(("predictive", "limit")) and row["kl"] is not None:
            assert row["kl"] > ours[row["scene"], row["bits"]]


def test_sampled_labels_are_unbiased_and_predictive_ones_are_pulled_to_the_prior() -> None:
    for row in json.loads((DOCS / "results" / "labels.json").read_text())["rows"]:
        if row["codec"] == "samples":
            assert abs(row["slope"] - 1) <= 2.5 * max(row["slope_se"], 0.001)
        elif row["slope"] is not None:
            assert row["slope"] < 1 - 4 * row["slope_se"]


def test_mixture_is_the_best_rule_in_every_row() -> None:
    kept = json.loads((DOCS / "results" / "rules.json").read_text())["rows"]
    cases: dict[tuple[Any, ...], dict[str, float]] = {}
    for row in kept:
        if row["rule"]:
            key = row["corpus"], row["seed"], row["round"], row["model"]
            cases.setdefault(key, {})[row["rule"]] = row["heldout_loss"]
    assert len(cases) == 32
    assert all(min(found, key=lambda rule: found[rule]) == "mixture" for found in cases.values())


def test_no_attack_costs_a_guarded_student_much() -> None:
    kept = json.loads((DOCS / "results" / "attack-students.json").read_text())["rows"]
    worst = {rule: max(row["worse"] for row in kept if row["rule"] == rule) for rule in ("guarded", "mixture", "mean")}
    without = next(row["worse"] for row in kept if (row["attack"], row["rule"]) == ("without", "guarded"))
    assert worst["guarded"] < without + 0.01 < 0.03
    assert worst["mixture"] > 0.3
    assert worst["mean"] > 1


def test_forged_labels_cost_a_guarded_student_nothing_but_their_nodes_text() -> None:
    kept = json.loads((DOCS / "results" / "attack-guarded.json").read_text())["rows"]
    assert {row["corpus"] for row in kept} == {"sotu", "pubmed"}
    assert max(row["worst"] for row in kept) <= 0.03
    forged = [row for row in kept if row["attack"] in {"mass", "mean-mass", "balanced-mass"}]
    assert len(forged) == 6
    assert all(row["trust"] < 0.05 for row in forged)


def test_refinement_falls_from_round_to_round_and_vanilla_does_not() -> None:
    for row in json.loads((DOCS / "results" / "refinement.json").read_text())["rows"]:
        first = row["kl_1e3"][0]
        last = row["kl_1e3"][-1]
        if row["scheme"] == "refinement":
            assert last < first / 10
        elif row["scheme"] == "vanilla":
            assert last > 0.9 * first


def test_students_at_equal_bytes_are_paired_by_seed(tmp_path: Path) -> None:
    losses = {"samples": (3.0, 3.2), "predictive": (3.1, 3.4)}
    lines = [
        f"seed-{seed},{codec},2.0,{seed},1999999,{1000 + seed},16.0,{loss}"
        for codec, own in losses.items()
        for seed, loss in enumerate(own)
    ]
    columns = "run,codec,megabytes,seed,uplink_bytes,contexts,context_bits,heldout_loss"
    (tmp_path / "labels.csv").write_text("\n".join([columns, *lines]))
    found = kept_results.take_students(tmp_path)
    first, second = found["rows"]
    assert (found["seeds"], first["codec"], second["codec"]) == ([0, 1], "samples", "predictive")
    assert (second["heldout_loss"], second["heldout_se"]) == pytest.approx((3.25, 0.15))
    assert (second["behind"], second["behind_se"]) == pytest.approx((0.15, 0.05))
    assert (
        table_lines.student_lines(found["rows"])[3]
        == "| 2 MB | `predictive` | 1,001 | 3.250 ± 0.150 | +0.150 ± 0.050 |"
    )


def test_own_models_are_paired_with_those_alone_for_as_long(tmp_path: Path) -> None:
    """Two runs whose losses are half as many bits per byte as nats."""
    rows = [{"method": "fpld", "heldout_loss": 4.0, "unit": "bits per byte"}]
    (tmp_path / "seeds.json").write_text(json.dumps({"seeds": [0, 1], "rows": rows}))
    for seed, longer in ((0, 5.0), (1, 5.4)):
        run = tmp_path / f"seed-{seed}"
        run.mkdir()
        table = [("fpld", 4.0), ("alone longer: north", longer)]
        result = [{"method": name, "heldout_loss": loss, "bits_per_byte": loss / 2} for name, loss in table]
        (run / "result.json").write_text(json.dumps(result))
        own = {"alone": 6.0, "own": 4.5, "alone_all": 6.0, "own_all": 4.8, "ahead": longer - 4.8, "ahead_se": 0.06}
        (run / "own.json").write_text(json.dumps([{"node": "north", **own}]))
    (row,) = kept_results.take_nodes("families")(tmp_path)["rows"]
    assert (row["own_all"], row["longer_all"], row["least_gain"]) == pytest.approx((2.4, 2.6, 0.6))
    assert (row["ahead"], row["ahead_se"]) == pytest.approx((0.2, 0.1))
    assert row["windows_se"] == pytest.approx(0.03 / 2**0.5)
    lines = table_lines.node_lines([row])
    assert "node (bits per byte)" in lines[0]
    assert lines[2].endswith("| +0.200 ± 0.100 | 0.021 |")


def test_students_over_strings_are_paired_with_the_model_before(tmp_path: Path) -> None:
    lines = ["seed,model,student,symbols,symbol_bytes,marked,bits,loss"]
    for seed, loss in ((0, 2.0), (1, 2.4)):
        lines += [f'{seed},"B, before",,,,,,3.0', f"{seed},student,B,2048,12,True,60.0,{loss}"]
    (tmp_path / "strings.csv").write_text("\n".join(lines))
    found = kept_results.take_strings(tmp_path)
    before, student = found["rows"]
    assert found["seeds"] == [0, 1]
    assert "gain" not in before
    assert (student["loss"], student["gain"], student["gain_se"]) == pytest.approx((2.2, 0.8, 0.2))
    last = "| student B | 2,048 symbols of 12 bytes, marked | 60 bits | 2.200 ± 0.200 | 0.800 ± 0.200 |"
    assert table_lines.string_lines(found["rows"])[3] == last


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
    found = {row["method"]: row for row in summarize_seeds([first, second])}
    assert set(found) == {"base", "best node alone", "fpld"}
    assert found["best node alone"]["heldout_loss"] == pytest.approx(3.7)
    assert found["best node alone"]["behind"] == pytest.approx(0.3)
    assert found["best node alone"]["behind_se"] == pytest.approx(0.0, abs=1e-12)
    assert found["base"]["behind_se"] == pytest.approx(0.2)
    assert (found["base"]["uplink_bytes"], found["base"]["downlink_bytes"]) == (10, 20)
    (alone,) = [row for row in summarize_seeds([first]) if row["method"] == "fpld"]
    assert math.isnan(alone["heldout_se"])


def test_the_figure_has_a_point_for_every_method_that_sends() -> None:
    from matplotlib.figure import Figure

    figure = Figure()
    draw_summary(
        summarize_seeds([result({"base": 4.0, "fedavg, 1 round": 3.9, "fedavg, 2 rounds": 3.8, "fpld": 3.5})] * 2),
        figure,
    )
    (axes,) = figure.axes
    assert set(axes.get_legend_handles_labels()[1]) == {"base", "fedavg", "fpld"}


def test_no_audit_shows_more_than_was_promised() -> None:
    kept = json.loads((DOCS / "results" / "audits.json").read_text())
    assert len(kept["rows"]) == 5
    assert all(row["epsilon_lower"] <= row["epsilon_upper"] <= 3 for row in kept["rows"])
