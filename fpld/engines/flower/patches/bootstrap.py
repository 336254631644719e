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

from fpld.engines.flower.patches import ALL, CHOICE_VARIABLE, NONE, encode_choice, is_chosen, is_on
from fpld.errors import ProtocolError
from fpld.storage.files import write_atomic

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

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
    """Install what this process needs: the app in all of them, the rest as its program is SuperNode or SuperExec.

    A patch that does not fit this version of Flower is left out, with a line in the site's log; but not the app.
    """
    program = Path(sys.argv[0]).name
    folder = os.environ.get(_FOLDER_VARIABLE)
    if folder is None or program not in ("flower-supernode", "flower-superexec"):
        _install_app()
        return
    from fpld.engines.flower.log import FolderLogHandler
    from fpld.federation.telemetry import listen

    with listen(FolderLogHandler(Path(folder).parent.parent)):
        if program == "flower-supernode":
            _install_in_supernode(Path(folder))
        else:
            _install_in_superexec(Path(folder))


def _install_in_supernode(folder: Path) -> None:
    from fpld.engines.flower.patches.polling import fleet_pause, patch_polling
    from fpld.engines.flower.patches.retry import MAX_RETRY_SECONDS, retry_sooner

    _install_app()
    retry_sooner(max(MAX_RETRY_SECONDS, fleet_pause(folder.parent)))
    wait: Callable[[], bool | None] = lambda: None  # noqa: E731 - no long poll
    if is_on("connection"):
        from fpld.engines.flower.patches.connection import use_site_client, wait_for_message

        use_site_client(folder)
        wait = wait_for_message
    if is_on("polling"):
        patch_polling(folder.parent, wait)


def _install_in_superexec(folder: Path) -> None:
    from fpld.engines.flower.patches.polling import fleet_pause
    from fpld.engines.flower.patches.prefork import PreforkServer
    from fpld.engines.flower.patches.retry import MAX_RETRY_SECONDS, retry_sooner

    prefork = PreforkServer()
    if is_chosen("prefork"):
        prefork.start()  # first: it does its imports while this process does its own
    _install_app()
    retry_sooner(max(MAX_RETRY_SECONDS, fleet_pause(folder.parent)))
    if is_on("prefork"):
        prefork.take_over()
    else:
        prefork.stop()


def _install_app() -> None:
    """Load the installed package's ClientApp in this process; refuse to go on if that was chosen and is impossible."""
    if not is_chosen("installed_app"):
        return
    if not is_on("installed_app"):
        raise ProtocolError(
            "this version of Flower loads apps in another way, and would execute the code of each run: install a "
            "tested one, or allow that in node.toml by `patches` without installed_app"
        )
    from flwr.clientapp import utils

    def load(*_served: Any, **_named: Any) -> Callable[..., Any]:
        from fpld.engines.flower.client import client_app, run_forked

        return lambda *_app: client_app(runner=run_forked)

    utils.get_load_client_app_fn = load


def supernode_environment(folder: Path, choice: str | Sequence[str] = ALL) -> dict[str, str]:
    """Write `sitecustomize` into a folder; return the variables that let a SuperNode's processes find it.

    Without any patch there are none: its processes are those of stock Flower.
    """
    if encode_choice(choice)[CHOICE_VARIABLE] == NONE:
        return {}
    write_atomic(folder / "sitecustomize.py", _SITECUSTOMIZE.encode())
    path = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        "PYTHONPATH": os.pathsep.join(path),
        _FOLDER_VARIABLE: str(folder),
        **encode_choice(choice),
    }


def node_folder() -> Path | None:
    """Return the folder of the site whose process this is; None in any other process."""
    folder = os.environ.get(_FOLDER_VARIABLE)
    return None if folder is None else Path(folder).parent.parent
