"""`fpld dashboard`: the live page of the runs in a folder, and the planner with sliders."""

from __future__ import annotations

import os
import secrets
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from fpld.cli.arguments import Command
from fpld.errors import InputError, MissingExtraError
from fpld.report.run import find_runs

if TYPE_CHECKING:
    import argparse

    from fpld.cli.output import Output

_EPILOG = """\
The page is read-only, and for this machine only unless --host says otherwise. On another address it asks for a token:
$FPLD_TOKEN, or one that is made and printed. It speaks plain HTTP. Over a shared network use an SSH tunnel
(ssh -L 8337:localhost:8337 HOST), or put it behind a proxy with TLS. Examples:

  fpld dashboard
  fpld dashboard runs --port 9000
"""
_MIN_TOKEN_CHARACTERS = 16


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder",
        nargs="?",
        type=Path,
        default=Path("runs"),
        metavar="DIR",
        help="a folder of runs, or a run (default: runs)",
    )
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to serve on (default: 127.0.0.1, this machine only)"
    )
    parser.add_argument("--port", type=int, default=8337, help="port to serve on (default: 8337; 0: any free one)")


def _run(arguments: argparse.Namespace, output: Output) -> int:
    """Serve until stopped."""
    try:
        from fpld.web.app import make_app, make_server
        from fpld.web.guard import LOCAL
    except ImportError:
        raise MissingExtraError("the dashboard", "dashboard") from None
    if not arguments.folder.is_dir():
        raise InputError(
            f"{arguments.folder} is no folder: give the folder that holds runs, or start one with fpld run"
        )
    find_runs(arguments.folder)
    token = _token(local=arguments.host in LOCAL)
    listener = _listen(arguments.host, arguments.port)
    host = f"[{arguments.host}]" if ":" in arguments.host else arguments.host
    url = f"http://{host}:{listener.getsockname()[1]}/"
    if output.json:
        output.result("dashboard", [{"url": url, "token": token}])
    else:
        output.note(f"{url}  (runs in {arguments.folder}; Ctrl-C ends it)")
        if token is not None:
            output.note(f"token: {token}")
    sys.stdout.flush()
    make_server(make_app(arguments.folder, token)).run(sockets=[listener])
    return 0


def _token(*, local: bool) -> str | None:
    """Return the token to ask for: the one that is set, a new one, or none on this machine."""
    token = os.environ.get("FPLD_TOKEN", "").strip()
    if token and len(token) < _MIN_TOKEN_CHARACTERS:
        raise InputError(f"FPLD_TOKEN must have at least {_MIN_TOKEN_CHARACTERS} characters, got {len(token)}")
    return token or (None if local else secrets.token_urlsafe(24))


def _listen(host: str, port: int) -> socket.socket:
    if not 0 <= port <= 65535:
        raise InputError(f"--port must be from 0 to 65535, got {port}")
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        # Listening from here on: a client may connect as soon as the address is printed.
        return socket.create_server((host, port), family=family, backlog=64)
    except OSError as error:
        raise InputError(
            f"cannot serve on {host} port {port} ({error.strerror or error}): choose another --host or --port"
        ) from None


COMMAND = Command(_EPILOG, _configure, _run)
