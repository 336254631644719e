"""The nodes' parts as they travel: files are named by the SHA-256 of their content, and carried beside."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, overload

from fpld.federation.part import Files, make_part

if TYPE_CHECKING:
    from fpld.config import Config
    from fpld.federation.part import Part
    from fpld.storage.folder import RunFolder


class Parts(Sequence["Part"]):
    """The nodes' parts, each made when it is asked for: their number costs no memory."""

    def __init__(self, config: Config, digests: dict[str, str]) -> None:
        self._config, self._digests = config, digests

    def __len__(self) -> int:
        return len(self._config.nodes)

    @overload
    def __getitem__(self, index: int) -> Part: ...
    @overload
    def __getitem__(self, index: slice) -> list[Part]: ...
    def __getitem__(self, index: int | slice) -> Part | list[Part]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        part = make_part(self._config, range(len(self))[index])
        named = {field: self._digests[file] for field, file in part.files.model_dump(exclude_none=True).items()}
        return part.model_copy(update={"files": Files(**named)})


def publish(config: Config, run: RunFolder) -> tuple[Parts, dict[str, bytes]]:
    """Return each node's part, and the files that the parts name."""
    digests, contents = dict[str, str](), dict[str, bytes]()
    for index in range(len(config.nodes)):
        for file in sorted(make_part(config, index).files.names() - set(digests)):
            data = (run.path / file).read_bytes()
            digests[file] = hashlib.sha256(data).hexdigest()
            contents[digests[file]] = data
    return Parts(config, digests), contents
