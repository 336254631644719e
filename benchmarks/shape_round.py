"""Print the functions of the package that one round enters, as JSON; `benchmarks.shape` runs this in its own process.

    python -P benchmarks/shape_round.py ROOT CONFIG.toml BEGIN END

BEGIN and END are functions as file:qualified name, with the file below ROOT. The package is imported from ROOT, which
must be first in PYTHONPATH, so nothing else of the repository is imported here.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import fpld
from fpld.cli import main as command_line

if TYPE_CHECKING:
    from types import CodeType, FrameType


class Tracer:
    """Record the functions entered from the first call of `begin` to the next return of `end`."""

    def __init__(self, root: Path, begin: str, end: str) -> None:
        self.entered: dict[CodeType, None] = {}
        self.ended = False
        self._active = False
        self._begin = str(root / begin)
        self._end = str(root / end)
        self._inside = f"{root / 'fpld'}{os.sep}"

    def __call__(self, frame: FrameType, event: str, _argument: object) -> None:
        """Take an event of the interpreter, as `sys.setprofile` has them."""
        code = frame.f_code
        if self.ended or event not in ("call", "return") or not code.co_filename.startswith(self._inside):
            return
        place = f"{code.co_filename}:{code.co_qualname}"
        if event == "return":
            self.ended = self._active and place == self._end
            return
        self._active = self._active or place == self._begin
        # Comprehensions, lambdas and the bodies of modules are no functions that a reader looks up by name.
        if self._active and not code.co_name.startswith("<"):
            self.entered[code] = None


def main() -> None:
    """Run the configuration and print the places of the functions that its round entered."""
    root = Path(sys.argv[1]).resolve()
    config = Path(sys.argv[2])
    if not Path(fpld.__file__).resolve().is_relative_to(root):
        raise SystemExit(f"fpld was imported from {fpld.__file__}, not from {root}")
    tracer = Tracer(root, *sys.argv[3:])
    threading.setprofile(tracer)  # the federation runs in a thread of its own
    sys.setprofile(tracer)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.ExitStack() as stack:
        stack.callback(sys.setprofile, None)
        status = command_line(["run", str(config), "--out", str(config.parent / f"run-{os.getpid()}"), "--json"])
    if status or not tracer.ended:
        raise SystemExit(f"the run ended with status {status}; was the round traced to its end? {tracer.ended}")
    rows = [(code.co_filename, code.co_firstlineno, code.co_qualname) for code in tracer.entered]
    print(json.dumps([(Path(file).relative_to(root).as_posix(), line, name) for file, line, name in rows]))


if __name__ == "__main__":
    main()
