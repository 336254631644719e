"""Long polls: a node asks once for a message, and is answered when there is one.

Flower's nodes poll every few seconds. Over a thin link that costs more than the messages do, and a thousand nodes leave
a SuperLink no time for anything else. The long poll is a heartbeat with one more header:

    node       POST send-node-heartbeat, header `fpld-wait: SECONDS`
    SuperLink  checks it like any heartbeat; 200, header `fpld-wait`
               `.` every three seconds: the connection is alive
               `!` a message is stored for this node: poll for it;  `-` none came within SECONDS

The answer never holds a message, so none is lost with a connection. Only the SuperLink of `fpld aggregator` knows the
header (`patches.superlink`). Any other one answers the heartbeat at once, and nodes poll as `patches.polling` says.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import httpx
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest, SendNodeHeartbeatResponse
from flwr.proto.node_pb2 import Node
from flwr.supercore.protobuf.client import ProtobufRequestContext
from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE
from flwr.supernode import fleet_http_connection as connection
from flwr.supernode.fleet_http_client import FleetHttpClient

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flwr.supercore.protobuf.client import ProtobufCall

HEARTBEAT_PATH = "/v1/fleet/send-node-heartbeat"
WAIT_HEADER = "fpld-wait"
KEEPALIVE_SECONDS = 3.0  # between two dots
DEAD_AFTER_SECONDS = 10.0  # a connection without a dot for so long is gone
KEEPALIVE = b"."
MESSAGE_STORED = b"!"
NO_MESSAGE = b"-"
_IDLE_CONNECTION_SECONDS = 60.0  # a new connection costs two kilobytes
_HEARTBEAT_SHARE = 2 / 3  # of the heartbeat interval, for which a long poll stands for a heartbeat
_ACTIVATE_PATH = "/v1/fleet/activate-node"
_UNUSED_HEADERS = "Accept", "Accept-Encoding", "Connection", "User-Agent"  # no SuperLink reads these
_VERSION_HEADERS = "flwr-package-name", "flwr-package-version", "flwr-component-name"  # read when a node signs on


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
        longest = connection.HEARTBEAT_DEFAULT_INTERVAL  # type: ignore[attr-defined]
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
