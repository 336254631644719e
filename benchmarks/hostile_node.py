"""A site that misbehaves: it trains as it should, and then answers with an attack of its own in every round.

`benchmarks.deployment_attacks` starts it; its SuperNode loads `attack` in the place of our ClientApp.
"""

from __future__ import annotations

import os
import pickle
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fpld.engines.flower.messages import (
    FRAME,
    SIGNED_MESSAGE,
    SharedArrays,
    add_field,
    field_names,
    pack_fields,
    read_field,
    unpack_task,
)
from fpld.protocol.messages import encode_prior_request
from fpld.protocol.wire import CHECKSUM_BYTES, HEADER, _checksum
from fpld.storage.files import write_atomic

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from flwr.app import Context, Message, RecordDict

    from fpld.protocol import Task

ESCAPES = "\x1b[2J\x1b]0;owned\x07\r\n"
HOME = "HOSTILE_HOME"  # a variable of the environment: the node's folder
SLOW = "slow"  # a file that says how long, in seconds, the SuperNode keeps back what it has announced
HUGE = 64 << 20


@dataclass(frozen=True)
class Scene:
    """What an attack has: the right reply's bytes, the node's secret, its folder, the round, and the round's task."""

    right: bytes
    key: bytes
    folder: Path
    round: int
    task: Task | None = None

    def kept(self, round: int) -> bytes:
        """Return the right frame of a round before."""
        return (self.folder / f"frame-{round}").read_bytes()


def framed(frame: bytes) -> RecordDict:
    """Return the content of a reply with a frame."""
    return pack_fields(frame=(frame, FRAME))


def relabelled(scene: Scene, field: int, value: Any, key: bytes | None = None) -> RecordDict:
    """Return the right frame with another field in its header, and a checksum made with the node's own key."""
    fields = list(HEADER.unpack_from(scene.right))
    fields[field] = value if value is not None else fields[field]
    body = HEADER.pack(*fields) + scene.right[HEADER.size : -CHECKSUM_BYTES]
    return framed(body + _checksum(body, scene.key if key is None else key))


def flipped(scene: Scene) -> RecordDict:
    """Flip a bit of the payload."""
    frame = bytearray(scene.right)
    frame[HEADER.size + 7] ^= 4
    return framed(bytes(frame))


def scrambled(scene: Scene) -> RecordDict:
    """Send random bytes for symbols, with a right header and tag."""
    size = len(scene.right) - HEADER.size - CHECKSUM_BYTES
    body = scene.right[: HEADER.size] + np.random.default_rng(0).bytes(size)
    return framed(body + _checksum(body, scene.key))


def twice(scene: Scene) -> RecordDict:
    """Send two frames in one reply."""
    content = framed(scene.right)
    add_field(content, "more", scene.right, FRAME)
    return content


def asking(scene: Scene) -> RecordDict:
    """Ask for all blocks of the prior, whatever was sent: again when they have come."""
    if scene.task is None or scene.task.notes is None:
        raise ValueError("the task has no prior that a node computes")
    blocks = range(len(scene.task.notes.counts))
    return framed(encode_prior_request(list(blocks), scene.task.plan, key=scene.key))


def folded(_scene: Scene) -> RecordDict:
    """Send 100 kB that stand for three gigabytes: one piece, named 30,000 times."""
    from flwr.app import Array, RecordDict

    deflate = Array.deflate

    def folding(array: Array) -> bytes:
        head, body = deflate(array).split(b"\x00", 1)
        body = body.replace(b'"arraychunk_ids": [0]', b'"arraychunk_ids": [' + b"0, " * 30_000 + b"0]")
        return head.rsplit(b" ", 1)[0] + f" {len(body)}".encode() + b"\x00" + body

    setattr(Array, "deflate", folding)  # noqa: B010 - a method of another's
    content = RecordDict()
    add_field(content, "frame", bytes(100_000), FRAME, shared=SharedArrays())
    return content


def pickled(scene: Scene) -> RecordDict:
    """Send a pickle that would leave a file behind if anyone opened it."""
    from flwr.app import Array, ArrayRecord, RecordDict

    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (scene.folder / "pickle-ran",)

    array = Array("object", (1,), "numpy.ndarray", pickle.dumps(np.array([Evil()], dtype=object)))
    return RecordDict({"shared": ArrayRecord({"frame": array})})


def shouting(_scene: Scene) -> RecordDict:
    """Fail with a text of 1.5 MB that would clear a terminal and change its title."""
    raise RuntimeError(ESCAPES + "x" * 1_500_000)


def slow(scene: Scene) -> RecordDict:
    """Let the SuperNode announce the reply, and keep its pieces back."""
    (scene.folder / SLOW).write_text("200")
    return framed(scene.right)


def evaluated(**changes: Any) -> Callable[[Scene], RecordDict]:
    """Return an attack on an evaluation: the right letter with other values, and a right tag."""
    from fpld.engines.flower.credentials import SignedMessage, sign_message

    def change(scene: Scene) -> RecordDict:
        key = changes.get("key", scene.key)
        told = {name: value for name, value in changes.items() if name != "key"}
        return pack_fields(
            letter=(sign_message(key, {**SignedMessage.parse(scene.right).body, **told}), SIGNED_MESSAGE)
        )

    return change


TRAIN: Mapping[str, Callable[[Scene], RecordDict]] = {
    "a flipped bit in the frame": flipped,
    "the frame of an earlier round": lambda scene: framed(scene.kept(1)),
    "a frame of another run, with a right tag": lambda scene: relabelled(scene, 3, bytes(16)),
    "a frame coded against another plan or prior, with a right tag": lambda scene: relabelled(scene, 10, bytes(32)),
    "a frame in another node's name, with a right tag": lambda scene: relabelled(scene, 5, 0),
    "a right frame under another key": lambda scene: relabelled(scene, 0, None, key=bytes(32)),
    "an empty frame": lambda _scene: framed(b""),
    "random symbols, with a right tag": scrambled,
    "two frames in one reply": twice,
    "requests for the prior again and again": asking,
    "a frame 100 kB over its budget": lambda scene: framed(scene.right + bytes(100_000)),
    "a pickle in the place of a frame": pickled,
    "an error text of 1.5 MB with escape sequences": shouting,
    "a reply of 64 MiB": lambda _scene: framed(np.random.default_rng(0).bytes(HUGE)),
    "a chunk named 30,000 times (3 GB from 100 kB)": folded,
    "a reply that is announced and never whole": slow,
}
"""What is sent in the place of a frame: one a round, in this order."""
EVALUATE: Mapping[str, Callable[[Scene], RecordDict]] = {
    '"tokens": true in an evaluation': evaluated(tokens=True),
    "a loss of 4000": evaluated(loss=4000.0),
    "a negative loss": evaluated(loss=-1.0),
    "an evaluation of another round": evaluated(round=99),
    "an evaluation with another key": evaluated(key=bytes(32)),
    "a huge name for a field": evaluated(**{ESCAPES + "y" * 50_000: 1}),
}
"""What is sent in the place of an evaluation, in the first rounds."""
JOIN = "a name with escape sequences"


def attack(message: Message, context: Context) -> Message:
    """Answer as our ClientApp does, with what this round's attack makes of it."""
    from flwr.app import Message as Reply

    from fpld.engines.flower.client import client_app, site_of
    from fpld.engines.flower.credentials import SignedMessage, sign_message

    reply = client_app()(message, context)
    home = site_of(context)
    letter = SignedMessage.parse(read_field(message.content, "letter", SIGNED_MESSAGE)).body
    key = home.secret(bytes.fromhex(letter["session"]))
    kind = message.metadata.message_type
    if kind == "query.join":
        if (home.folder / "joined").exists():
            return reply
        (home.folder / "joined").touch()
        body = SignedMessage.parse(read_field(reply.content, "letter", SIGNED_MESSAGE)).body
        return Reply(
            pack_fields(letter=(sign_message(key, {**body, "name": ESCAPES + "south"}), SIGNED_MESSAGE)),
            reply_to=message,
        )
    content = reply.content
    if kind == "train":
        round = int(letter["round"])
        scene = Scene(read_field(content, "frame", FRAME), key, home.folder, round, unpack_task(message.content))
        (home.folder / f"frame-{round}").write_bytes(scene.right)
        attacks = list(TRAIN.values())
        content = attacks[round - 1](scene) if round <= len(attacks) else content
    told = letter.get("evaluate", letter["round"] if kind == "evaluate" else 0)
    lies = list(EVALUATE.values())
    if told > 0 and "letter" in field_names(reply.content):
        right = read_field(reply.content, "letter", SIGNED_MESSAGE)
        lie = (
            lies[told - 1](Scene(right, key, home.folder, told))
            if told <= len(lies)
            else pack_fields(letter=(right, SIGNED_MESSAGE))
        )
        add_field(content, "letter", read_field(lie, "letter", SIGNED_MESSAGE), SIGNED_MESSAGE)
    return Reply(content, reply_to=message)


def pin() -> None:
    """Let this process of Flower's load `attack`, and keep replies back where that is asked for."""
    from flwr.clientapp import utils

    utils.get_load_client_app_fn = lambda *_served, **_named: lambda *_app: attack  # type: ignore[assignment]
    if "supernode" not in Path(sys.argv[0]).name:
        return
    from flwr.supernode import start_client_internal as node

    name = "push_object_contents_from_iterable"
    mark = Path(os.environ[HOME]) / SLOW
    push = getattr(node, name)

    def keep_back(contents: Any, **named: Any) -> None:
        if mark.exists():
            seconds = float(mark.read_text())
            mark.unlink()
            time.sleep(seconds)
            return
        push(contents, **named)

    setattr(node, name, keep_back)


def environment(folder: Path) -> dict[str, str]:
    """Return what a SuperNode's environment must have so that all its processes call `pin`."""
    write_atomic(folder / "sitecustomize.py", b"from benchmarks.hostile_node import pin\n\npin()\n")
    root = str(Path(__file__).parent.parent)
    return {"PYTHONPATH": os.pathsep.join([str(folder), root]), HOME: str(folder.parent.parent)}
