"""Run a page of the docs as a script: what a reader does who types it all, in a folder of its own.

    python docs/run_page.py docs/tutorials/own-text.md my-folder

A block of code with a title becomes the file of that name. A block of shell is run as it stands. All shell of a page is
one script, which ends at the first error. Blocks of other languages without a title are for reading.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

_BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)


def script(text: str) -> str:
    """Return the shell script that a page is."""
    parts = ["set -euo pipefail"]
    for language, title, body in _BLOCK.findall(text):
        if title:
            parts.append(f"mkdir -p \"$(dirname '{title}')\"\ncat > '{title}' <<'END_OF_BLOCK'\n{body}END_OF_BLOCK")
        elif language == "sh":
            parts.append(body.rstrip())
    return "\n".join(parts) + "\n"


def run(
    text: str, folder: Path, *, timeout: float | None = None, capture: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run a page in a folder; `fpld` and `python` are those of this interpreter."""
    tools = folder / ".tools"
    tools.mkdir(parents=True, exist_ok=True)
    for name, command in (("fpld", f'"{sys.executable}" -m fpld'), ("python", f'"{sys.executable}"')):
        (tools / name).write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        (tools / name).chmod(0o755)
    return subprocess.run(
        ["bash", "-c", script(text)],  # noqa: S607
        cwd=folder,
        env={**os.environ, "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"},
        timeout=timeout,
        text=True,
        capture_output=capture,
        check=False,
    )


def main() -> int:
    """Run the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path, help="a page of the docs")
    parser.add_argument("folder", type=Path, help="where to run it; it is made")
    given = parser.parse_args()
    return run(given.page.read_text("utf-8"), given.folder.resolve()).returncode


if __name__ == "__main__":
    sys.exit(main())
