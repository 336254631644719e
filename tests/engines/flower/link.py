"""A SuperLink's Runtime API at the end of Flower's own HTTP client, which serves whatever nodes gave it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import httpx
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_to_proto
from flwr.proto.message_pb2 import (
    ConfirmMessageReceivedRequest,
    ConfirmMessageReceivedResponse,
    ObjectTree,
    PullObjectRequest,
    PullObjectResponse,
)
from flwr.proto.node_pb2 import NodeInfo
from flwr.proto.runtime_pb2 import GetNodesResponse, PullAppMessagesRequest, PullAppMessagesResponse
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.superlink.grid.http_grid import HttpGrid

from fpld.engines.flower.patches.receive import PieceByPiece, poll_announcements

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from flwr.app import Message
    from flwr.serverapp import Grid

    from fpld.engines.flower.exchange import SentMessage

NODE = 7


class Link:
    """A SuperLink's Runtime API at the end of a real HTTP client: it serves whatever nodes gave it."""

    def __init__(self) -> None:
        self.replies: dict[str, tuple[Message, ObjectTree]] = {}
        self.objects: dict[str, bytes | None] = {}
        self.pulled: list[str] = []
        self.questions: list[int] = []
        self.confirmed: list[str] = []
        self.status = 200
        self.online = [NODE]

    def reply(self, to: str, message: Message, change: Callable[[bytes], bytes] = lambda content: content) -> None:
        """Take a reply from a node; `change` is what the node makes of the pieces before they are named."""
        for identity, item in get_all_nested_objects(message).items():
            self.objects[identity] = change(item.deflate())
        message.metadata.__dict__["_message_id"] = message.object_id
        self.replies[to] = message, get_object_tree(message)

    def __call__(self, request: httpx.Request) -> httpx.Response:
        answer: Any
        if request.url.path.endswith("pull-messages"):
            asked = PullAppMessagesRequest.FromString(request.content).message_ids
            found = {identity: self.replies.pop(identity) for identity in asked if identity in self.replies}
            heads = [message_to_proto(remove_content_from_message(message)) for message, _ in found.values()]
            for identity, head in zip(found, heads, strict=True):
                head.metadata.reply_to_message_id = identity  # that much a SuperLink sees to
            trees = [tree for _, tree in found.values()]
            answer = PullAppMessagesResponse(messages_list=heads, message_object_trees=trees)
            self.questions.append(len(asked))
        elif request.url.path.endswith("pull-object"):
            identity = PullObjectRequest.FromString(request.content).object_id
            content = self.objects.get(identity)
            self.pulled.append(identity)
            there = identity in self.objects
            answer = PullObjectResponse(
                object_found=there, object_available=bool(content), object_content=content or b""
            )
        elif request.url.path.endswith("get-nodes"):
            answer = GetNodesResponse(nodes=[NodeInfo(node_id=identity) for identity in self.online])
        else:
            self.confirmed.append(ConfirmMessageReceivedRequest.FromString(request.content).message_object_id)
            answer = ConfirmMessageReceivedResponse()
        content = answer.SerializeToString()
        return httpx.Response(self.status, content=content, headers={"content-length": str(len(content))})


def pulled(grid: Grid, asked: SentMessage) -> Message | None:
    """Return a reply as soon as it is whole; None if none is announced."""
    pull = PieceByPiece(grid, asked)
    if found := poll_announcements(grid, {asked.identity: pull}):
        return found[0]
    while pull.announced:
        if (reply := pull.step()) is not None:
            return reply
        time.sleep(pull.pause)
    return None


class LinkedGrid(HttpGrid):
    """Flower's own Grid, connected to a `Link`; messages are taken without a word."""

    def __init__(self, link: Link) -> None:
        super().__init__("localhost:1", insecure=True, token="t")  # noqa: S106
        client = self._runtime_client
        client._client = httpx.Client(transport=httpx.MockTransport(link))
        self._run: Any = self.run  # which Flower's own `pull_messages` reads

    @property
    def run(self) -> Any:
        return type("Run", (), {"run_id": 1})

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        return [message.metadata.message_id for message in messages]
