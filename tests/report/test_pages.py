"""The pages as they are looked at: states, filter, address, phone width, and what an accessibility checker finds."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from playwright.sync_api import expect

from fpld.cli import main
from tests.federation.conftest import CONFIG, write_texts
from tests.report.conftest import serve
from tests.report.test_browser import PATIENCE, Watched, browser, watched

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

__all__ = ["browser", "watched"]

pytestmark = pytest.mark.slow
AXE = Path(__file__).parent / "assets" / "axe.min.js"
TOUCHING = """() => {
  const touching = [];
  for (const axis of document.querySelectorAll("[aria-label$='tick label']")) {
    const texts = [...axis.querySelectorAll("text")];
    const boxes = texts.map((text) => text.getBoundingClientRect()).filter((box) => box.width);
    boxes.forEach((a, i) => boxes.slice(i + 1).forEach((b) => {
      if (a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom) touching.push(axis.textContent);
    }));
  }
  return touching;
}"""


def report(finished: Path, folder: Path) -> str:
    assert main(["report", str(finished), "--out", str(folder), "--no-figures", "--json"]) == 0
    return (folder / "report.html").as_uri()


def plan(folder: Path) -> str:
    links = ["--links", "2Mbit/s,2Mbit/s,384kbit/s,256kbit/s", "--clips", "4,4,8,8", "--deadline", "300"]
    names = ["--names", "metropolitan,university-hospital,valley-clinic,island"]
    sizes = ["--contexts", "16384", "--vocab", "1024", "--total", "20"]
    assert main(["plan", *links, *names, *sizes, "--out", str(folder / "plan.html"), "--json"]) == 0
    return (folder / "plan.html").as_uri()


@pytest.mark.parametrize("width", [390, 1400])
def test_ticks_never_touch(browser: Browser, width: int, finished: Path, tmp_path: Path) -> None:
    page = browser.new_page(viewport={"width": width, "height": 900})
    for url in (report(finished, tmp_path), plan(tmp_path)):
        page.goto(url)
        page.locator("figure.chart svg").last.wait_for()
        assert page.evaluate(TOUCHING) == []
        for figure in page.locator("figure.chart").all():
            assert figure.locator("[aria-label='y-axis tick label'] text:visible").count() >= 2, figure.inner_text()
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        sizes = page.locator("[class*=swatches]").evaluate_all("all => all.map(e => getComputedStyle(e).fontSize)")
        assert set(sizes) == {"12px"}
    page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_an_accessibility_checker_finds_nothing_serious(
    browser: Browser, scheme: str, finished: Path, tmp_path: Path
) -> None:
    context = browser.new_context(color_scheme=scheme, bypass_csp=True)  # type: ignore[arg-type]
    page = context.new_page()
    for url in (report(finished, tmp_path), plan(tmp_path)):
        page.goto(url)
        page.locator("figure.chart svg").last.wait_for()
        assert serious(page) == []
    with serve(finished.parent) as served:
        page.goto(served.url)
        page.locator("#run figure.chart svg").last.wait_for()
        assert serious(page) == []
    context.close()


def serious(page: Page) -> list[str]:
    """Return what axe-core calls serious or critical."""
    page.evaluate(AXE.read_text("utf-8"))
    result: dict[str, Any] = page.evaluate("axe.run()")
    return [
        f"{each['id']}: {each['nodes'][0]['html'][:200]}"
        for each in result["violations"]
        if each["impact"] in ("serious", "critical")
    ]


def test_runs_are_filtered_sorted_and_have_addresses(watched: Watched, finished: Path, tmp_path: Path) -> None:
    for name in ("alpha", "beta", "gamma"):
        shutil.copytree(finished, tmp_path / "runs" / name)
    page = watched.page
    with serve(tmp_path / "runs") as served:
        page.goto(f"{served.url}#run/beta")
        expect(page.locator("#run h2").first).to_have_text("beta", timeout=PATIENCE)
        page.locator("#sort").select_option("name")
        runs = page.locator("#runs button")
        expect(runs.first).to_have_text("alpha (done)")
        page.locator("#filter").fill("GAM")
        expect(runs).to_have_text(["gamma (done)", "planner"])
        runs.first.click()
        expect(page.locator("#run h2").first).to_have_text("gamma", timeout=PATIENCE)
        assert page.url.endswith("#run/gamma")
        page.go_back()
        expect(page.locator("#run h2").first).to_have_text("beta", timeout=PATIENCE)
    assert [text for text in watched.complaints if "ERR_CONNECTION" not in text] == []


def test_a_killed_run_is_shown_as_stopped(watched: Watched, tmp_path: Path) -> None:
    """Within 30 s of the kill: four heartbeats that do not come, and a page that asks once a second."""
    write_texts(tmp_path)
    config = tmp_path / "config.toml"
    out = tmp_path / "runs" / "killed"
    config.write_text(CONFIG.format(folder=tmp_path).replace("rounds = 3", "rounds = 500"))
    command = [sys.executable, "-m", "fpld", "run", str(config), "--out", str(out), "--json"]
    out.parent.mkdir()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as run, serve(out.parent) as served:
        watched.page.goto(served.url)
        expect(watched.page.locator("#live h2")).to_contain_text("of 500", timeout=4 * PATIENCE)
        run.send_signal(signal.SIGKILL)
        killed = time.monotonic()
        expect(watched.page.locator("#now")).to_contain_text("Stopped", timeout=PATIENCE)
        assert time.monotonic() - killed < 30
        expect(watched.page.locator("#runs")).to_contain_text("killed (stopped)")
