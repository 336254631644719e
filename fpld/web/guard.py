"""Access control of the dashboard: without a token only for this machine, with one for any address; read-only.

Without a token the host name of a request must be one of this machine: another site's name that resolves to it must
not read the page in a browser here. With a token, a request shows it as bearer token, or as the cookie of a login. The
cookie is a MAC, so it does not contain the token. Wrong tokens are answered one at a time after a pause: guessing is
slow, however many guess at once.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
from typing import TYPE_CHECKING
from urllib.parse import parse_qs

from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response

from fpld.report.page import template_environment

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

COOKIE = "fpld"
LOCAL = ("127.0.0.1", "localhost", "::1")
# The whole header is matched: what follows a closing bracket is part of the name. Starlette's TrustedHostMiddleware
# cuts at the first colon, so it cannot tell [::1] from [::1].evil.
_LOCAL_HOST = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:[0-9]{1,5})?", re.ASCII | re.IGNORECASE)
_MAX_FORM_BYTES = 4096
FORM_TIMEOUT_SECONDS = 5.0  # for the form of a login to come whole
_WRONG_TOKEN_PAUSE_SECONDS = 0.5
_MAX_WAITING = 16  # wrong tokens that wait for their answer
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
        self._app = app
        self._token = token
        self._pause = asyncio.Lock()
        self._waiting = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse the request, or pass it to the application."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        refusal = await self._check(Request(scope, receive))
        await (self._app if refusal is None else refusal)(scope, receive, _with_headers(send))

    async def _check(self, request: Request) -> Response | None:
        """Return the response to a request that the application must not see; None if it may."""
        if self._token is None:
            if not _LOCAL_HOST.fullmatch(request.headers.get("host", "")):
                return PlainTextResponse("this page is for this machine only: open it as localhost", 403)
        elif request.url.path == "/login" and request.method == "POST":
            return await self._login(request)
        elif not self._authorized(request):
            return await self._refuse_token("") if "authorization" in request.headers else _token_form("", 401)
        if request.method not in ("GET", "HEAD"):
            return PlainTextResponse("read-only", 405)
        return None

    async def _login(self, request: Request) -> Response:
        body = b""
        try:
            async with asyncio.timeout(FORM_TIMEOUT_SECONDS):
                async for part in request.stream():
                    body += part
                    if len(body) > _MAX_FORM_BYTES:
                        return PlainTextResponse("too long", 413)
        except (TimeoutError, ClientDisconnect):  # whoever keeps a form open keeps a connection from others
            return PlainTextResponse("too slow", 408, {"Connection": "close"})
        candidate = parse_qs(body.decode("utf-8", "replace")).get("token", [""])[0].strip()
        if not _equal(candidate, self._token or ""):
            return await self._refuse_token("That is not the token.")
        response = RedirectResponse("/", 303)
        response.set_cookie(COOKIE, _token_mac(self._token or ""), httponly=True, samesite="strict")
        return response

    async def _refuse_token(self, message: str) -> Response:
        """Answer a wrong token after a pause that all wrong tokens share."""
        if self._waiting >= _MAX_WAITING:
            return PlainTextResponse("too many wrong tokens: try again later", 429)
        self._waiting += 1
        try:
            async with self._pause:
                await asyncio.sleep(_WRONG_TOKEN_PAUSE_SECONDS)
        finally:
            self._waiting -= 1
        return _token_form(message, 401)

    def _authorized(self, request: Request) -> bool:
        """Return whether the request shows the token: by the cookie of a login, or as a bearer token."""
        token = self._token or ""
        bearer = request.headers.get("authorization", "")
        return _equal(request.cookies.get(COOKIE, ""), _token_mac(token)) or _equal(bearer, f"Bearer {token}")


def _equal(text: str, secret: str) -> bool:
    return hmac.compare_digest(text.encode(), secret.encode())  # in a time that does not depend on the texts


def _token_mac(token: str) -> str:
    return hmac.new(token.encode(), b"fpld dashboard", hashlib.sha256).hexdigest()


def _token_form(message: str, status: int) -> Response:
    return HTMLResponse(template_environment().get_template("token.html.j2").render(message=message), status)


def _with_headers(send: Send) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            extra = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
            message["headers"] = [*message.get("headers", []), *extra]
        await send(message)

    return sending
