"""The app on a Flower whose internal names are all gone: as another version may be, short of 2."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from fpld.engines.flower.patches import INTERNALS, PATCHES
from fpld.engines.local import run_local
from fpld.seeds import derive_key
from fpld.storage.run_folder import RunFolder
from tests.test_package import ROOT

if TYPE_CHECKING:
    from tests.engines.flower.conftest import Deployment

# Names of Flower's that are not public fail to be imported by modules of this package; Flower itself has them.
PROGRAM = """
import builtins, importlib, sys
from pathlib import Path

internals = sys.argv[2:]
whole_import = builtins.__import__

def refuse(importer, wanted):
    if importer.startswith("fpld.") and any((one + ".").startswith(f"{each}.") for one in wanted for each in internals):
        raise ImportError(f"{importer} wants {wanted}", name=min(wanted))

def import_some(name, globals=None, locals=None, fromlist=(), level=0):
    refuse((globals or {}).get("__name__", ""), {name, *(f"{name}.{each}" for each in fromlist or ())})
    return whole_import(name, globals, locals, fromlist, level)

def import_module(name):
    refuse("fpld.engines.flower.patches", {name})
    return importlib.import_module(name)

builtins.__import__ = import_some
from fpld.engines.flower import patches

patches.import_module = import_module
from flwr.supercore.task_identity import TaskIdentity
from fpld import config
from fpld.engines.flower import serve
from tests.engines.flower.conftest import InProcessGrid

TaskIdentity._task_id = TaskIdentity._run_id = TaskIdentity._node_id = 1
folder = Path(sys.argv[1])
text = (folder / "config.toml").read_text()
grid = InProcessGrid([folder / f"nodes/{name}/node.toml" for name in ("north", "east", "south")])
serve(grid, config.parse_config(text, "test"), text, folder / "flower")
"""


@pytest.mark.slow
def test_without_any_internal_name_of_flowers_patches_are_off_and_runs_go_on(deployment: Deployment) -> None:
    """`auto`: each patch that is looked for is off with its line; the trace is that of one machine."""
    folder = deployment.folder
    run_local(deployment.config, deployment.text, folder / "local", resume=False)
    key = derive_key(deployment.config.run.seed)
    RunFolder(folder / "flower").write_json("session.json", {"session": "ab" * 32, "key": key.hex()})
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder), *INTERNALS],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    said = "\n".join(deployment.log())
    receive = next(patch for patch in PATCHES if patch.name == "receive")
    assert "patch receive is off: Flower" in said
    assert receive.without in said
    assert len(deployment.trace()) == 3
    assert deployment.trace() == deployment.trace("local")
