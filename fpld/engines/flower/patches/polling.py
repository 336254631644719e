"""When a SuperNode asks its SuperLink for messages, and when it sends the replies that it has.

Flower's loop has two stages, and sleeps in each of them:

    while True:
        message = pull()              # nothing there: sleep 3 s, and pull again
        _push_messages()              # wait for the reply in steps of 0.5 s, then send it

`PollingClock` replaces the module's `time`, so each of these sleeps is ours. Which stage a sleep belongs to is not
passed to `sleep`: `PendingReplies` wraps `_push_messages` and says whether it is running.

*Idle stage.* A poll costs about a kilobyte of a thin uplink, and a SuperLink some 12 ms. With the SuperLink of
`fpld aggregator` a node therefore waits in a long poll (`patches.superlink`). Any other SuperLink answers at once.
Rounds of a run are much alike, so a node first sleeps for most of the time that the last message took to come, at most
three seconds. Then pauses grow with the time without a message: one that comes after T seconds waits for at most
0.15 T more. Many nodes poll less often, 30 ms for each of them; the aggregator says how many there are. Heartbeats are
requests too: from 250 nodes on there are fewer.

*Reply stage.* The reply comes from a process of this machine, so it is looked for often. After a run was stopped the
reply to its last message may come first. Flower would keep the new run's reply until one more message comes, so
pending replies are also looked for while the node is idle.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from fpld.errors import StorageError
from fpld.storage.files import write_atomic

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

log = logging.getLogger(__name__)

MAX_FLEET_SIZE = 1000  # nodes that a SuperNode believes in: an aggregator cannot silence it for long
FLEET_SIZE_FILE = "crowd"
_MAX_IDLE_SECONDS = 3.0  # Flower's own pause between two polls
_MIN_IDLE_SECONDS = 0.4
_IDLE_SHARE = 0.15  # of the time without a message
_GAP_SHARE = 0.7  # of the last time between two messages in which nothing is polled
_IDLE_SECONDS_PER_NODE = 0.03
_REPLY_SECONDS = 0.1  # between two looks for a reply of this node's own process
_HEARTBEAT_SECONDS_PER_NODE = 0.12  # a SuperLink drops a node that misses two heartbeats
_MAX_EMPTY_WAITS = 4  # long polls without a message after which a node polls nevertheless
_MEANWHILE_SECONDS = 1.0  # between two calls of `meanwhile` during a long poll
_HEARTBEAT_INTERVAL = "HEARTBEAT_DEFAULT_INTERVAL"  # Flower's name of the seconds between two heartbeats


class _KnownReplies:
    """A node's state whose pending replies were read already: reading them again would return none."""

    def __init__(self, state: Any, replies: Sequence[Any]) -> None:
        self._state = state
        self._replies = replies

    def get_messages_legacy(self, **_filter: Any) -> Sequence[Any]:
        return self._replies

    def __getattr__(self, name: str) -> Any:
        return getattr(self._state, name)


class PendingReplies:
    """The reply stage of a SuperNode's loop, which is the module `loop`; `active` while Flower's function runs."""

    def __init__(self, loop: Any) -> None:
        self._push: Any = loop._push_messages
        self._arguments: dict[str, Any] = {}
        self.active = False
        loop._push_messages = self._push_messages

    def _push_messages(self, **arguments: Any) -> None:
        self._arguments = arguments
        self._send(arguments)

    def _send(self, arguments: dict[str, Any]) -> None:
        self.active = True
        try:
            self._push(**arguments)
        finally:
            self.active = False

    def send(self) -> None:
        """Send the replies that are pending, if any; wait for none."""
        if not self._arguments:
            return
        state = self._arguments["state"]
        if replies := state.get_messages_legacy(is_reply=True):
            self._send({**self._arguments, "state": _KnownReplies(state, replies)})


class PollingClock:
    """The clock of a SuperNode's loop.

    Parameters
    ----------
    folder
        The folder with the number of nodes (`write_fleet_size`); without it there is one node.
    wait
        Wait for a message in a long poll. Return whether to poll for it; None if the SuperLink has no long poll.
    meanwhile
        Called from time to time while the node is idle.
    replying
        Return whether the loop is in its reply stage.
    """

    def __init__(
        self,
        folder: Path | None = None,
        *,
        wait: Callable[[], bool | None] = lambda: None,
        meanwhile: Callable[[], None] = lambda: None,
        replying: Callable[[], bool] = lambda: False,
    ) -> None:
        self._folder = folder
        self._wait = wait
        self._meanwhile = meanwhile
        self._replying = replying
        self._last_work = time.monotonic()
        self._gap = 0.0
        self._polled = False
        self._long_poll = True

    def sleep(self, _seconds: float) -> None:
        """Wait in the place of `time.sleep`: as long as the stage needs, whatever Flower asks for."""
        now = time.monotonic()
        if self._replying():
            if self._polled:
                self._gap = now - self._last_work
            self._polled = False
            self._last_work = now
            time.sleep(_REPLY_SECONDS)
            return
        nodes = read_fleet_size(self._folder)
        set_heartbeat_interval(nodes)
        self._meanwhile()
        if not self._waited_for_message(now):
            time.sleep(self.idle(now - self._last_work, 0.0 if self._polled else self._gap, nodes))
        self._polled = True

    def _waited_for_message(self, begun: float) -> bool:
        """Wait in long polls; return whether the loop may poll now.

        An answer that comes at once does not count: a SuperLink in trouble would be polled without a pause.
        """
        for _ in range(_MAX_EMPTY_WAITS):
            answer = self._wait_beside() if self._long_poll else None
            self._long_poll = answer is not None
            if answer is not False:
                return bool(answer) and time.monotonic() - begun > _MIN_IDLE_SECONDS
        return True

    def _wait_beside(self) -> bool | None:
        """Return the answer to a long poll, which a thread waits for; this one calls `meanwhile`."""
        answers = queue.SimpleQueue[bool | None]()

        def ask() -> None:
            try:
                answers.put(self._wait())
            except Exception as error:  # whatever it is: the next poll meets it again
                log.warning("waiting for messages failed: %r", error)
                answers.put(True)

        threading.Thread(target=ask, daemon=True).start()
        while True:
            with contextlib.suppress(queue.Empty):
                return answers.get(timeout=_MEANWHILE_SECONDS)
            self._meanwhile()

    @staticmethod
    def idle(waited: float, gap: float = 0.0, nodes: int = 1) -> float:
        """Return the pause in seconds before the next poll.

        Parameters
        ----------
        waited
            Seconds since the node last worked on a message.
        gap
            Seconds that the last message took to come; 0 if the node has polled since.
        nodes
            Number of nodes of the federation.

        >>> [round(PollingClock.idle(waited), 2) for waited in (0.0, 10.0, 1000.0)]
        [0.4, 1.5, 3.0]
        >>> [round(PollingClock.idle(0.1, gap), 2) for gap in (0.2, 2.0, 60.0)]
        [0.4, 1.4, 3.0]
        >>> PollingClock.idle(10.0, nodes=500)
        15.0
        """
        pause = max(_MIN_IDLE_SECONDS, _IDLE_SHARE * waited, _GAP_SHARE * gap)
        return max(min(pause, _MAX_IDLE_SECONDS), _IDLE_SECONDS_PER_NODE * nodes)


def write_fleet_size(folder: Path, nodes: object) -> None:
    """Write down how many nodes the aggregator says there are, for the process that polls."""
    if isinstance(nodes, int):
        with contextlib.suppress(StorageError):
            write_atomic(folder / FLEET_SIZE_FILE, b"%d" % min(max(nodes, 1), MAX_FLEET_SIZE))


def read_fleet_size(folder: Path | None) -> int:
    """Return how many nodes there are; 1 if that was not written down."""
    if folder is None:
        return 1
    try:
        return min(int((folder / FLEET_SIZE_FILE).read_bytes()), MAX_FLEET_SIZE)
    except (OSError, ValueError):
        return 1


def fleet_pause(folder: Path) -> float:
    """Return the least seconds between two requests of one node of the fleet."""
    return _IDLE_SECONDS_PER_NODE * read_fleet_size(folder)


def set_heartbeat_interval(nodes: int) -> None:
    """Set the interval of this process's heartbeats to that of one of so many nodes."""
    from flwr.common import constant
    from flwr.supercore import heartbeat
    from flwr.supernode import fleet_http_connection

    interval = max(constant.HEARTBEAT_DEFAULT_INTERVAL, _HEARTBEAT_SECONDS_PER_NODE * nodes)
    for module in (heartbeat, fleet_http_connection):
        setattr(module, _HEARTBEAT_INTERVAL, interval)


def patch_polling(folder: Path, wait: Callable[[], bool | None]) -> None:
    """Let the SuperNode of this process sleep by a `PollingClock`; `folder` and `wait` are the clock's."""
    from flwr.supernode import start_client_internal as loop

    replies = PendingReplies(loop)
    clock = PollingClock(folder, wait=wait, meanwhile=replies.send, replying=lambda: replies.active)
    loop.time = SimpleNamespace(sleep=clock.sleep)  # type: ignore[attr-defined, assignment]
