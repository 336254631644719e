"""Access control: open on this machine, by token on another address, and read-only everywhere."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
from typing import TYPE_CHECKING
from urllib.parse import parse_qs

from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response

from fpld.report.page import environment

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

COOKIE = "fpld"
LOCAL = ("127.0.0.1", "localhost", "::1")
# The whole header: what follows a closing bracket is part of the name. Starlette's TrustedHostMiddleware cuts at the
# first colon, so it cannot tell [::1] from [::1].evil.
_LOCAL_HOST = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:[0-9]{1,5})?", re.ASCII | re.IGNORECASE)
_LARGEST_FORM = 4096
_PAUSE = 0.5  # seconds after a wrong token, one at a time: guessing is slow, however many guess at once
_MOST_WAITING = 16  # wrong tokens that wait for their answer
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; connect-src 'self'; img-src data:; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


class Guard:
    """Middleware that checks method, host and token, and sets security headers."""

    def __init__(self, app: ASGIApp, token: str | None) -> None:
        self._app, self._token = app, token
        self._one, self._waiting = asyncio.Lock(), 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse the request, or pass it to the application."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        answer = await self._judge(Request(scope, receive))
        await (self._app if answer is None else answer)(scope, receive, _with_headers(send))

    async def _judge(self, request: Request) -> Response | None:
        if self._token is None:
            # Another site's name that resolves to this machine must not read the page in a browser here.
            if not _LOCAL_HOST.fullmatch(request.headers.get("host", "")):
                return PlainTextResponse("this page is for this machine only: open it as localhost", 403)
        elif request.url.path == "/login" and request.method == "POST":
            return await self._login(request)
        elif not self._known(request):
            return await self._wrong("") if "authorization" in request.headers else _ask("", 401)
        if request.method not in ("GET", "HEAD"):
            return PlainTextResponse("read-only", 405)
        return None

    async def _login(self, request: Request) -> Response:
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > _LARGEST_FORM:
                return PlainTextResponse("too long", 413)
        given = parse_qs(body.decode("utf-8", "replace")).get("token", [""])[0].strip()
        if not self._equal(given, self._token or ""):
            return await self._wrong("That is not the token.")
        answer = RedirectResponse("/", 303)
        answer.set_cookie(COOKIE, _proof(self._token or ""), httponly=True, samesite="strict")
        return answer

    async def _wrong(self, message: str) -> Response:
        """Answer a wrong token, after a pause that all who guess share."""
        if self._waiting >= _MOST_WAITING:
            return PlainTextResponse("too many wrong tokens: try again later", 429)
        self._waiting += 1
        try:
            async with self._one:
                await asyncio.sleep(_PAUSE)
        finally:
            self._waiting -= 1
        return _ask(message, 401)

    def _known(self, request: Request) -> bool:
        """Return whether the request shows the token: by the cookie of a login, or as a bearer token."""
        token = self._token or ""
        bearer = request.headers.get("authorization", "")
        return self._equal(request.cookies.get(COOKIE, ""), _proof(token)) or self._equal(bearer, f"Bearer {token}")

    @staticmethod
    def _equal(given: str, wanted: str) -> bool:
        return hmac.compare_digest(given.encode(), wanted.encode())


def _proof(token: str) -> str:
    """Return the cookie's value: a MAC that proves knowledge of the token without containing it."""
    return hmac.new(token.encode(), b"fpld dashboard", hashlib.sha256).hexdigest()


def _ask(message: str, status: int) -> Response:
    return HTMLResponse(environment().get_template("token.html.j2").render(message=message), status)


def _with_headers(send: Send) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            extra = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
            message["headers"] = [*message.get("headers", []), *extra]
        await send(message)

    return sending
