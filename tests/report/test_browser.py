"""The pages in a real browser: no error, no request to anyone, a round that closes while one looks, sliders, token."""

from __future__ import annotations

import os
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

import pytest
from playwright.sync_api import expect, sync_playwright

from fpld import config as configuration
from fpld.cli import main
from fpld.engines.local import LocalEngine
from fpld.federation import workers
from fpld.federation.prepare import prepare, versions
from fpld.federation.rounds import Federation
from fpld.storage.run_folder import RunFolder
from tests.federation.conftest import CONFIG, write_texts
from tests.report.conftest import EVIL, serve

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from playwright.sync_api import Browser, ConsoleMessage, Dialog, Page

    from fpld.node.round import NodePaths
    from fpld.node.spec import NodeSpec

pytestmark = pytest.mark.slow
PATIENCE = 30_000  # milliseconds: the machine may be busy


def chromium() -> str:
    """Find the system's Chromium; `make test` installs it. FPLD_BROWSER=none leaves these tests out on purpose."""
    if os.environ.get("FPLD_BROWSER") == "none":
        pytest.skip("FPLD_BROWSER=none")
    for name in (os.environ.get("FPLD_BROWSER", ""), "chromium", "chromium-browser", "google-chrome"):
        path = shutil.which(name) if name else None
        if path:
            return path
    pytest.fail("no Chromium: `make browser` installs it, FPLD_BROWSER names another or (none) skips these tests")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as driver:
        instance = driver.chromium.launch(executable_path=chromium())
        yield instance
        instance.close()


class Watched(NamedTuple):
    """A page, what its console complained of, and whom it asked."""

    page: Page
    complaints: list[str]
    requests: list[str]


@pytest.fixture
def watched(browser: Browser) -> Iterator[Watched]:
    context = browser.new_context()
    page = context.new_page()
    complaints = []
    requests = []
    page.set_default_timeout(PATIENCE)

    def complain(message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            complaints.append(message.text)

    def dismiss(dialog: Dialog) -> None:
        complaints.append(f"dialog {dialog.message}")
        dialog.dismiss()

    page.on("console", complain)
    page.on("dialog", dismiss)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: requests.append(request.url))
    yield Watched(page, complaints, requests)
    context.close()


def bars(page: Page, figure: str) -> list[str]:
    """Return the heights of the bars of a figure, by its title."""
    rectangles = page.locator("figure.chart", has_text=figure).locator("[aria-label=bar] rect")
    heights: list[str] = rectangles.evaluate_all("all => all.map(bar => bar.getAttribute('height'))")
    return heights


def test_the_report_opens_alone(watched: Watched, finished: Path, tmp_path: Path) -> None:
    assert main(["report", str(finished), "--out", str(tmp_path), "--no-figures", "--json"]) == 0
    page = watched.page
    url = (tmp_path / "report.html").as_uri()
    page.goto(url)
    figures = page.locator("figure.chart")
    assert figures.count() >= 6
    for figure in figures.all():
        expect(figure.locator(".plot svg").last).to_be_visible()
    assert len(bars(page, "Bits by node and round")) == 6  # two rounds of three nodes
    assert watched.complaints == []
    assert watched.requests == [url]
    # Every dot of a line is whole: beside the axes, and within the figure.
    edges = page.locator("figure.chart svg [aria-label=dot] circle").evaluate_all(
        """all => all.map(dot => {
          const at = dot.getBoundingClientRect(), box = dot.ownerSVGElement.getBoundingClientRect();
          return Math.min(at.left - box.left - 56, box.right - at.right, at.top - box.top, box.bottom - 38 - at.bottom);
        })"""
    )
    assert len(edges) > 6
    assert min(edges) > 0

    # An axis has one unit: here bytes from some hundred kilobytes to some megabytes.
    figure = page.locator("figure.chart").first
    figure.evaluate(
        """figure => {
          const data = figure.querySelector("script[type='application/json']"), spec = JSON.parse(data.textContent);
          spec.x = { label: "bytes", scale: "linear", unit: "B" };
          spec.series = [{ name: "fpld", kind: "line", x: [2e5, 9e5, 2.4e6], y: [3, 2, 1], low: [], limit: [] }];
          data.textContent = JSON.stringify(spec);
          fpldCharts.drawAll();
        }"""
    )
    labels = figure.locator("[aria-label='x-axis tick label'] text").all_text_contents()
    assert labels
    assert "0.5 MB" in labels
    assert {label.split(" ")[1] for label in labels} == {"MB"}

    table = page.locator("table[id$=-results]")
    table.get_by_role("button", name="heldout loss").click()
    losses = [float(cell.get_attribute("data-value") or "nan") for cell in table.locator("tbody td:nth-child(2)").all()]
    assert losses == sorted(losses)
    expect(table.locator("th").nth(1)).to_have_attribute("aria-sort", "ascending")
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    table.get_by_role("button", name="copy").click()
    expect(table.get_by_role("button", name="copied")).to_be_visible()
    copied = page.evaluate("navigator.clipboard.readText()")
    assert copied.splitlines()[0].split("\t")[:2] == ["method", "heldout loss"]
    assert float(copied.splitlines()[1].split("\t")[1]) == losses[0]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_and_figures_can_be_read_in_either_light(
    browser: Browser, scheme: str, finished: Path, tmp_path: Path
) -> None:
    assert main(["report", str(finished), "--out", str(tmp_path), "--no-figures", "--json"]) == 0
    context = browser.new_context(color_scheme=scheme)  # type: ignore[arg-type]
    page = context.new_page()
    page.goto((tmp_path / "report.html").as_uri())
    for part in ("h1", "td", "figcaption", "figure.chart svg [aria-label='y-axis tick label']"):
        assert contrast(page, part) >= 4.5, part
    page.emulate_media(media="print", color_scheme=scheme)  # type: ignore[arg-type]
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert contrast(page, "td") >= 7
    context.close()


def contrast(page: Page, selector: str) -> float:
    """Return the WCAG contrast of an element's colour to the page."""
    rendered = page.evaluate(
        """(selector) => {
          const ink = getComputedStyle(document.querySelector(selector));
          return [ink.fill !== "rgb(0, 0, 0)" && selector.includes("svg") ? ink.fill : ink.color,
                  getComputedStyle(document.body).backgroundColor];
        }""",
        selector,
    )
    light, dark = sorted((luminance(colour) for colour in rendered), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def luminance(colour: str) -> float:
    parts = [float(part) / 255 for part in colour[colour.index("(") + 1 : -1].split(",")[:3]]
    linear = [value / 12.92 if value <= 0.03928 else ((value + 0.055) / 1.055) ** 2.4 for value in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_the_plan_opens_alone(watched: Watched, tmp_path: Path) -> None:
    file = tmp_path / "plan.html"
    sizes = ["--contexts", "16384", "--vocab", "1024", "--deadline", "300"]
    links = ["--links", "2Mbit/s,256kbit/s", "--clips", "4,8", "--names", f"city,{EVIL}"]
    assert main(["plan", *links, *sizes, "--total", "9", "--out", str(file), "--json"]) == 0
    watched.page.goto(file.as_uri())
    assert len(bars(watched.page, "Bits for each node")) == 6
    expect(watched.page.locator("td", has_text=EVIL).first).to_be_visible()
    assert watched.complaints == []
    assert watched.requests == [file.as_uri()]


def test_hostile_texts_run_nothing(watched: Watched, hostile: Path) -> None:
    with serve(hostile.parent) as served:
        watched.page.goto(served.url)
        expect(watched.page.locator("h2", has_text=EVIL).first).to_be_visible()
        watched.page.locator("button", has_text="planner").click()
        expect(watched.page.locator("#planner-source")).not_to_be_empty()
        assert watched.page.locator("img").count() == 0
        assert all(url.startswith(served.url) for url in watched.requests)
        assert [text for text in watched.complaints if "404" not in text] == []  # it cannot plan from such a run


def test_a_round_closes_while_one_looks(watched: Watched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One node waits for an event, not for a clock, so what there is to see at each moment is certain."""
    write_texts(tmp_path)
    text = CONFIG.format(folder=tmp_path)
    config = configuration.parse_config(text, "test")
    store = RunFolder(tmp_path / "runs" / "live")
    store.write_json("versions.json", versions())
    store.write("config.toml", text.encode())
    released = threading.Event()
    real = workers.node_round

    def node_round(part: NodeSpec, place: NodePaths, task: bytes) -> bytes:
        if part.name == "south":
            assert released.wait(120)
        return real(part, place, task)

    monkeypatch.setattr(workers, "node_round", node_round)
    page = watched.page
    with serve(tmp_path / "runs") as served, ThreadPoolExecutor(4) as pool, ThreadPoolExecutor(1) as aggregator:
        page.goto(served.url)
        expect(page.locator("#now")).to_contain_text("Preparing")
        prepared = prepare(config, store)
        federation = Federation(config, store, prepared, "fpld", pool=pool)
        engine = LocalEngine(federation, prepared.bytes_per_token)
        closing = aggregator.submit(federation.advance, engine)
        try:
            expect(page.locator("#live h2")).to_have_text("Round 1 of 3: collecting", timeout=PATIENCE)
            expect(page.locator("#live")).to_contain_text("2 of 3 nodes have answered", timeout=PATIENCE)
            states = [row.locator("td").nth(1).inner_text() for row in page.locator("#live tbody tr").all()]
            assert states == ["accepted", "accepted", "no answer yet"]
            expect(page.locator("#run .tiles")).to_contain_text("0 of 3")
        finally:
            released.set()
        line = closing.result()
        expect(page.locator("#run .tiles")).to_contain_text("1 of 3", timeout=PATIENCE)
        expect(page.locator("#run .tiles")).to_contain_text(f"{line.heldout_loss:.4f}")
        expect(page.locator("#live h2")).to_have_text("Round 1 of 3: closed")
        assert len(bars(page, "Bits by node and round")) == 3
        # What the reader opened stays open when the next round comes.
        page.locator("summary", has_text="Configuration").click()
        federation.advance(engine)
        expect(page.locator("#run .tiles")).to_contain_text("2 of 3", timeout=PATIENCE)
        assert page.locator("details", has_text="Configuration").last.get_attribute("open") is not None
        assert all(url.startswith(served.url) for url in watched.requests)
    assert [text for text in watched.complaints if "ERR_CONNECTION" not in text] == []


def test_a_slider_changes_the_bars(watched: Watched, finished: Path) -> None:
    page = watched.page
    with serve(finished.parent) as served:
        page.goto(served.url)
        page.get_by_role("button", name="planner").click()
        page.locator("#plan figure.chart svg").first.wait_for()
        promised = page.locator("#plan .tiles b").last
        assert page.get_by_role("slider", name="deadline").count() == 0  # no node of this run has a link
        for label, key in (("total, of what", "PageDown"), ("north", "ArrowUp")):
            before = bars(page, "Bits for each node")
            loss = promised.inner_text()
            assert before  # a bar for each site and policy; policies that share it out alike are not drawn twice
            assert len(before) % 3 == 0
            slider = page.get_by_role("slider", name=label)
            value = slider.input_value()
            slider.focus()
            for _ in range(3):
                page.keyboard.press(key)
            assert slider.input_value() != value
            expect(promised).not_to_have_text(loss, timeout=PATIENCE)
            deadline = time.monotonic() + PATIENCE / 1000
            while bars(page, "Bits for each node") == before:
                assert time.monotonic() < deadline
    assert [text for text in watched.complaints if "ERR_CONNECTION" not in text] == []


def test_a_wrong_token_is_refused(watched: Watched, finished: Path) -> None:
    page = watched.page
    with serve(finished.parent, "--host", "0.0.0.0") as served:  # noqa: S104
        page.goto(served.url)
        page.get_by_label("token").fill("not the token at all")
        page.get_by_role("button", name="open").click()
        expect(page.get_by_role("alert")).to_have_text("That is not the token.")
        assert page.locator("#runs").count() == 0
        page.get_by_label("token").fill(served.token or "")
        page.get_by_role("button", name="open").click()
        expect(page.locator("#runs")).to_contain_text("toy (done)")
