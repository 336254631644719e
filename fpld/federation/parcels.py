"""The student on its way to the nodes: packed once for all who have the same, as a difference to what they have."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fpld.protocol.weights import pack_weights, weights_digest

if TYPE_CHECKING:
    from fpld.storage.folder import Arrays


class Parcels:
    """Packed students by what a node has: the student itself, the one before it, or the base model that all have."""

    def __init__(self, base: Arrays) -> None:
        self._base = base
        self._known = {weights_digest(base): base}
        self._student, self.digest = base, weights_digest(base)
        self._packed: dict[str, bytes] = {}

    def turn(self, student: Arrays) -> None:
        """Take a new student; the one until now is what nodes will have that are up to date."""
        self._known = {weights_digest(self._base): self._base, self.digest: self._student}
        self._student, self.digest = student, weights_digest(student)
        self._packed = {}

    def parcel(self, held: str) -> bytes:
        """Return what a node needs that has the student with this digest; nothing if it is the one."""
        if held == self.digest:
            return b""
        reference = held if held in self._known else next(iter(self._known))
        if reference == self.digest:  # the base model is still the student
            return b""
        if reference not in self._packed:
            self._packed[reference] = pack_weights(self._student, self._known[reference])
        return self._packed[reference]

    @property
    def size(self) -> int:
        """Return the bytes that the student takes on its way to a node that has the one before it."""
        return len(self.parcel(list(self._known)[-1]))
