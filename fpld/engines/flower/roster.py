"""Who is connected: Flower's node ids on one side, the names and keys of the federation on the other.

A node id says nothing about who it is. Each new one is asked; its answer carries a tag that only the holder of the
registered key can make, over a challenge that was never used before.
"""

from __future__ import annotations

import logging
import secrets
import time
from typing import TYPE_CHECKING

from flwr.app import Message

from fpld._check import printable
from fpld.engines.flower.answers import MOST_BYTES, Joined
from fpld.engines.flower.exchange import exchange, explain
from fpld.engines.flower.identity import Letter, write_letter
from fpld.engines.flower.payload import LETTER, pack, unpack
from fpld.errors import FpldError, ProtocolError
from fpld.protocol.wire import VERSION

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from flwr.serverapp import Grid

log = logging.getLogger(__name__)

_PATIENCE = 120.0  # seconds that a node has to say who it is: a new process, and its imports
_PAUSE = 1.0


class Roster:
    """Know which node of the federation is behind which id, which student it has, and which files it lacks."""

    def __init__(
        self,
        names: Sequence[str],
        keys: Mapping[int, bytes],
        session: bytes,
        files: Collection[str],
    ) -> None:
        self.names, self._keys, self._session, self._files = names, keys, session, sorted(files)
        self.ids: dict[int, int] = {}
        self.missing: dict[int, list[str]] = {}
        self.holds: dict[int, str | None] = {}

    def gather(self, grid: Grid, *, enough: int, wait: float) -> None:
        """Wait until `enough` nodes are here, at most `wait` seconds; who is here then takes part."""
        end, said = time.monotonic() + wait, False
        while True:
            self._refresh(grid)
            if len(self.ids) >= enough or time.monotonic() >= end:
                return
            if not said:
                away = ", ".join(name for index, name in enumerate(self.names) if index not in self.ids)
                log.info("waiting for nodes to connect: %s", away)
                said = True
            time.sleep(min(_PAUSE, max(end - time.monotonic(), 0.05)))

    def forget(self, index: int) -> None:
        """Ask a node anew who it is before it is given work again, since it failed."""
        self.ids.pop(index, None)

    def _refresh(self, grid: Grid) -> None:
        online = set(grid.get_node_ids())
        self.ids = {index: identity for index, identity in self.ids.items() if identity in online}
        unknown = sorted(online - set(self.ids.values()))
        if not unknown:
            return
        challenges = {identity: secrets.token_hex(32) for identity in unknown}
        common = {"kind": "join", "session": self._session.hex(), "files": self._files, "wire": VERSION}
        messages = [
            Message(
                pack(letter=(write_letter(b"", {**common, "challenge": challenges[identity]}), LETTER)),
                identity,
                "query.join",
                ttl=_PATIENCE,
            )
            for identity in unknown
        ]
        for reply in exchange(grid, messages, _PATIENCE, [MOST_BYTES] * len(messages)):
            if reply.has_error():
                log.warning("a node did not say who it is: %s", explain("", reply.error).reason)
                continue
            identity = reply.metadata.src_node_id
            try:
                self._admit(identity, unpack(reply.content, "letter", LETTER), challenges.get(identity, ""))
            except FpldError as error:
                log.warning("a node was turned away: %s", error)

    def _admit(self, identity: int, data: bytes, challenge: str) -> None:
        letter = Letter.parse(data)
        name = letter.body.get("name")
        if name not in self.names:
            raise ProtocolError(f"{printable(name, 64)!r} is not a node of this federation")
        index = list(self.names).index(str(name))
        body = letter.check(self._keys.get(index, b""), "joined")
        if body.get("wire") != VERSION:
            spoken = printable(body.get("wire", "an older one"), 20)
            raise ProtocolError(
                f"{name} speaks version {spoken} of the wire, the aggregator {VERSION}: install the same fpld at both"
            )
        answer = Joined.parse(body)
        if answer.challenge != challenge:
            raise ProtocolError(f"{name}: its answer is to another question")
        if not set(answer.missing) <= set(self._files):
            raise ProtocolError(f"{name}: its answer asks for files that are not of this run")
        self.ids[index], self.missing[index], self.holds[index] = identity, answer.missing, answer.student
        log.info("%s is connected", name)
