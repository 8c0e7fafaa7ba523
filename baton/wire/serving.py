"""Ending a served stream from this side."""

import asyncio
from collections.abc import Coroutine
from typing import Any


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
