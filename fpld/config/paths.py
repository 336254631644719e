"""Paths in a configuration file: a relative one starts at the folder of the file, wherever a command is called.

They are written out in the configuration's text before it is parsed. So a run's own `config.toml` has whole paths, and
messages show them. Names stay as they are: of models that come with the package, of repositories of a hub, and labels
of a corpus. `run.out` starts at the working directory, as `--out` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fpld.config.sections import FlowerSection
from fpld.data.fetch import ARCHIVES
from fpld.data.hub import is_hub_name
from fpld.errors import InputError
from fpld.storage.files import parse_toml_tables
from fpld.validation import printable

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

Place = tuple[int | str, ...]
"""Where a value stands in nested tables: keys, and indices of lists."""

_MAX_KEY = 80  # characters of a key's part in errors
SOURCE: Place = ("probe", "source")
_TEXTS: tuple[Place, ...] = (("data", "path"), SOURCE)
_MODELS: tuple[Place, ...] = (("student", "path"), ("tokenizer", "path"))


def show_place(place: Place) -> str:
    """Return a place as errors name it.

    >>> show_place(("nodes", 0, "data"))
    'nodes[0].data'
    """
    parts = (f"[{part}]" if isinstance(part, int) else f".{printable(part, _MAX_KEY)}" for part in place)
    return "".join(parts).lstrip(".")


def text_places(tables: Mapping[str, Any]) -> Iterator[tuple[Place, str]]:
    """Yield where a configuration names a text by a path or a name, and what it names."""
    yield from _strings(tables, [*_TEXTS, *(("nodes", index, "data") for index in _node_indices(tables))])


def model_places(tables: Mapping[str, Any]) -> Iterator[tuple[Place, str]]:
    """Yield where a configuration names a model by a path or a name, and what it names."""
    own = [("nodes", index, *place) for index in _node_indices(tables) for place in _MODELS]
    yield from _strings(tables, [*_MODELS, *own])


def absolute_paths(text: str, folder: Path) -> str:
    r"""Return the text of a configuration with relative paths written out from `folder`.

    What is no TOML is returned as it is: parsing it names the mistake.

    >>> from pathlib import Path
    >>> absolute_paths('[data]\npath = "texts"  # mine\n', Path("/home/me"))
    '[data]\npath = "/home/me/texts"  # mine\n'
    >>> absolute_paths('[student]\npath = "smollm2"\n', Path("/home/me"))
    '[student]\npath = "smollm2"\n'
    """
    try:
        tables = parse_toml_tables(text)
    except InputError:
        return text
    changes = dict(_changes(tables, folder))
    if not changes:
        return text
    import tomlkit

    document: Any = tomlkit.parse(text)
    for (*above, key), value in changes.items():
        table = document
        for part in above:
            table = table[part]
        table[key] = value
    return tomlkit.dumps(document)


def _changes(tables: Mapping[str, Any], folder: Path) -> Iterator[tuple[Place, str]]:
    named = [*text_places(tables), *((place, path) for place, path in model_places(tables) if path not in ARCHIVES)]
    for place, path in named:
        if is_hub_name(path) and not (folder / path).exists():
            continue
        if place == SOURCE and _may_be_label(path, tables, folder):
            continue
        yield from _moved(place, path, folder)
    flower = tables.get("flower")
    if isinstance(flower, dict):
        for key in ("certs", "keys"):
            path = flower.get(key, FlowerSection.model_fields[key].default)
            if isinstance(path, str):
                yield from _moved(("flower", key), path, folder)


def _moved(place: Place, path: str, folder: Path) -> Iterator[tuple[Place, str]]:
    """Yield the place with the whole path, if that is another one."""
    whole = str(folder / path)
    if path and whole != path and not path.startswith("/"):
        yield place, whole


def _may_be_label(source: str, tables: Mapping[str, Any], folder: Path) -> bool:
    """Return whether the public text may be a label of the corpus: one word, where there is a corpus."""
    if "/" in source:
        return False
    section = tables.get("data")
    section = section if isinstance(section, dict) else {}
    if section.get("corpus") is not None:
        return not (folder / source).is_file()
    path = section.get("path")
    if not isinstance(path, str):
        return False
    root = folder / path
    if root.is_dir():
        return (root / source).is_dir()  # folders are labels
    return not (folder / source).exists()


def _strings(tables: Mapping[str, Any], places: list[Place]) -> Iterator[tuple[Place, str]]:
    for place in places:
        value: Any = tables
        for part in place:
            known = isinstance(value, dict) and part in value
            value = value[part] if known or (isinstance(value, list) and isinstance(part, int)) else None
        if isinstance(value, str):
            yield place, value


def _node_indices(tables: Mapping[str, Any]) -> range:
    nodes = tables.get("nodes")
    return range(len(nodes) if isinstance(nodes, list) else 0)
