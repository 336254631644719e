"""Make the pictures of report, planner and dashboard that the docs show, from a real run: the demonstration.

The run is made while the dashboard looks on, so that one picture shows a round in progress. Needs the system's Chromium
(`make browser`) and as long as the demonstration takes. With a finished run (`--run DIR`) only the report and the
planner are pictured. `--all DIR` leaves every page there besides, README and some of the docs among them: wide and
narrow, light and dark, from top to bottom.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from playwright.sync_api import sync_playwright

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Browser, Page

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docs/figures"
WIDTHS = (1400, 390)  # pixels: a desktop and a phone
DOCS = ("index", "using", "results", "planning", "deploy", "tutorials/own-text", "reference/commands")
FPLD = [sys.executable, "-m", "fpld"]
HOUR = 3_600_000  # milliseconds


def main() -> None:
    """Take the pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, help="a finished run, in place of a new one")
    parser.add_argument("--all", type=Path, metavar="DIR", help="a folder for pictures of all pages, to look at")
    arguments = parser.parse_args()
    runs = Path(tempfile.mkdtemp()) / "runs"
    if arguments.run is not None:
        shutil.copytree(arguments.run, runs / arguments.run.resolve().name)
    else:
        runs.mkdir()
    with sync_playwright() as driver, _dashboard(runs) as url:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"))
        page = browser.new_page(viewport={"width": 1200, "height": 900})
        page.set_default_timeout(HOUR)
        page.goto(url)
        if arguments.run is None:
            _watch(page, runs / "demo")
        page.locator("#now", has_text="Done").wait_for()
        _plan(page)
        (run,) = runs.iterdir()
        subprocess.run([*FPLD, "report", str(run), "--no-figures", "--json"], check=True, capture_output=True)
        report = (run / "report/report.html").as_uri()
        page.goto(report)
        page.locator("figure.chart svg").last.wait_for()
        _shoot(page, "report", 1700)
        if arguments.all is not None:
            arguments.all.mkdir(parents=True, exist_ok=True)
            charts = {"dashboard": url, "planner": f"{url}#planner/{run.name}", "report": report}
            _all(browser, charts, arguments.all, wait_for="figure.chart svg >> visible=true")
            _all(browser, _docs(runs.parent), arguments.all, wait_for="h1")
        browser.close()
    sys.stdout.write(f"run: {run}; pictures: {FOLDER}\n")


def _watch(page: Page, out: Path) -> None:
    """Run the demonstration, and picture it while some of its nodes have answered."""
    run = subprocess.Popen([*FPLD, "run", "--out", str(out), "--json"], stdout=subprocess.DEVNULL)
    try:
        page.locator("#live", has_text="2 of 5 nodes have answered").wait_for()
        page.locator("#now table", has_text="At work").wait_for()
        _shoot(page, "dashboard", 1000)
        if run.wait():
            raise SystemExit("the run failed")
    finally:
        run.terminate()


def _plan(page: Page) -> None:
    """Open the planner on what the run measured, and give it half of what the links could carry."""
    page.get_by_role("button", name="planner").click()
    page.locator("#plan figure.chart svg").first.wait_for()
    before = page.locator("#plan .tiles").inner_html()
    page.locator("input[name=total]").evaluate("e => { e.value = 0.5; e.dispatchEvent(new Event('input')); }")
    page.wait_for_function("before => document.querySelector('#plan .tiles').innerHTML !== before", arg=before)
    _shoot(page, "planner", 1250)


def _docs(folder: Path) -> dict[str, str]:
    """Build the documentation; return the addresses of README and of pages."""
    import markdown

    site = folder / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(site)]
    subprocess.run(command, check=True, cwd=ROOT, capture_output=True)
    body = markdown.markdown((ROOT / "README.md").read_text("utf-8"), extensions=["tables", "fenced_code"])
    style = "body { max-width: 60em; margin: auto; font-family: sans-serif } img { max-width: 100% }"
    style += " pre, table { overflow: auto; display: block }"
    page = folder / "README.html"
    head = f'<meta name="viewport" content="width=device-width"><base href="{ROOT.as_uri()}/"><style>{style}</style>'
    page.write_text(f"<!doctype html>{head}{body}", "utf-8")
    addresses = {f"docs-{name.replace('/', '-')}": (site / f"{name}.html").as_uri() for name in DOCS}
    return {"readme": page.as_uri()} | addresses


def _all(browser: Browser, pages: dict[str, str], folder: Path, *, wait_for: str) -> None:
    """Picture pages from top to bottom."""
    for width, scheme in product(WIDTHS, ("light", "dark")):
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)  # type: ignore[arg-type]
        for name, address in pages.items():
            page = context.new_page()
            page.goto(address)
            page.locator(wait_for).first.wait_for()
            page.wait_for_timeout(1500)  # the planner's first answer
            page.screenshot(path=folder / f"{name}-{width}-{scheme}.png", full_page=True)
            page.close()
        context.close()


@contextmanager
def _dashboard(runs: Path) -> Iterator[str]:
    """Serve the dashboard of a folder; yield its address."""
    command = [*FPLD, "dashboard", "runs", "--port", "0", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=runs.parent)
    try:
        text = ""
        for line in process.stdout or []:
            text += line
            if line == "}\n":
                break
        yield str(json.loads(text)["rows"][0]["url"])
    finally:
        process.terminate()


def _shoot(page: Page, name: str, height: int) -> None:
    page.wait_for_timeout(500)  # a legend that has just been drawn
    page.screenshot(path=FOLDER / f"{name}.png", full_page=True, clip={"x": 0, "y": 0, "width": 1200, "height": height})


if __name__ == "__main__":
    main()
