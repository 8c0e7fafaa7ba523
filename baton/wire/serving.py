"""The beginning and the end of a call on the answering side."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import grpc

from baton.wire.decoding import WireError
from baton.wire.link import END, Link, LinkBroken

T = TypeVar("T")

HELLO_S = 5.0
"""The longest time from opening a session to the caller's first message."""


async def first_message(context: Any) -> Any:
    """The first message; END also stands for a caller that opens a session and says nothing."""
    try:
        async with asyncio.timeout(HELLO_S):
            return await context.read()
    except TimeoutError:
        return END


async def request_of(context: Any, decode: Callable[[Any], T], message: Any) -> T:
    """What the caller asks for; a call that makes no sense ends with INVALID_ARGUMENT."""
    try:
        return decode(message)
    except WireError as error:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        raise


async def until_end(serving: Coroutine[Any, Any, None], link: Link[Any, Any]) -> None:
    try:
        await serving
    except LinkBroken:
        pass  # the handler has seen it; the stream is over either way
    finally:
        await link.close()


async def serve_until(dropped: asyncio.Event, reading: Coroutine[Any, Any, None]) -> None:
    """Await `reading`, or leave it when `dropped` is set; raises what `reading` raises.

    A handler that *returns* ends the stream for the peer. Cancelling a handler does not: gRPC then
    leaves the peer waiting.
    """
    reader = asyncio.create_task(reading)
    drop = asyncio.create_task(dropped.wait())
    try:
        await asyncio.wait({reader, drop}, return_when=asyncio.FIRST_COMPLETED)
        if reader.done():
            reader.result()
    finally:
        for task in (reader, drop):
            task.cancel()
        await asyncio.gather(reader, drop, return_exceptions=True)
