"""What names of a hub were in a run: `sources.json` has the digest of each text and model that is read from a cache.

A name has a commit, but a cache can be damaged, or filled by hand. With the digests two runs can be compared, and a run
that is resumed on other files is refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fpld.config.paths import model_places, show_place, text_places
from fpld.data.hub import describe_source, is_hub_name
from fpld.errors import InputError
from fpld.progress import report_elapsed
from fpld.storage.run_folder import SOURCES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fpld.config import Config
    from fpld.data.hub import Kind
    from fpld.storage.run_folder import RunFolder


def record_sources(config: Config, store: RunFolder) -> None:
    """Write the digests of what names of a hub stand for; with [flower] the nodes' texts are elsewhere.

    Raises
    ------
    InputError
        If the run was begun with other files under the same names, or one is not in the cache.
    """
    rows = [row for row in _sources(config) if row is not None]
    if not rows:
        return
    if store.has(SOURCES):
        kept = {row["key"]: row["sha256"] for row in store.read_json(SOURCES)}
        changed = [row["key"] for row in rows if row["sha256"] != kept.get(row["key"])]
        if changed:
            raise InputError(f"{changed[0]} is not what the run was begun with: its files in the cache have changed")
    store.write_json(SOURCES, rows)


def _sources(config: Config) -> Iterator[dict[str, Any] | None]:
    tables = config.model_dump()
    kinds: list[tuple[Kind, Any]] = [("dataset", text_places(tables)), ("model", model_places(tables))]
    for kind, places in kinds:
        for place, path in places:
            if not is_hub_name(path) or (config.flower is not None and place[-1] == "data"):
                continue
            with report_elapsed(f"computing the digest of {path}"):
                source = describe_source(path, kind)
            if source is not None:
                row = source._asdict() | {"folder": str(source.folder)}
                yield {"key": show_place(place), **row}
