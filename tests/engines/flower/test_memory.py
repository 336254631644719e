"""What each further node costs the aggregator in memory between the first message and the last answer of a round."""

from __future__ import annotations

import gc
import logging
import tracemalloc
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from flwr.app import Message

from fpld import config as configuration
from fpld.engines.flower import serve
from fpld.engines.flower.credentials import SignedMessage, sign_message
from fpld.engines.flower.messages import FRAME, SIGNED_MESSAGE, pack_fields, read_field, unpack_task
from fpld.federation.rounds import Federation
from fpld.protocol.wire import VERSION, encode_frame
from fpld.registry import codecs
from tests.engines.flower.conftest import InProcessGrid, carried
from tests.federation.conftest import CONFIG, write_texts

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from flwr.app import RecordDict

CONTEXTS = 64
VOCAB = 256
LOGITS = np.random.default_rng(0).normal(0, 1, (CONTEXTS, VOCAB)).astype(np.float32)
MOST = 7500  # bytes of a node: its number in lists, task, counts, losses, lines of the trace; 6,000 were measured


class Crowd(InProcessGrid):
    """Many nodes that have no text: they send the same logits, and the same loss."""

    def __init__(self, names: list[str]) -> None:
        super().__init__([])
        self.names = {100 + index: name for index, name in enumerate(names)}

    def get_node_ids(self) -> Iterable[int]:
        return list(self.names)

    def answer(self, message: Message, size: int) -> Message:
        content = self._answer(message.content, self.names[message.metadata.dst_node_id])
        return carried(Message(content, reply_to=message))[0]

    def _answer(self, content: RecordDict, name: str) -> RecordDict:
        order = SignedMessage.parse(read_field(content, "letter", SIGNED_MESSAGE)).body
        if order["kind"] == "join":
            said = {"kind": "joined", "name": name, "challenge": order["challenge"], "missing": order["files"]}
            return pack_fields(letter=(sign_message(b"", {**said, "wire": VERSION, "student": None}), SIGNED_MESSAGE))
        said = {"kind": "evaluated", "round": order.get("evaluate", order["round"]), "loss": 3.0}
        parts = {"letter": (sign_message(b"", {**said, "tokens": 100, "bytes": 100}), SIGNED_MESSAGE)}
        if order["kind"] == "train":
            task = unpack_task(content)
            codec = codecs.get(task.codec)
            parts["frame"] = encode_frame(codec.encode([LOGITS], task.plan), task.plan, codec.code), FRAME
        return pack_fields(**parts)


def held(folder: Path, nodes: int) -> list[int]:
    """Return the bytes that are held at the end of collecting, in each round of a run with so many nodes."""
    names = [f"site-{number:03d}" for number in range(nodes)]
    found = []
    head = CONFIG.format(folder=folder).split("[[nodes]]", 1)[0]
    tail = CONFIG[CONFIG.index("[student]") :]
    head = head.replace("contexts = 480", f"contexts = {CONTEXTS}").replace("rounds = 3", "rounds = 2")
    text = head + tail + '\n[codec]\nname = "uniform"\n'
    text += "".join(f'\n[[nodes]]\nname = "{name}"\ndata = "{folder}/texts/north"\nbits = 2.0\n' for name in names)
    close = Federation.close

    def closing(self: Federation, *arguments: Any) -> Any:
        gc.collect()
        found.append(tracemalloc.get_traced_memory()[0])
        return close(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Federation, "close", closing)
        patch.setattr(logging.root.manager, "disable", logging.CRITICAL)  # pytest keeps what is logged
        serve(Crowd(names), configuration.parse_config(text, "test"), text, folder / f"out-{nodes}")
    return found


@pytest.mark.slow
def test_a_node_costs_a_few_kilobytes(tmp_path: Path) -> None:
    """Whatever it was sent, and besides its frame, which is in memory of the system's."""
    write_texts(tmp_path)
    held(tmp_path, 4)  # imports, and compiles
    tracemalloc.start()
    few = held(tmp_path, 8)
    many = held(tmp_path, 72)
    tracemalloc.stop()
    each = [(more - less) / 64 for less, more in zip(few, many, strict=True)]
    assert len(each) == 2
    assert max(each) < MOST, each
