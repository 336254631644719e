"""The dashboard's web application and its HTTP server.

The application serves a page, its assets, and JSON about runs and plans. It is read-only: all routes are GET, and
`fpld.web.guard` checks access. The server closes idle connections and limits their number, in all and from one
address, so that half-open ones cannot keep others out.
"""

from __future__ import annotations

import logging
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from fpld import __version__
from fpld.errors import FpldError
from fpld.report.monitoring import metrics, run_status_row
from fpld.report.page import SCRIPTS, asset, template_environment
from fpld.storage.run_folder import CONFIG
from fpld.validation import visible
from fpld.web.guard import Guard
from fpld.web.state import RunIndex

if TYPE_CHECKING:
    from asyncio import TimerHandle, Transport
    from collections.abc import Callable
    from pathlib import Path

    from starlette.requests import Request
    from uvicorn.protocols.http.h11_impl import RequestResponseCycle

log = logging.getLogger(__name__)

IDLE_TIMEOUT_SECONDS = 5.0  # for a connection to send the header of a request
MAX_CONNECTIONS = 200  # further requests are answered with status 503
MAX_ADDRESS_CONNECTIONS = 100  # from one address: further ones are closed, and others are still served
_WEB_ASSETS = ("dashboard.js", "planner.js")  # in this package; the others are the report's
_MEDIA_TYPES = dict.fromkeys((*SCRIPTS, *_WEB_ASSETS), "text/javascript") | {"page.css": "text/css"}


class IdleTimeoutProtocol(H11Protocol):
    """HTTP/1.1 that closes a connection on which no request comes, and those beyond what one address may have."""

    _seen: RequestResponseCycle | None = None
    _timer: TimerHandle | None = None

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        """Start the timer of a connection, unless its address has too many."""
        super().connection_made(transport)
        address = self.client and self.client[0]
        same = [other for other in self.connections if other.client and other.client[0] == address]
        if len(same) > MAX_ADDRESS_CONNECTIONS:
            transport.abort()
            return
        self._timer = self.loop.call_later(IDLE_TIMEOUT_SECONDS, self._close_if_idle)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer."""
        super().connection_lost(exc)
        if self._timer is not None:
            self._timer.cancel()

    def _close_if_idle(self) -> None:
        """Close the connection if no request has begun since the last check, and none is being answered."""
        cycle: Any = self.cycle
        if cycle is None or (cycle.response_complete and cycle is self._seen):
            self.transport.close()
            return
        self._seen = cycle
        self._timer = self.loop.call_later(IDLE_TIMEOUT_SECONDS, self._close_if_idle)


def make_server(app: Starlette) -> uvicorn.Server:
    """Return a server of the application."""
    config = uvicorn.Config(
        app,
        http=IdleTimeoutProtocol,
        limit_concurrency=MAX_CONNECTIONS,
        log_level="warning",
        access_log=False,
        server_header=False,
    )
    return uvicorn.Server(config)


def make_app(folder: Path, token: str | None = None) -> Starlette:
    """Return the application for a folder of runs; with a token, every request must show it."""
    state = RunIndex(folder)
    routes = [
        Route("/", lambda _request: _index(folder)),
        Route("/assets/{name:path}", _asset),
        Route("/metrics", lambda _request: _metrics(folder)),
        Route("/api/runs", lambda _request: _answer(state.runs)),
        Route("/api/run", lambda request: _run(state, request)),
        Route("/api/planner", lambda request: _answer(lambda: state.planner(request.query_params.get("run")))),
        Route("/api/plan", lambda request: _plan(state, request)),
    ]
    return Starlette(routes=routes, middleware=[Middleware(Guard, token=token)])


def _index(folder: Path) -> Response:
    page = template_environment().get_template("dashboard.html.j2")
    scripts = [*SCRIPTS, "planner.js", "dashboard.js"]
    return HTMLResponse(page.render(folder=str(folder), version=__version__, scripts=scripts))


def _metrics(folder: Path) -> Response:
    """Return the status of all runs as Prometheus text; a run without versions.json is being prepared."""
    runs = [each for each in sorted(folder.iterdir()) if (each / CONFIG).is_file()] if folder.is_dir() else []
    return Response(metrics([run_status_row(each) for each in runs]), media_type="text/plain; version=0.0.4")


def _asset(request: Request) -> Response:
    """Return an asset whose name is in the table: no name becomes a path."""
    name = request.path_params["name"]
    if name not in _MEDIA_TYPES:
        return Response("no such asset", 404, media_type="text/plain")
    text = files("fpld.web").joinpath("assets", name).read_text("utf-8") if name in _WEB_ASSETS else asset(name)
    return Response(text, media_type=_MEDIA_TYPES[name])


def _run(state: RunIndex, request: Request) -> Response:
    """Return a run, or only its stamp if that is the one which the page has."""
    name = request.query_params.get("name", "")
    have = request.query_params.get("have")
    return _answer(lambda: {"stamp": have} if have and state.stamp(name) == have else state.run(name))


def _plan(state: RunIndex, request: Request) -> Response:
    query = request.query_params
    try:
        rates = [float(part) for part in query.get("links", "").split(",")]
        deadline = float(query.get("deadline", ""))
        share = float(query.get("total", "1"))
    except ValueError:
        return JSONResponse({"error": "links, deadline and total must be numbers"}, 400)
    return _answer(lambda: {"body": state.plan(query.get("run"), rates, deadline, share)})


def _answer(compute: Callable[[], Any]) -> Response:
    """Return the result of `compute` as JSON; an FpldError is a 404 with its message.

    Folders may be edited by hand while they are read: an unexpected error concerns one folder, not the server.
    """
    try:
        return JSONResponse(compute())
    except FpldError as error:
        return JSONResponse({"error": visible(error)}, 404)
    except (ValueError, TypeError, LookupError, ArithmeticError, OSError, RecursionError) as error:
        log.warning("a folder cannot be shown: %s", error, exc_info=True)
        return JSONResponse({"error": f"cannot be shown: {type(error).__name__} in what its files say"}, 404)
