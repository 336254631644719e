"""Make the pictures of report, planner and dashboard that the docs show, from a real run: the demonstration.

The run is made while the dashboard looks on, so that one picture shows a round in progress. Needs the system's Chromium
(`make browser`) and as long as the demonstration takes.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from playwright.sync_api import sync_playwright

if TYPE_CHECKING:
    from playwright.sync_api import Page

FOLDER = Path(__file__).parent / "figures"
FPLD = [sys.executable, "-m", "fpld"]
HOUR = 3_600_000  # milliseconds


def main() -> None:
    """Run the demonstration, watch it, and take the three pictures."""
    runs = Path(tempfile.mkdtemp()) / "runs"
    runs.mkdir()
    run = subprocess.Popen([*FPLD, "run", "--out", str(runs / "demo"), "--json"], stdout=subprocess.DEVNULL)
    dashboard = subprocess.Popen(
        [*FPLD, "dashboard", "runs", "--port", "0", "--json"], stdout=subprocess.PIPE, text=True, cwd=runs.parent
    )
    try:
        with sync_playwright() as driver:
            browser = driver.chromium.launch(executable_path=shutil.which("chromium"))
            page = browser.new_page(viewport={"width": 1200, "height": 900})
            page.set_default_timeout(HOUR)
            page.goto(_url(dashboard))
            page.locator("#live h2", has_text="Round 2 of 3: collecting").wait_for()
            page.locator("#live", has_text="2 of 5 nodes have answered").wait_for()
            _shoot(page, "dashboard", 1150)
            run.wait()
            page.locator("#now", has_text="Done").wait_for()
            _plan(page)
            subprocess.run(
                [*FPLD, "report", str(runs / "demo"), "--no-figures", "--json"], check=True, capture_output=True
            )
            page.goto((runs / "demo/report/report.html").as_uri())
            page.locator("figure.chart svg").last.wait_for()
            _shoot(page, "report", 1700)
            browser.close()
    finally:
        dashboard.terminate()
        run.terminate()
    sys.stdout.write(f"run: {runs / 'demo'}; pictures: {FOLDER}\n")


def _plan(page: Page) -> None:
    """Open the planner on what the run measured, and return it half of what the links could carry."""
    page.get_by_role("button", name="planner").click()
    page.locator("#plan figure.chart svg").first.wait_for()
    before = page.locator("#plan .tiles").inner_html()
    page.locator("input[name=total]").evaluate("e => { e.value = 0.5; e.dispatchEvent(new Event('input')); }")
    page.wait_for_function("before => document.querySelector('#plan .tiles').innerHTML !== before", arg=before)
    _shoot(page, "planner", 1250)


def _url(dashboard: subprocess.Popen[str]) -> str:
    text = ""
    for line in dashboard.stdout or []:
        text += line
        if line == "}\n":
            break
    return str(json.loads(text)["rows"][0]["url"])


def _shoot(page: Page, name: str, height: int) -> None:
    page.wait_for_timeout(500)  # a legend that has just been drawn
    page.screenshot(path=FOLDER / f"{name}.png", full_page=True, clip={"x": 0, "y": 0, "width": 1200, "height": height})


if __name__ == "__main__":
    main()
