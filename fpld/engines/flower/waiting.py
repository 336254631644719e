"""A node that waits for messages asks once, and is answered when there is one.

Flower's nodes ask every few seconds: over a thin link the questions cost more than the messages, and a thousand nodes
leave a SuperLink no time for anything else. So a sign of life may say that the node waits (header `fpld-wait`, with the
longest wait in seconds). The SuperLink of `fpld aggregator` (`fpld.engines.flower.superlink`) checks it as any other,
and holds the answer until a message for that node is stored. A dot every three seconds shows that the connection still
stands. The answer says only that it is time to ask: a message is never in it, so none is lost with it.

Any other SuperLink answers a sign of life at once: then nodes ask as often as `fpld.engines.flower.polling` says.
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

LIFE = "/v1/fleet/send-node-heartbeat"
WAITS = "fpld-wait"
SIGN = 3.0  # seconds between two dots
LOST = 10.0  # seconds without one after which the connection is gone
DOT, ASK, NOTHING = b".", b"!", b"-"
_KEPT = 60.0  # seconds for which a connection is kept that has nothing to do: a new one costs two kilobytes
_FRESH = 2 / 3  # the part of the time between two signs of life for which a wait is one
_SIGNING_ON = "/v1/fleet/activate-node"
_NEEDLESS = "Accept", "Accept-Encoding", "Connection", "User-Agent"  # no SuperLink asks for these headers
_VERSION = "flwr-package-name", "flwr-package-version", "flwr-component-name"  # it looks at these when a node signs on


class _Sparing:
    """Leave headers away that cost more than they say; of an interceptor's chain, the last one."""

    def intercept(self, context: ProtobufRequestContext, call_next: ProtobufCall) -> httpx.Response:
        request = context.request
        for name in _NEEDLESS if request.url.path == _SIGNING_ON else _NEEDLESS + _VERSION:
            request.headers.pop(name, None)
        return call_next(context)


class WaitingClient(FleetHttpClient):
    """Flower's client of a SuperLink, which can wait, and is sparing with its uplink."""

    def __init__(
        self,
        base_url: str,
        *,
        interceptors: Sequence[Any] = (),
        verify: Any = True,
        timeout: float = 30.0,
        **named: Any,
    ) -> None:
        super().__init__(base_url, interceptors=[*interceptors, _Sparing()], verify=verify, timeout=timeout, **named)
        self._client.close()
        self._client = httpx.Client(verify=verify, timeout=timeout, limits=httpx.Limits(keepalive_expiry=_KEPT))
        self._waiting_since: float | None = None

    def wait(self, node: int) -> bool | None:
        """Wait for a message; return whether to ask for it, None at once where the SuperLink lets nobody wait."""
        longest = connection.HEARTBEAT_DEFAULT_INTERVAL  # type: ignore[attr-defined]
        message = SendNodeHeartbeatRequest(node=Node(node_id=node), heartbeat_interval=longest)
        request = self._client.build_request(
            "POST",
            f"{self._base_url}{LIFE}",
            content=message.SerializeToString(deterministic=True),
            headers={"content-type": PROTOBUF_MEDIA_TYPE, WAITS: f"{longest:.0f}"},
            timeout=LOST,
        )
        self._waiting_since = time.monotonic()
        try:
            response = self._send(ProtobufRequestContext("/flwr.proto.Fleet/SendNodeHeartbeat", message, request))
        finally:
            self._waiting_since = None
        response.raise_for_status()
        return not response.content.endswith(NOTHING) if WAITS in response.headers else None

    def SendNodeHeartbeat(self, request: SendNodeHeartbeatRequest) -> SendNodeHeartbeatResponse:  # noqa: N802
        """Give a sign of life, unless one is being answered: a node that waits has just given one."""
        since = self._waiting_since
        if since is not None and time.monotonic() - since < _FRESH * request.heartbeat_interval:
            return SendNodeHeartbeatResponse(success=True)
        return super().SendNodeHeartbeat(request)
