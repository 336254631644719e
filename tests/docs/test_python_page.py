"""docs/python.md runs as it stands, as one script in an empty folder."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/python.md").read_text("utf-8")


@pytest.mark.slow
def test_the_page_runs(tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    script = tmp_path / "page.py"
    script.write_text(f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n" + "\n".join(_blocks()))
    done = subprocess.run([sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    shown = [line.partition("#")[2].strip() for line in "\n".join(_blocks()).splitlines() if "print(error)" in line]
    assert shown
    assert set(shown) <= set(done.stdout.splitlines())  # each is a whole line
    assert (tmp_path / "my-model/model.safetensors").exists()
    assert (tmp_path / "tables/rounds.csv").exists()
    assert (tmp_path / "mine.toml").exists()


def _blocks() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
