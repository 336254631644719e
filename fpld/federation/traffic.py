"""What a round's messages carry, node by node and by kind, in both directions.

Down: `weights` (the student's, packed), `prior` (notes on its prediction, or blocks of it), `tables` (of a codec that
learns), `labels` (combined logits, where they are broadcast), `files` (probe set, tokenizer, base model: once).
Up: `labels` (the payload of a frame), `answers` (what the student is worth). Both: `overhead` (what `fpld` adds: heads,
orders, checksums) and `transport` (what the engine's own records add to a message; connections are not in it).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fpld.federation.state import Line
    from fpld.protocol import Task
    from fpld.protocol.messages import Broadcast
    from fpld.types import Ints

DOWN = "weights", "prior", "tables", "labels", "files", "overhead", "transport"
UP = "labels", "answers", "overhead", "transport"


class Traffic:
    """Count bytes of a round."""

    def __init__(self, nodes: int) -> None:
        self._nodes = nodes
        self.clear()

    def clear(self) -> None:
        """Begin a round."""
        self._down = np.zeros((self._nodes, len(DOWN)), np.int64)
        self._up = np.zeros((self._nodes, len(UP)), np.int64)

    def add(self, node: int, sizes: Mapping[str, int], *, up: bool = False) -> None:
        """Count a message."""
        counts, kinds = (self._up, UP) if up else (self._down, DOWN)
        for kind, size in sizes.items():
            counts[node, kinds.index(kind)] += size

    def added(self, line: Line) -> Line:
        """Return a line of the trace with all that was counted added to what it says."""
        before = line.get("node_downlink_bytes") or [0] * self._nodes
        nodes = [old + new for old, new in zip(before, self._down.sum(axis=1).tolist(), strict=True)]
        return line | {
            "downlink": _joined(line.get("downlink"), DOWN, self._down),
            "uplink": _joined(line.get("uplink"), UP, self._up),
            "node_downlink_bytes": nodes,
            "downlink_bytes": sum(nodes),
        }


def _joined(before: Mapping[str, int] | None, kinds: Sequence[str], counts: Ints) -> dict[str, int]:
    """Return the sums of all nodes by kind."""
    sums = zip(kinds, counts.sum(axis=0).tolist(), strict=True)
    return {kind: (before or {}).get(kind, 0) + size for kind, size in sums}


def array_kinds(arrays: Mapping[str, int], broadcast: Broadcast) -> dict[str, int]:
    """Return the bytes of a task's arrays, given by their names, by kind."""
    sizes = dict.fromkeys(DOWN, 0)
    for name, size in arrays.items():
        sizes[_kind(name, broadcast)] += size
    return sizes


def task_kinds(task: Task, size: int) -> dict[str, int]:
    """Return the bytes of a task by kind; `size` are those that it takes in all."""
    sizes = array_kinds({name: array.nbytes for name, array in task.all_arrays().items()}, task.broadcast)
    sizes["overhead"] = size - sum(sizes.values())
    return sizes


def _kind(name: str, broadcast: Broadcast) -> str:
    if name.startswith(("plan.prior", "notes.", "sent.")):
        return "prior"
    if name == "plan.learnt":
        return "tables"
    return "labels" if broadcast == "logits" else "weights"
