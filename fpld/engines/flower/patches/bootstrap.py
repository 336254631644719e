"""Install the patches in every process of a site's SuperNode.

`fpld node` starts a SuperNode with a folder on PYTHONPATH. Its `sitecustomize` calls `install` when a process starts:

- Every process loads the ClientApp of the installed package: code that comes with a run is never imported.
- The SuperNode signs its predecessor off, and waits for messages in a long poll: `patches.connection`,
  `patches.polling`.
- The SuperExec hands each message to a prefork server, which has done all imports: `patches.prefork`.

A process in which this fails ends at once.
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

_FOLDER_VARIABLE = "FPLD_PINNED"  # the folder with `sitecustomize`, in the folder `flower` of a site
_SITECUSTOMIZE = """\
import os, sys

try:
    from fpld.engines.flower.patches.bootstrap import install

    install()
except BaseException as error:
    sys.stderr.write(f"ERROR: the node's app cannot be fixed: {error!r}\\n")
    os._exit(70)
"""


def install() -> None:
    """Install what this process needs: the app in all of them, the rest as its program is SuperNode or SuperExec."""
    program = Path(sys.argv[0]).name
    folder = os.environ.get(_FOLDER_VARIABLE)
    prefork = None
    if folder is not None and program == "flower-superexec":
        from fpld.engines.flower.patches.prefork import PreforkServer

        prefork = PreforkServer()
        prefork.start()  # first: it does its imports while this process does its own
    _replace_client_app()
    if folder is None:
        return
    from fpld.engines.flower.patches.polling import fleet_pause
    from fpld.engines.flower.patches.retry import MAX_RETRY_SECONDS, retry_sooner

    retry_sooner(max(MAX_RETRY_SECONDS, fleet_pause(Path(folder).parent)))
    if program == "flower-supernode":
        from fpld.engines.flower.patches.connection import use_site_client, wait_for_message
        from fpld.engines.flower.patches.polling import patch_polling

        patch_polling(Path(folder).parent, wait_for_message)
        use_site_client(Path(folder))
    elif prefork is not None:
        prefork.take_over()


def _replace_client_app() -> None:
    from flwr.clientapp import utils

    def load(*_served: Any, **_named: Any) -> Callable[..., Any]:
        from fpld.engines.flower.client import client_app, run_forked

        return lambda *_app: client_app(runner=run_forked)

    if not callable(getattr(utils, "get_load_client_app_fn", None)):
        raise ProtocolError("this version of Flower loads apps in another way")
    utils.get_load_client_app_fn = load


def supernode_environment(folder: Path) -> dict[str, str]:
    """Write `sitecustomize` into a folder; return the variables that let a SuperNode's processes find it."""
    write_atomic(folder / "sitecustomize.py", _SITECUSTOMIZE.encode())
    path = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        "PYTHONPATH": os.pathsep.join(path),
        _FOLDER_VARIABLE: str(folder),
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.4",
    }


def node_folder() -> Path | None:
    """Return the folder of the site whose process this is; None in any other process."""
    folder = os.environ.get(_FOLDER_VARIABLE)
    return None if folder is None else Path(folder).parent.parent
