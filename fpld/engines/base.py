"""The contract of an engine: what moves bytes between an aggregator and its nodes.

`Federation` owns the rounds and asks an engine three things: that the nodes can be reached, their replies to the tasks
of a round, and the held-out losses of a student. When the losses arrive is the engine's business: the local engine has
them at once, Flower's nodes evaluate a student when they get it, which is with the next round's task.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from fpld.federation.record import Heldout, Incident
    from fpld.protocol import Receipt, Task
    from fpld.types import Arrays


class CollectedReplies(NamedTuple):
    """The end of a round's collecting: the nodes that gave no frame, and why.

    `heldout` are the losses of the student before, where nodes evaluate it with the task that brings it.
    """

    absent: Sequence[Incident]
    heldout: Heldout | None = None


class Engine(Protocol):
    """What moves bytes between the aggregator and its nodes."""

    def gather(self) -> None:
        """Wait until as many nodes can be reached as a round needs."""

    def collect(self, tasks: Mapping[int, Task], deliver: Callable[[int, bytes], Receipt]) -> CollectedReplies:
        """Run the tasks at their nodes and deliver each frame as it comes.

        A receipt that says `asked` is answered with the task of `Federation.again`.
        """

    def evaluate(self, student: Arrays, *, wait: bool) -> Heldout | None:
        """Return the student's losses on the nodes' held-out texts; None if they will come with the next round.

        With `wait` there is no next round, and they are returned.
        """
