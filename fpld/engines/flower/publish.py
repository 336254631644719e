"""The nodes' parts as they travel: files are named by the SHA-256 of their content, and carried beside."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from fpld.federation.part import Files, parts

if TYPE_CHECKING:
    from collections.abc import Callable

    from fpld.config import Config
    from fpld.federation.part import Part
    from fpld.storage.folder import RunFolder


def publish(config: Config, run: RunFolder) -> tuple[list[Part], dict[str, bytes]]:
    """Return each node's part, and the files that the parts name."""
    contents: dict[str, bytes] = {}

    def name(file: str) -> str:
        data = (run.path / file).read_bytes()
        digest = hashlib.sha256(data).hexdigest()
        contents[digest] = data
        return digest

    return [part.model_copy(update={"files": _named(part.files, name)}) for part in parts(config)], contents


def _named(files: Files, name: Callable[[str], str]) -> Files:
    return Files(**{field: name(file) for field, file in files.model_dump(exclude_none=True).items()})
