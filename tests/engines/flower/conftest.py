"""A small federation whose nodes have homes of their own, and a Grid that carries real bytes within this process."""

from __future__ import annotations

import json
from itertools import count
from typing import TYPE_CHECKING, Any

import pytest
from flwr.app import Context, Error, Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.task_identity import TaskIdentity

from fpld import config as configuration
from fpld.engines.flower import client_app, serve
from fpld.engines.flower.credentials import make_certificates
from fpld.engines.flower.site.config import Invitation, init_node
from tests.federation.conftest import CONFIG, write_texts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from fpld.config import Config

NAMES = ("north", "east", "south")
WRITTEN = [
    (
        "[baselines]",
        '[codec]\nname = "samples"\n\n[combine]\nrule = "mixture"\n\n[written]\ncontexts = 320\n\n[baselines]',
    ),
    ("bits = 1.5", "bits = 0.25"),
    ("bits = 4.0", "bits = 0.25"),
]
"""Changes that let nodes write text."""
Wire = dict[str, bytes]


@pytest.fixture(autouse=True)
def _in_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower makes messages only inside a run: the one place where a test pretends to be in one."""
    for name, value in (("_task_id", 1), ("_run_id", 1), ("_node_id", 1)):
        monkeypatch.setattr(TaskIdentity, name, value)


class InProcessGrid(Grid):
    """Call each node's ClientApp with every message serialized and parsed, both ways, as SuperLink and SuperNode do.

    `tamper(node file, reply)` may change what comes back; `offline` holds ids of nodes that are not there.
    """

    def __init__(self, node_files: list[Path]) -> None:
        self.nodes = {100 + k: file for k, file in enumerate(node_files)}
        self.offline: set[int] = set()
        self.replies: dict[str, Message] = {}
        self.numbers = count()
        self.sent: list[tuple[str, str, int]] = []
        self.tamper: Callable[[Path, Message], Message | None] = lambda _file, reply: reply

    def set_run(self, run: Any) -> None:
        raise NotImplementedError

    @property
    def run(self) -> Any:
        raise NotImplementedError

    def create_message(self, *arguments: Any, **named: Any) -> Message:
        raise NotImplementedError

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        return self.pull_messages(self.push_messages(messages))

    def get_node_ids(self) -> Iterable[int]:
        return [identity for identity in self.nodes if identity not in self.offline]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        identities = []
        for message in messages:
            identity = f"message {next(self.numbers)}"
            message.metadata.__dict__["_message_id"] = identity
            received, size = carried(message)
            received.metadata.__dict__["_message_id"] = identity
            back = self.answer(received, size)
            if back is not None:
                self.replies[identity] = back
            identities.append(identity)
        return identities

    def answer(self, message: Message, size: int) -> Message | None:
        """Return what a node answers to a message of so many bytes, None if nothing."""
        file = self.nodes[message.metadata.dst_node_id]
        self.sent.append((file.parent.name, message.metadata.message_type, size))
        context = Context(1, message.metadata.dst_node_id, {"node": str(file)}, RecordDict(), {})
        try:
            reply = client_app()(message, context)
        except Exception as error:  # as flwr does
            reply = Message(Error(2, f"{type(error)}:<'{error}'>"), reply_to=message)
        return self.tamper(file, carried(reply)[0])

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [self.replies.pop(identity) for identity in message_ids if identity in self.replies]


def carried(message: Message) -> tuple[Message, int]:
    """Return the message as the other end parses it, and the bytes that carried it."""
    wire: Wire = {identity: item.deflate() for identity, item in get_all_nested_objects(message).items()}
    parsed = inflate_object_from_contents(message.object_id, dict(wire))
    assert isinstance(parsed, Message)
    return parsed, sum(map(len, wire.values()))


class Deployment:
    """Configuration, certificates and nodes in a folder."""

    def __init__(
        self, folder: Path, changes: Iterable[tuple[str, str]] = (), *, address: str = "127.0.0.1:8000"
    ) -> None:
        write_texts(folder)
        text = CONFIG.format(folder=folder).replace(f'path = "{folder}/texts"\n', "")
        text = text.replace('source = "public"', f'source = "{folder}/texts/public"')
        for name in NAMES:
            text = text.replace(f'name = "{name}"', f'name = "{name}"\ndata = "{folder}/texts/{name}"')
        text += (
            f'\n[baselines]\nmethods = []\n\n[flower]\ncerts = "{folder}/certs"\nkeys = "{folder}/keys"\nwait = 0.2\n'
        )
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
        self.folder = folder
        self.text = text
        self.file = folder / "config.toml"
        self.file.write_text(text)
        make_certificates(folder / "certs", address, ["localhost", "127.0.0.1"], days=2)
        invitation = Invitation.read(folder / "certs/federation.toml")
        (folder / "keys").mkdir()
        self.node_files = []
        for name in NAMES:
            home = folder / "nodes" / name
            public = init_node(home, name, invitation, f'data = "{folder}/texts/{name}"')
            (folder / "keys" / public.name).write_bytes(public.read_bytes())
            self.node_files.append(home / "node.toml")

    def allow(self, may_send: list[str], *names: str, more: str = "") -> None:
        """Say what may leave these sites, all without names; `more` goes into their files besides."""
        for file in self.node_files:
            if not names or file.parent.name in names:
                text = file.read_text()
                assert text.count('may_send = ["labels"]') == 1
                file.write_text(text.replace('may_send = ["labels"]', f"may_send = {json.dumps(may_send)}\n{more}"))

    @property
    def config(self) -> Config:
        return configuration.parse_config(self.file.read_text(), "test")

    def grid(self) -> InProcessGrid:
        return InProcessGrid(self.node_files)

    def serve(self, grid: Grid, out: str = "flower") -> list[dict[str, Any]]:
        return serve(grid, self.config, self.file.read_text(), self.folder / out)

    def trace(self, out: str = "flower") -> list[dict[str, Any]]:
        lines = (self.folder / out / "fpld/trace.jsonl").read_text().splitlines()
        # How long it took, and what an engine sends down besides the tasks, are not the federation's.
        own = {"seconds": None, "downlink_bytes": None, "node_downlink_bytes": None, "downlink": None, "uplink": None}
        return [{**json.loads(line), **own} for line in lines]

    def log(self, out: str = "flower") -> list[str]:
        return [json.loads(line)["text"] for line in (self.folder / out / "log.txt").read_text().splitlines()]


@pytest.fixture
def deployment(tmp_path: Path) -> Deployment:
    """Three nodes with keys and texts, and the aggregator's configuration."""
    return Deployment(tmp_path)
