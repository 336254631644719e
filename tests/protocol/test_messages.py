"""Tasks: a round trip, the same bytes for the same task, and nothing unsound accepted."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fpld import InputError
from fpld.protocol import Task
from fpld.storage.arrays import dump_arrays
from tests.helpers import make_plan

TASK = Task(make_plan(), "uniform", "own", "weights", {"a": np.arange(6, dtype=np.float32).reshape(2, 3)})


def test_round_trip() -> None:
    again = Task.from_bytes(TASK.to_bytes())
    assert again.plan == TASK.plan
    assert (again.codec, again.against, again.broadcast) == ("uniform", "own", "weights")
    assert np.array_equal(again.arrays["a"], TASK.arrays["a"])
    assert again.to_bytes() == TASK.to_bytes()


@given(st.binary(max_size=300))
def test_arbitrary_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(InputError):
        Task.from_bytes(data)


def test_cut_tasks_are_refused() -> None:
    data = TASK.to_bytes()
    for end in range(len(data)):
        with pytest.raises(InputError):
            Task.from_bytes(data[:end])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"against": "everything"}, "against must be one of nothing, own"),
        ({"broadcast": "gossip"}, "broadcast must be one of"),
        ({"command": "rm"}, "command"),
        ({"plan": {}}, "sound plan"),
        ({"plan": None}, "sound plan"),
    ],
)
def test_unsound_fields_are_refused(change: dict[str, object], message: str) -> None:
    fields = {
        "run_key": bytes(16).hex(),
        "round": 1,
        "node": 0,
        "probe": bytes(32).hex(),
        "contexts": 2,
        "vocab": 3,
        "bits": 4.0,
        "clip": None,
    }
    head = {"plan": fields, "codec": "uniform", "against": "nothing", "broadcast": "none", **change}
    with pytest.raises(InputError, match=message):
        Task.from_bytes(dump_arrays({}, {"format": "fpld-task-4", "task": json.dumps(head)}))


def test_another_format_is_named() -> None:
    with pytest.raises(InputError, match="format must be 'fpld-task-4', got 'x'"):
        Task.from_bytes(dump_arrays({}, {"format": "x", "task": "{}"}))
