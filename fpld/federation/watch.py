"""What loops say of themselves (`fpld.pace`), in two files of a run's folder for whoever looks on.

now.json         the last line of each loop that goes on
curves.jsonl     points of every training: base, local by node, distillation; at most a hundred each

Nothing reads them back: a run does not depend on them.
"""

from __future__ import annotations

import json
import logging
import time
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from fpld.errors import StorageError
from fpld.federation.log import listen
from fpld.pace import POINTS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fpld.storage.folder import RunFolder

NOW, CURVES = "now.json", "curves.jsonl"
OLD = 15.0  # seconds after which a loop that says nothing more has ended


class Watch(logging.Handler):
    """Write what loops say; a disk that refuses is the run's own matter, which meets it too."""

    def __init__(self, store: RunFolder) -> None:
        super().__init__(logging.DEBUG)
        self._store = store
        self._loops: dict[str, dict[str, Any]] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """Take a line or a point; pass over all else."""
        found = vars(record)
        try:
            if "point" in found:
                with (self._store.path / CURVES).open("a", encoding="utf-8") as file:
                    file.write(json.dumps(found["point"]) + "\n")
            elif "pace" in found:
                self._tell(found["pace"])
        except (OSError, StorageError):
            return

    def _tell(self, pace: dict[str, Any]) -> None:
        now = time.time()
        key = f"{pace['method']} {pace['round']} {pace['model']}"
        self._loops[key] = {**pace, "time": now}
        self._loops = {name: each for name, each in self._loops.items() if now - each["time"] < OLD}
        self._store.write_json(NOW, {"updated": now, "loops": list(self._loops.values())})


@contextmanager
def watch(store: RunFolder) -> Iterator[None]:
    """Write what loops say into a run's folder while the context lasts."""
    handler = Watch(store)
    with ExitStack() as stack:
        stack.enter_context(listen(handler, level=logging.INFO))
        stack.enter_context(listen(handler, POINTS))
        yield
