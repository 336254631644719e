"""From a TOML file or a preset to a configuration; every error names the key."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from fpld._check import printable
from fpld.config.sections import Section
from fpld.config.whole import Config
from fpld.errors import InputError
from fpld.storage.files import read_utf8

_SEED = re.compile(r"# --seed (\d{1,19})\n")

S = TypeVar("S", bound=Section)


def parse(text: str, source: str) -> Config:
    """Check the text of a configuration; `source` names it in errors."""
    return parse_toml(Config, text, source)


def parse_toml(cls: type[S], text: str, source: str) -> S:
    """Check the text of a TOML file against what it must hold; every error names the key."""
    try:
        return cls.model_validate(_tables(text, source))
    except ValidationError as error:
        raise InputError("; ".join(f"{source}: {line}" for line in _problems(error))) from None


def _tables(text: str, source: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise InputError(f"{source}: must be TOML of tables that are not nested so deep") from None
    except ValueError as error:  # of TOML, or of a number with thousands of digits
        raise InputError(f"{source}: must be TOML: {printable(error)}") from None


def examine(text: str, source: str) -> tuple[Config | None, list[str]]:
    """Return every problem of a configuration, and the rest of it without what is wrong, if that makes one."""
    try:
        tables = _tables(text, source)
    except InputError as error:
        return None, [str(error)]
    found: list[str] = []
    removed: list[tuple[int | str, ...]] = []
    while True:
        try:
            return Config.model_validate(tables), found
        except ValidationError as error:
            # What is said of a table only because a key of it was taken out is no problem of the file's.
            new = [item for item in error.errors() if not any(_above(item["loc"], place) for place in removed)]
            found += [_key(item["loc"]) + part for item in new for part in _message(item).split("; ")]
            places = [item["loc"] for item in new if _remove(tables, item["loc"])]
            if not places:
                return None, found
            removed += places


def _above(place: tuple[int | str, ...], other: tuple[int | str, ...]) -> bool:
    return place == other[: len(place)]


def _remove(tables: Any, place: tuple[int | str, ...]) -> bool:
    """Take a key out of nested tables; return whether it was there."""
    for part in place[:-1]:
        try:
            tables = tables[part]
        except (KeyError, IndexError, TypeError):
            return False
    return bool(place) and isinstance(tables, dict) and tables.pop(place[-1], None) is not None


def _problems(error: ValidationError) -> list[str]:
    return [f"{_key(item['loc'])}{_message(item)}" for item in error.errors()]


def load(path: str | Path, *, seed: int | None = None) -> tuple[Config, str]:
    """Read a configuration file, or a preset by its name; return it and its text.

    `seed` replaces run.seed. The first line of the text then says so, and counts when a run's config.toml is read.
    """
    text, source = read_text(path)
    config, said = parse(text, source), _SEED.match(text)
    if said is not None:
        seed, text = (int(said[1]) if seed is None else seed), text[said.end() :]
    if seed is None:
        return config, text
    changed = config.model_copy(update={"run": config.run.model_copy(update={"seed": seed})})
    return changed, f"# --seed {seed}\n{text}"


def read_text(path: str | Path) -> tuple[str, str]:
    """Return the text of a configuration file or a preset, and what to call it in errors."""
    name = str(path)
    if name in presets():
        return read_utf8(_preset_folder() / f"{name}.toml"), f"preset {name}"
    if not Path(path).exists():
        raise InputError(f"{path} does not exist: give a TOML file, or one of the presets {', '.join(presets())}")
    return read_utf8(Path(path)), name


def presets() -> list[str]:
    """List the presets that come with the package."""
    return sorted(file.stem for file in _preset_folder().glob("*.toml"))


def _preset_folder() -> Path:
    """Find the presets: inside an installed package, or in `experiments/` of a checkout."""
    package = Path(__file__).parent.parent
    installed = package / "presets"
    return installed if installed.is_dir() else package.parent / "experiments"


def _key(place: tuple[int | str, ...]) -> str:
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).lstrip(".")
    return f"{text}: " if text else ""


def _message(item: Any) -> str:
    message = item["msg"].removeprefix("Value error, ")
    if item["type"] == "extra_forbidden":
        return "unknown key"
    if item["type"] == "missing":
        return "is missing"
    value = item.get("input")
    return message if isinstance(value, dict | list) or "got" in message else f"{message}, got {value!r}"
