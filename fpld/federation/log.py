"""What a run says while it goes: lines of the loggers below `fpld`, for whoever listens.

A line at level INFO is a thing that begins or ends; one with `result` set is what a round has brought. A line at level
DEBUG with `done` and `total` counts jobs. `fpld.pace` says what long loops add.
"""

from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

LOGGER = "fpld"
RESULT = {"result": True}
"""What marks a line as a result: `log.info(text, extra=RESULT)`."""


@contextmanager
def listen(handler: logging.Handler, name: str = LOGGER, *, level: int | None = None) -> Iterator[None]:
    """Attach a handler to the loggers below a name while the context lasts, down to a level (the handler's own)."""
    logger = logging.getLogger(name)
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(min(level or handler.level or logging.DEBUG, before or logging.CRITICAL))
    try:
        yield
    finally:
        logger.setLevel(before)
        logger.removeHandler(handler)
