"""The tables of what is changed of Flower, against the code of the package and the installed Flower."""

from __future__ import annotations

import ast
import inspect
import re
import warnings
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import get_args

import pytest
from flwr.supernode import start_client_internal

import fpld.engines.flower
from fpld.config.sections import PatchName
from fpld.engines.flower import patches
from fpld.engines.flower.patches import (
    CHOICE_VARIABLE,
    INTERNALS,
    PATCHES,
    Patch,
    bootstrap,
    encode_choice,
    has_name,
    is_on,
)
from fpld.errors import ProtocolError
from tests.test_package import ROOT

PACKAGE = Path(fpld.engines.flower.__file__).parent
SOURCES = {file.relative_to(PACKAGE).with_suffix(""): file.read_text() for file in sorted(PACKAGE.rglob("*.py"))}
TREES = {".".join(name.parts): ast.parse(source) for name, source in SOURCES.items()}
PUBLIC = "flwr.app", "flwr.clientapp", "flwr.clientapp.typing", "flwr.serverapp", "flwr.serverapp.strategy"
PUBLIC_EXTRAS = "flwr.simulation", "flwr.simulation.run_simulation"


def imported(trees: dict[str, ast.Module]) -> set[str]:
    """Return the modules of Flower's that some modules import, whatever the way."""
    modules: set[str] = set()
    for tree in trees.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("flwr"):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
                modules |= {name if is_module(name) else str(node.module) for name in names}
            elif isinstance(node, ast.Import):
                modules |= {alias.name for alias in node.names if alias.name.startswith("flwr")}
            elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
                names = [str(ast.literal_eval(each)) for each in node.args if isinstance(each, ast.Constant)]
                modules |= {name for name in names if name.startswith("flwr")}
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


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: str(patch.name))
def test_a_patch_names_what_flower_has_and_what_its_modules_use(patch: Patch) -> None:
    used = "".join(SOURCES[Path(*module.split("."))] for module in patch.used_in)
    for dotted in patch.names:
        assert has_name(dotted), dotted
        assert dotted.rpartition(".")[2].rpartition(":")[2] in used, dotted
    assert (ROOT / patch.test).exists()
    assert min(map(len, (patch.why, patch.without, patch.versions))) > 0
    assert f"| `{patch.name}` | {patch.why} | {patch.without} |" in (ROOT / "docs/flower.md").read_text()


def test_make_compat_has_the_tests_of_every_patch() -> None:
    makefile = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    line = next(line for line in makefile.splitlines() if line.startswith("COMPAT_TESTS"))
    files = {f"tests/engines/flower/test_{name}" for name in re.findall(r"[a-z_]+\.py", line)}
    assert {patch.test for patch in PATCHES} <= files
    assert [file for file in files if not (ROOT / file).exists()] == []


@pytest.mark.filterwarnings("default")
def test_patches_were_tested_with_the_version_that_is_installed() -> None:
    """A newer one is a warning: `make compat` says whether it fits, and the table then gets it."""
    installed = ".".join(version("flwr").split(".")[:2])
    newest = max(tuple(map(int, each.split("."))) for patch in PATCHES for each in patch.versions)
    for patch in PATCHES:
        if installed not in patch.versions:
            assert tuple(map(int, installed.split("."))) > newest, patch.name
            warnings.warn(f"patch {patch.name} is not tested with Flower {installed} yet", stacklevel=1)


def test_the_names_of_patches_are_those_of_the_configuration() -> None:
    assert tuple(patch.name for patch in PATCHES) == get_args(PatchName)


@pytest.mark.parametrize(
    ("dotted", "expected"),
    [
        ("flwr.supernode.start_client_internal:time", True),
        ("flwr.supercore.protobuf.client:ProtobufClient._client", True),  # set when it is made
        ("flwr.app.metadata:Metadata._message_id", True),  # in a dictionary of attributes
        ("flwr.supercore.protobuf.client:ProtobufClient._gone", False),
        ("flwr.supercore.protobuf.client:Gone.name", False),
        ("flwr.gone:name", False),
    ],
)
def test_a_name_of_flowers_is_found(dotted: str, expected: bool) -> None:
    assert has_name(dotted) == expected


def test_a_patch_that_does_not_fit_is_off_with_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Flower without a name that the patch replaces, as another version may be."""
    patches._fits.cache_clear()
    monkeypatch.delenv(CHOICE_VARIABLE, raising=False)
    monkeypatch.delattr(start_client_internal, "_push_messages")
    try:
        assert not is_on("polling")
        assert not is_on("polling")  # said once
        assert is_on("connection")
        (record,) = caplog.records
        assert "patch polling is off" in record.getMessage()
        assert "start_client_internal._push_messages" in record.getMessage()
    finally:
        patches._fits.cache_clear()


def test_only_chosen_patches_are_on(monkeypatch: pytest.MonkeyPatch) -> None:
    for choice, expected in (
        ("auto", (True, True)),
        ("none", (False, False)),
        (["retry"], (True, False)),
        ([], (False, False)),
    ):
        monkeypatch.setenv(CHOICE_VARIABLE, encode_choice(choice)[CHOICE_VARIABLE])
        assert (is_on("retry"), is_on("polling")) == expected


def test_a_site_without_its_own_app_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one patch that protects a site is not left out because Flower has changed: node.toml must say so."""
    from flwr.clientapp import utils

    patches._fits.cache_clear()
    monkeypatch.setenv(CHOICE_VARIABLE, "auto")
    monkeypatch.delattr(utils, "get_load_client_app_fn")
    try:
        with pytest.raises(ProtocolError, match="would execute the code of each run"):
            bootstrap.install()
        monkeypatch.setenv(CHOICE_VARIABLE, "retry")
        bootstrap.install()
    finally:
        patches._fits.cache_clear()


def test_every_name_that_is_replaced_or_private_is_in_the_table() -> None:
    listed = {
        (module, part)
        for patch in PATCHES
        for module in patch.used_in
        for dotted in patch.names
        for part in dotted.partition(":")[2].split(".")
    }
    for module, tree in TREES.items():
        missing = {name for name in foreign_attributes(tree) if (module, name) not in listed}
        assert missing - {"event_hooks", "due", "stored", "_replace", "_asdict"} == set(), module


def test_every_internal_module_of_flowers_is_in_the_table() -> None:
    modules = {name for name in imported(TREES) if name not in (*PUBLIC, *PUBLIC_EXTRAS)}
    prefixes = {name: [key for key in INTERNALS if name == key or name.startswith(f"{key}.")] for name in modules}
    assert [name for name, keys in prefixes.items() if not keys] == []
    assert {key for keys in prefixes.values() for key in keys} == set(INTERNALS)


def test_outside_of_the_patches_only_public_names_of_flowers_are_used() -> None:
    """In the whole package, and as text too: a module's name in a string is a way to import it."""
    for file in sorted((ROOT / "fpld").rglob("*.py")):
        if PACKAGE / "patches" in file.parents:
            continue
        source = file.read_text("utf-8")
        assert imported({file.name: ast.parse(source)}) <= {*PUBLIC, *PUBLIC_EXTRAS}, file
        assert not re.findall(r"flwr\.(?:supercore|superlink|supernode|server|client|common|proto|cli)\b", source), file


def test_the_package_does_not_grow_unseen() -> None:
    """Files and lines of docs/flower.md, with room for small changes: raise them there and here, or make it smaller."""
    lines = sum(len(source.splitlines()) for source in SOURCES.values())
    page = (ROOT / "docs/flower.md").read_text()
    assert f"`fpld/engines/flower` has {len(SOURCES)} files" in page
    assert len(SOURCES) <= 33
    assert lines <= 7250


def test_flowers_loop_sleeps_in_two_stages() -> None:
    """`PollingClock` takes a sleep outside of `_push_messages` for that of the idle stage: there is one."""
    sleeps = {}
    for function in ast.parse(inspect.getsource(start_client_internal)).body:
        if isinstance(function, ast.FunctionDef):
            calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
            sleeps[function.name] = sum(ast.unparse(call.func) == "time.sleep" for call in calls)
    assert {name for name, count in sleeps.items() if count} == {"start_client_internal", "_push_messages"}
    assert sleeps["start_client_internal"] == 1
