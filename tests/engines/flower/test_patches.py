"""The tables of what is changed of Flower, against the code of the package and the installed Flower."""

from __future__ import annotations

import ast
import inspect
from importlib import import_module
from pathlib import Path

import pytest
from flwr.supernode import start_client_internal

import fpld.engines.flower
from fpld.engines.flower.patches import INTERNALS, PATCHES, Patch

PACKAGE = Path(fpld.engines.flower.__file__).parent
SOURCES = {file.relative_to(PACKAGE).with_suffix(""): file.read_text() for file in sorted(PACKAGE.rglob("*.py"))}
TREES = {".".join(name.parts): ast.parse(source) for name, source in SOURCES.items()}
PUBLIC = "flwr.app", "flwr.clientapp", "flwr.clientapp.typing", "flwr.serverapp", "flwr.serverapp.strategy"
PUBLIC_EXTRAS = "flwr.simulation", "flwr.simulation.run_simulation"


def imported() -> set[str]:
    """Return the modules of Flower's that the package imports, whatever the way."""
    modules = set()
    for tree in TREES.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("flwr"):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
                modules |= {name if is_module(name) else str(node.module) for name in names}
            elif isinstance(node, ast.Import):
                modules |= {alias.name for alias in node.names if alias.name.startswith("flwr")}
            elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
                modules |= {ast.literal_eval(each) for each in node.args if isinstance(each, ast.Constant)}
    return modules


def is_module(name: str) -> bool:
    try:
        return import_module(name) is not None
    except ImportError:
        return False


def foreign_attributes(tree: ast.Module) -> set[str]:
    """Return attributes that are private to another object, or that are assigned to one that is not our own class."""
    classes = {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    names = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or not isinstance(node.value, ast.Name | ast.Attribute):
            continue
        owner = ast.unparse(node.value)
        assigned = isinstance(node.ctx, ast.Store)
        if owner.split(".")[0] not in {"self", "cls", "os", "result", "response", *classes} and (
            assigned or (node.attr.startswith("_") and not node.attr.endswith("__"))
        ):
            names.add(node.attr)
    return names


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: f"{patch.used_in}:{patch.name}")
def test_a_patched_name_is_flowers_and_is_used(patch: Patch) -> None:
    module = import_module(patch.module)
    owner: object = module
    *path, last = patch.name.split(".")
    for name in path:
        owner = getattr(owner, name)
    assert hasattr(owner, last) or f'"{last}"' in inspect.getsource(module) or f".{last} =" in inspect.getsource(module)
    assert last in SOURCES[Path(*patch.used_in.split("."))]
    assert patch.reason


def test_every_name_that_is_replaced_or_private_is_in_the_table() -> None:
    listed = {(patch.used_in, patch.name.split(".")[-1]) for patch in PATCHES}
    for module, tree in TREES.items():
        if module.split(".")[0] in ("patches", "launch"):
            missing = {name for name in foreign_attributes(tree) if (module, name) not in listed}
            assert missing - {"event_hooks", "due", "stored"} == set(), module


def test_every_internal_module_of_flowers_is_in_the_table() -> None:
    modules = {name for name in imported() if name not in (*PUBLIC, *PUBLIC_EXTRAS)}
    prefixes = {name: [key for key in INTERNALS if name == key or name.startswith(f"{key}.")] for name in modules}
    assert [name for name, keys in prefixes.items() if not keys] == []
    assert {key for keys in prefixes.values() for key in keys} == set(INTERNALS)


def test_flowers_loop_sleeps_in_two_stages() -> None:
    """`PollingClock` takes a sleep outside of `_push_messages` for that of the idle stage: there is one."""
    sleeps = {}
    for function in ast.parse(inspect.getsource(start_client_internal)).body:
        if isinstance(function, ast.FunctionDef):
            calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
            sleeps[function.name] = sum(ast.unparse(call.func) == "time.sleep" for call in calls)
    assert {name for name, count in sleeps.items() if count} == {"start_client_internal", "_push_messages"}
    assert sleeps["start_client_internal"] == 1
