"""Unforeseen errors: the client gets OpenAI's error shape, and the log one bounded report."""

import asyncio
import logging
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
from router.http.error_shapes import status_answer
from router.live.defects import INTERNAL, NOT_DEFECTS, report

log = logging.getLogger(__name__)

CLOSING_S = 5.0
"""Time from a connection's close to the message that it is gone."""


class ErrorMiddleware:
    """The outermost middleware: no exception leaves it."""

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
        except NOT_DEFECTS:
            raise
        except BaseException as error:
            fields = {"client_request_id": scope.get(REQUEST_ID, "")}
            log.error(
                "defect in %s %s: %s",
                scope["method"],
                scope["path"][:200],
                report(error),
                extra={"fields": fields},
            )
            if not has_begun:
                await respond(send, 500, status_answer(scope["path"], 500, INTERNAL), JSON)
            elif not is_complete:
                scope.get(ABORT, _no_way_to_hang_up)()
        if is_closing():
            await _settled(receive)


def _no_way_to_hang_up() -> None:
    """Do nothing. Other servers than ours offer no way to hang up."""


async def _settled(receive: Receive) -> None:
    """Wait until a closing connection is closed. Otherwise the server would call its request a defect."""
    try:
        async with asyncio.timeout(CLOSING_S):
            await until_disconnected(receive)
    except TimeoutError:
        log.debug("a closed connection was not reported as lost")
