"""`fpld report`: one page that needs nothing, the same figures as files, and text that stays text."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
from dataclasses import replace
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import fpld.report
from fpld.cli import main
from fpld.report.charts import (
    COLOURS,
    Axis,
    Chart,
    Series,
    bandwidth_by_round,
    colours,
    comparison_charts,
    run_charts,
)
from fpld.report.draw import draw_chart
from fpld.report.page import SCRIPTS, asset, report_page
from fpld.report.run import RunState, find_runs, read_run_data
from fpld.report.tables import (
    allocation_rows,
    continuation_rows,
    difference_rows,
    node_rows,
    shown_allocation_rows,
    summary_tiles,
)
from fpld.units import show_time
from fpld.web.state import RunIndex
from tests.report.conftest import EVIL, EVIL_PATH, EVIL_SCRIPT


class Page(HTMLParser):
    """What a browser would see: tags with their attributes, text, and the content of scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.scripts: list[str] = []
        self.data: list[str] = []
        self._inside: dict[str, str | None] | None = None
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside = dict(attrs) if tag == "script" else None

    def handle_endtag(self, tag: str) -> None:
        self._inside = None

    def handle_data(self, data: str) -> None:
        if self._inside is None:
            self.text += data
        else:
            (self.data if self._inside.get("type") == "application/json" else self.scripts).append(data)


def rows_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    assert main([*arguments, "--json"]) == 0
    rows: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["rows"]
    return rows


@pytest.mark.slow
def test_a_page_and_its_figures(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    (row,) = rows_of(capsys, "report", str(finished), "--out", str(out))
    assert row["run"] == "toy"
    assert row["state"] == "done"
    charts = run_charts(read_run_data(finished))
    names = {chart.name for chart in charts}
    assert names >= {
        "loss-by-bytes",
        "distillation-by-round",
        "bits-by-node",
        "seconds-by-phase",
        "seconds-by-node",
        "loss-by-node",
        "training-by-step",
        "distillation-by-step",
    }
    assert {file.name for file in out.iterdir()} == {"report.html"} | {
        f"{name}.{suffix}" for name in names for suffix in ("png", "svg")
    }
    assert (out / "loss-by-bytes.png").read_bytes().startswith(b"\x89PNG")
    page = Page((out / "report.html").read_text())
    # Every figure has its data and a description in words.
    assert [json.loads(data)["name"] for data in page.data] == [chart.name for chart in charts]
    images = [attributes for _, attributes in page.tags if attributes.get("role") == "img"]
    assert [image["aria-label"] for image in images] == [chart.alt for chart in charts]
    assert all(len(chart.alt) > 40 for chart in charts)
    # The numbers of the run are in the tables, and so are configuration and versions.
    for row in json.loads((finished / "result.json").read_text()):
        assert row["method"] in page.text
        assert f"{row['heldout_loss']:.4g}" in page.text
    for part in ("north", "buckets = 256", "numpy 2."):
        assert part in page.text


def test_the_page_asks_no_one_and_runs_only_its_own_scripts(finished: Path) -> None:
    text = report_page([read_run_data(finished)])
    page = Page(text)
    for tag, attributes in page.tags:
        assert not {"src", "action", "formaction", "srcset", "ping"} & set(attributes), (tag, attributes)
        assert attributes.get("href") in (None, "data:,")
    assert "url(" not in asset("page.css")
    assert "@import" not in asset("page.css")
    (policy,) = [a["content"] for t, a in page.tags if t == "meta" and a.get("http-equiv") == "Content-Security-Policy"]
    assert policy is not None
    assert policy.startswith("default-src 'none'")
    for script in page.scripts:
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy
    assert len(page.scripts) == len(SCRIPTS) + 1
    assert all("</script" not in asset(name) for name in SCRIPTS)


def test_hostile_texts_are_shown_as_text(hostile: Path) -> None:
    page = Page(report_page([read_run_data(hostile)]))
    assert "img" not in {tag for tag, _ in page.tags}
    assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on")]
    assert len(page.scripts) == len(SCRIPTS) + 1
    assert not any("alert(" in script for script in page.scripts)
    for text in (EVIL, EVIL_SCRIPT, EVIL_PATH):
        assert text in page.text
    # What figures draw is data: it comes out of JSON as it went in, and never closes its script.
    assert any(EVIL_SCRIPT in [series["name"] for series in json.loads(data)["series"]] for data in page.data)


@pytest.mark.slow
def test_hostile_names_make_no_files_elsewhere(
    hostile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = set(tmp_path.rglob("*"))
    rows_of(capsys, "report", str(hostile), "--out", str(tmp_path / "out"))
    new = set(tmp_path.rglob("*")) - before
    assert all(path == tmp_path / "out" or path.parent == tmp_path / "out" for path in new)
    assert all(re.fullmatch(r"[a-z-]+\.(png|svg|html)|out", path.name) for path in new)


@pytest.mark.slow
def test_several_runs_side_by_side(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "toy"
    shutil.copytree(finished, other)
    config = other / "config.toml"
    config.write_text(config.read_text().replace("bits = 1.5", "bits = 1.75"))
    out = tmp_path / "both"
    rows = rows_of(capsys, "report", str(finished), str(other), "--out", str(out))
    assert {row["run"] for row in rows} == {str(finished), str(other)}  # called the same: told apart by their paths
    runs = [read_run_data(finished, "one"), read_run_data(other, "two")]
    assert difference_rows(runs) == [{"configuration key": "nodes[north].bits", "one": "1.5", "two": "1.75"}]
    assert [chart.name for chart in comparison_charts(runs)] == ["loss-by-bytes", "loss-by-round"]
    assert {"loss-by-round.png", "1-loss-by-bytes.svg", "2-loss-by-bytes.svg"} <= {file.name for file in out.iterdir()}
    page = Page((out / "report.html").read_text())
    assert "nodes[north].bits" in page.text
    assert main(["report", str(finished), str(finished)]) == 2
    assert "each RUN must be given once" in capsys.readouterr().err


def test_shares_add_up(finished: Path) -> None:
    rows = node_rows(read_run_data(finished))
    assert sum(row["share"] for row in rows) == pytest.approx(1)
    assert [row["rounds_answered"] for row in rows] == [2, 2, 2]


def test_a_run_without_a_closed_round_has_a_page(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    young = tmp_path / "young"
    (young / "fpld").mkdir(parents=True)
    for name in ("config.toml", "versions.json", "fpld/progress.json"):
        shutil.copy(finished / name, young / name)
    (row,) = rows_of(capsys, "report", str(young))
    assert (row["state"], row["rounds"], row["of"]) == ("running", 0, 2)
    assert "No round is closed yet" in (young / "report/report.html").read_text()


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("trace.jsonl", "{}", "trace.jsonl, line 1: round Field required"),
        ("trace.jsonl", "[1, 2", "trace.jsonl, line 1: "),
        ("result.json", '[{"method": 1}]', "result.json: 0.method"),
        ("fpld/progress.json", '{"round": "x"}', "progress.json: round"),
        ("versions.json", '{"numpy": [1]}', "versions.json: numpy"),
        ("config.toml", b"\xff\xfe", "config.toml must be UTF-8"),
    ],
)
def test_damaged_files_are_named(
    name: str, text: str | bytes, message: str, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    assert main(["report", str(folder)]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


def test_no_run_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path)]) == 2
    assert "holds no run" in capsys.readouterr().err


def test_runs_are_found_where_they_are_and_not_through_links(finished: Path, tmp_path: Path) -> None:
    assert list(find_runs(finished.parent)) == ["toy"]
    assert list(find_runs(finished)) == ["toy"]
    (tmp_path / "out").symlink_to(finished)
    assert find_runs(tmp_path) == {}


def test_the_libraries_are_those_that_are_said_to_be_there() -> None:
    folder = Path(fpld.report.__file__).parent / "assets/vendor"
    table = re.findall(r"^\| (\S+\.js) \|.*\| ([0-9a-f]{64}) \|$", (folder / "README.md").read_text(), re.MULTILINE)
    assert {name for name, _ in table} == {file.name for file in folder.glob("*.js")}
    for name, digest in table:
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest
        assert (folder / f"LICENSE.{name.partition('.')[0]}").exists()


def test_nodes_see_the_student_beside_their_own_models(finished: Path) -> None:
    run = read_run_data(finished)
    rows = {row["node"]: row for row in node_rows(run)}
    losses = run.trace[-1].heldout_by_node
    for each, loss in zip(run.own_losses, losses, strict=True):
        row = rows[each.node]
        assert row["heldout_loss"] == loss
        assert row["own_model_loss"] == each.own
        assert row["alone_loss"] == each.alone
        assert each.own is not None
        assert 0 < each.own < 10
    assert "own model loss" in report_page([run])


def test_curves_are_drawn_and_damage_is_left_out(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path / "run")
    with (tmp_path / "run/curves.jsonl").open("a") as file:
        file.write('{"torn\n[]\n')
        file.write('{"method": "fpld", "round": 1, "model": "x", "what": "training", "step": 1, "loss": 1e999}\n')
    (tmp_path / "run/now.json").write_text('{"loops": [1, {"what": "x"}]}')
    run = read_run_data(tmp_path / "run")
    assert run.loops == []
    charts = {chart.name: chart for chart in run_charts(run)}
    assert {series.name for series in charts["training-by-step"].series} == {"base-0", "north", "east", "south"}
    (student,) = charts["distillation-by-step"].series
    assert student.x[-1] == 2 * 60  # two rounds of sixty steps
    assert student.y[-1] < student.y[0]


@pytest.mark.parametrize("paper", ["#ffffff", "#15181d"])
def test_every_mark_has_a_contrast_of_three_to_either_page(paper: str) -> None:
    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [value / 12.92 if value <= 0.03928 else ((value + 0.055) / 1.055) ** 2.4 for value in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    assert f"--paper: {paper}" in asset("page.css")
    for colour in COLOURS:
        dark, light = sorted((luminance(colour), luminance(paper)))
        assert (light + 0.05) / (dark + 0.05) >= 3, colour
    assert len(set(COLOURS)) == len(COLOURS)


def test_the_bracket_says_whether_its_conditions_hold(finished: Path) -> None:
    run = read_run_data(finished)
    bounded = [
        replace(line, bandwidth_upper=0.2, bandwidth_lower=0.1, conditions=conditions)
        for line, conditions in zip(
            run.trace, ({"SE": True, "SE'": False, "ND": True}, {"SE": True, "SE'": True, "ND": True}), strict=True
        )
    ]
    chart = bandwidth_by_round(replace(run, trace=bounded))
    assert chart is not None
    assert "(SE) held in every round: the upper bound is one." in chart.caption
    assert "(SE') and (ND) failed in rounds 1: there the lower line is an estimate and no bound." in chart.caption
    assert "stratified" in chart.caption
    assert bandwidth_by_round(run) is None  # sampled labels have no bracket


def test_the_report_shows_what_students_wrote_and_who_was_at_work(finished: Path) -> None:
    run = read_run_data(finished)
    page = report_page([run])
    for sample in run.trace[-1].continuations:
        assert escape(sample.prompt) in page
    rows = continuation_rows(run)
    assert [row["round"] for row in rows] == [2, 2, 2, 1, 1, 1]
    times = [pair for line in run.trace for pair in zip(line.work, line.answers, strict=True)]
    assert all(work and answer and 0 < work <= answer for work, answer in times)
    assert {"seconds_to_answer", "seconds_at_work"} <= node_rows(run)[0].keys()
    bits = next(chart for chart in run_charts(run) if chart.name == "bits-by-node")
    assert bits.series[0].limit == [256 * line.bits_allotted[0] for line in run.trace]
    assert bits.y.label == "bits per context"


def test_a_node_has_the_same_colour_in_all_figures(finished: Path) -> None:
    run = read_run_data(finished)
    colours_of: dict[str, set[str]] = {}
    for chart in run_charts(run):
        for series, colour in zip(chart.series, chart.colours, strict=True):
            colours_of.setdefault(series.name, set()).add(colour)
        assert len(set(chart.colours)) == len(chart.series), chart.name
    assert all(len(colours_of[name]) == 1 for name in run.nodes)
    of_nodes = set[str]().union(*(colours_of[name] for name in run.nodes))
    others = set[str]().union(*(each for name, each in colours_of.items() if name not in run.nodes))
    assert not of_nodes & others
    assert len(of_nodes) == len(run.nodes)
    many = [f"node {i}" for i in range(20)]
    assert len(set(colours(["fpld", "fedavg", "feddf"], many))) == 3


def test_one_round_has_no_curve_of_one_point(finished: Path) -> None:
    run = read_run_data(finished)
    names = [chart.name for chart in run_charts(replace(run, trace=run.trace[:1]))]
    assert names[:3] == ["loss-by-bytes", "training-by-step", "distillation-by-step"]
    assert not {"distillation-by-round"} & set(names)
    for chart in run_charts(replace(run, trace=run.trace[:1])):
        assert all(len(series.x) > 1 for series in chart.shown() if series.kind == "line"), chart.name
    assert [chart.name for chart in comparison_charts([replace(run, trace=run.trace[:1])])] == ["loss-by-bytes"]


def test_bits_are_per_context_on_pages_and_per_coordinate_in_the_trace(finished: Path) -> None:
    run = read_run_data(finished)
    (first, *_) = node_rows(run)
    assert first["allotted_mean"] == pytest.approx(256 * run.trace[0].bits_allotted[0])
    assert shown_allocation_rows(run)[0]["bits_allotted"] == first["allotted_mean"]
    assert allocation_rows(run)[0]["bits_allotted"] == run.trace[0].bits_allotted[0]
    assert "bits per coordinate" not in report_page([run]).lower()
    # A folder without a probe set does not say how many logits a context has.
    unknown = replace(run, vocab=None)
    assert node_rows(unknown)[0]["allotted_mean"] == run.trace[0].bits_allotted[0]
    assert unknown.bits_unit == "bits per coordinate"


def test_times_are_dates_and_durations(finished: Path) -> None:
    run = replace(read_run_data(finished), started=1_700_000_000.0, modified=1_700_000_000.0 + 7500, heartbeat=1.7e9)
    tiles = summary_tiles(run)
    assert tiles["duration"] == "2 h 5 min"
    assert re.fullmatch(r"2023-11-1[45] \d\d:\d\d \S+", tiles["begun"])
    assert tiles["ended"] == show_time(run.modified)
    assert "last heartbeat" not in tiles
    assert "last heartbeat" in summary_tiles(replace(run, state=RunState("running")))


def test_a_run_that_closed_without_a_node_begins_with_that(finished: Path, tmp_path: Path) -> None:
    """On the live page, which else says that all is done, and in the report, before any number."""
    place = tmp_path / "toy"
    shutil.copytree(finished, place)
    assert RunIndex(tmp_path).run("toy")["live"] == '<p class="good"><b>Done.</b></p>'
    assert "closed without" not in report_page([read_run_data(finished)])
    for trace in (place / "trace.jsonl", place / "fpld/trace.jsonl"):
        *earlier, last = trace.read_text().splitlines()
        row = json.loads(last)
        row["nodes"].remove("south")
        row["absent"] = [{"node": "south", "state": "late", "reason": "no answer within 9 s"}]
        trace.write_text("\n".join([*earlier, json.dumps(row)]) + "\n")
    said = "closed without south in 1 of 2 rounds (late: no answer within 9 s)"
    text = Page(report_page([read_run_data(place)])).text
    assert text.index(said) < text.index("held-out loss")
    shown = RunIndex(tmp_path).run("toy")
    assert "<b>Done, but not every round had all nodes.</b>" in shown["live"]
    assert "good" not in shown["live"]
    assert said in shown["body"]


def test_a_figure_has_one_unit_on_an_axis_and_whole_points() -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    for values, unit, scale in (
        ([2e5, 9e5, 2.4e6], "MB", "linear"),
        ([500.0, 4e4], "kB", "log"),
        ([3.0], "B", "linear"),
    ):
        axis = Axis("bytes", scale, "B")  # type: ignore[arg-type]
        line = Series("fpld", "line", values, [3.0 - i / 10 for i in range(len(values))])
        figure = Figure()
        draw_chart(Chart("a", "a", "a", axis, Axis("loss"), [line]), figure)
        (axes,) = figure.axes
        shown = [axes.xaxis.get_major_formatter()(value, 0) for value in values]
        assert {label.split()[1] for label in shown} == {unit}, shown
        assert [float(label.split()[0]) for label in shown] == [
            value / {"MB": 1e6, "kB": 1e3, "B": 1.0}[unit] for value in values
        ]
        assert not axes.lines[0].get_clip_on()  # a point at a corner is whole
