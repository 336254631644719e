"""What an engine must do for a federation, and the records that it hands over."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from fpld._check import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from fpld.protocol import Receipt, Task
    from fpld.storage.folder import Arrays

Why = Literal["absent", "busy", "failed", "late", "lost"]


@dataclass(frozen=True, order=True, slots=True)
class Absence:
    """A node that gave no frame in a round: its name, the state it is in, and the reason.

    It was `absent` when the round began, `busy` with an earlier one, its work `failed`, it was too `late`, or the
    connection was `lost`.

    >>> str(Absence("north", "late", "no answer within 9 s"))
    'north: late: no answer within 9 s'
    """

    node: str
    state: Why
    reason: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "reason", printable(self.reason))  # it may be a node's own text

    def __str__(self) -> str:
        return f"{self.node}: {self.state}: {self.reason}"


class Refusal(NamedTuple):
    """An answer of a node that cannot be used, and why."""

    node: str
    reason: str


class Heldout(NamedTuple):
    """A student's loss in nats per token on each node's held-out text (None: no answer), and bytes per token.

    `refused` are the answers that could not be used.
    """

    losses: Sequence[float | None]
    bytes_per_token: float | None
    refused: Sequence[Refusal] = ()


class Engine(Protocol):
    """What moves bytes between the aggregator and its nodes."""

    def collect(self, tasks: Mapping[int, Task], deliver: Callable[[int, bytes], Receipt]) -> list[Absence]:
        """Run the tasks at their nodes, deliver each frame as it comes; return which nodes did not answer, and why."""

    def evaluate(self, student: Arrays) -> Heldout:
        """Evaluate the student on the nodes' held-out texts."""
