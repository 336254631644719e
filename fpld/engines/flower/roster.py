"""Who is connected: Flower's node ids on one side, the names and keys of the federation on the other.

A node id says nothing about who it is. Each new one is asked; its answer carries a tag that only the holder of the
registered key can make, over a challenge that was never used before.
"""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections import Counter
from itertools import repeat
from typing import TYPE_CHECKING, NamedTuple

from flwr.app import Message

from fpld._check import listed, printable
from fpld.engines.flower.answers import MOST_BYTES, Joined
from fpld.engines.flower.exchange import Exchange, explain
from fpld.engines.flower.identity import Letter, write_letter
from fpld.engines.flower.payload import LETTER, pack, unpack
from fpld.engines.flower.receive import LOST
from fpld.errors import FpldError, ProtocolError
from fpld.protocol.wire import VERSION

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from flwr.app import Metadata
    from flwr.serverapp import Grid

log = logging.getLogger(__name__)

_PATIENCE = 120.0  # seconds that a node has to say who it is: a new process, and its imports
_GRACE = 10.0  # seconds for which a round that could begin waits for those who were just asked
_PAUSE = 0.3
_AT_ONCE = 100  # nodes that are asked at the same time: a thousand answers would not come in time
_EACH = 0.005  # seconds between two looks at who is connected, for each node of the federation
_INSTANCES = 10  # processes of a node that are remembered


class _Asked(NamedTuple):
    """A node that was asked who it is: Flower's id of it, the challenge, and until when it may answer."""

    identity: int
    challenge: str
    end: float


class Roster:
    """Know which node of the federation is behind which id, which student it has, and which files it lacks.

    Nodes that are `revoked` are asked for nothing; it is looked up before every round.
    """

    def __init__(
        self,
        names: Sequence[str],
        keys: Mapping[int, bytes],
        session: bytes,
        files: Collection[str],
        revoked: Callable[[str], bool] = lambda _name: False,
    ) -> None:
        self.revoked = revoked
        self.names, self._keys, self._session, self._files = names, keys, session, sorted(files)
        self.ids: dict[int, int] = {}
        self.missing: dict[int, list[str]] = {}
        self.holds: dict[int, str | None] = {}
        self._asked: dict[str, _Asked] = {}
        self._exchanges: dict[bool, Exchange] = {}
        self._alone, self._tries = set[int](), Counter[int]()
        self._online, self._looked = frozenset[int](), -math.inf
        self._instances: dict[int, list[str]] = {}

    def gather(self, grid: Grid, *, enough: int, wait: float) -> None:
        """Wait until `enough` nodes are here, at most `wait` seconds; who is here then takes part.

        Those who were asked who they are have a little longer to say it.
        """
        begun, said = time.monotonic(), False
        while True:
            self._refresh(grid)
            spent, asked = time.monotonic() - begun, bool(self._asked)
            if len(self.ids) >= enough and (not asked or spent >= _GRACE):
                return
            if spent >= wait and not asked:
                return
            if not said:
                away = [name for index, name in enumerate(self.names) if index not in self.ids]
                log.info("waiting for nodes to connect: %s", listed(away))
                said = True
            time.sleep(0.05 if asked else min(_PAUSE, max(wait - spent, 0.05)))

    def forget(self, index: int) -> None:
        """Ask a node anew who it is before it is given work again, since it failed."""
        self.ids.pop(index, None)

    def _refresh(self, grid: Grid) -> None:
        """Take what nodes have said, and ask those who are new; nobody is waited for."""
        online = self._connected(grid)
        self.ids = {
            index: identity
            for index, identity in self.ids.items()
            if identity in online and not self.revoked(self.names[index])
        }
        now = time.monotonic()
        self._asked = {message: asked for message, asked in self._asked.items() if now <= asked.end}
        asked = {each.identity for each in self._asked.values()}
        unknown = sorted(
            online - set(self.ids.values()) - asked, key=lambda identity: (self._tries[identity], identity)
        )
        unknown = unknown[: max(_AT_ONCE - len(asked), 0)]
        self._tries.update(unknown)
        for alone in (False, True):
            self._ask(grid, [identity for identity in unknown if (identity in self._alone) == alone], alone=alone)
        for exchange in self._exchanges.values():
            while (reply := exchange.wait(0.0)) is not None:
                self._hear(reply)

    def _connected(self, grid: Grid) -> frozenset[int]:
        """Return Flower's ids of the nodes that are connected; many are not asked for at every look."""
        now = time.monotonic()
        if now - self._looked >= _EACH * len(self.names):
            self._online, self._looked = frozenset(grid.get_node_ids()), now
        return self._online

    def _ask(self, grid: Grid, unknown: Sequence[int], *, alone: bool) -> None:
        """Ask nodes who they are; nobody is waited for. Answers that were lost once are asked for one by one."""
        if not unknown:
            return
        if alone not in self._exchanges or self._exchanges[alone].grid is not grid:
            self._exchanges[alone] = Exchange(grid, alone=alone)
        common = {"kind": "join", "session": self._session.hex(), "files": self._files, "wire": VERSION}
        common["nodes"] = len(self.names)
        sent: list[tuple[Metadata, str]] = []

        def asking(identity: int) -> Message:
            challenge = secrets.token_hex(32)
            letter = write_letter(b"", {**common, "challenge": challenge})
            message = Message(pack(letter=(letter, LETTER)), identity, "query.join", ttl=_PATIENCE)
            sent.append((message.metadata, challenge))
            return message

        for _ in self._exchanges[alone].send(map(asking, unknown), repeat(MOST_BYTES, len(unknown))):
            pass  # answers are taken later
        end = time.monotonic() + _PATIENCE
        self._asked |= {head.message_id: _Asked(head.dst_node_id, challenge, end) for head, challenge in sent}

    def _hear(self, reply: Message) -> None:
        """Take a node's answer who it is."""
        asked = self._asked.pop(reply.metadata.reply_to_message_id, None)
        if asked is None:
            return
        if reply.has_error():
            if reply.error.code == LOST:
                self._alone.add(asked.identity)
            log.warning("a node did not say who it is: %s", explain("", reply.error).reason)
            return
        try:
            self._admit(asked.identity, unpack(reply.content, "letter", LETTER), asked.challenge)
        except FpldError as error:
            log.warning("a node was turned away: %s", error)

    def _admit(self, identity: int, data: bytes, challenge: str) -> None:
        letter = Letter.parse(data)
        name = letter.body.get("name")
        if name not in self.names:
            raise ProtocolError(f"{printable(name, 64)!r} is not a node of this federation")
        if self.revoked(str(name)):
            raise ProtocolError(f"{name} was revoked")
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
        missing = [file for file in self._files if file in answer.missing]  # the same texts for all nodes
        self.ids[index], self.missing[index], self.holds[index] = identity, missing, answer.student
        self._compare(index, answer.instance)
        log.info("%s is connected", name)

    def _compare(self, index: int, instance: str) -> None:
        """Say it if two processes answer as one node by turns: each has drawn a name of its own when it started."""
        seen = self._instances.setdefault(index, [])
        if seen and instance != seen[-1] and instance in seen:
            log.warning(
                "%s answers from two processes with one key, by turns: a site is started once; stop one of them",
                self.names[index],
            )
        if not seen or instance != seen[-1]:
            seen.append(instance)
            del seen[:-_INSTANCES]
