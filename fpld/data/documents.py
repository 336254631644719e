"""A document: the unit that is dealt to nodes and held out, never cut by a split."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Document:
    """Hold one text with its name, the label that natural splits use, and its group.

    Documents of one `group` are near-duplicates or belong together (the messages of one year): `hold_out`
    keeps them on the same side. An empty group means that the document stands alone.
    """

    name: str
    text: str
    label: str = ""
    group: str = ""

    @property
    def size(self) -> int:
        """Return the length of the text in bytes of UTF-8."""
        return len(self.text.encode())
