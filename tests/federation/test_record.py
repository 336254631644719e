"""The record of a round: what is written is read back, and the held-out mean is over the same sites in every round."""

from __future__ import annotations

import json
import math

import pytest

from fpld.federation.record import (
    Incident,
    RoundRecord,
    SampleText,
    Traffic,
    best_round,
    common_sites,
    round_row,
    with_means,
)

NAMES = ["north", "east", "south"]


def record(losses: list[float | None], **fields: object) -> RoundRecord:
    known = {"round": 1, "nodes": NAMES, "bits_allotted": [1.0], "bits_sent": [1.0], "payload_bytes": 9}
    fields = {**known, "overhead_bytes": 1, "heldout_by_node": losses, "heldout_bytes_per_token": 2.0, **fields}
    return RoundRecord(**fields)  # type: ignore[arg-type]


def records(*rounds: list[float | None]) -> list[RoundRecord]:
    return [record(losses) for losses in rounds]


def test_a_site_that_misses_a_round_leaves_the_mean_of_all() -> None:
    first = with_means(records([3.0, 2.0, 1.0]), NAMES)
    assert (first[0].heldout_loss, first[0].heldout_sites) == (2.0, NAMES)
    trace = with_means([*first, *records([2.5, None, 0.5])], NAMES)
    assert [each.heldout_loss for each in trace] == [2.0, 1.5]  # both over north and south
    assert all(each.heldout_sites == ["north", "south"] for each in trace)
    trace = with_means([*trace, *records([2.0, 0.1, 1.5])], NAMES)
    assert [each.heldout_loss for each in trace] == [2.0, 1.5, 1.75]
    assert trace[2].heldout_bits_per_byte == pytest.approx(1.75 / math.log(2) / 2)
    assert trace[1].heldout_by_node == [2.5, None, 0.5]


def test_a_round_that_nobody_evaluated_has_no_mean_and_takes_none_away() -> None:
    trace = with_means(records([3.0, 2.0, 1.0], [None, None, None]), NAMES)
    assert [each.heldout_loss for each in trace] == [2.0, None]
    assert common_sites([[None, None]]) == []
    alternating = with_means(records([3.0, None], [None, 2.0]), NAMES)
    assert [each.heldout_loss for each in alternating] == [None, None]


def test_the_best_round_is_over_the_sites_that_all_have_and_the_last_of_ties() -> None:
    assert best_round([[3.0, None], [2.0, 9.0], [2.0, 1.0]]) == 2
    assert best_round([[1.0, None], [None, 2.0]]) == 1  # no site has both: the last
    assert best_round([[None], [None]]) == 1


def test_a_record_is_what_its_line_says() -> None:
    made = record(
        [1.5, None, 2.0],
        refused=[Incident("east", "refused", "too long")],
        continuations=[SampleText("My fellow", "citizens")],
        seconds={"local": 1.5, "nodes": [0.5, None, 1.0]},
    )
    line = json.dumps(made.to_json())
    assert RoundRecord.from_json(line) == made
    assert json.dumps(RoundRecord.from_json(json.loads(line)).to_json()) == line
    assert (made.sent, made.phases, made.answers, made.work) == (10, {"local": 1.5}, [0.5, None, 1.0], [])


def test_lines_of_earlier_versions_are_read() -> None:
    fields = ("round", "nodes", "bits_allotted", "bits_sent", "payload_bytes", "overhead_bytes", "heldout_by_node")
    line = {name: value for name, value in record([1.0]).to_json().items() if name in fields}
    old = RoundRecord.from_json({**line, "refused": ["north: too long"], "unknown": 1})
    assert old.refused == [Incident("", "", "north: too long")]
    assert (old.trust, old.downlink_bytes, old.seconds) == (None, 0, {})


@pytest.mark.parametrize(("key", "value"), [("round", "x"), ("bits_sent", None), ("kl", math.nan), ("refused", [7])])
def test_a_damaged_line_is_refused_by_the_key(key: str, value: object) -> None:
    with pytest.raises(ValueError, match=key):
        RoundRecord.from_json({**record([1.0]).to_json(), key: value})


def test_traffic_is_added_by_node_and_kind() -> None:
    traffic = Traffic(2)
    traffic.add(0, {"weights": 5, "overhead": 1})
    traffic.add(1, {"labels": 7, "text": 0}, up=True)
    once = traffic.added_to(record([1.0, 2.0]))
    assert (once.downlink["weights"], once.uplink["labels"], once.node_downlink_bytes) == (5, 7, [6, 0])
    assert traffic.added_to(once).downlink_bytes == 12
    assert "text" not in once.uplink
    assert "updates" not in once.uplink
    traffic.add(0, {"text": 3}, up=True)
    twice = traffic.added_to(once)
    assert (twice.uplink["labels"], twice.uplink["text"]) == (14, 3)
    row = round_row(twice, 0)
    assert (row["up_labels"], row["up_text"], row["up_updates"]) == (14, 3, None)
