"""The documentation site: it builds without a warning, loads nothing from outside, and its references are complete."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

import fpld
from fpld import config
from fpld.cli import COMMANDS, parser

ROOT = Path(__file__).parents[2]
SITE = runpy.run_path(str(ROOT / "docs/hooks.py"))


class Loads(HTMLParser):
    """Collect what a page loads by itself: scripts, styles, pictures, fonts; not where its links lead."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attributes}
        if tag in ("script", "img", "iframe", "source", "video", "audio"):
            self.found.append(given.get("src", ""))
        if tag == "link" and given.get("rel") not in ("canonical", "prev", "next"):
            self.found.append(given.get("href", ""))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": path}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
def test_the_site_builds_and_loads_nothing_from_outside(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 25
    for page in pages:
        reader = Loads()
        reader.feed(page.read_text("utf-8"))
        assert not [address for address in reader.found if re.match(r"(?:https?:)?//", address)], page
    for style in site.rglob("*.css"):
        assert not re.findall(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//", style.read_text("utf-8")), style


@pytest.mark.slow
def test_pages_from_the_disk_ask_nobody_find_words_and_fit_a_phone(site: Path) -> None:
    from playwright.sync_api import expect, sync_playwright

    from tests.report.test_browser import PATIENCE, chromium

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium())
        page = browser.new_page(viewport={"width": 390, "height": 844})
        asked: list[str] = []
        failed: list[tuple[str | None, str]] = []
        page.set_default_timeout(PATIENCE)
        page.on("request", lambda request: asked.append(request.url))
        page.on("requestfailed", lambda request: failed.append((request.failure, request.url)))
        for path in sorted(set(site.rglob("*.html")) - {site / "404.html"}):  # which is for servers
            page.goto(path.as_uri())
            assert page.evaluate("document.documentElement.scrollWidth") <= 390, path
        page.set_viewport_size({"width": 1400, "height": 900})
        page.goto((site / "tutorials/codec.html").as_uri())
        page.locator(".md-search__input").click()
        page.locator(".md-search__input").press_sequentially("water-filling")
        expect(page.locator(".md-search-result__item").first).to_be_attached(timeout=PATIENCE)
        browser.close()
    # An icon still on its way when its page is left is aborted; one that is missing fails otherwise.
    assert not [url for reason, url in failed if reason != "net::ERR_ABORTED"]
    assert not [address for address in asked if not address.startswith(("file:", "data:", "blob:"))]


@pytest.mark.slow
def test_the_library_page_has_every_public_name(site: Path) -> None:
    page = (ROOT / "docs/reference/api.md").read_text("utf-8")
    assert {f"fpld.{name}" for name in fpld.__all__} <= set(re.findall(r"^::: (\S+)$", page, re.MULTILINE))
    built = (site / "reference/api.html").read_text("utf-8")
    assert "Encode" in built
    assert 'id="fpld.encode"' in built


def test_the_commands_are_those_of_the_parsers() -> None:
    page = SITE["commands_page"]()
    for name, record in COMMANDS.items():
        section = page.partition(f"\n## {name}\n")[2].partition("\n## ")[0]
        assert record.help in page
        assert f"fpld {name}" in section
    choices = parser()._subparsers._group_actions[0].choices  # type: ignore[union-attr]
    for name, command in choices.items():  # type: ignore[union-attr]
        section = page.partition(f"\n## {name}\n")[2].partition("\n## ")[0]
        for action in command._actions:
            for option in action.option_strings:
                if option not in ("-h", "--help", "--json"):
                    assert f"`{option}" in section, option


def test_the_presets_are_whole() -> None:
    page = SITE["presets_page"]()
    for name in config.presets():
        assert config.read_config_text(name)[0].rstrip() in page


def test_a_graph_becomes_a_picture() -> None:
    drawn = SITE["picture"]("    a --> b\n    b --> c\n    a --> c\n")
    assert drawn.count("<rect") == 3
    assert drawn.count('<path d="M') == 3 + 1  # and the arrow's head
    assert "a imports b" in drawn
