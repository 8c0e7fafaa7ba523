"""The dashboard's door, and the metrics pages that it reads: damaged requests of strangers never get further
than the login page, and no page of metrics makes it fail."""

import asyncio
import math
from typing import Any

from tests.fuzz.harness import Fuzzer, main

PACKAGES = ("control_plane.dashboard.authentication", "control_plane.dashboard.samples", "baton.core.tokens")
WORDS = (
    *(
        b"cookie: baton_session=",
        b"origin: http://baton",
        b"host: baton",
        b"POST /login\n",
        b"token=",
        b"GET /\n",
    ),
    *(
        b"sec-fetch-site: same-origin",
        b"accept: text/html",
        b"/_nicegui_ws/",
        b"/logout",
        b"/health/live",
        b"%00",
    ),
    *(b"baton_requests_total", b'{model="m"} ', b"NaN", b"+Inf", b"1e999", b"# TYPE", b"\\", b'"', b"WS /\n"),
)


def load() -> Fuzzer:
    from baton.core.tokens import Scope, TokenBook, TokenRecord, digest_of
    from baton.telemetry.catalogue import CATALOGUE
    from control_plane.dashboard.authentication import Authentication
    from control_plane.dashboard.samples import MetricsReader, frame_of
    from control_plane.dashboard.sessions import SessionStore

    book = TokenBook([TokenRecord("ada", Scope.OPERATE, digest_of("bt-known"))])
    names = [metric.name for metric in CATALOGUE]

    async def inside(scope: dict[str, Any], receive: Any, send: Any) -> None:
        raise AssertionError("a stranger got in")

    def knock(content: bytes) -> None:
        app = Authentication(inside, SessionStore(lambda: book, now_s=lambda: 0.0), is_tls=False)
        scope, body = _request(content)
        sent: list[Any] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": body}

        async def send(message: Any) -> None:
            sent.append(message)

        asyncio.run(app(scope, receive, send))
        assert sent, "no answer"
        if scope["type"] == "http" and b"bt-known" not in body:
            assert not any(
                name == b"set-cookie" and b"Max-Age=0" not in value for name, value in sent[0]["headers"]
            )

    def read(content: bytes) -> None:
        table = MetricsReader(names).read(content.decode("utf-8", "replace"))
        frame = frame_of(1.0, 1.0, [(table, table), (None, table)])
        values = [value for levels in frame.levels.values() for value in levels.values()]
        assert all(not math.isnan(value) for value in values)

    def check(content: bytes) -> None:
        """The first byte says what the rest is: a metrics page or a request."""
        (read if content[:1] == b"m" else knock)(content[1:])

    return Fuzzer("dashboard", check, WORDS)


def _request(content: bytes) -> tuple[dict[str, Any], bytes]:
    """A request in lines: METHOD PATH, headers, an empty line, the body. As a server hands it over."""
    head, _, body = content.partition(b"\n\n")
    first, *lines = head.split(b"\n")
    method, _, path = first.partition(b" ")
    pairs = [line.partition(b":") for line in lines]
    headers = [(name.strip().lower(), value.strip()) for name, _, value in pairs]
    scope = {
        "type": "websocket" if method == b"WS" else "http",
        "method": method.decode("latin-1"),
        "path": path.decode("utf-8", "replace"),
        "headers": headers,
        "client": ("127.0.0.1", 1),
    }
    return scope, body


if __name__ == "__main__":
    main(load, PACKAGES)
