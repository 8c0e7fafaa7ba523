"""One end of a long-lived stream between two processes: typed, bounded, and clear about its end."""

import asyncio
import contextlib
import re
from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar

import grpc
import grpc.aio

from baton.wire.decoding import WireError
from baton.wire.transport import explained

Out = TypeVar("Out")
In = TypeVar("In")

END: Any = getattr(grpc.aio, "EOF")  # noqa: B009 - the stubs do not know it
"""The result of reading when the peer has closed its side in good order."""

OUTBOX_MESSAGES_MAX = 4096
"""The most messages that wait to be written. A peer that reads this much slower than we speak is dropped."""

FLUSH_S = 1.0
"""The longest time that closing waits until queued messages are written."""


_WHERE = re.compile(r"^failed to connect to all addresses; last error: \w+: (ipv4|ipv6|unix):\S+: ")
"""gRPC's own preamble is cut off, since our error text names the address already."""


class LinkBroken(Exception):
    """The other side is gone, or too slow to be worth waiting for. Nothing more will arrive."""


class LinkRefused(LinkBroken):
    """The other side is there, and does not do this for us."""


class Link(Generic[Out, In]):
    """Send without waiting, receive by iteration.

    Iteration ends when the peer closes the stream in good order and raises LinkBroken otherwise. A write that
    comes after the peer's end breaks the link, whatever is still unread: `decode` may return END for a
    message that announces the end, so that this side can close first.
    """

    def __init__(
        self,
        *,
        peer: str,
        read: Callable[[], Awaitable[Any]],
        write: Callable[[Any], Awaitable[None]],
        encode: Callable[[Out], Any],
        decode: Callable[[Any], In],
    ) -> None:
        self.peer = peer
        self._read, self._write = read, write
        self._encode, self._decode = encode, decode
        self._outbox: asyncio.Queue[Out] = asyncio.Queue(OUTBOX_MESSAGES_MAX)
        self._broken: str | None = None
        self._writer = asyncio.create_task(self._write_all(), name=f"link-writer {peer}")

    def send(self, message: Out) -> None:
        """Queue a message; order is kept. Raises LinkBroken if it can never be delivered."""
        if self._broken is not None:
            raise LinkBroken(f"{self.peer}: {self._broken}")
        try:
            self._outbox.put_nowait(message)
        except asyncio.QueueFull:
            self._broken = f"{OUTBOX_MESSAGES_MAX} messages unread"
            raise LinkBroken(f"{self.peer}: {self._broken}") from None

    async def _write_all(self) -> None:
        while True:
            message = await self._outbox.get()
            try:
                await self._write(self._encode(message))
            except asyncio.CancelledError:
                raise
            except BaseException as error:
                # Nothing more will be written, whatever the reason (a message that can't be encoded is one),
                # and the sender must hear of it.
                self._broken = self._broken or describe(error)
                return
            finally:
                self._outbox.task_done()

    def __aiter__(self) -> "Link[Out, In]":
        return self

    async def __anext__(self) -> In:
        try:
            envelope = await self._read()
            message = END if envelope is END else self._decode(envelope)
            if message is END:
                raise StopAsyncIteration
            return message
        except (grpc.RpcError, WireError, OSError, asyncio.InvalidStateError, grpc.aio.BaseError) as error:
            self._broken = self._broken or describe(error)
            raise LinkBroken(f"{self.peer}: {self._broken}") from error

    async def close(self) -> None:
        """Write what is queued, for at most FLUSH_S, then stop. A second call does nothing."""
        if self._broken is None:
            self._broken = "closed"
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._outbox.join(), FLUSH_S)
        self._writer.cancel()
        await asyncio.wait({self._writer})  # unlike awaiting it, this never swallows our own cancellation


def describe(error: BaseException) -> str:
    """The error in one line, for logs and for a peer; gRPC's own text where there is one."""
    if isinstance(error, grpc.aio.AioRpcError):
        details, failed = _WHERE.subn("", error.details() or "")
        return f"{error.code().name}: {explained(details) if failed else details}"
    return f"{type(error).__name__}: {error}"
