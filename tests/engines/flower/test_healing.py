"""What comes back by itself, and what is started once: locks, seats, lost tasks, work in a process of its own."""

from __future__ import annotations

import errno
import json
import mmap
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from flwr.app import Error, Message
from flwr.proto.fleet_pb2 import ActivateNodeRequest, ActivateNodeResponse, PullMessagesRequest, PushMessagesRequest
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.message_pb2 import PushObjectRequest, PushObjectResponse
from flwr.supercore.retry import http_retry

from fpld.cli import main
from fpld.engines.flower.credentials import sign_message
from fpld.engines.flower.patches import connection, retry
from fpld.engines.flower.patches.connection import SiteClient
from fpld.engines.flower.roster import Roster
from fpld.engines.flower.site import handlers
from fpld.engines.flower.site.config import open_site
from fpld.engines.flower.site.folder import read_presence, site_lock
from fpld.engines.flower.site.resources import SandboxError, own_bytes, run_sandboxed
from fpld.errors import ResourceError, StorageError
from tests.engines.flower.conftest import NAMES, Deployment, InProcessGrid

if TYPE_CHECKING:
    from collections.abc import Iterable


@pytest.mark.slow
def test_a_site_is_started_once(deployment: Deployment, capsys: pytest.CaptureFixture[str]) -> None:
    """Whoever is second is told who is first; the lock goes with the process, even if it is killed."""
    folder = deployment.node_files[0].parent
    code = (
        "import sys, time, pathlib\nfrom fpld.engines.flower.site.folder import site_lock\n"
        "with site_lock(pathlib.Path(sys.argv[1]), 'north'):\n    print('held', flush=True)\n    time.sleep(60)\n"
    )
    first = subprocess.Popen([sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE)
    try:
        assert first.stdout is not None
        assert first.stdout.readline() == b"held\n"
        assert main(["node", str(deployment.node_files[0])]) == 2
        said = capsys.readouterr().err
        assert f"north takes part already, from this folder as process {first.pid}" in said
        assert "a node is started once; stop the other one first" in said
    finally:
        first.kill()
        first.communicate()
    with site_lock(folder, "north"):
        found = read_presence(folder)
        assert found is not None
        assert found["process"] == os.getpid()
    assert read_presence(folder) is None


def test_two_processes_with_one_key_are_said_by_the_aggregator(
    deployment: Deployment, caplog: pytest.LogCaptureFixture
) -> None:
    home = open_site(deployment.node_files[0])
    session = bytes(32)
    roster = Roster(["north"], {0: home.secret(session)}, session, [])
    letter = {"kind": "join", "session": session.hex(), "files": [], "challenge": "cd" * 32, "wire": 5}

    def join(instance: str) -> None:
        (home.folder / "node.json").write_text(json.dumps({"process": 1, "since": "now", "instance": instance}))
        roster._admit(7, handlers.handle_join(home, sign_message(b"", letter)), "cd" * 32)

    for instance in ("aa", "aa", "bb", "bb"):  # started again once: nothing to say
        join(instance)
    assert "two processes" not in caplog.text
    join("aa")
    assert "north answers from two processes with one key, by turns" in caplog.text


class Silent(InProcessGrid):
    """Nodes that are there and never answer."""

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        for message in messages:
            message.metadata.__dict__["_message_id"] = f"message {next(self.numbers)}"
            self.sent.append(("", message.metadata.message_type, message.metadata.dst_node_id))
            yield message.metadata.message_id


def test_many_nodes_are_asked_in_turns_and_silent_ones_keep_nobody_out() -> None:
    """A SuperLink cannot serve a thousand answers before the questions expire."""
    grid = Silent([Path("node.toml")] * 250)
    roster = Roster([f"site-{number}" for number in range(250)], {}, bytes(32), [])
    turns = []
    for _ in range(3):
        roster._refresh(grid)
        roster._refresh(grid)  # nobody is asked twice
        turns.append([node for *_, node in grid.sent])
        grid.sent.clear()
        roster._requests.clear()  # their time is over
    assert turns == [[*range(100, 200)], [*range(200, 300)], [*range(300, 350), *range(100, 150)]]


class SuperLink:
    """Answer as a SuperLink does that holds a node for alive until it is signed off."""

    def __init__(self) -> None:
        self.alive = True
        self.paths = list[str]()

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.paths.append(request.url.path.rsplit("/", 1)[1])
        if self.paths[-1] == "deactivate-node":
            self.alive = False
            return httpx.Response(200, content=b"")
        if self.alive:
            return httpx.Response(412, json={"code": 2004}, request=request)
        return httpx.Response(200, content=ActivateNodeResponse(node_id=9).SerializeToString())


def test_a_node_that_was_killed_signs_off_what_is_left_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only from the folder where it was signed on: a copy elsewhere must not throw the first one out."""
    monkeypatch.setattr(connection, "SIGN_OFF_SECONDS", 0.01)
    monkeypatch.setattr(SiteClient, "folder", tmp_path, raising=False)

    def client(link: SuperLink) -> SiteClient:
        made = SiteClient.from_server_address("localhost:1", True, None, [])
        made._client = httpx.Client(transport=httpx.MockTransport(link))
        return made

    link = SuperLink()
    with pytest.raises(httpx.HTTPStatusError):  # it was never here
        client(link).ActivateNode(ActivateNodeRequest())
    link.alive = False
    assert client(link).ActivateNode(ActivateNodeRequest()).node_id == 9
    assert json.loads((tmp_path / "seat.json").read_text())["node"] == 9
    link.alive = True
    link.paths = []
    assert client(link).ActivateNode(ActivateNodeRequest()).node_id == 9
    assert link.paths == ["activate-node", "deactivate-node", "activate-node"]
    seat = json.loads((tmp_path / "seat.json").read_text())
    (tmp_path / "seat.json").write_text(json.dumps({**seat, "place": "elsewhere"}))
    link.alive = True
    with pytest.raises(httpx.HTTPStatusError):
        client(link).ActivateNode(ActivateNodeRequest())


@pytest.mark.parametrize(("errors", "status", "tries"), [(3, 500, 4), (9, 500, 4), (9, 404, 1)])
def test_an_internal_error_of_the_superlink_is_not_the_end(
    errors: int, status: int, tries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A database that is locked for a moment ends no run; one that stays so does, and what is refused is refused."""
    for name in ("RetryInvoker", "MAX_RETRY_DELAY"):
        monkeypatch.setattr(http_retry, name, getattr(http_retry, name))
    monkeypatch.setattr(retry, "SERVER_ERROR_SECONDS", (0.01, 0.01, 0.01))
    retry.retry_sooner()
    tried = 0

    def ask() -> str:
        nonlocal tried
        tried += 1
        if tried <= errors:
            httpx.Response(status, request=httpx.Request("POST", "http://localhost/")).raise_for_status()
        return "an answer"

    invoker = http_retry.make_simple_http_retry_invoker()
    if errors < tries:
        assert invoker.invoke(ask) == "an answer"
    else:
        with pytest.raises(httpx.HTTPStatusError):
            invoker.invoke(ask)
    assert tried == tries


def test_what_a_superlink_leaves_uncertain_when_it_dies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A piece whose first answer got lost counts as stored; where a message may be lost the node signs on anew."""
    monkeypatch.setattr(SiteClient, "folder", tmp_path / "pinned", raising=False)
    left: list[int] = []

    def leave(code: int) -> None:
        left.append(code)
        raise SystemExit

    monkeypatch.setattr(os, "_exit", leave)
    answers = list[httpx.Response | Exception]()
    asked = list[str]()

    def link(request: httpx.Request) -> httpx.Response:
        assert "user-agent" not in request.headers
        asked.append(request.url.path.rpartition("/")[2])
        found = answers.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    client = SiteClient.from_server_address("localhost:1", True, None, [])
    client._client = httpx.Client(transport=httpx.MockTransport(link))
    request = PushObjectRequest(session_id="s", object_id="o")
    refused = httpx.Response(200, content=PushObjectResponse(stored=False).SerializeToString())
    answers += [refused, httpx.ReadError("gone"), refused, refused]
    assert not client.PushObject(request).stored  # it never came
    with pytest.raises(httpx.ReadError):
        client.PushObject(request)
    assert client.PushObject(request).stored
    assert not client.PushObject(request).stored
    client._renew_reason = ""
    answers += [httpx.ConnectError("away"), httpx.ReadError("gone")]
    with pytest.raises(httpx.ConnectError):  # nothing was asked: it is tried again
        client.PullMessages(PullMessagesRequest())
    with pytest.raises(SystemExit):  # it has not signed on
        client.PullMessages(PullMessagesRequest())
    assert left == [1]
    monkeypatch.setattr(SiteClient, "signed_on", None)
    monkeypatch.setattr(time, "sleep", lambda _seconds: None)
    on = httpx.Response(200, content=ActivateNodeResponse(node_id=7).SerializeToString())
    heard = httpx.Response(200)
    answers += [on, httpx.ReadError("gone"), httpx.ConnectError("away"), heard, on]
    client.ActivateNode(ActivateNodeRequest(public_key=b"key"))
    assert len(client.PullMessages(PullMessagesRequest()).messages_list) == 0
    assert asked[-3:] == ["deactivate-node", "deactivate-node", "activate-node"]
    answers += [httpx.ConnectError("away"), httpx.ReadError("gone"), heard]
    for expected in (httpx.ConnectError, httpx.ReadError):
        with pytest.raises(expected):
            client.PushMessages(PushMessagesRequest())
    client.PushMessages(PushMessagesRequest())  # known already: the rest of the reply may be asked for no more
    answers += [heard, on, heard, heard]
    for _ in range(2):
        client.PullMessages(PullMessagesRequest())
    assert asked[-4:] == ["deactivate-node", "activate-node", "pull-messages", "pull-messages"]
    answers += [refused, heard, on, heard]
    assert not client.PushObject(request).stored
    client.PullMessages(PullMessagesRequest())
    assert asked[-3:] == ["deactivate-node", "activate-node", "pull-messages"]
    answers += [httpx.ReadError("gone"), httpx.Response(401)]
    with pytest.raises(SystemExit):  # its key is known no more
        client.PullMessages(PullMessagesRequest())
    assert client.SendNodeHeartbeat(SendNodeHeartbeatRequest()).success  # signed off: no heartbeat leaves it
    assert answers == []


def test_a_node_without_file_handles_says_so_and_begins_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "_exit", sys.exit)
    connection.touch_contact(tmp_path / "contact")
    assert (tmp_path / "contact").exists()
    connection.touch_contact(tmp_path)  # a folder: whatever else fails is not worth a node

    def full(*_arguments: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(type(tmp_path), "open", full)
    with pytest.raises(SystemExit):
        connection.touch_contact(tmp_path / "contact")
    assert "ERROR: no file handles are left: raise the limit" in capsys.readouterr().err


@pytest.mark.slow
def test_a_node_that_is_lost_and_back_is_asked_again_in_the_same_round(tmp_path: Path) -> None:
    """The result is that of an undisturbed run: nothing is counted twice, and nobody is left out."""
    deployment = Deployment(tmp_path, [("rounds = 3", "rounds = 2")])
    for out, session in (("undisturbed", "ab" * 32), ("flower", "ac" * 32)):  # one key: dither depends on it
        (tmp_path / out).mkdir()
        (tmp_path / out / "session.json").write_text(json.dumps({"session": session, "key": "cd" * 32}))
    deployment.serve(deployment.grid(), "undisturbed")
    grid = deployment.grid()
    lost = [2]

    def lose(file: Path, reply: Message) -> Message:
        if reply.metadata.message_type != "train" or file.parent.name != "east" or not lost[0]:
            return reply
        lost[0] -= 1
        failed = Message(Error(5, "unavailable"), reply_to=reply)
        failed.metadata.__dict__["_reply_to_message_id"] = reply.metadata.reply_to_message_id
        return failed

    grid.tamper = lose
    deployment.serve(grid)
    assert deployment.trace() == deployment.trace("undisturbed")
    assert [line["nodes"] for line in deployment.trace()] == [list(NAMES)] * 2
    assert sum(name == "east" and kind == "train" for name, kind, _ in grid.sent) == 4
    assert any("east is back: its task is sent again" in line for line in deployment.log())


def conceal(error: Exception) -> str:
    return f"{type(error).__name__} here"


def test_work_apart_answers_whatever_becomes_of_it() -> None:
    assert run_sandboxed(lambda: [b"one", b"", bytes(3_000_000)], conceal) == [b"one", b"", bytes(3_000_000)]

    def fail() -> list[bytes]:
        raise KeyError("private")

    with pytest.raises(SandboxError, match=r"^KeyError here$"):
        run_sandboxed(fail, conceal)

    def die() -> list[bytes]:
        os.kill(os.getpid(), signal.SIGKILL)
        return []

    with pytest.raises(ResourceError, match=r"ended by SIGKILL: most likely memory ran out"):
        run_sandboxed(die, conceal)

    def leave() -> list[bytes]:
        os._exit(3)

    with pytest.raises(ResourceError, match="ended without an answer"):
        run_sandboxed(leave, conceal)

    def no_memory() -> list[bytes]:
        raise MemoryError

    with pytest.raises(SandboxError, match="MemoryError here"):
        run_sandboxed(no_memory, conceal)


@pytest.mark.skipif(sys.platform != "linux", reason="memory of a process is looked up in /proc")
def test_work_apart_has_its_memory_and_its_time() -> None:
    def grow() -> list[bytes]:
        held: list[Any] = []
        while True:
            held.append(bytearray(10_000_000))
            time.sleep(0.02)

    begun = time.monotonic()
    with pytest.raises(ResourceError, match=r"of memory, most_memory in node\.toml allows 600 MB: allow more"):
        run_sandboxed(grow, conceal, memory=600_000_000)
    with pytest.raises(ResourceError, match=r"longer than the 0\.6 s that its answer is waited for"):
        run_sandboxed(lambda: time.sleep(60) or [], conceal, seconds=0.6)  # type: ignore[func-returns-value]
    assert time.monotonic() - begun < 60


@pytest.mark.skipif(sys.platform != "linux", reason="memory of a process is looked up in /proc")
def test_pages_of_a_mapped_file_are_not_memory_that_the_work_took(tmp_path: Path) -> None:
    path = tmp_path / "text"
    with path.open("wb") as file:
        file.truncate(300_000_000)

    def read() -> list[bytes]:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            touched = sum(mapped[place] for place in range(0, len(mapped), 4096))
            time.sleep(1.2)
        return [b"%d" % touched]

    assert run_sandboxed(read, conceal, memory=own_bytes(os.getpid()) + 100_000_000) == [b"0"]


def test_a_lock_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "node.lock").mkdir()
    with pytest.raises(StorageError, match=r"node\.lock cannot be written"), site_lock(tmp_path, "north"):
        pass
