"""Many nodes in one process, which speak a SuperLink's Fleet API as SuperNodes do, and train as one of them.

    python -m benchmarks.fleet_nodes FOLDER      (with FOLDER/nodes/NAME/node.toml, one for each node)

Each node has an id, connections, heartbeats and polls of its own, by the client of real nodes. Each
proves who it is to the aggregator with its own secret. The first node is whole: it trains on its text. Every other
codes the first one's logits under its own plan, and says the first one's losses.
"""

from __future__ import annotations

import os
import resource
import sys
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from flwr.app import Message, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree, iterate_object_tree
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supernode import fleet_http_connection

from fpld.codecs import ArrayPrior
from fpld.data.places import round_probe
from fpld.engines.flower.credentials import SignedMessage, sign_message
from fpld.engines.flower.messages import (
    FRAME,
    SIGNED_MESSAGE,
    STUDENT,
    field_names,
    pack_fields,
    read_field,
    unpack_files,
    unpack_task,
)
from fpld.engines.flower.patches.connection import LongPollClient
from fpld.engines.flower.patches.polling import set_heartbeat_interval
from fpld.engines.flower.site import handlers
from fpld.engines.flower.site.config import NodeFile, open_site
from fpld.node.prior_cache import Predictions
from fpld.node.training import open_student
from fpld.numerics import centre
from fpld.protocol.shared_prior import ComputedPrior
from fpld.protocol.wire import VERSION, encode_frame
from fpld.registry import codecs
from fpld.storage.run_folder import OWN_MODEL

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

    from fpld.engines.flower.site.config import Site
    from fpld.protocol import Task

THREADS = 6
_AGAIN = 2.0  # seconds until a node tries again what went wrong
_WAIT = 0.2  # seconds until a node looks again for what the first one must do before it


class Done(NamedTuple):
    """What the first node has made of a message: the reply, and the prior and the logits of its round."""

    content: RecordDict
    prior: ArrayPrior | None = None
    logits: np.ndarray[Any, np.dtype[np.float32]] | None = None


class First:
    """The first node, which is whole; what it has done is what the others send in their own names."""

    def __init__(self, home: Site) -> None:
        self.home = home
        self._done: dict[str, Done] = {}

    def find(self, content: RecordDict) -> Done | None:
        """Return what it has answered to such a message, None before it has."""
        return self._done.get(_kind(content))

    def answer(self, content: RecordDict) -> RecordDict:
        """Do the work, and keep it for the others."""
        letter = read_field(content, "letter", SIGNED_MESSAGE)
        key = _kind(content)
        if key == "join":
            return pack_fields(letter=(handlers.handle_join(self.home, letter), SIGNED_MESSAGE))
        files = unpack_files(content)
        student = read_field(content, "student", STUDENT) if "student" in field_names(content) else b""
        if key == "evaluate":
            reply = pack_fields(letter=(handlers.handle_evaluate(self.home, letter, files, student), SIGNED_MESSAGE))
            self._done[key] = Done(reply)
            return reply
        task = unpack_task(content)
        frame, evaluation = handlers.handle_train(self.home, letter, task, files, student)
        reply = pack_fields(
            frame=(frame, FRAME), **({} if evaluation is None else {"letter": (evaluation, SIGNED_MESSAGE)})
        )
        self._done[key] = Done(reply, *self._round(letter, task))
        return reply

    def _round(self, letter: bytes, task: Task) -> tuple[ArrayPrior | None, np.ndarray[Any, Any]]:
        request = handlers.Request.parse(self.home, letter, "train")
        part = request.spec
        place = request.paths
        public = None if part.files.public is None else place.files / part.files.public
        probe = round_probe(place.files / part.files.probe, public, part.seed, task.plan.round)
        prior = None
        if task.notes is not None:
            shared = open_student(place.files / part.files.student, handlers._unpack_student(request, b""))
            computed = ComputedPrior(Predictions(shared, probe.sequences), task.notes, task.sent)
            prior = ArrayPrior(computed.block(range(probe.contexts)))
        return prior, centre(open_student(place.folder / OWN_MODEL).logits(probe.sequences))


def _kind(content: RecordDict) -> str:
    body = SignedMessage.parse(read_field(content, "letter", SIGNED_MESSAGE)).body
    return f"train {body['round']}" if body["kind"] == "train" else str(body["kind"])


class Client(LongPollClient):
    """A node's connections; the last one that was made is that of the node that signs on."""

    made: Client

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        Client.made = self


@dataclass
class Node:
    """One of the nodes, with its connections."""

    index: int
    file: Path
    first: First
    calls: Any  # of Flower's connection, the node's id first
    client: Any  # the same connection's, which can wait
    files: bool = False
    secrets: dict[bytes, bytes] = field(default_factory=dict)

    def work(self, turns: threading.Semaphore) -> None:
        """Wait for messages and answer them, for ever; only so many nodes work at once."""
        while True:
            try:
                with turns:
                    message = self._receive()
                if message is None:
                    while self.client.wait(self.calls[0]) is False:
                        pass
                else:
                    self._answer(message, turns)
            except Exception as error:  # a run that has ended, a SuperLink that is busy: as a SuperNode, try again
                print(f"{self.file.parent.name}: {type(error).__name__}: {error}", flush=True)
                time.sleep(_AGAIN)

    def _answer(self, message: Message, turns: threading.Semaphore) -> None:
        while True:
            with turns:
                if (reply := self._reply(message.content)) is not None:
                    self._send(Message(reply, reply_to=message))
                    return
            time.sleep(_WAIT)

    def _receive(self) -> Message | None:
        _, receive, _, _, _, pull, _, confirm = self.calls
        found = receive()
        if found is None:
            return None
        head, tree = found
        run = head.metadata.run_id
        identity = head.metadata.message_id
        contents = {}
        for piece in dict.fromkeys(each.object_id for each in iterate_object_tree(tree)):
            contents[piece] = _whole(partial(pull, run, piece))
        confirm(run, identity)
        message = cast("Message", inflate_object_from_contents(identity, contents))
        message.metadata.__dict__["_message_id"] = identity
        return message

    def _reply(self, content: RecordDict) -> RecordDict | None:
        if self.index == 0:
            return self.first.answer(content)
        letter = SignedMessage.parse(read_field(content, "letter", SIGNED_MESSAGE)).body
        key = self._secret(bytes.fromhex(letter["session"]))
        if letter["kind"] == "join":
            set_heartbeat_interval(int(letter["nodes"]))
            missing = [] if self.files else letter["files"]
            answer = {"kind": "joined", "name": self.file.parent.name, "challenge": letter["challenge"]}
            more = {"missing": missing, "wire": VERSION, "student": None, "instance": ""}
            return pack_fields(letter=(sign_message(key, answer | more), SIGNED_MESSAGE))
        self.files = True
        done = self.first.find(content)
        return None if done is None else self._repeated(content, done, key)

    def _repeated(self, content: RecordDict, done: Done, key: bytes) -> RecordDict:
        """Return what the first node has answered, under this node's plan and with its key."""
        parts = {}
        if done.logits is not None:
            task = unpack_task(content)
            plan = replace(task.plan, prior=done.prior)
            codec = codecs.get(task.codec)
            parts["frame"] = encode_frame(codec.encode([done.logits], plan), plan, codec.code, key=key), FRAME
        if "letter" in field_names(done.content):
            said = SignedMessage.parse(read_field(done.content, "letter", SIGNED_MESSAGE)).body
            parts["letter"] = sign_message(key, said), SIGNED_MESSAGE
        return pack_fields(**parts)

    def _secret(self, session: bytes) -> bytes:
        if session not in self.secrets:
            self.secrets[session] = open_site(self.file).secret(session)
        return self.secrets[session]

    def _send(self, reply: Message) -> None:
        _, _, send, _, _, _, push, _ = self.calls
        reply.metadata.__dict__["_message_id"] = reply.object_id
        wanted, session = send(reply, get_object_tree(reply), 0.0)
        for identity, item in get_all_nested_objects(reply).items():
            if identity in wanted:
                push(reply.metadata.run_id, session, identity, item.deflate())


def _whole(pull: Callable[[], bytes]) -> bytes:
    """Wait for a piece of a message that was announced."""
    from flwr.supercore.inflatable.inflatable_utils import ObjectUnavailableError

    while True:
        try:
            return pull()
        except ObjectUnavailableError:
            time.sleep(0.3)


def main() -> None:
    """Sign all nodes on, and let them work until this process is ended."""
    folder = Path(sys.argv[1])
    files = sorted(folder.glob("nodes/*/node.toml"))
    address = NodeFile.read(files[0]).address
    first = First(open_site(files[0]))
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    fleet_http_connection.FleetHttpClient = Client  # type: ignore[attr-defined]
    stack = ExitStack()
    turns = threading.Semaphore(THREADS)
    threads = []
    for index, file in enumerate(files):
        calls = stack.enter_context(fleet_http_connection.http_request_response(address, insecure=True))
        node = Node(index, file, first, calls, Client.made)
        threads.append(threading.Thread(target=node.work, args=(turns,), daemon=True))
    print(f"{len(threads)} nodes are connected", flush=True)
    for thread in threads:
        thread.start()
    try:
        threads[0].join()
    finally:
        os._exit(0)  # a thousand threads that wait are not waited for


if __name__ == "__main__":
    main()
