"""A site's connection to the SuperLink: a node that restarts is let in at once, and waits in long polls.

A SuperLink takes a node that died for alive until it has missed two heartbeats, up to a minute. Until then it refuses
the node's return (HTTP 412). A process that holds the site's lock knows that it is the only one of this site. So it
first signs the node off, under the node id that it had, and then on again. The pause in between lets the aggregator
see that what it had asked for is lost.

The same is done when the connection breaks at a moment that may have cost a message: the SuperLink hands each message
out once, and takes each piece of a reply once.
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
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest, SendNodeHeartbeatResponse
from flwr.proto.node_pb2 import Node
from flwr.supercore.protobuf.client import ProtobufRequestContext
from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE
from flwr.supernode import fleet_http_connection
from flwr.supernode.fleet_http_client import FleetHttpClient

from fpld.engines.flower.credentials import clock_difference
from fpld.engines.flower.patches.retry import MAX_RETRY_SECONDS
from fpld.engines.flower.patches.superlink import (
    DEAD_AFTER_SECONDS,
    HEARTBEAT_PATH,
    NO_MESSAGE,
    WAIT_HEADER,
)
from fpld.engines.flower.site.folder import CONTACT_FILE
from fpld.errors import DISK_SPACE, FpldError, exhausted_resource
from fpld.storage.files import write_atomic

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from flwr.proto.fleet_pb2 import (
        ActivateNodeRequest,
        ActivateNodeResponse,
        PullMessagesRequest,
        PushMessagesRequest,
        PushMessagesResponse,
    )
    from flwr.proto.message_pb2 import PushObjectRequest, PushObjectResponse
    from flwr.supercore.protobuf.client import ProtobufCall

NODE_ID_FILE = "seat.json"
SIGN_OFF_SECONDS = 3.0  # an aggregator of up to 600 nodes looks for its nodes more often than that
# Errors after which the SuperLink may have done what was asked for, although its response never came.
LOST_RESPONSE_ERRORS = httpx.ReadError, httpx.ReadTimeout, httpx.RemoteProtocolError
_ALREADY_ACTIVE = 412
_IDLE_CONNECTION_SECONDS = 60.0  # a new connection costs two kilobytes
_HEARTBEAT_SHARE = 2 / 3  # of the heartbeat interval, for which a long poll stands for a heartbeat
_ACTIVATE_PATH = "/v1/fleet/activate-node"
_UNUSED_HEADERS = "Accept", "Accept-Encoding", "Connection", "User-Agent"  # no SuperLink reads these
_VERSION_HEADERS = "flwr-package-name", "flwr-package-version", "flwr-component-name"  # read when a node signs on

log = logging.getLogger(__name__)


class _HeaderFilter:
    """Remove headers that no SuperLink reads; the last one in the chain of interceptors."""

    def intercept(self, context: ProtobufRequestContext, call_next: ProtobufCall) -> httpx.Response:
        request = context.request
        unread = _UNUSED_HEADERS if request.url.path == _ACTIVATE_PATH else _UNUSED_HEADERS + _VERSION_HEADERS
        for name in unread:
            request.headers.pop(name, None)
        return call_next(context)


class LongPollClient(FleetHttpClient):
    """Flower's client of a SuperLink, with long polls and fewer headers."""

    def __init__(
        self,
        base_url: str,
        *,
        interceptors: Sequence[Any] = (),
        verify: Any = True,
        timeout: float = 30.0,
        **named: Any,
    ) -> None:
        super().__init__(
            base_url, interceptors=[*interceptors, _HeaderFilter()], verify=verify, timeout=timeout, **named
        )
        self._client.close()
        self._client = httpx.Client(
            verify=verify, timeout=timeout, limits=httpx.Limits(keepalive_expiry=_IDLE_CONNECTION_SECONDS)
        )
        self._waiting_since: float | None = None

    def wait(self, node: int) -> bool | None:
        """Wait for a message of a node.

        Returns
        -------
        bool or None
            True if a message is stored, False if none came; None, at once, if the SuperLink has no long poll.
        """
        longest = fleet_http_connection.HEARTBEAT_DEFAULT_INTERVAL  # type: ignore[attr-defined]
        message = SendNodeHeartbeatRequest(node=Node(node_id=node), heartbeat_interval=longest)
        request = self._client.build_request(
            "POST",
            f"{self._base_url}{HEARTBEAT_PATH}",
            content=message.SerializeToString(deterministic=True),
            headers={"content-type": PROTOBUF_MEDIA_TYPE, WAIT_HEADER: f"{longest:.0f}"},
            timeout=DEAD_AFTER_SECONDS,
        )
        self._waiting_since = time.monotonic()
        try:
            response = self._send(ProtobufRequestContext("/flwr.proto.Fleet/SendNodeHeartbeat", message, request))
        finally:
            self._waiting_since = None
        response.raise_for_status()
        if WAIT_HEADER not in response.headers:
            return None
        return not response.content.endswith(NO_MESSAGE)

    def SendNodeHeartbeat(self, request: SendNodeHeartbeatRequest) -> SendNodeHeartbeatResponse:  # noqa: N802
        """Send a heartbeat, unless a long poll has stood for one just now."""
        since = self._waiting_since
        if since is not None and time.monotonic() - since < _HEARTBEAT_SHARE * request.heartbeat_interval:
            return SendNodeHeartbeatResponse(success=True)
        return super().SendNodeHeartbeat(request)


class SiteClient(LongPollClient):
    """Flower's client of a SuperLink, at a site with a folder.

    Flower makes the client itself, so folder and signed-on client are attributes of the class. `signed_on` is the
    client of this process with the node's id.
    """

    folder: Path
    signed_on: tuple[SiteClient, int] | None = None

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._unacknowledged: set[tuple[str, str]] = set()
        self._activation: ActivateNodeRequest | None = None
        self._signed_off = False
        self._renew_reason = ""

    def ActivateNode(self, request: ActivateNodeRequest) -> ActivateNodeResponse:  # noqa: N802 - Flower's name
        """Sign on; if the SuperLink takes the predecessor for alive, sign that one off first."""
        try:
            response = super().ActivateNode(request)
        except httpx.HTTPStatusError as error:
            if difference := clock_difference(error.response.headers.get("date")):
                sys.stderr.write(f"ERROR: {difference}\n")
            predecessor = _read(self.folder / NODE_ID_FILE)
            if error.response.status_code != _ALREADY_ACTIVE or predecessor is None:
                raise
            try:
                self.DeactivateNode(DeactivateNodeRequest(node_id=predecessor))
            except httpx.HTTPError:
                raise error from None
            time.sleep(SIGN_OFF_SECONDS)
            response = super().ActivateNode(request)
        _write(self.folder / NODE_ID_FILE, response.node_id)
        SiteClient.signed_on = (self, response.node_id)
        self._activation = request
        return response

    def wait(self, node: int) -> bool | None:
        """Wait for a message in a long poll."""
        answer = super().wait(node)
        touch_contact(self.folder.parent / CONTACT_FILE)
        return answer

    def PullMessages(self, request: PullMessagesRequest) -> PullMessagesResponse:  # noqa: N802
        """Ask for messages; sign on anew first if a message or a reply may have been lost."""
        if self._renew_reason:
            self._sign_on_anew(self._renew_reason)
        try:
            response = super().PullMessages(request)
        except LOST_RESPONSE_ERRORS as error:
            self._sign_on_anew(f"an answer of the SuperLink got lost ({error!r}), and perhaps a message with it")
            response = PullMessagesResponse()
        touch_contact(self.folder.parent / CONTACT_FILE)
        return response

    def PushMessages(self, request: PushMessagesRequest) -> PushMessagesResponse:  # noqa: N802
        """Announce a reply. If the response is lost, the SuperLink may not ask a retry for its pieces."""
        try:
            return super().PushMessages(request)
        except LOST_RESPONSE_ERRORS as error:
            self._renew_reason = f"an answer of the SuperLink got lost ({error!r}), and perhaps a reply with it"
            raise

    def SendNodeHeartbeat(self, request: SendNodeHeartbeatRequest) -> SendNodeHeartbeatResponse:  # noqa: N802
        """Send a heartbeat, unless this node is signed off at the moment."""
        if self._signed_off:
            return SendNodeHeartbeatResponse(success=True)
        response = super().SendNodeHeartbeat(request)
        touch_contact(self.folder.parent / CONTACT_FILE)  # while it trains there is no other contact
        return response

    def _sign_on_anew(self, why: str) -> None:
        """Sign off and on again as soon as the SuperLink is back: the aggregator then asks again for what is lost."""
        if self._activation is None or SiteClient.signed_on is None:
            _leave(why)
        sys.stderr.write(f"WARNING: {why}: signing on again\n")
        self._signed_off = True
        while True:
            try:
                self.DeactivateNode(DeactivateNodeRequest(node_id=SiteClient.signed_on[1]))
                time.sleep(SIGN_OFF_SECONDS)
                self.ActivateNode(self._activation)
            except httpx.TransportError:
                time.sleep(random.uniform(0.2, 1.0) * MAX_RETRY_SECONDS)  # noqa: S311 - moments, no secrets
            except httpx.HTTPStatusError as error:
                _leave(f"{why}, and the node is not let in again ({error})")
            else:
                self._signed_off = False
                self._renew_reason = ""
                return

    def PushObject(self, request: PushObjectRequest) -> PushObjectResponse:  # noqa: N802
        """Send a piece of a reply. One that is refused after a lost response was stored the first time."""
        name = request.session_id, request.object_id
        try:
            response = super().PushObject(request)
        except LOST_RESPONSE_ERRORS:
            self._unacknowledged.add(name)
            raise
        response.stored = response.stored or name in self._unacknowledged
        self._unacknowledged.discard(name)
        if not response.stored:
            self._renew_reason = "the SuperLink refused a chunk of a reply"
        return response


def use_site_client(folder: Path) -> None:
    """Let the SuperNode of this process use `SiteClient`; the folder keeps the node's id."""
    SiteClient.folder = folder
    fleet_http_connection.FleetHttpClient = SiteClient  # type: ignore[attr-defined]


def wait_for_message() -> bool | None:
    """Wait in a long poll; return whether to poll for a message, None if there is no long poll."""
    if SiteClient.signed_on is None:
        return None
    client, node = SiteClient.signed_on
    try:
        return client.wait(node)
    except httpx.HTTPError:
        return True  # the poll meets the same error, and reports it


def touch_contact(path: Path) -> None:
    """Note the time of the last contact with the SuperLink; end a process that has no file handle left for that."""
    try:
        with path.open("ab"):
            os.utime(path)
    except OSError as error:
        resource = exhausted_resource(error)
        # A full disk is no reason to end: the file is only for monitoring.
        if resource is not None and resource is not DISK_SPACE:
            _leave(f"{resource.what}: {resource.remedy}")


def _leave(why: str) -> NoReturn:
    """End this SuperNode. It is started anew and signs on again; the aggregator then asks again for what is lost."""
    sys.stderr.write(f"ERROR: {why}\n")
    sys.stderr.flush()
    os._exit(1)


def _place(path: Path) -> str:
    """Name this machine and folder: a copy of a site's folder elsewhere must not sign the original off."""
    return f"{platform.node()}/{uuid.getnode():x}{path.resolve()}"


def _read(path: Path) -> int | None:
    try:
        content = json.loads(path.read_bytes())
        return int(content["node"]) if content["place"] == _place(path) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(path: Path, node: int) -> None:
    try:
        write_atomic(path, json.dumps({"node": node, "place": _place(path)}).encode())
    except FpldError as error:  # the next return then takes a minute
        log.warning("%s", error)
