"""Replies that are huge, slow, torn or not what they say, over Flower's own HTTP client: one node's trouble."""

from __future__ import annotations

import threading
import time
import tracemalloc
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from flwr.app import ConfigRecord, Error, Message, RecordDict
from flwr.supercore.inflatable.inflatable_utils import ObjectPushError
from flwr.supercore.run import RunNotRunningException

from fpld.engines.flower.exchange import SLACK_BYTES, SentMessage, exchange, explain
from fpld.engines.flower.messages import FRAME, SharedArrays, add_field, pack_fields, read_field
from fpld.engines.flower.patches import CHOICE_VARIABLE
from fpld.engines.flower.patches import receive as receiving
from tests.engines.flower.link import NODE, Link, LinkedGrid, pulled

if TYPE_CHECKING:
    from collections.abc import Callable

MOST = 1000


def question(number: int = 0) -> Message:
    message = Message(pack_fields(frame=(b"task", FRAME)), NODE, "train")
    message.metadata.__dict__["_message_id"] = f"question {number}"
    return message


def answer(frame: bytes, to: Message, *, pieces: bool = False) -> Message:
    content = RecordDict()
    add_field(content, "frame", frame, FRAME, shared=SharedArrays() if pieces else None)
    return Message(content, reply_to=to)


def received(link: Link, most: int = MOST) -> Message:
    found = pulled(LinkedGrid(link), SentMessage("question 0", NODE, most))
    assert found is not None
    return found


def reason(link: Link, most: int = MOST) -> str:
    found = received(link, most)
    assert found.has_error()
    assert found.metadata.reply_to_message_id == "question 0"
    absence = explain("north", found.error)
    assert absence.state == "failed"
    return absence.reason


def test_a_right_reply_comes_through_and_is_confirmed() -> None:
    link = Link()
    assert pulled(LinkedGrid(link), SentMessage("question 0", NODE, MOST)) is None
    link.reply("question 0", answer(bytes(range(250)) * 4, question()))
    assert read_field(received(link).content, "frame", FRAME) == bytes(range(250)) * 4
    assert len(link.confirmed) == 1


@pytest.mark.parametrize("size", [MOST + SLACK_BYTES + 1, 100 << 20])
def test_a_huge_reply_is_refused_before_it_is_read(size: int) -> None:
    """One piece of 100 MiB, or a few bytes too many: memory does not move, and the SuperLink may forget it."""
    link = Link()
    link.reply("question 0", answer(bytes(size), question()))
    grid = LinkedGrid(link)
    answers = {identity: link.objects[identity] for identity in link.objects}
    assert max(len(content or b"") for content in answers.values()) > MOST

    def stated(request: httpx.Request) -> httpx.Response:
        """As `Link`, but a long body is only made when it is read."""
        response = link(request)
        if len(response.content) <= 1 << 17:
            return response
        length = {"content-length": str(len(response.content))}
        return httpx.Response(200, headers=length, stream=Unread())

    grid._runtime_client._client = httpx.Client(transport=httpx.MockTransport(stated))
    found = pulled(grid, SentMessage("question 0", NODE, MOST))
    assert found is not None
    assert "its reply is too long: a chunk of " in explain("north", found.error).reason
    assert len(link.confirmed) == 1


class Unread(httpx.SyncByteStream):
    """A body that nobody may read."""

    def __iter__(self) -> Any:
        raise AssertionError("the body was read")


def test_many_small_pieces_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flwr.app.message.array.FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE", 40_000)
    link = Link()
    link.reply("question 0", answer(bytes(range(256)) * 1000, question(), pieces=True))
    assert "its reply is too long" in reason(link)
    monkeypatch.setattr("flwr.app.message.array.FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE", 10)
    link.reply("question 0", answer(b"".join(n.to_bytes(10, "big") for n in range(100)), question(), pieces=True))
    assert reason(link) == "its reply is in 104 chunks, at most 64 are wanted"
    assert len(link.pulled) < 50


def test_a_piece_that_is_named_a_million_times_is_not_unfolded() -> None:
    """An Array lists its pieces by number: 1 kB sent may stand for a gigabyte received."""

    def fold(content: bytes) -> bytes:
        head, body = content.split(b"\x00", 1)
        if not head.startswith(b"Array "):
            return content
        body = body.replace(b'"arraychunk_ids": [0]', b'"arraychunk_ids": [' + b"0, " * 30_000 + b"0]")
        return head.rsplit(b" ", 1)[0] + f" {len(body)}".encode() + b"\x00" + body

    link = Link()
    link.reply("question 0", answer(bytes(40_000), question(), pieces=True), fold)
    tracemalloc.start()
    assert "its reply holds 1200" in reason(link, 40_000)
    assert tracemalloc.get_traced_memory()[1] < 20 << 20
    tracemalloc.stop()


@pytest.mark.parametrize("change", [lambda _c: b"x", lambda c: c[:-1], lambda c: b"Array" + c, lambda c: c[::-1]])
def test_pieces_that_are_not_what_they_must_be_are_that_nodes_failure(change: Callable[[bytes], bytes]) -> None:
    link = Link()
    link.reply("question 0", answer(bytes(10), question()), change)
    assert reason(link).startswith("its reply ")


def test_who_answers_for_another_is_refused() -> None:
    """What a reply says about itself was written by the node: the question that it came to is what counts."""
    link = Link()
    other = question(1)
    link.reply("question 0", answer(b"x", other))
    assert reason(link) == "its reply says that it answers another message"
    stranger = question()
    stranger.metadata.dst_node_id = 8
    link.reply("question 0", answer(b"x", stranger))
    assert reason(link) == "its reply says that it comes from another node"


def test_an_error_text_of_a_megabyte_and_records_of_other_kinds() -> None:
    link = Link()
    link.reply("question 0", Message(Error(2, "x" * 1_500_000), reply_to=question()))
    assert "its reply is too long" in reason(link)
    link.reply("question 0", Message(RecordDict({"more": ConfigRecord({"a": "x" * 10})}), reply_to=question()))
    assert received(link).has_content()  # which `unpack` refuses


def test_pieces_that_never_come_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiving, "MAX_REPLY_SECONDS", 0.3)
    link = Link()
    link.reply("question 0", answer(b"x", question()))
    link.objects = dict.fromkeys(link.objects)  # announced, not sent
    assert reason(link) == "its reply was announced, and not whole within 0.3 s"
    link.reply("question 0", answer(b"x", question()))
    link.objects.clear()
    assert reason(link) == "its reply was announced, and chunks of it never came"


def test_a_node_that_goes_while_it_sends_is_lost_and_not_waited_for() -> None:
    """It is asked again when it is back: `lost`, not `failed`."""
    link = Link()
    link.reply("question 0", answer(b"x", question()))
    link.objects = dict.fromkeys(link.objects)
    link.online.clear()
    found = received(link)
    assert explain("north", found.error).state == "lost"
    assert len(link.confirmed) == 1


def test_messages_that_a_superlink_lost_half_way_are_pushed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was killed while it took them; the one that is started in its place knows them when they come again."""
    link = Link()
    tries = [0]
    link.reply("question 0", answer(b"x", question()))

    def push(grid: LinkedGrid, messages: list[Message]) -> list[str]:
        tries[0] += 1
        if tries[0] < 3 or len(messages) > 1:
            raise ObjectPushError("object", 1, "session")
        return [message.metadata.message_id for message in messages]

    monkeypatch.setattr(LinkedGrid, "push_messages", push)
    (reply,) = exchange(LinkedGrid(link), [question()], 5.0, [MOST])
    assert read_field(reply.content, "frame", FRAME) == b"x"
    assert tries == [3]
    with pytest.raises(ObjectPushError):  # not for ever
        list(exchange(LinkedGrid(link), [question(0), question(1)], 5.0, [MOST] * 2))


def test_a_slow_reply_holds_up_no_other_and_not_the_deadline() -> None:
    """Of four replies one is never whole: the others are taken at once, and the end is the deadline."""
    link = Link()
    for number in range(4):
        link.reply(f"question {number}", answer(bytes([number]), question(number)))
    slow = link.replies["question 1"][1].object_id
    link.objects[slow] = None
    before = set(threading.enumerate())  # others' exchanges may still wait
    begun = time.monotonic()
    found = []
    for reply in exchange(LinkedGrid(link), [question(number) for number in range(4)], 1.5, [MOST] * 4):
        found.append(read_field(reply.content, "frame", FRAME))
        assert len(found) < 3 or time.monotonic() - begun < 1.4
    assert sorted(found) == [b"\x00", b"\x02", b"\x03"]
    assert 1.4 < time.monotonic() - begun < 10
    for thread in set(threading.enumerate()) - before:
        thread.join(5)
        assert not thread.is_alive()  # nobody waits for it


def test_many_replies_are_one_question() -> None:
    link = Link()
    for number in range(120):
        link.reply(f"question {number}", answer(bytes([number]), question(number)))
    messages = (question(number) for number in range(120))
    found = [
        read_field(reply.content, "frame", FRAME) for reply in exchange(LinkedGrid(link), messages, 30.0, [MOST] * 120)
    ]
    assert sorted(found) == [bytes([number]) for number in range(120)]
    assert max(link.questions) == 50
    assert len(link.questions) < 20


@pytest.mark.parametrize("alone", [False, True])
def test_an_announcement_that_is_too_long_costs_others_at_most_a_second_question(alone: bool) -> None:
    """Asked for together, all three are lost and asked again; asked for one by one, only its sender's is refused."""
    link = Link()
    for number in range(3):
        link.reply(f"question {number}", answer(bytes([number]), question(number)))
    message, tree = link.replies["question 1"]
    for number in range(30_000):
        tree.children.add(object_id=f"{number:064d}")
    link.replies["question 1"] = message, tree
    messages = [question(number) for number in range(3)]
    replies = {
        r.metadata.reply_to_message_id: r for r in exchange(LinkedGrid(link), messages, 5.0, [MOST] * 3, alone=alone)
    }
    states = [explain("", r.error).state if r.has_error() else "right" for _, r in sorted(replies.items())]
    assert states == (["right", "failed", "right"] if alone else ["lost"] * 3)


def test_a_run_that_was_stopped_ends_and_trouble_at_the_superlink_is_said() -> None:
    link = Link()
    link.status = 500
    assert reason(link) == "its reply cannot be read (HTTPStatusError)"
    link.status = 403
    with pytest.raises(RunNotRunningException):
        received(link)


@pytest.mark.parametrize("patches", ["all", "none"])
def test_a_run_that_was_stopped_ends_what_waits_for_its_replies(patches: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, not when the time is over; without a time it would wait for ever."""
    monkeypatch.setenv(CHOICE_VARIABLE, patches)
    link = Link()
    link.status = 403
    started = time.monotonic()
    with pytest.raises(RunNotRunningException):
        list(exchange(LinkedGrid(link), [question()], 60.0, [MOST]))
    assert time.monotonic() - started < 30


@pytest.mark.parametrize("alone", [False, True])
def test_on_stock_flower_a_malformed_reply_costs_those_that_come_with_it(
    alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flower fetches replies whole: of those that are asked for together it says only that one is malformed."""
    monkeypatch.setenv(CHOICE_VARIABLE, "none")
    link = Link()
    for number in range(3):
        change = (lambda content: content[::-1]) if number == 1 else (lambda content: content)
        link.reply(f"question {number}", answer(bytes([number]), question(number)), change)
    messages = [question(number) for number in range(3)]
    replies = {
        r.metadata.reply_to_message_id: r for r in exchange(LinkedGrid(link), messages, 5.0, [MOST] * 3, alone=alone)
    }
    states = [explain("", r.error).state if r.has_error() else "right" for _, r in sorted(replies.items())]
    assert states == (["right", "failed", "right"] if alone else ["lost"] * 3)


def test_on_stock_flower_a_reply_that_is_too_long_is_refused_after_it_was_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the aggregator holds at most is what a node sends: with the patch `receive` it is a little of that."""
    size = 20 << 20
    peaks = {}
    for patches in ("none", "receive"):
        monkeypatch.setenv(CHOICE_VARIABLE, patches)
        link = Link()
        link.reply("question 0", answer(bytes(size), question()))
        messages = [question()]
        tracemalloc.start()
        (reply,) = exchange(LinkedGrid(link), messages, 30.0, [MOST])
        peaks[patches] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert explain("", reply.error).state == "failed"
    assert peaks["none"] > size
    assert peaks["receive"] < size
