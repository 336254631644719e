"""The roster: Flower's node ids on one side, names and keys of the federation on the other.

A node id does not say which node it is. Each new one is sent a challenge that was never used before. The answer is
signed with the secret of the node's registered key, and says which student and files of the run the node has.
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

from fpld.engines.flower.answer_schema import MAX_ANSWER_BYTES, Joined
from fpld.engines.flower.credentials import SignedMessage, sign_message
from fpld.engines.flower.exchange import LOST_CODE, Exchange, explain
from fpld.engines.flower.messages import SIGNED_MESSAGE, pack_fields, read_field
from fpld.errors import FpldError, ProtocolError
from fpld.protocol.wire import VERSION
from fpld.validation import printable, shortened_list

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from flwr.app import Metadata
    from flwr.serverapp import Grid

log = logging.getLogger(__name__)

_JOIN_SECONDS = 120.0  # that a node has to answer: a new process, and its imports
_GRACE_SECONDS = 10.0  # for which a round that could begin waits for nodes that were just asked
_POLL_SECONDS = 0.3
_MAX_OPEN_REQUESTS = 100  # a thousand answers at the same time would not come in time
_LOOKUP_SECONDS_PER_NODE = 0.005  # between two lookups of the connected nodes
_MAX_INSTANCES = 10  # processes of a node that are remembered


class _JoinRequest(NamedTuple):
    """A node that was asked for its name: Flower's id of it, the challenge, and until when it may answer."""

    identity: int
    challenge: str
    end: float


class Roster:
    """Which node of the federation is behind which id, which student it has, and which files it lacks.

    Parameters
    ----------
    names
        The nodes of the federation.
    keys
        The secret of each node in this run, by its number; an empty one where it is missing.
    session
        The run's session.
    files
        Digests of the run's files.
    revoked
        Returns whether a node was revoked. It is called before every round: such a node takes no part.
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
        self.names = names
        self._keys = keys
        self._session = session
        self._files = sorted(files)
        self.ids: dict[int, int] = {}
        self.missing: dict[int, list[str]] = {}
        self.holds: dict[int, str | None] = {}
        self._requests: dict[str, _JoinRequest] = {}
        self._exchanges: dict[bool, Exchange] = {}
        self._lost_before = set[int]()
        self._attempts = Counter[int]()
        self._online = frozenset[int]()
        self._lookup_time = -math.inf
        self._instances: dict[int, list[str]] = {}

    def gather(self, grid: Grid, *, enough: int, wait: float, wanted: Collection[int] | None = None) -> None:
        """Wait for `enough` nodes (of `wanted`) to connect, at most `wait` seconds; asked ones have a little longer."""
        counted = set(range(len(self.names)) if wanted is None else wanted)
        begun = time.monotonic()
        logged = False
        while True:
            self._refresh(grid)
            waited = time.monotonic() - begun
            pending = bool(self._requests)
            if len(self.ids.keys() & counted) >= enough and (not pending or waited >= _GRACE_SECONDS):
                return
            if waited >= wait and not pending:
                return
            if not logged:
                away = [self.names[index] for index in sorted(counted - self.ids.keys())]
                log.info("waiting for nodes to connect: %s", shortened_list(away))
                logged = True
            time.sleep(0.05 if pending else min(_POLL_SECONDS, max(wait - waited, 0.05)))

    def forget(self, index: int) -> None:
        """Ask a node that failed for its name again, before it is given work."""
        self.ids.pop(index, None)

    def _refresh(self, grid: Grid) -> None:
        """Take the answers that have come, and ask new nodes; wait for none."""
        online = self._connected(grid)
        self.ids = {
            index: identity
            for index, identity in self.ids.items()
            if identity in online and not self.revoked(self.names[index])
        }
        now = time.monotonic()
        self._requests = {message: request for message, request in self._requests.items() if now <= request.end}
        pending = {request.identity for request in self._requests.values()}
        unknown = online - set(self.ids.values()) - pending
        # Nodes that were asked least often come first: one that never answers holds up no other.
        chosen = sorted(unknown, key=lambda identity: (self._attempts[identity], identity))
        chosen = chosen[: max(_MAX_OPEN_REQUESTS - len(pending), 0)]
        self._attempts.update(chosen)
        for alone in (False, True):
            self._ask(grid, [identity for identity in chosen if (identity in self._lost_before) == alone], alone=alone)
        for exchange in self._exchanges.values():
            while (reply := exchange.wait(0.0)) is not None:
                self._take(reply)

    def _connected(self, grid: Grid) -> frozenset[int]:
        """Return Flower's ids of the connected nodes; of many nodes they are not looked up every time."""
        now = time.monotonic()
        if now - self._lookup_time >= _LOOKUP_SECONDS_PER_NODE * len(self.names):
            self._online = frozenset(grid.get_node_ids())
            self._lookup_time = now
        return self._online

    def _ask(self, grid: Grid, identities: Sequence[int], *, alone: bool) -> None:
        """Ask nodes for their names; wait for none. With `alone`, answers are polled for one by one."""
        if not identities:
            return
        if alone not in self._exchanges or self._exchanges[alone].grid is not grid:
            self._exchanges[alone] = Exchange(grid, alone=alone)
        common = {"kind": "join", "session": self._session.hex(), "files": self._files, "wire": VERSION}
        common["nodes"] = len(self.names)
        sent: list[tuple[Metadata, str]] = []

        def request(identity: int) -> Message:
            challenge = secrets.token_hex(32)
            unsigned = sign_message(b"", {**common, "challenge": challenge})
            content = pack_fields(letter=(unsigned, SIGNED_MESSAGE))
            message = Message(content, identity, "query.join", ttl=_JOIN_SECONDS)
            sent.append((message.metadata, challenge))
            return message

        for _ in self._exchanges[alone].send(map(request, identities), repeat(MAX_ANSWER_BYTES, len(identities))):
            pass  # answers are taken by `_refresh`
        end = time.monotonic() + _JOIN_SECONDS
        self._requests |= {head.message_id: _JoinRequest(head.dst_node_id, challenge, end) for head, challenge in sent}

    def _take(self, reply: Message) -> None:
        """Take a node's answer."""
        request = self._requests.pop(reply.metadata.reply_to_message_id, None)
        if request is None:
            return
        if reply.has_error():
            if reply.error.code == LOST_CODE:
                self._lost_before.add(request.identity)
            log.warning("a node did not give its name: %s", explain("", reply.error).reason)
            return
        try:
            self._admit(request.identity, read_field(reply.content, "letter", SIGNED_MESSAGE), request.challenge)
        except FpldError as error:
            log.warning("a node was refused: %s", error)

    def _admit(self, identity: int, data: bytes, challenge: str) -> None:
        message = SignedMessage.parse(data)
        name = message.body.get("name")
        if name not in self.names:
            raise ProtocolError(f"{printable(name, 64)!r} is not a node of this federation")
        if self.revoked(str(name)):
            raise ProtocolError(f"{name} was revoked")
        index = list(self.names).index(str(name))
        body = message.check(self._keys.get(index, b""), "joined")
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
        # Strings of this roster, not of the answer: they are the same objects for all nodes.
        missing = [file for file in self._files if file in answer.missing]
        self.ids[index] = identity
        self.missing[index] = missing
        self.holds[index] = answer.student
        self._compare(index, answer.instance)
        log.info("%s is connected", name)

    def _compare(self, index: int, instance: str) -> None:
        """Warn if two processes answer as one node by turns: each draws its instance when it starts."""
        seen = self._instances.setdefault(index, [])
        if seen and instance != seen[-1] and instance in seen:
            log.warning(
                "%s answers from two processes with one key, by turns: a node is started once; stop one of them",
                self.names[index],
            )
        if not seen or instance != seen[-1]:
            seen.append(instance)
            del seen[:-_MAX_INSTANCES]
