"""The ClientApp: Flower's messages in, a node's duties, Flower's messages out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fpld.engines.flower import duties
from fpld.engines.flower.apart import ApartError, apart
from fpld.engines.flower.discretion import SiteError, conceal
from fpld.engines.flower.home import Home, open_home
from fpld.engines.flower.journal import note
from fpld.engines.flower.mods import budget_guard, discreet
from fpld.engines.flower.payload import FRAME, LETTER, STUDENT, names, pack, unpack, unpack_files, unpack_task
from fpld.errors import InputError

if TYPE_CHECKING:
    from flwr.app import RecordDict
    from flwr.clientapp.typing import Mod

JOIN = "query.join"
Work = Callable[[], Sequence[bytes]]
Runner = Callable[[Home, Work, float], Sequence[bytes]]


def home_of(context: Context) -> Home:
    """Find the node's home: the node file that the SuperNode was started with (`--node-config 'node="..."'`)."""
    path = context.node_config.get("node")
    if not isinstance(path, str):
        raise InputError("the SuperNode must be started with --node-config 'node=\"path of node.toml\"'")
    return open_home(Path(path))


def here(home: Home, work: Work, seconds: float) -> Sequence[bytes]:  # noqa: ARG001  # the form of all runners
    """Do a message's work in this process."""
    return work()


def forked(home: Home, work: Work, seconds: float) -> Sequence[bytes]:
    """Do it in a fork, within the site's memory and the time for which the answer is waited."""
    try:
        said = partial(_said, home)
        return apart(work, said, memory=home.terms.most_memory, seconds=seconds)
    except ApartError as error:
        raise SiteError(str(error)) from None


def _said(home: Home, error: Exception) -> str:
    return str(conceal("the work", error, home.folder))


def client_app(
    home: Callable[[Context], Home] = home_of, *, mods: Sequence[Mod] = (), runner: Runner = here
) -> ClientApp:
    """Make a ClientApp that takes part in a federation; `home` says which node it is.

    `runner` does the work of a message: `here`, or `forked` where this process must outlive it. The budget guard comes
    before your mods: nothing after it can send more than the plan allows. Outermost is `discreet`: of errors only a
    code and a sentence leave.
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
        files, student = unpack_files(content), _student(content)

        def work() -> Sequence[bytes]:
            answer = duties.train(node, letter, task, files, student)
            return (answer.frame,) if answer.letter is None else (answer.frame, answer.letter)

        frame, *letters = runner(node, work, message.metadata.ttl)
        note(node.folder, f"round {task.plan.round}: sending {len(frame)} bytes")
        parts = {"frame": (frame, FRAME)}
        if letters:
            parts["letter"] = letters[0], LETTER
        return Message(pack(**parts), reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        content = message.content
        letter, node = unpack(content, "letter", LETTER), home(context)
        files, student = unpack_files(content), _student(content)
        (answer,) = runner(node, lambda: (duties.evaluate(node, letter, files, student),), message.metadata.ttl)
        return Message(pack(letter=(answer, LETTER)), reply_to=message)

    return app


def _student(content: RecordDict) -> bytes:
    """Return the student as it was packed, nothing if this node has it already."""
    return unpack(content, "student", STUDENT) if "student" in names(content) else b""
