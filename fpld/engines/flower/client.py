"""The ClientApp of a site: Flower's messages in, the site's handlers, Flower's messages out.

Two mods stand between the handlers and the network: `redact_errors` lets no detail of an error out, and `budget_guard`
no reply that is larger than its task allows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING

from flwr.app import Context, Message, MessageType
from flwr.clientapp import ClientApp

from fpld.engines.flower.log import append_log
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
from fpld.engines.flower.site import handlers
from fpld.engines.flower.site.config import Site, open_site
from fpld.engines.flower.site.disclosure import SiteError, redact
from fpld.engines.flower.site.ledger import MAX_LOSS_MESSAGE_BYTES
from fpld.engines.flower.site.resources import SandboxError, run_sandboxed
from fpld.errors import BudgetError, InputError
from fpld.protocol.wire import OVERHEAD_BYTES

if TYPE_CHECKING:
    from flwr.app import RecordDict
    from flwr.clientapp.typing import ClientAppCallable, Mod


frame_limit: ContextVar[int | None] = ContextVar("frame_limit", default=None)
"""The most bytes of the frame that answers the message in work, as the handler of this thread has found it."""

Work = Callable[[], Sequence[bytes]]
Runner = Callable[[Site, Work, float], Sequence[bytes]]


def redact_errors(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Replace an error by one of a few sentences: paths, field names and private content stay at the site.

    A mod of Flower's, the outermost one.
    """
    try:
        return call_next(message, context)
    except SiteError:  # it is redacted already
        raise
    except Exception as error:  # whatever it is, the details stay at the site
        path = context.node_config.get("node")
        folder = Path(path).resolve().parent if isinstance(path, str) else None
        raise redact(message.metadata.message_type, error, folder) from None


def budget_guard(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Refuse a round's reply unless it is one frame within the task's budget and, at most, an evaluation.

    A mod of Flower's. It keeps the bit budget, whatever the other mods do. The limit is that of the task which the
    handler has parsed in its sandbox: this process parses none.

    Raises
    ------
    BudgetError
        If the reply is larger, or holds anything else, or no handler said a limit. Nothing is sent then.
    """
    if message.metadata.message_type != MessageType.TRAIN:
        return call_next(message, context)
    before = frame_limit.set(None)
    try:
        reply = call_next(message, context)
        max_bytes = frame_limit.get()
    finally:
        frame_limit.reset(before)
    if not reply.has_content():
        return reply
    if max_bytes is None:
        raise BudgetError(
            "a reply must come from the handler of fpld, which says how large it may be: nothing was sent"
        )
    frame = read_field(reply.content, "frame", FRAME)
    fields = field_names(reply.content)
    evaluation = read_field(reply.content, "letter", SIGNED_MESSAGE) if "letter" in fields else b""
    if not fields <= {"frame", "letter"} or len(frame) > max_bytes:
        raise BudgetError(
            f"a reply must be one frame of at most {max_bytes} bytes, got {len(frame)} bytes in {sorted(fields)}: "
            "nothing was sent"
        )
    if len(evaluation) > MAX_LOSS_MESSAGE_BYTES:
        raise BudgetError(
            f"the evaluation beside a frame must have at most {MAX_LOSS_MESSAGE_BYTES} bytes, got {len(evaluation)}"
        )
    return reply


def site_of(context: Context) -> Site:
    """Return the site of the node file that the SuperNode was started with (`--node-config 'node="..."'`)."""
    path = context.node_config.get("node")
    if not isinstance(path, str):
        raise InputError("the SuperNode must be started with --node-config 'node=\"path of node.toml\"'")
    return open_site(Path(path))


def run_inline(site: Site, work: Work, seconds: float) -> Sequence[bytes]:  # noqa: ARG001 - the signature of runners
    """Do a message's work in this process."""
    return work()


def run_forked(site: Site, work: Work, seconds: float) -> Sequence[bytes]:
    """Do a message's work in a sandbox, within the site's memory and the time for which its answer is waited."""

    def reason(error: Exception) -> str:
        return str(redact("the work", error, site.folder))

    try:
        return run_sandboxed(work, reason, memory=site.terms.most_memory, seconds=seconds)
    except SandboxError as error:
        raise SiteError(str(error)) from None


def client_app(
    home: Callable[[Context], Site] = site_of, *, mods: Sequence[Mod] = (), runner: Runner = run_inline
) -> ClientApp:
    """Make a ClientApp that takes part in a federation.

    Parameters
    ----------
    home
        Returns the site of a context.
    mods
        Mods of your own. They come after `redact_errors` and `budget_guard`, so that they cannot send more than the
        plan allows, nor details of an error.
    runner
        Does the work of a message: `run_inline`, or `run_forked` if this process must outlive it.
    """
    app = ClientApp(mods=[redact_errors, budget_guard, *mods])

    @app.query("join")
    def join(message: Message, context: Context) -> Message:
        site = home(context)
        answer = handlers.handle_join(site, read_field(message.content, "letter", SIGNED_MESSAGE))
        append_log(site.folder, f"{site.terms.name} is connected")
        return Message(pack_fields(letter=(answer, SIGNED_MESSAGE)), reply_to=message)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        content = message.content
        signed = read_field(content, "letter", SIGNED_MESSAGE)
        site = home(context)
        handlers.Request.parse(site, signed, "train")

        # The task is parsed in here: only of a message whose tag is right, and within the limits of a sandbox.
        def work() -> Sequence[bytes]:
            task = unpack_task(content)
            plan = task.plan
            most = OVERHEAD_BYTES + plan.budget_bytes
            append_log(site.folder, f"round {plan.round}: training, at most {most} bytes to send")
            answer = handlers.handle_train(site, signed, task, unpack_files(content), _student(content))
            append_log(site.folder, f"round {plan.round}: sending {len(answer.frame)} bytes")
            limit = str(most).encode()
            return (limit, answer.frame) if answer.evaluation is None else (limit, answer.frame, answer.evaluation)

        limit, frame, *evaluation = runner(site, work, message.metadata.ttl)
        frame_limit.set(int(limit))
        fields = {"frame": (frame, FRAME)}
        if evaluation:
            fields["letter"] = evaluation[0], SIGNED_MESSAGE
        return Message(pack_fields(**fields), reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        content = message.content
        signed = read_field(content, "letter", SIGNED_MESSAGE)
        site = home(context)
        handlers.Request.parse(site, signed, "evaluate")

        def work() -> Sequence[bytes]:
            return (handlers.handle_evaluate(site, signed, unpack_files(content), _student(content)),)

        (answer,) = runner(site, work, message.metadata.ttl)
        return Message(pack_fields(letter=(answer, SIGNED_MESSAGE)), reply_to=message)

    return app


def _student(content: RecordDict) -> bytes:
    """Return the student's delta; empty if the site has this student already."""
    return read_field(content, "student", STUDENT) if "student" in field_names(content) else b""
