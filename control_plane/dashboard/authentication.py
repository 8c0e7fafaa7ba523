"""Authentication middleware in front of everything that the dashboard serves. A browser that is not signed in
gets the login page and nothing else.

It is plain ASGI, so that pages, files and WebSockets all pass through it.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from http.cookies import CookieError, SimpleCookie
from importlib.resources import files
from typing import Any
from urllib.parse import parse_qs, urlsplit

from control_plane.dashboard.sessions import IDLE_S, Session, SessionStore
from control_plane.dashboard.sign_in import sign_in_page

log = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

SESSION_KEY = "baton.session"
"""Key of the session in the ASGI scope of an authenticated request."""

LIVE_PATH = "/health/live"
FORM_BYTES_MAX = 4096
FORM_S = 10.0
STYLE_PATH = "/sign-in.css"

_COMMON: Headers = [
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"permissions-policy", b"camera=(), microphone=(), geolocation=()"),
]
_OWN = (
    b"default-src 'none'; style-src 'self'; img-src data:; form-action 'self'; frame-ancestors 'none'; "
    b"base-uri 'none'"
)
_APP = (
    b"default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
    b"img-src 'self' data:; font-src 'self' data:; connect-src 'self'; object-src 'none'; "
    b"frame-ancestors 'none'; base-uri 'none'; form-action 'self'"
)
"""Content security policy of pages. NiceGUI's page has its elements and their code inline. What matters
holds: nothing is loaded from elsewhere, and nothing is sent there."""


class Authentication:
    def __init__(self, app: Any, sessions: SessionStore, *, is_tls: bool, hint: str = "") -> None:
        """`hint` is shown on the login page and says where a token can be found."""
        self.app = app
        self._sessions, self._is_tls, self._hint = sessions, is_tls, hint
        self._cookie = "__Host-baton" if is_tls else "baton_session"
        self._style = files("control_plane.dashboard").joinpath("assets/sign_in.css").read_bytes()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        match scope["type"]:
            case "lifespan":
                await self.app(scope, receive, send)
            case "http":
                await self._http(scope, receive, send)
            case _:
                await self._websocket(scope, receive, send)

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, method = scope["path"], scope["method"]
        if path == LIVE_PATH:
            await _respond(send, 200, b"", b"text/plain")
        elif path == STYLE_PATH:
            await _respond(send, 200, self._style, b"text/css")
        elif path == "/login" and method == "POST":
            await self._sign_in(scope, receive, send)
        elif path == "/logout" and method == "POST" and _is_same_origin(scope):
            self._sessions.sign_out(self._secret(scope))
            await _redirect(send, "/login", cookie=self._set_cookie("", age_s=0))
        elif (session := self._session(scope)) is None:
            await self._turn_away(scope, send)
        elif method not in ("GET", "HEAD") and not _is_same_origin(scope):
            await _respond(
                send, 403, b"this request comes from another site; open the dashboard itself\n", b"text/plain"
            )
        elif path == "/login":
            await _redirect(send, "/")
        else:
            scope[SESSION_KEY] = session
            await self.app(scope, receive, _guarded(send))

    async def _websocket(self, scope: Scope, receive: Receive, send: Send) -> None:
        session = self._session(scope)
        if session is None or not _is_same_origin(scope):
            await receive()
            await send({"type": "websocket.close", "code": 1008, "reason": "sign in first"})
            return
        scope[SESSION_KEY] = session
        await self.app(scope, receive, send)

    async def _turn_away(self, scope: Scope, send: Send) -> None:
        """Show the login page to a browser, and answer 401 to anything else."""
        wants_page = b"text/html" in _header(scope, b"accept")
        if scope["path"] == "/login":
            await self._page(send, 200, "")
        elif wants_page and scope["method"] == "GET":
            await _redirect(send, "/login")
        else:
            await _respond(send, 401, b"sign in first\n", b"text/plain")

    async def _sign_in(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not _is_same_origin(scope):
            await _respond(
                send, 403, b"this request comes from another site; open the dashboard itself\n", b"text/plain"
            )
            return
        try:
            async with asyncio.timeout(FORM_S):
                form = await _body(receive)
        except TimeoutError:
            await _respond(send, 408, b"the form did not arrive in time; try again\n", b"text/plain")
            return
        if form is None:
            await _respond(send, 413, b"the form is too large\n", b"text/plain")
            return
        token = parse_qs(form.decode(errors="replace")).get("token", [""])[0].strip()
        secret = self._sessions.sign_in(token)
        if secret is None and self._sessions.has_many_failures:
            await self._page(
                send,
                429,
                "This token is not known, and many wrong ones were tried lately: try again in a minute.",
            )
            return
        if secret is None:
            who = (scope.get("client") or ("somebody",))[0]
            log.warning("dashboard refused a wrong token from %s", who)
            await self._page(
                send, 403, "This token is not known; it may have been revoked. Ask for a new one."
            )
            return
        await _redirect(send, "/", cookie=self._set_cookie(secret, age_s=int(IDLE_S)))

    async def _page(self, send: Send, status: int, trouble: str) -> None:
        page = sign_in_page(trouble, self._hint)
        await _respond(send, status, page, b"text/html; charset=utf-8")

    def _session(self, scope: Scope) -> Session | None:
        secret = self._secret(scope)
        return self._sessions.of(secret) if secret else None

    def _secret(self, scope: Scope) -> str:
        cookies: SimpleCookie = SimpleCookie()
        try:
            cookies.load(_header(scope, b"cookie").decode("latin-1"))
        except CookieError:
            return ""
        return cookies[self._cookie].value if self._cookie in cookies else ""

    def _set_cookie(self, secret: str, *, age_s: int) -> bytes:
        flags = "; Secure" if self._is_tls else ""
        text = f"{self._cookie}={secret}; Path=/; HttpOnly; SameSite=Strict; Max-Age={age_s}{flags}"
        return text.encode()


def _header(scope: Scope, name: bytes) -> bytes:
    return next((value for key, value in scope["headers"] if key == name), b"")


def _is_same_origin(scope: Scope) -> bool:
    """Return whether a request comes from our own pages. Browsers say where a request comes from whenever it
    could do harm. Programs need not."""
    if _header(scope, b"sec-fetch-site") not in (b"", b"same-origin", b"none"):
        return False
    origin = _header(scope, b"origin").decode("latin-1")
    if not origin:
        return True
    try:
        from_host = urlsplit(origin).netloc
    except ValueError:
        return False
    return from_host != "" and from_host == _header(scope, b"host").decode("latin-1")


async def _body(receive: Receive) -> bytes | None:
    """Return the body of a form, or None if it is too large."""
    parts: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return b""
        parts.append(message.get("body", b""))
        if sum(map(len, parts)) > FORM_BYTES_MAX:
            return None
        if not message.get("more_body"):
            return b"".join(parts)


def _guarded(send: Send) -> Send:
    async def guarded(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            ours = [*_COMMON, (b"content-security-policy", _APP)]
            names = {name for name, _ in ours}
            kept = [(name, value) for name, value in message.get("headers", []) if name.lower() not in names]
            message = {**message, "headers": [*kept, *ours]}
        await send(message)

    return guarded


async def _respond(send: Send, status: int, body: bytes, kind: bytes, extra: Headers | None = None) -> None:
    headers = [
        (b"content-type", kind),
        (b"content-length", b"%d" % len(body)),
        (b"cache-control", b"no-store"),
        (b"content-security-policy", _OWN),
        *_COMMON,
        *(extra or []),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _redirect(send: Send, path: str, *, cookie: bytes = b"") -> None:
    extra = [(b"location", path.encode()), *([(b"set-cookie", cookie)] if cookie else [])]
    await _respond(send, 303, b"", b"text/plain", extra)
