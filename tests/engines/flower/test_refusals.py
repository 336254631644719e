"""What must be refused, each by name and reason, while the others go on: frames, nodes, tasks, files."""

from __future__ import annotations

import json
import re
import shutil
from typing import TYPE_CHECKING, Any

import pytest
from flwr.app import Context, Message, RecordDict

from benchmarks import deployment_attacks, hostile_node
from fpld.engines.flower.client import budget_guard, frame_limit
from fpld.engines.flower.credentials import make_node_keys, sign_message
from fpld.engines.flower.messages import (
    FRAME,
    SIGNED_MESSAGE,
    add_field,
    field_names,
    pack_fields,
    read_field,
    unpack_task,
)
from fpld.engines.flower.roster import Roster
from fpld.engines.flower.site import handlers
from fpld.engines.flower.site.config import open_site
from fpld.errors import BudgetError, InputError, ProtocolError, QuorumError
from fpld.protocol.wire import HEADER, encode_frame
from fpld.registry import codecs
from fpld.storage.run_folder import RunFolder
from tests.engines.flower.conftest import Deployment, InProcessGrid, carried
from tests.engines.flower.test_operations import rows

if TYPE_CHECKING:
    from pathlib import Path

    from fpld.protocol import Task

QUORUM = ("rounds = 3", "rounds = 2\nquorum = 2")


pytestmark = pytest.mark.slow


@pytest.fixture
def two_of_three(tmp_path: Path) -> Deployment:
    return Deployment(tmp_path, [QUORUM])


def frame_of(reply: Message) -> bytes | None:
    if reply.has_error() or reply.metadata.message_type != "train":
        return None
    return read_field(reply.content, "frame", FRAME)


def with_frame(reply: Message, frame: bytes) -> Message:
    add_field(reply.content, "frame", frame, FRAME)
    return reply


def refused(deployment: Deployment, grid: InProcessGrid, out: str = "flower") -> list[list[str]]:
    deployment.serve(grid, out)
    traced = [line["refused"] for line in deployment.trace(out)]
    assert all(record["state"] == "refused" for records in traced for record in records)
    return [[f"{record['node']}: {record['reason']}" for record in records] for records in traced]


def absent(deployment: Deployment) -> list[list[tuple[str, str, str]]]:
    return [[(a["node"], a["state"], a["reason"]) for a in line["absent"]] for line in deployment.trace()]


def test_an_altered_frame(two_of_three: Deployment) -> None:
    grid = two_of_three.grid()

    def alter(file: Path, reply: Message) -> Message:
        frame = frame_of(reply)
        if frame is None or file.parent.name != "south":
            return reply
        altered = bytearray(frame)
        altered[HEADER.size + 7] ^= 4
        return with_frame(reply, bytes(altered))

    grid.tamper = alter
    for lines in refused(two_of_three, grid):
        assert len(lines) == 1
        assert lines[0].startswith(
            "south: frame's checksum does not match: the frame was altered, or made with another"
        )
    assert two_of_three.trace()[1]["nodes"] == ["north", "east"]


def test_an_altered_frame_with_the_checksum_made_right_again(two_of_three: Deployment) -> None:
    """Whoever sits on the wire can compute a checksum, but not the tag of a key that never left the node."""
    grid = two_of_three.grid()
    tasks: dict[str, Task] = {}
    push = grid.push_messages

    def listen(messages: Any) -> Any:
        seen = list(messages)
        for message in seen:
            if message.metadata.message_type == "train":
                tasks[str(message.metadata.dst_node_id)] = unpack_task(message.content)
        return push(seen)

    grid.push_messages = listen  # type: ignore[method-assign]

    def forge(file: Path, reply: Message) -> Message:
        if frame_of(reply) is None or file.parent.name != "south":
            return reply
        plan = tasks["102"].plan
        return with_frame(reply, encode_frame(bytes(plan.budget_bytes), plan, codecs.get("samples").code))

    grid.tamper = forge
    # The digest of a plan whose prior the forger does not compute, or the checksum.
    wrong = ("checksum does not match", "plan digest must be")
    assert all(any(each in lines[0] for each in wrong) for lines in refused(two_of_three, grid))


def test_a_replayed_frame_and_one_of_another_run(two_of_three: Deployment) -> None:
    """Round 1's frame in round 2; then the frames of a whole run in another one with the same configuration."""
    kept: dict[tuple[str, str], bytes] = {}
    grid = two_of_three.grid()

    def replay(file: Path, reply: Message) -> Message:
        frame = frame_of(reply)
        if frame is None:
            return reply
        count = sum(name == file.parent.name for name, _ in kept)
        kept[file.parent.name, str(count)] = frame
        return with_frame(reply, kept["south", "0"]) if file.parent.name == "south" else reply

    grid.tamper = replay
    assert refused(two_of_three, grid) == [[], ["south: frame's round must be 2, got 1"]]
    again = two_of_three.grid()

    def foreign(file: Path, reply: Message) -> Message:
        return (
            reply if frame_of(reply) is None or file.parent.name != "south" else with_frame(reply, kept["south", "0"])
        )

    again.tamper = foreign
    (first,) = refused(two_of_three, again, "another")[0]
    # Same seed, but a key of its own for each run.
    assert re.fullmatch(r"south: frame's run id must be [0-9a-f]{32}, got [0-9a-f]{32}", first)


def test_an_over_budget_frame_at_both_ends(two_of_three: Deployment) -> None:
    grid = two_of_three.grid()

    def fatten(file: Path, reply: Message) -> Message:
        frame = frame_of(reply)
        return reply if frame is None or file.parent.name != "north" else with_frame(reply, frame + bytes(100_000))

    grid.tamper = fatten
    assert all("bytes under this plan's budget, got" in lines[0] for lines in refused(two_of_three, grid))
    # What came as a task is not parsed again, outside the sandbox: it is no task at all here.
    message = Message(pack_fields(task=(b"no task", FRAME)), 1, "train")
    context = Context(1, 1, {}, RecordDict(), {})

    def guarded(limit: int | None, content: RecordDict) -> Message:
        def handle(asked: Message, _context: Context) -> Message:
            frame_limit.set(limit)
            return Message(content, reply_to=asked)

        return budget_guard(message, context, handle)

    for content in (
        pack_fields(frame=(bytes(141), FRAME)),
        pack_fields(frame=(bytes(140), FRAME), more=(b"text", FRAME)),
    ):
        with pytest.raises(BudgetError, match=r"one frame of at most 140 bytes, got .* nothing was sent"):
            guarded(140, content)
    whole = pack_fields(frame=(bytes(140), FRAME))
    assert guarded(140, whole).has_content()
    with pytest.raises(BudgetError, match="nothing was sent"):  # the limit of the message before does not hold
        guarded(None, whole)


def test_a_site_with_a_limit_of_its_own(two_of_three: Deployment) -> None:
    file = two_of_three.node_files[1]
    file.write_text(file.read_text() + "\nmost_bytes = 1000\n")
    two_of_three.serve(two_of_three.grid())
    ((node, state, reason),) = absent(two_of_three)[0]
    assert (node, state) == ("east", "failed")
    assert reason == "limit: the request goes beyond what this node allows"
    assert "this node's file allows 1000 (most_bytes)" in (file.parent / "log.txt").read_text()


def test_an_unregistered_key_under_a_registered_name(two_of_three: Deployment) -> None:
    home = two_of_three.node_files[2].parent
    for secret in ("auth.key", "mac.key", "south.pub"):
        (home / secret).unlink()
    make_node_keys(home, "south")
    two_of_three.serve(two_of_three.grid())
    turned = "a node was refused: a message's tag does not match: it was altered, or made with another key"
    assert turned in two_of_three.log()
    for line in two_of_three.trace():
        assert line["nodes"] == ["north", "east"]
        assert line["absent"] == [{"node": "south", "state": "absent", "reason": "not connected"}]


def test_a_name_that_is_not_of_the_federation_and_an_old_answer(two_of_three: Deployment) -> None:
    file = two_of_three.node_files[2]
    file.write_text(file.read_text().replace("'south'", "'west'"))
    two_of_three.serve(two_of_three.grid())
    assert "a node was refused: 'west' is not a node of this federation" in two_of_three.log()
    file.write_text(file.read_text().replace("'west'", "'south'"))
    grid = two_of_three.grid()
    old: dict[str, bytes] = {}

    def replay(file: Path, reply: Message) -> Message:
        if reply.metadata.message_type == "query.join" and file.parent.name == "south":
            letter = old.setdefault("letter", read_field(reply.content, "letter", SIGNED_MESSAGE))
            reply.content = pack_fields(letter=(letter, SIGNED_MESSAGE))
        return reply

    grid.tamper = replay
    two_of_three.serve(grid, "one")
    assert two_of_three.trace("one")[0]["nodes"] == ["north", "east", "south"]
    RunFolder(two_of_three.folder / "two").write(
        "session.json", (two_of_three.folder / "one/session.json").read_bytes()
    )
    with pytest.raises(QuorumError):  # a run of its own would have a session of its own
        two_of_three.serve(grid, "two")
    assert "a node was refused: south: its answer is to another question" in two_of_three.log("two")


@pytest.mark.parametrize("what", ["probe", "tokenizer"])
def test_a_site_that_insists_on_another_probe_set_or_tokenizer(
    what: str, two_of_three: Deployment, capsys: pytest.CaptureFixture[str]
) -> None:
    file = two_of_three.node_files[0]
    file.write_text(file.read_text() + f'\n{what} = "{"ab" * 32}"\n')
    two_of_three.serve(two_of_three.grid())
    ((node, state, reason),) = absent(two_of_three)[0]
    assert (node, state) == ("north", "failed")
    (row,) = rows(capsys, "aggregator", "status", two_of_three.folder / "flower")
    name = {"probe": "probe set", "tokenizer": "tokenizer"}[what]
    digests = f"{name}: the run's is {row[what]}, node.toml insists on {'ab' * 32}"
    assert reason.startswith(digests)
    assert "`fpld check node.toml` show them" in reason
    assert digests in (file.parent / "log.txt").read_text()
    assert {"key": what, "state": "known", "says": f"only {'ab' * 32}"} in rows(capsys, "check", file)


def test_a_node_that_does_not_answer_and_one_that_crashes(two_of_three: Deployment) -> None:
    grid = two_of_three.grid()
    text = two_of_three.folder / "texts/east"
    text.rename(text.with_name("gone"))
    two_of_three.serve(grid)
    failed = "east", "failed", "setup: the node's own text, files or settings do not do"
    said = (two_of_three.node_files[1].parent / "log.txt").read_text()
    assert f"{text} does not exist: give the path of an existing file or folder" in said
    assert absent(two_of_three) == [[failed], [failed]]
    assert json.loads((two_of_three.folder / "flower/status.json").read_text())["state"] == "done"


def test_silence_ends_with_the_deadline(tmp_path: Path) -> None:
    deployment = Deployment(tmp_path, [("rounds = 3", "rounds = 2\nquorum = 2\ndeadline = 1.5")])
    grid = deployment.grid()
    quiet = {"train": 1}

    def silent(file: Path, reply: Message) -> Message | None:
        kind = reply.metadata.message_type
        if file.parent.name == "north" and quiet.get(kind, 0) > 0:
            quiet[kind] -= 1
            return None
        return reply

    grid.tamper = silent
    deployment.serve(grid)
    assert absent(deployment) == [[("north", "late", "no answer within 1.5 s")], []]


def test_below_the_quorum_the_run_stops_and_can_be_resumed(deployment: Deployment) -> None:
    """It goes on from the last closed round, and ends as if nothing had been."""
    for out, session in (("undisturbed", "ab" * 32), ("flower", "ac" * 32)):  # one key: dither depends on it
        RunFolder(deployment.folder / out).write_json("session.json", {"session": session, "key": "cd" * 32})
    undisturbed = deployment.serve(deployment.grid(), "undisturbed")
    grid = deployment.grid()
    push = grid.push_messages
    kinds: list[str] = []

    def lose(messages: Any) -> Any:
        seen = list(messages)
        kinds.extend(message.metadata.message_type for message in seen)
        if kinds.count("train") > 3:  # in round 2
            grid.offline.add(101)
            seen = [message for message in seen if message.metadata.dst_node_id != 101]
        return push(seen)

    grid.push_messages = lose  # type: ignore[method-assign]
    with pytest.raises(QuorumError, match="2 of 3 nodes answered, the quorum is 3; missing: east"):
        deployment.serve(grid)
    assert json.loads((deployment.folder / "flower/status.json").read_text())["state"] == "failed"
    # What a node has got already is not sent to it again.
    resumed = [{**row, "downlink_bytes": None} for row in deployment.serve(deployment.grid())]
    assert resumed == [{**row, "downlink_bytes": None} for row in undisturbed]
    assert deployment.trace() == deployment.trace("undisturbed")


def test_two_aggregators_on_one_folder(deployment: Deployment) -> None:
    with RunFolder(deployment.folder / "flower").lock(), pytest.raises(InputError, match="in use by another run"):
        deployment.serve(deployment.grid())


def test_a_node_that_lost_its_disk_gets_all_that_it_needs_again(two_of_three: Deployment) -> None:
    grid = two_of_three.grid()

    def lose(file: Path, reply: Message) -> Message:
        if reply.metadata.message_type == "train" and not reply.has_error() and file.parent.name == "east":
            shutil.rmtree(file.parent / "runs")
            shutil.rmtree(file.parent / "files")
        return reply

    grid.tamper = lose
    two_of_three.file.write_text(two_of_three.text.replace("rounds = 2", "rounds = 4"))
    two_of_three.serve(grid)
    lost = "east", "failed", "message: the message is not one that this node can act on"
    assert "the student of the last round is not here" in (two_of_three.node_files[1].parent / "log.txt").read_text()
    assert absent(two_of_three) == [[], [lost], [], [lost]]


def test_another_version_of_the_wire_is_refused_in_a_sentence(deployment: Deployment) -> None:
    """At both ends: a node that is asked by an older aggregator, and an aggregator that an older node answers."""
    home = open_site(deployment.node_files[0])
    letter = {"kind": "join", "session": "ab" * 32, "files": [], "challenge": "cd" * 32}
    for said, shown in ({}, "None"), ({"wire": 4}, "4"):
        with pytest.raises(
            ProtocolError, match=f"speaks version 5 of the wire, the aggregator {shown}: install the same"
        ):
            handlers.handle_join(home, sign_message(b"", letter | said))
    key = home.secret(bytes.fromhex("ab" * 32))
    roster = Roster(["north"], {0: key}, bytes.fromhex("ab" * 32), [])
    old = {"kind": "joined", "name": "north", "challenge": "cd" * 32, "missing": []}
    with pytest.raises(ProtocolError, match="north speaks version an older one of the wire, the aggregator 5: install"):
        roster._admit(7, sign_message(key, old), "cd" * 32)
    roster._admit(7, handlers.handle_join(home, sign_message(b"", letter | {"wire": 5})), "cd" * 32)
    assert roster.ids == {0: 7}
    assert roster.holds == {0: None}


def test_an_evaluation_that_fails_costs_no_frame(two_of_three: Deployment) -> None:
    """Why is said in a sentence; a reply without a signed message, or with one of another round, is a refusal too."""
    grid = two_of_three.grid()

    def lose(file: Path, reply: Message) -> Message:
        if frame_of(reply) is not None and "letter" in field_names(reply.content) and file.parent.name == "south":
            del reply.content.config_records["fpld"]["letter"]
        return reply

    grid.tamper = lose
    (held,) = [lines for lines in refused(two_of_three, grid) if lines]
    assert held == ["south: did not evaluate the student: a message must hold 'letter', got ['frame']"]
    assert [line["nodes"] for line in two_of_three.trace()] == [["north", "east", "south"]] * 2


def test_a_site_is_revoked_while_the_run_goes_on(two_of_three: Deployment) -> None:
    """A file beside its keys: from the next round on it is asked for nothing, and it cannot come back."""
    grid = two_of_three.grid()

    def revoke(_file: Path, reply: Message) -> Message:
        if reply.metadata.message_type == "train":
            (two_of_three.folder / "keys/south.revoked").touch()
        return reply

    grid.tamper = revoke
    two_of_three.serve(grid)
    assert absent(two_of_three) == [[], [("south", "absent", "revoked")]]
    assert [kind for name, kind, _ in grid.sent if name == "south"][:2] == ["query.join", "train"]
    assert "evaluate" not in [kind for name, kind, _ in grid.sent if name == "south"]


class HostileGrid(InProcessGrid):
    """One node answers as `benchmarks.hostile_node` does."""

    def answer(self, message: Message, size: int) -> Message | None:
        file = self.nodes[message.metadata.dst_node_id]
        if file.parent.name != "south":
            return super().answer(message, size)
        context = Context(1, message.metadata.dst_node_id, {"node": str(file)}, RecordDict(), {})
        return carried(hostile_node.attack(message, context))[0]


def test_a_hostile_nodes_frames_and_losses_are_refused_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of what `python -m benchmarks.deployment_attacks` tries over the network, that which needs none."""
    names = ("an empty frame", "random symbols, with a right tag", "two frames in one reply")
    expected = {name: deployment_attacks.EXPECTED[name] for name in (*names, "requests for the prior again and again")}
    monkeypatch.setattr(hostile_node, "TRAIN", {name: hostile_node.TRAIN[name] for name in expected})
    monkeypatch.setattr(hostile_node, "EVALUATE", {"a negative loss": hostile_node.EVALUATE["a negative loss"]})
    deployment = Deployment(tmp_path, [("rounds = 3", f"rounds = {len(expected) + 1}\nquorum = 2")])
    grid = HostileGrid(deployment.node_files)
    (deployment.node_files[2].parent / "joined").touch()  # it gives its right name
    deployment.serve(grid)
    lines = deployment.trace()
    for line, (name, reason) in zip(lines, expected.items(), strict=False):
        told = [record["reason"] for record in (*line["refused"], *line["absent"]) if record["node"] == "south"]
        assert any(reason in each for each in told), (name, told)
        assert line["nodes"] == ["north", "east"], name
    told = [record["reason"] for record in lines[0]["refused"]]
    assert any(each.startswith("did not evaluate the student: its answer's loss") for each in told)
    assert lines[-1]["nodes"] == ["north", "east", "south"]
