"""A site's end of the connection to the SuperLink: let in at once when it comes back.

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
import random
import sys
import time
import uuid
from typing import TYPE_CHECKING, Any, NoReturn

import httpx
from flwr.proto.fleet_pb2 import DeactivateNodeRequest, PullMessagesResponse
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatResponse
from flwr.supernode import fleet_http_connection

from fpld.engines.flower.expiry import clock_difference
from fpld.engines.flower.presence import CONTACT
from fpld.engines.flower.returning import LONGEST_WAIT
from fpld.engines.flower.waiting import WaitingClient
from fpld.errors import SPACE, FpldError, ProtocolError, ran_out
from fpld.storage.files import write_atomic

if TYPE_CHECKING:
    from pathlib import Path

    from flwr.proto.fleet_pb2 import (
        ActivateNodeRequest,
        ActivateNodeResponse,
        PullMessagesRequest,
        PushMessagesRequest,
        PushMessagesResponse,
    )
    from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
    from flwr.proto.message_pb2 import PushObjectRequest, PushObjectResponse

SEAT = "seat.json"
NOTICED = 3.0  # seconds off: an aggregator of up to 600 nodes looks more often than that
ANSWER_LOST = httpx.ReadError, httpx.ReadTimeout, httpx.RemoteProtocolError  # what was asked for may have been done
_HELD = 412

log = logging.getLogger(__name__)


class SiteClient(WaitingClient):
    """Flower's client, as a site uses it that has a folder."""

    folder: Path
    signed_on: tuple[SiteClient, int] | None = None  # this process's one, with the node's id

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._uncertain: set[tuple[str, str]] = set()
        self._signing_on: ActivateNodeRequest | None = None
        self._off, self._doubt = False, ""

    def ActivateNode(self, request: ActivateNodeRequest) -> ActivateNodeResponse:  # noqa: N802 - Flower's name
        """Sign on; where the SuperLink still holds who was here before for alive, sign that one off first."""
        try:
            response = super().ActivateNode(request)
        except httpx.HTTPStatusError as error:
            if difference := clock_difference(error.response.headers.get("date")):
                sys.stderr.write(f"ERROR: {difference}\n")
            before = _read(self.folder / SEAT)
            if error.response.status_code != _HELD or before is None:
                raise
            try:
                self.DeactivateNode(DeactivateNodeRequest(node_id=before))
            except httpx.HTTPError:
                raise error from None
            time.sleep(NOTICED)
            response = super().ActivateNode(request)
        _write(self.folder / SEAT, response.node_id)
        SiteClient.signed_on, self._signing_on = (self, response.node_id), request
        return response

    def wait(self, node: int) -> bool | None:
        """Wait for a message."""
        found = super().wait(node)
        sign(self.folder.parent / CONTACT)
        return found

    def PullMessages(self, request: PullMessagesRequest) -> PullMessagesResponse:  # noqa: N802
        """Ask for messages; where one may have got lost, or a reply, the node first signs on anew: `_sign_on_anew`."""
        if self._doubt:
            self._sign_on_anew(self._doubt)
        try:
            response = super().PullMessages(request)
        except ANSWER_LOST as error:
            self._sign_on_anew(f"an answer of the SuperLink got lost ({error!r}), and perhaps a message with it")
            response = PullMessagesResponse()
        sign(self.folder.parent / CONTACT)
        return response

    def PushMessages(self, request: PushMessagesRequest) -> PushMessagesResponse:  # noqa: N802
        """Announce a reply; one whose first answer got lost may be known, and its pieces asked for no more."""
        try:
            return super().PushMessages(request)
        except ANSWER_LOST as error:
            self._doubt = f"an answer of the SuperLink got lost ({error!r}), and perhaps a reply with it"
            raise

    def SendNodeHeartbeat(self, request: SendNodeHeartbeatRequest) -> SendNodeHeartbeatResponse:  # noqa: N802
        """Give a sign of life, unless this node is just signed off."""
        return SendNodeHeartbeatResponse(success=True) if self._off else super().SendNodeHeartbeat(request)

    def _sign_on_anew(self, why: str) -> None:
        """Sign off and on again, as soon as the SuperLink is back: what it has not got is then asked for again."""
        if self._signing_on is None or SiteClient.signed_on is None:
            _leave(why)
        sys.stderr.write(f"WARNING: {why}: signing on anew\n")
        self._off = True
        while True:
            try:
                self.DeactivateNode(DeactivateNodeRequest(node_id=SiteClient.signed_on[1]))
                time.sleep(NOTICED)
                self.ActivateNode(self._signing_on)
            except httpx.TransportError:
                time.sleep(random.uniform(0.2, 1.0) * LONGEST_WAIT)  # noqa: S311 - moments, no secrets
            except httpx.HTTPStatusError as error:
                _leave(f"{why}, and the node is not let in again ({error})")
            else:
                self._off, self._doubt = False, ""
                return

    def PushObject(self, request: PushObjectRequest) -> PushObjectResponse:  # noqa: N802
        """Take a piece for stored that a SuperLink refuses the second time: only its first answer was lost."""
        name = request.session_id, request.object_id
        try:
            response = super().PushObject(request)
        except ANSWER_LOST:
            self._uncertain.add(name)
            raise
        response.stored = response.stored or name in self._uncertain
        self._uncertain.discard(name)
        if not response.stored:
            self._doubt = "the SuperLink refused a piece of a reply"
        return response


def use_site_client(folder: Path) -> None:
    """Let the SuperNode of this process use it; the folder remembers the node's id."""
    if not hasattr(fleet_http_connection, "FleetHttpClient"):
        raise ProtocolError("this version of Flower reaches a SuperLink in another way")
    SiteClient.folder = folder
    fleet_http_connection.FleetHttpClient = SiteClient


def wait_for_message() -> bool | None:
    """Let this process's SuperNode wait; return whether to ask for a message, None if it cannot wait."""
    if SiteClient.signed_on is None:
        return None
    client, node = SiteClient.signed_on
    try:
        return client.wait(node)
    except httpx.HTTPError:
        return True  # who asks hears what is wrong


def sign(path: Path) -> None:
    """Write down that the SuperLink was reached; a process that has no file handle left for it begins anew."""
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
