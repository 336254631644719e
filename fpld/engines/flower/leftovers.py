"""Replies that a SuperNode has, and would send only with the next one.

Flower's loop takes a message, waits for a reply, and sends the replies that are there. After a run was stopped the
reply to its last message may come first: then that to the new run's message stays behind until one more message comes.
So replies are looked for also when there is no message.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fpld.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Sequence


class _Holding:
    """A node's state in which these replies are those that wait: each is told of once."""

    def __init__(self, state: Any, replies: Sequence[Any]) -> None:
        self._state, self._replies = state, replies

    def get_messages_legacy(self, **_which: Any) -> Sequence[Any]:
        return self._replies

    def __getattr__(self, name: str) -> Any:
        return getattr(self._state, name)


class Leftovers:
    """Send what is left over in a SuperNode's loop, which is the module `loop`."""

    def __init__(self, loop: Any) -> None:
        self._push: Any = getattr(loop, "_push_messages", None)
        if self._push is None:
            raise ProtocolError("this version of Flower sends replies in another way")
        self._with: dict[str, Any] = {}
        loop._push_messages = self._sending

    def _sending(self, **named: Any) -> None:
        self._with = named
        self._push(**named)

    def send(self) -> None:
        """Send the replies that are there, if any; nothing is waited for."""
        if self._with and (replies := self._with["state"].get_messages_legacy(is_reply=True)):
            self._push(**{**self._with, "state": _Holding(self._with["state"], replies)})
