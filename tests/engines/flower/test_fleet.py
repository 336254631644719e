"""Simulated nodes of `benchmarks.fleet` are nodes: an aggregator takes their frames and losses for what they say."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from flwr.app import Message

from benchmarks.fleet_nodes import First, Node
from fpld.engines.flower.messages import STUDENT, SharedArrays, add_field, pack_task, unpack_task
from fpld.engines.flower.site.config import open_site
from fpld.protocol import Task
from tests.engines.flower.conftest import NAMES, Deployment, InProcessGrid, carried
from tests.helpers import make_plan

if TYPE_CHECKING:
    from pathlib import Path


class FleetGrid(InProcessGrid):
    """Let simulated nodes answer, the first of which is whole."""

    def __init__(self, node_files: list[Path]) -> None:
        super().__init__(node_files)
        first = First(open_site(node_files[0]))
        self._fleet = {100 + index: Node(index, file, first, None, None) for index, file in enumerate(node_files)}

    def answer(self, message: Message, size: int) -> Message:
        content = self._fleet[message.metadata.dst_node_id]._reply(message.content)
        assert content is not None
        return carried(Message(content, reply_to=message))[0]


def test_what_all_nodes_get_is_held_once() -> None:
    """Messages of one round share large arrays and bytes; parts of an array that differ are not taken for one."""
    shelf = SharedArrays()
    logits = np.random.default_rng(0).standard_normal((200, 300)).astype(np.float32)
    tasks = [Task(make_plan(node=k), "uniform", broadcast="logits", arrays={"logits": logits[:]}) for k in range(3)]
    contents = [pack_task(task, shared=shelf) for task in tasks]
    held = {id(content.array_records["arrays"]["logits"]) for content in contents}
    assert len(held) == 1
    assert [unpack_task(content).to_bytes() for content in contents] == [task.to_bytes() for task in tasks]
    student = bytes(100)
    for content in contents:
        add_field(content, "student", student, STUDENT, shared=shelf)
    assert len({id(content.array_records["shared"]["student"]) for content in contents}) == 1
    parts = [logits[:100], logits[:99], logits[::2], logits[100:], logits[:100].view(np.int32)]
    assert len({id(shelf.array("part", part)) for part in parts}) == len(parts)


@pytest.mark.slow
def test_simulated_nodes_take_part_in_every_round(tmp_path: Path) -> None:
    deployment = Deployment(tmp_path)
    deployment.serve(FleetGrid(deployment.node_files))
    for line in deployment.trace():
        assert line["nodes"] == list(NAMES)
        assert line["refused"] == []
        assert len(set(line["heldout_by_node"])) == 1  # all say what the first one has found
    losses = [line["heldout_loss"] for line in deployment.trace()]
    assert losses[-1] < losses[0]
