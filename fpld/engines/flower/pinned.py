"""The node's app is the one of the package that is installed at the site, whatever app a SuperLink serves.

A SuperNode loads the code of the app that comes with a run. `fpld node` starts it with a folder on the path whose
`sitecustomize` calls `pin`: each of its processes then answers with our ClientApp, and none of the code that came is
ever imported. If pinning fails the process ends.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from fpld.errors import ProtocolError
from fpld.storage.files import write_atomic

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_SITE = """\
import os, sys

try:
    from fpld.engines.flower.pinned import pin

    pin()
except BaseException as error:
    sys.stderr.write(f"ERROR: the node's app cannot be fixed: {error!r}\\n")
    os._exit(70)
"""


def pin() -> None:
    """Let every ClientApp that this process loads be ours."""
    from flwr.clientapp import utils

    def load(*_served: Any, **_named: Any) -> Callable[..., Any]:
        from fpld.engines.flower.client import client_app

        return lambda *_app: client_app()

    if not callable(getattr(utils, "get_load_client_app_fn", None)):
        raise ProtocolError("this version of Flower loads apps in another way")
    utils.get_load_client_app_fn = load


def pinned_environment(folder: Path) -> dict[str, str]:
    """Return what the environment of a SuperNode must have besides; the folder is where the hook is written."""
    write_atomic(folder / "sitecustomize.py", _SITE.encode())
    path = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(path)}
