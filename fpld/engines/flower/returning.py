"""A SuperNode that comes back is let in at once.

A SuperLink holds a node that died for alive until two signs of life are missed, up to a minute, and turns its return
away till then (HTTP 412). Whoever holds the site's lock knows that no other process of this site is there: so it signs
the node off first, under the node id that it had, and then on again. In between the aggregator has time to see that
what it had asked for is lost.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import sys
import time
import uuid
from typing import TYPE_CHECKING, Any, NoReturn

from fpld.engines.flower.expiry import clock_difference
from fpld.errors import SPACE, FpldError, ProtocolError, ran_out
from fpld.storage.files import write_atomic

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SEAT, CONTACT = "seat.json", "contact"
NOTICED = 3.0  # seconds off: an aggregator of up to 600 nodes looks more often than that
LONGEST_WAIT = 4  # seconds between two attempts to reach a SuperLink that is away; Flower's own are longer
PIECE_WAITS = 0.3, 2.0  # seconds between two looks for a piece of a message, first and at most
_HELD = 412

log = logging.getLogger(__name__)


def return_at_once(folder: Path) -> None:
    """Let the SuperNode of this process sign off what is left of the one before it; the folder remembers its id."""
    from flwr.proto.fleet_pb2 import DeactivateNodeRequest
    from flwr.supernode.fleet_http_client import FleetHttpClient
    from httpx import HTTPError, HTTPStatusError, ReadError, ReadTimeout, RemoteProtocolError, TransportError

    original = FleetHttpClient.ActivateNode
    if not callable(original):
        raise ProtocolError("this version of Flower signs nodes on in another way")

    pull, push = FleetHttpClient.PullMessages, FleetHttpClient.PushObject
    uncertain: set[tuple[str, str]] = set()

    def pull_messages(client: Any, request: Any) -> Any:
        try:
            response = pull(client, request)
        except (ReadError, ReadTimeout, RemoteProtocolError) as error:
            _leave(f"an answer of the SuperLink got lost ({error!r}), and perhaps a message with it")
        _sign(folder.parent / CONTACT)
        return response

    def push_object(client: Any, request: Any) -> Any:
        """Take a piece for stored that a SuperLink refuses the second time: only its first answer was lost."""
        name = request.session_id, request.object_id
        try:
            response = push(client, request)
        except TransportError:
            uncertain.add(name)
            raise
        response.stored = response.stored or name in uncertain
        uncertain.discard(name)
        return response

    def activate(client: Any, request: Any) -> Any:
        try:
            response = original(client, request)
        except HTTPStatusError as error:
            if difference := clock_difference(error.response.headers.get("date")):
                sys.stderr.write(f"ERROR: {difference}\n")
            before = _read(folder / SEAT)
            if error.response.status_code != _HELD or before is None:
                raise
            try:
                client.DeactivateNode(DeactivateNodeRequest(node_id=before))
            except HTTPError:
                raise error from None
            time.sleep(NOTICED)
            response = original(client, request)
        _write(folder / SEAT, response.node_id)
        return response

    FleetHttpClient.ActivateNode = activate  # type: ignore[method-assign, assignment]
    FleetHttpClient.PullMessages = pull_messages  # type: ignore[method-assign, assignment]
    FleetHttpClient.PushObject = push_object  # type: ignore[method-assign, assignment]


def _sign(path: Path) -> None:
    """Write down that the SuperLink was reached; a process that has no file handle left for it ends, to begin anew."""
    try:
        with path.open("ab"):
            os.utime(path)
    except OSError as error:  # a full disk: this is only for who looks on
        found = ran_out(error)
        if found is not None and found is not SPACE:
            _leave(f"{found.what}: {found.remedy}")


def _leave(why: str) -> NoReturn:
    """End this SuperNode, which is started anew and signs on again: then what it was asked for is asked again."""
    sys.stderr.write(f"ERROR: {why}\n")
    sys.stderr.flush()
    os._exit(1)


def hurry(longest: float = LONGEST_WAIT) -> None:
    """Let this process look more often for a SuperLink that is away, and for pieces of a message that are on their way.

    It looks at least every `longest` seconds; moments stay random. A node hears of a message before its pieces are
    there: Flower then waits for one second, two, four, at both of its hops.
    """
    from flwr.supercore.inflatable.inflatable_utils import pull_objects
    from flwr.supercore.retry import http_retry
    from flwr.supercore.retry.retry_invoker import RetryInvoker

    class Invoker(RetryInvoker):
        """Give up at once when it is this machine that lacks something: nobody else's return would help."""

        def __init__(self, *arguments: Any, should_giveup: Callable[[Exception], bool], **named: Any) -> None:
            def hopeless(error: Exception) -> bool:
                return ran_out(error) is not None or should_giveup(error)

            super().__init__(*arguments, should_giveup=hopeless, **named)

    http_retry.RetryInvoker = Invoker  # type: ignore[attr-defined, misc]
    http_retry.MAX_RETRY_DELAY = min(http_retry.MAX_RETRY_DELAY, longest)  # type: ignore[attr-defined]
    waits = pull_objects.__kwdefaults__ or {}
    if not {"initial_backoff", "backoff_cap"} <= set(waits):
        raise ProtocolError("this version of Flower waits for pieces of messages in another way")
    waits["initial_backoff"], waits["backoff_cap"] = PIECE_WAITS


def _place(path: Path) -> str:
    """Name this machine and folder: a copy of a site's folder elsewhere must not sign the first one off."""
    return f"{platform.node()}/{uuid.getnode():x}{path.resolve()}"


def _read(path: Path) -> int | None:
    try:
        found = json.loads(path.read_bytes())
        return int(found["node"]) if found["place"] == _place(path) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(path: Path, node: int) -> None:
    try:
        write_atomic(path, json.dumps({"node": node, "place": _place(path)}).encode())
    except FpldError as error:  # then a return takes a minute
        log.warning("%s", error)
