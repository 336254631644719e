"""How often a SuperNode asks for messages: often while a run goes on, rarely when nothing happens.

Flower's own loop asks every three seconds, and looks for a finished reply every half second. Each question takes about
a kilobyte of a thin uplink. So the pauses grow with the time for which there was nothing: a message that comes after T
seconds of waiting waits for 0.15 T more at most, and never for more than three seconds.
"""

from __future__ import annotations

import time
from types import SimpleNamespace

from fpld.errors import ProtocolError

_IDLE, _REPLY = 3.0, 0.5  # seconds that Flower's loop waits: for a message, and for a reply of this node's own process
SHARE, LEAST, OWN = 0.15, 0.4, 0.1


class Pauses:
    """The clock of a SuperNode's loop."""

    def __init__(self) -> None:
        self._since = time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Wait in the place of `time.sleep`: shorter while something goes on."""
        if seconds == _REPLY:  # a message is being worked on
            self._since = time.monotonic()
            time.sleep(OWN)
        elif seconds == _IDLE:
            time.sleep(self.idle(time.monotonic() - self._since))
        else:
            time.sleep(seconds)

    @staticmethod
    def idle(waited: float) -> float:
        """Return the pause after so many seconds without a message.

        >>> [round(Pauses.idle(waited), 2) for waited in (0.0, 10.0, 1000.0)]
        [0.4, 1.5, 3.0]
        """
        return min(max(LEAST, SHARE * waited), _IDLE)


def poll_often() -> None:
    """Let the SuperNode of this process wait by `Pauses`."""
    from flwr.supernode import start_client_internal as loop

    if not hasattr(loop, "time"):
        raise ProtocolError("this version of Flower waits for messages in another way")
    loop.time = SimpleNamespace(sleep=Pauses().sleep)
