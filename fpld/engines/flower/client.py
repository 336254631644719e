"""The ClientApp: Flower's messages in, a node's duties, Flower's messages out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fpld.engines.flower import duties
from fpld.engines.flower.home import Home, open_home
from fpld.engines.flower.journal import note
from fpld.engines.flower.mods import budget_guard, discreet
from fpld.engines.flower.payload import FRAME, LETTER, STUDENT, pack, unpack, unpack_files, unpack_task
from fpld.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from flwr.app import RecordDict
    from flwr.clientapp.typing import Mod

JOIN = "query.join"


def home_of(context: Context) -> Home:
    """Find the node's home: the node file that the SuperNode was started with (`--node-config 'node="..."'`)."""
    path = context.node_config.get("node")
    if not isinstance(path, str):
        raise InputError("the SuperNode must be started with --node-config 'node=\"path of node.toml\"'")
    return open_home(Path(path))


def client_app(home: Callable[[Context], Home] = home_of, *, mods: Sequence[Mod] = ()) -> ClientApp:
    """Make a ClientApp that takes part in a federation; `home` says which node it is.

    The budget guard comes before your mods: nothing after it can send more than the plan allows. Outermost is
    `discreet`: of errors only a code and a sentence leave.
    """
    app = ClientApp(mods=[discreet, budget_guard, *mods])

    @app.query("join")
    def join(message: Message, context: Context) -> Message:
        node = home(context)
        answer = duties.join(node, unpack(message.content, "letter", LETTER))
        note(node.folder, f"{node.terms.name} is connected")
        return Message(pack(letter=(answer, LETTER)), reply_to=message)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        content = message.content
        letter = unpack(content, "letter", LETTER)
        node, task = home(context), unpack_task(content)
        note(node.folder, f"round {task.plan.round}: training, at most {task.plan.budget_bytes} bytes to send")
        answer = duties.train(node, letter, task, unpack_files(content), _student(content))
        note(node.folder, f"round {task.plan.round}: sending {len(answer.frame)} bytes")
        parts = {"frame": (answer.frame, FRAME)}
        if answer.letter is not None:
            parts["letter"] = answer.letter, LETTER
        return Message(pack(**parts), reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        content = message.content
        letter = unpack(content, "letter", LETTER)
        answer = duties.evaluate(home(context), letter, unpack_files(content), _student(content))
        return Message(pack(letter=(answer, LETTER)), reply_to=message)

    return app


def _student(content: RecordDict) -> bytes:
    """Return the student as it was packed, nothing if this node has it already."""
    return unpack(content, "student", STUDENT) if "student" in content else b""
