"""The web application: a page, its assets, and JSON about runs and plans. GET only; `guard` checks access."""

from __future__ import annotations

import logging
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from fpld import __version__
from fpld.errors import FpldError
from fpld.report.page import SCRIPTS, asset, environment
from fpld.report.standing import metrics, standing
from fpld.web.guard import Guard
from fpld.web.state import Runs

log = logging.getLogger(__name__)

if TYPE_CHECKING:
    from pathlib import Path

    from starlette.requests import Request

_ASSETS = dict.fromkeys((*SCRIPTS, "dashboard.js", "planner.js"), "text/javascript") | {"page.css": "text/css"}
_OWN = ("dashboard.js", "planner.js")


def make_app(folder: Path, token: str | None = None) -> Starlette:
    """Return the application for a folder of runs; with a token, every request must show it."""
    state = Runs(folder)
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
    page = environment().get_template("dashboard.html.j2")
    scripts = [*SCRIPTS, "planner.js", "dashboard.js"]
    return HTMLResponse(page.render(folder=str(folder), version=__version__, scripts=scripts))


def _metrics(folder: Path) -> Response:
    """Return how all runs stand, as Prometheus text."""
    runs = [each for each in sorted(folder.iterdir()) if (each / "config.toml").is_file()] if folder.is_dir() else []
    return Response(metrics([standing(each) for each in runs]), media_type="text/plain; version=0.0.4")


def _asset(request: Request) -> Response:
    """Return one of the known assets: the name is looked up, never opened."""
    name = request.path_params["name"]
    if name not in _ASSETS:
        return Response("no such asset", 404, media_type="text/plain")
    text = files("fpld.web").joinpath("assets", name).read_text("utf-8") if name in _OWN else asset(name)
    return Response(text, media_type=_ASSETS[name])


def _run(state: Runs, request: Request) -> Response:
    name, have = request.query_params.get("name", ""), request.query_params.get("have")

    def ask() -> dict[str, Any]:
        return {"stamp": have} if have and state.stamp(name) == have else state.run(name)

    return _answer(ask)


def _plan(state: Runs, request: Request) -> Response:
    query = request.query_params
    try:
        rates = [float(part) for part in query.get("links", "").split(",")]
        deadline, share = float(query.get("deadline", "")), float(query.get("total", "1"))
    except ValueError:
        return JSONResponse({"error": "links, deadline and total must be numbers"}, 400)
    return _answer(lambda: {"body": state.plan(query.get("run"), rates, deadline, share)})


def _answer(ask: Any) -> Response:
    """Return the result of `ask` as JSON; an FpldError is a 404 with its message.

    Folders may be edited by hand while they are read: whatever is odd about one is said of that one.
    """
    try:
        return JSONResponse(ask())
    except FpldError as error:
        return JSONResponse({"error": str(error)}, 404)
    except (ValueError, TypeError, LookupError, ArithmeticError, OSError, RecursionError) as error:
        log.warning("a folder cannot be shown: %s", error, exc_info=True)
        return JSONResponse({"error": f"cannot be shown: {type(error).__name__} in what its files say"}, 404)
