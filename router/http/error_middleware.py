"""What nobody foresaw: the client gets OpenAI's error shape, the log one bounded report."""

import asyncio
import logging
import traceback
from collections.abc import Callable

from router.http.asgi import (
    ABORT,
    IS_CLOSING,
    JSON,
    REQUEST_ID,
    App,
    ClientDisconnected,
    Message,
    Receive,
    Scope,
    Send,
    respond,
    until_disconnected,
)
from router.openai.responses import error_body

log = logging.getLogger(__name__)

FRAMES_MAX = 8
"""Of a traceback, from its inner end: a recursion has thousands."""
CHARACTERS_MAX = 500
CLOSING_S = 5.0
"""From a connection's close to the word that it is gone."""


class ErrorMiddleware:
    """Outermost: no exception leaves it."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        is_closing: Callable[[], bool] = scope.get(IS_CLOSING, lambda: False)
        has_begun = is_complete = False

        async def send_to_client(message: Message) -> None:
            nonlocal has_begun, is_complete
            has_begun = True
            try:
                await send(message)
                is_complete = message["type"] == "http.response.body" and not message.get("more_body", False)
            except RuntimeError as error:
                if is_closing():
                    raise ClientDisconnected from error
                raise

        try:
            await self._app(scope, receive, send_to_client)
        except ClientDisconnected:
            pass
        except Exception as error:
            fields = {"client_request_id": scope.get(REQUEST_ID, "")}
            log.error(
                "defect in %s %s: %s",
                scope["method"],
                scope["path"][:200],
                report(error),
                extra={"fields": fields},
            )
            if not has_begun:
                await respond(send, 500, error_body("internal error", "server_error"), JSON)
            elif not is_complete:
                scope.get(ABORT, _no_way_to_hang_up)()
        if is_closing():
            await _settled(receive)


def _no_way_to_hang_up() -> None:
    """Under another server than ours."""


async def _settled(receive: Receive) -> None:
    """A request whose connection is closing ends when that is done, or the server calls it a defect."""
    try:
        async with asyncio.timeout(CLOSING_S):
            await until_disconnected(receive)
    except TimeoutError:
        log.debug("a closed connection was not reported as lost")


def report(error: BaseException) -> str:
    """Kind, message and the innermost frames, without those of its causes."""
    frames = "".join(traceback.format_tb(error.__traceback__, limit=-FRAMES_MAX))
    return f"{type(error).__name__}: {str(error)[:CHARACTERS_MAX]}\n{frames}"
