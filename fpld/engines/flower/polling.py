"""How often a SuperNode asks for messages: often when one is due, rarely when nothing happens.

Flower's own loop asks every three seconds, and looks for a finished reply every half second. Each question takes about
a kilobyte of a thin uplink. The rounds of a run are much alike: so a node waits for most of the time that the last
message took to come before it asks at all, and never for more than three seconds. From then on pauses grow with the
time for which there was nothing: a message that comes after T seconds waits for 0.15 T more at most.
"""

from __future__ import annotations

import time
from types import SimpleNamespace

from fpld.errors import ProtocolError

_IDLE, _REPLY = 3.0, 0.5  # seconds that Flower's loop waits: for a message, and for a reply of this node's own process
SHARE, LEAST, OWN = 0.15, 0.4, 0.1
EARLY = 0.7  # the part of the last time between two messages in which nothing is asked


class Pauses:
    """The clock of a SuperNode's loop."""

    def __init__(self) -> None:
        self._since, self._gap, self._asked = time.monotonic(), 0.0, False

    def sleep(self, seconds: float) -> None:
        """Wait in the place of `time.sleep`: shorter while something goes on."""
        now = time.monotonic()
        if seconds == _REPLY:  # a message is being worked on
            self._gap, self._asked = now - self._since if self._asked else self._gap, False
            self._since = now
            time.sleep(OWN)
        elif seconds == _IDLE:
            time.sleep(self.idle(now - self._since, 0.0 if self._asked else self._gap))
            self._asked = True
        else:
            time.sleep(seconds)

    @staticmethod
    def idle(waited: float, gap: float = 0.0) -> float:
        """Return the pause after so many seconds without a message; `gap`: how long the last one took, at first.

        >>> [round(Pauses.idle(waited), 2) for waited in (0.0, 10.0, 1000.0)]
        [0.4, 1.5, 3.0]
        >>> [round(Pauses.idle(0.1, gap), 2) for gap in (0.2, 2.0, 60.0)]
        [0.4, 1.4, 3.0]
        """
        return min(max(LEAST, SHARE * waited, EARLY * gap), _IDLE)


def poll_often() -> None:
    """Let the SuperNode of this process wait by `Pauses`."""
    from flwr.supernode import start_client_internal as loop

    if not hasattr(loop, "time"):
        raise ProtocolError("this version of Flower waits for messages in another way")
    loop.time = SimpleNamespace(sleep=Pauses().sleep)
