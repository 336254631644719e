"""The node's processes are ours, whatever app a SuperLink serves.

`fpld node` starts a SuperNode with a folder on the path whose `sitecustomize` calls `pin`, in each of its processes:

- the app is that of the package that is installed at the site: none of the code that comes with a run is ever imported;
- the SuperNode signs off what is left of the one before it, and waits for messages at the SuperLink
  (`fpld.engines.flower.fleet`, `fpld.engines.flower.polling`);
- the SuperExec hands messages to a process that has done all imports (`fpld.engines.flower.spawner`).

If pinning fails the process ends.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fpld.errors import ProtocolError
from fpld.storage.files import write_atomic

if TYPE_CHECKING:
    from collections.abc import Callable

_FOLDER = "FPLD_PINNED"
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
    """Let every ClientApp that this process loads be ours, and its part of a SuperNode be as quick as it can."""
    program, folder = Path(sys.argv[0]).name, os.environ.get(_FOLDER)
    spawner = None
    if folder is not None and program == "flower-superexec":
        from fpld.engines.flower.spawner import Spawner

        spawner = Spawner()
        spawner.start()  # first of all: it does its imports while this process does its own
    _pin_app()
    if folder is None:
        return
    from fpld.engines.flower.polling import EACH, crowd
    from fpld.engines.flower.returning import LONGEST_WAIT, hurry

    hurry(max(LONGEST_WAIT, EACH * crowd(Path(folder).parent)))
    if program == "flower-supernode":
        from fpld.engines.flower.fleet import use_site_client, wait_for_message
        from fpld.engines.flower.polling import poll_often

        poll_often(Path(folder).parent, wait_for_message)
        use_site_client(Path(folder))
    elif spawner is not None:
        spawner.take_over()


def _pin_app() -> None:
    from flwr.clientapp import utils

    def load(*_served: Any, **_named: Any) -> Callable[..., Any]:
        from fpld.engines.flower.client import client_app, forked

        return lambda *_app: client_app(runner=forked)

    if not callable(getattr(utils, "get_load_client_app_fn", None)):
        raise ProtocolError("this version of Flower loads apps in another way")
    utils.get_load_client_app_fn = load


def pinned_environment(folder: Path) -> dict[str, str]:
    """Return what the environment of a SuperNode must have besides; the folder is where the hook is written."""
    write_atomic(folder / "sitecustomize.py", _SITE.encode())
    path = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(path), _FOLDER: str(folder), "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.4"}


def node_folder() -> Path | None:
    """Return the folder of the node whose process this is, if it is one's."""
    folder = os.environ.get(_FOLDER)
    return None if folder is None else Path(folder).parent.parent
