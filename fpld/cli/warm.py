"""`fpld warm`: compile all kernels ahead, once a machine."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from fpld.cli.arguments import Command
from fpld.errors import MissingExtraError
from fpld.kernels import compilations, numba_available
from fpld.units import show_count

if TYPE_CHECKING:
    import argparse

    from fpld.cli.output import Output

log = logging.getLogger(__name__)

_EPILOG = """\
Kernels are compiled when they are first called, which takes up to a minute in a new environment. They are kept in a
cache for all processes of this machine. After this command no run waits for them. The cache is beside the package, or
in the user's cache folder where that cannot be written; NUMBA_CACHE_DIR names another one. Example:

  fpld warm
"""


def _configure(parser: argparse.ArgumentParser) -> None:
    del parser  # it has no arguments


def _run(arguments: argparse.Namespace, output: Output) -> int:
    """Compile, and print how many kernels were not in the cache."""
    del arguments
    if not numba_available():
        raise MissingExtraError("compiled kernels", "fast")
    from fpld.protocol.fast_paths import warm_up_all
    from fpld.registry import codecs

    started = time.monotonic()
    total = len(codecs.names()) + 1
    with output.status():
        for done, name in enumerate(warm_up_all(), 1):
            log.info("%s: %s compiled so far", name, show_count(compilations.count, "kernel"))
            log.debug("%d of %d", done, total, extra={"done": done, "total": total})
    row = {"compiled": compilations.count, "seconds": round(time.monotonic() - started, 1)}
    output.result("warm", [row], title="Kernels that were not in the cache")
    return 0


COMMAND = Command(_EPILOG, _configure, _run)
