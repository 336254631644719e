"""When a SuperNode asks for messages: when there is one, if the SuperLink lets it wait, and else from time to time.

Flower's own loop asks every three seconds, and looks for a finished reply every half second. Each question takes about
a kilobyte of a thin uplink. With the SuperLink of `fpld aggregator` a node asks once and is told when to ask again
(`fpld.engines.flower.waiting`).

Any other SuperLink answers at once. The rounds of a run are much alike: so a node waits for most of the time that the
last message took to come before it asks at all, and never for more than three seconds. From then on pauses grow with
the time for which there was nothing: a message that comes after T seconds waits for 0.15 T more at most. A question
takes a SuperLink some 12 ms, whatever the answer: so the pauses of many nodes are longer, 30 ms for each; the
aggregator says how many. Signs of life are questions too: from 250 nodes on there are fewer.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING

from fpld.engines.flower.leftovers import Leftovers
from fpld.errors import ProtocolError, StorageError
from fpld.storage.files import write_atomic

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

log = logging.getLogger(__name__)

_IDLE, _REPLY = 3.0, 0.5  # seconds that Flower's loop waits: for a message, and for a reply of this node's own process
SHARE, LEAST, OWN, EACH = 0.15, 0.4, 0.1, 0.03
SIGN = 0.12  # seconds between two signs of life, for each node; a node is gone after twice as long without one
EARLY = 0.7  # the part of the last time between two messages in which nothing is asked
MOST_NODES = 1000  # that a SuperNode believes in: no word of an aggregator makes it silent for long
CROWD = "crowd"
_HELD = 4  # waits in vain after which a node asks nevertheless
_LOOK = 1.0  # seconds between two looks at what goes on meanwhile
_LIFE = "HEARTBEAT_DEFAULT_INTERVAL"  # Flower's name of the seconds between two signs of life


class Pauses:
    """The clock of a SuperNode's loop.

    `wait` waits for a message at the SuperLink, and returns whether to ask for it, None if nobody waits there;
    `meanwhile` is called from time to time.
    """

    def __init__(
        self,
        folder: Path | None = None,
        *,
        wait: Callable[[], bool | None] = lambda: None,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        self._since, self._folder, self._wait, self._meanwhile = time.monotonic(), folder, wait, meanwhile
        self._gap, self._asked, self._waits = 0.0, False, True

    def sleep(self, seconds: float) -> None:
        """Wait in the place of `time.sleep`: shorter while something goes on."""
        now = time.monotonic()
        if seconds == _REPLY:  # a message is being worked on
            self._gap, self._asked = now - self._since if self._asked else self._gap, False
            self._since = now
            time.sleep(OWN)
        elif seconds == _IDLE:
            nodes = crowd(self._folder)
            pace_life(nodes)
            self._meanwhile()
            if not self._rung(now):
                time.sleep(self.idle(now - self._since, 0.0 if self._asked else self._gap, nodes))
            self._asked = True
        else:
            time.sleep(seconds)

    def _rung(self, begun: float) -> bool:
        """Wait at the SuperLink; return whether that took a while: an answer at once is none to go by."""
        for _ in range(_HELD):
            answer = self._answer() if self._waits else None
            self._waits = answer is not None
            if answer is not False:  # else nothing came: wait on, without a question
                return bool(answer) and time.monotonic() - begun > LEAST
        return True

    def _answer(self) -> bool | None:
        """Return the answer to a question that is held; it is asked beside, for a loop that has other things to do."""
        answers = queue.SimpleQueue[bool | None]()

        def ask() -> None:
            try:
                answers.put(self._wait())
            except Exception as error:  # whatever it is: the next question meets it again
                log.warning("waiting for messages failed: %r", error)
                answers.put(True)

        threading.Thread(target=ask, daemon=True).start()
        while True:
            with contextlib.suppress(queue.Empty):
                return answers.get(timeout=_LOOK)
            self._meanwhile()

    @staticmethod
    def idle(waited: float, gap: float = 0.0, nodes: int = 1) -> float:
        """Return the pause of one of so many nodes after so many seconds without a message.

        `gap`: how long the last message took to come, if none was asked for yet.

        >>> [round(Pauses.idle(waited), 2) for waited in (0.0, 10.0, 1000.0)]
        [0.4, 1.5, 3.0]
        >>> [round(Pauses.idle(0.1, gap), 2) for gap in (0.2, 2.0, 60.0)]
        [0.4, 1.4, 3.0]
        >>> Pauses.idle(10.0, nodes=500)
        15.0
        """
        return max(min(max(LEAST, SHARE * waited, EARLY * gap), _IDLE), EACH * nodes)


def note_crowd(folder: Path, nodes: object) -> None:
    """Remember how many nodes the aggregator says there are, for the process that asks for messages."""
    if isinstance(nodes, int):
        with contextlib.suppress(StorageError):
            write_atomic(folder / CROWD, b"%d" % min(max(nodes, 1), MOST_NODES))


def crowd(folder: Path | None) -> int:
    """Return how many nodes there are, as far as is known."""
    if folder is None:
        return 1
    try:
        return min(int((folder / CROWD).read_bytes()), MOST_NODES)
    except (OSError, ValueError):
        return 1


def pace_life(nodes: int) -> None:
    """Let this process's SuperNodes give signs of life as one of so many nodes."""
    from flwr.common import constant
    from flwr.supercore import heartbeat
    from flwr.supernode import fleet_http_connection

    for module in (heartbeat, fleet_http_connection):
        setattr(module, _LIFE, max(constant.HEARTBEAT_DEFAULT_INTERVAL, SIGN * nodes))


def poll_often(folder: Path, wait: Callable[[], bool | None]) -> None:
    """Let the SuperNode of this process wait by `Pauses`; the site's folder says of how many it is one."""
    from flwr.supercore import heartbeat
    from flwr.supernode import fleet_http_connection
    from flwr.supernode import start_client_internal as loop

    if not hasattr(loop, "time"):
        raise ProtocolError("this version of Flower waits for messages in another way")
    if not (hasattr(heartbeat, _LIFE) and hasattr(fleet_http_connection, _LIFE)):
        raise ProtocolError("this version of Flower gives signs of life in another way")
    pauses = Pauses(folder, wait=wait, meanwhile=Leftovers(loop).send)
    loop.time = SimpleNamespace(sleep=pauses.sleep)
