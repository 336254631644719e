"""How large messages may be: a run that needs larger ones is refused before any node is asked, with the number.

Flower has no limit of its own on a message: Arrays go in pieces of 5 MiB, and what is no Array is kept below 1 MiB
(`fpld.engines.flower.payload`). But SuperLink, SuperNode and the apps hold a message whole, some of them several times.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fpld.config import MOST_MESSAGE
from fpld.engines.flower.ledger import LOSS_BYTES
from fpld.errors import SizeError
from fpld.protocol.wire import OVERHEAD

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fpld.config import Config
    from fpld.federation.part import Part
    from fpld.protocol import Settings
    from fpld.storage.folder import Arrays

_SMALLER = "choose a smaller student, adapters, or combine.weight_bits = 16"
_FEWER = "choose fewer probe contexts or fewer bits"


def most_message(config: Config) -> int:
    """Return the most bytes of a message in a run."""
    return MOST_MESSAGE if config.flower is None else config.flower.most_message


def check_content(name: str, size: int, most: int) -> None:
    """Refuse a message to a node that is too large."""
    if size > most:
        raise SizeError(f"a message to {name}", size, most, _SMALLER)


def check_run(
    config: Config, settings: Settings, parts: Sequence[Part], files: Mapping[str, bytes], student: Arrays
) -> None:
    """Refuse a run whose messages would be too large, before it begins.

    A node's first message has all files, later ones the student or what was combined; its answer is a frame.
    """
    most, coordinates = most_message(config), settings.contexts * settings.vocab
    sent = 6 * coordinates if config.combine.broadcast == "logits" else sum(array.nbytes for array in student.values())
    for part, cap in zip(parts, settings.budget.caps, strict=True):
        check_content(part.name, sum(len(files[name]) for name in part.files.names()), most)
        check_content(part.name, sent, most)
        frame = OVERHEAD + LOSS_BYTES + int(cap * settings.contexts / 8)
        if frame > most:
            raise SizeError(f"a frame of {part.name}", frame, most, _FEWER)
