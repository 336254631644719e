"""docs/limits.md names every default that cuts, caps or samples, with the value that the code has."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path
from typing import Any

import pytest

from fpld.config import Config
from fpld.engines.flower.site.config import Terms
from fpld.students.configs import config_class

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/limits.md").read_text("utf-8")
ROWS = dict(re.findall(r"^\| (`[^|]+?) \| ([^|]+?) \| ", PAGE, re.MULTILINE))

LIMITING_NAME = re.compile(r"^_?(MAX|MOST)_")
# Packages in which a limit cuts what a user gives or gets to see. Codecs, rules and budgets have limits of their
# formats and of arithmetic, which are on the pages of these.
PACKAGES = ("config", "data", "engines/local.py", "federation", "node", "progress.py", "report", "students")
# Constants there that limit no text, no work and no output.
OTHERS = {
    "fpld.config.sections.MOST_MESSAGE",  # the default of flower.most_message
    "fpld.data.probe._MAX_PERMUTED",  # how windows are chosen, not how many
    "fpld.data.documents.MAX_EXCESS",  # from which share on a document is split
    "fpld.data.token_stream._MAX_DRAWS",  # of windows, until one has a part of an answer
    "fpld.data.token_stream._MAX_OPEN_PACKS",  # handles of files, which are opened again
    "fpld.students.llama2c._MAX_SIZE",  # what a header of a model may say
    "fpld.federation.evaluation._MAX_EXPONENT",  # of a float
    "fpld.federation.record._MAX_SAMPLE_CHARACTERS",  # what a reader accepts: far more than is ever written
}
# Keys with a default that is no limit: names, switches, numbers that a method has to have.
UNLIMITING = {
    "seed",
    "alpha",
    "temperature",
    "margin",
    "warmup",
    "forget",
    "weight_bits",
    "effort",
    "clip",
    "epsilon",
    "delta",
    "windows",
    "public_weight",
    "average",
    "rounds",
}


def code_value(name: str) -> Any:
    """Return the value that the code has for a row of the page."""
    key = re.findall(r"`([^`]+)`", name)[0]
    if key.startswith("fpld."):
        module, _, constant = key.rpartition(".")
        return getattr(importlib.import_module(module), constant)
    if "node.toml" in name:
        return Terms.model_fields[key].default
    section, _, field = key.partition(".")
    if section == "student":
        return getattr(config_class("huggingface" if "pretrained" in name else "transformer"), field)
    return section_class(section).model_fields[field].default


def section_class(section: str) -> Any:
    """Return the class of a table of the configuration."""
    found = re.findall(r"(\w+Section)", str(Config.model_fields[section].annotation))
    return getattr(importlib.import_module("fpld.config.sections"), found[0])


@pytest.mark.parametrize("name", ROWS)
def test_every_value_on_the_page_is_that_of_the_code(name: str) -> None:
    value = code_value(name)
    if isinstance(value, list):
        value = str(value).replace("'", '"')
    shown = ROWS[name].strip("`")
    assert shown == ("none" if value is None else f"{value:g}" if isinstance(value, float) else str(value))


def test_every_constant_that_limits_is_on_the_page() -> None:
    missing = []
    for part in PACKAGES:
        path = ROOT / "fpld" / part
        for file in [path] if path.is_file() else sorted(path.rglob("*.py")):
            module = ".".join(file.relative_to(ROOT).with_suffix("").parts)
            limits = [f"{module}.{name}" for name in assigned_names(file) if LIMITING_NAME.match(name)]
            missing += [name for name in limits if f"`{name}`" not in PAGE]
    assert set(missing) == OTHERS


def assigned_names(file: Path) -> list[str]:
    """Return the names that a module assigns to at its top level."""
    names: list[str] = []
    for node in ast.parse(file.read_text("utf-8")).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        names += [target.id for target in targets if isinstance(target, ast.Name)]
    return names


def test_every_number_that_a_key_has_by_default_is_on_the_page_or_known_to_limit_nothing() -> None:
    missing = []
    for section in Config.model_fields:
        if section in ("student", "nodes"):
            continue
        for key, field in section_class(section).model_fields.items():
            is_number = isinstance(field.default, (int, float)) and not isinstance(field.default, bool)
            if is_number and key not in UNLIMITING and f"`{section}.{key}`" not in PAGE:
                missing.append(f"{section}.{key}")
    assert missing == []
