"""Plain ASGI for the hot path. FastAPI's own requests and responses cost twice as much."""

import asyncio
import re
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from baton.core.errors import BodyTooLarge, ClientError
from router.http.request_ids import new_id

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

ABORT = "baton.abort"
"""Key in the scope: a function that breaks the connection at once, whatever is still to be written."""

HANG_UP = "baton.hang_up"
"""Key in the scope: a function that ends a streamed body with the bytes given and closes the connection. It
serves for clients that do not read. Bytes that the client does not take within seconds are lost."""

IS_CLOSING = "baton.is_closing"
"""Key in the scope: a function that says whether the connection is closed or about to be."""

REQUEST_ID = "baton.request_id"
"""Key in the scope: x-request-id, as the answer will carry it."""

WRITE_NOW = "baton.write_now"
"""Key in the scope: a function that writes a piece of a streamed body without waiting. It returns False if it
cannot write now, or not any more; `send` tells which."""

WATCH = "baton.watch"
"""Key in the scope: a function that registers a callback for a connection that is lost before the answer is
complete. It serves for requests whose body was read. A task that waits for the disconnect message costs more.
"""

JSON: Headers = [(b"content-type", b"application/json")]
EVENTS: Headers = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]

BODY_TIMEOUT_S = 30.0
"""Time from a request's headers to the end of its body."""

LINGER_S = 1.0
LINGER_BYTES_MAX = 64 * 2**20

_SANE_ID = re.compile(rb"[\w.:/+=-]{1,128}")


class ClientDisconnected(Exception):
    """The client disconnected before its request was complete, so nobody is left to be answered."""


class BodyTimeout(ClientError):
    http_status = 408


class UnknownEncoding(ClientError):
    http_status = 415


class RequestIds:
    """Every response carries x-request-id: the client's own id if it is well formed, else a new one."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = header(scope, b"x-request-id")
        request_id = given if given and _SANE_ID.fullmatch(given) else new_id().encode()

        scope[REQUEST_ID] = request_id.decode()

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), (b"x-request-id", request_id)]
            await send(message)

        await self._app(scope, receive, send_with_id)


def header(scope: Scope, name: bytes) -> bytes | None:
    return next((value for key, value in scope["headers"] if key == name), None)


async def read_body(scope: Scope, receive: Receive, *, bytes_max: int) -> bytes:
    """Return the whole body. Raises UnknownEncoding, BodyTimeout, ClientDisconnected, and BodyTooLarge as
    soon as the size is known."""
    if (coding := (header(scope, b"content-encoding") or b"identity").strip().lower()) != b"identity":
        raise UnknownEncoding(
            f"content-encoding {coding.decode('latin-1')!r:.40} is not understood: send the body as it is"
        )
    declared = header(scope, b"content-length") or b""
    if declared.isdigit() and int(declared) > bytes_max:
        raise BodyTooLarge(f"the body has {int(declared)} bytes, at most {bytes_max} are allowed")
    parts: list[bytes] = []
    size, more = 0, True
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnected
                parts.append(message.get("body", b""))
                size += len(parts[-1])
                if size > bytes_max:
                    raise BodyTooLarge(f"the body has more than {bytes_max} bytes")
                more = message.get("more_body", False)
    except TimeoutError:
        raise BodyTimeout(f"the body did not arrive within {BODY_TIMEOUT_S:g} s") from None
    return b"".join(parts)


async def respond(send: Send, status: int, body: bytes, headers: Headers) -> None:
    length = (b"content-length", b"%d" % len(body))
    await send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
    await send({"type": "http.response.body", "body": body})


async def respond_and_linger(
    receive: Receive, send: Send, status: int, body: bytes, headers: Headers
) -> None:
    """Answer a client that is still sending, and hang up. Closing at once would reset the connection, and the
    client would never see the answer; so its further bytes are read and dropped for a moment."""
    more = [(b"content-length", b"%d" % len(body)), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": status, "headers": [*headers, *more]})
    await send({"type": "http.response.body", "body": body, "more_body": True})
    size = 0
    try:
        async with asyncio.timeout(LINGER_S):
            while size < LINGER_BYTES_MAX:
                message = await receive()
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    break
                size += len(message.get("body", b""))
    except TimeoutError:
        pass
    await send({"type": "http.response.body", "body": b""})


async def until_disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def watch(scope: Scope, receive: Receive, on_gone: Callable[[], None]) -> Callable[[], None]:
    """Call `on_gone` when the client hangs up. The body must have been read. Returns a function that ends the
    watch."""
    watched: Callable[[Callable[[], None]], Callable[[], None]] | None = scope.get(WATCH)
    if watched is not None:
        return watched(on_gone)

    async def wait() -> None:
        await until_disconnected(receive)
        on_gone()

    task = asyncio.create_task(wait())

    def end() -> None:
        task.cancel()

    return end
