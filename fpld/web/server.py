"""The HTTP server of the live page: connections that do not ask anything are closed, and there are only so many."""

from __future__ import annotations

from typing import TYPE_CHECKING

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

if TYPE_CHECKING:
    from asyncio import TimerHandle, Transport
    from typing import Any

    from starlette.applications import Starlette
    from uvicorn.protocols.http.h11_impl import RequestResponseCycle

PATIENCE = 5.0  # seconds that a connection has to send the head of a request
MOST = 200  # connections and requests at a time; whoever comes besides is told to come later


class Impatient(H11Protocol):
    """HTTP/1.1, where a connection on which no request comes is closed: half-open ones cost nothing for long."""

    _seen: RequestResponseCycle | None = None
    _timer: TimerHandle | None = None

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        """Begin to look at a connection."""
        super().connection_made(transport)
        self._timer = self.loop.call_later(PATIENCE, self._look)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop looking."""
        super().connection_lost(exc)
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        """Close the connection if no request has begun since the last look, and none is being answered."""
        cycle: Any = self.cycle
        if cycle is None or (cycle.response_complete and cycle is self._seen):
            self.transport.close()
            return
        self._seen = cycle
        self._timer = self.loop.call_later(PATIENCE, self._look)


def server(app: Starlette) -> uvicorn.Server:
    """Return a server of the application."""
    config = uvicorn.Config(
        app, http=Impatient, limit_concurrency=MOST, log_level="warning", access_log=False, server_header=False
    )
    return uvicorn.Server(config)
