"""A Service as clients outside see it: connections go, in turn, to the pods behind it that are ready."""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field

CONNECT_S = 2.0


@dataclass
class OutsideService:
    """`endpoints` tells addresses and ports of the pods that are ready now. A connection stays with its pod,
    as connections do in Kubernetes; it is refused while no pod is ready."""

    endpoints: Callable[[], list[tuple[str, int]]]
    port: int = 0
    _turn: int = 0
    _arrived: asyncio.Condition = field(default_factory=asyncio.Condition)
    _server: asyncio.Server | None = None
    _open: set["asyncio.Task[None]"] = field(default_factory=set["asyncio.Task[None]"])

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def after_connections(self, count: int) -> None:
        """Return when so many more connections were made than before."""
        goal = self._turn + count
        async with self._arrived:
            await self._arrived.wait_for(lambda: self._turn >= goal)

    async def close(self) -> None:
        if self._server:
            self._server.close()
        for task in self._open:
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        with contextlib.suppress(OSError, TimeoutError, asyncio.CancelledError):
            await self._forward(reader, writer)
        self._open.discard(task)
        writer.close()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ready = self.endpoints()
        if not ready:
            return
        self._turn += 1
        async with self._arrived:
            self._arrived.notify_all()
        address, port = ready[self._turn % len(ready)]
        there, to_there = await asyncio.wait_for(asyncio.open_connection(address, port), CONNECT_S)
        try:
            # The client's half may stay open for long after the answer: the pod's end is that of both.
            up = asyncio.create_task(_copy(reader, to_there))
            await _copy(there, writer)
            up.cancel()
        finally:
            to_there.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while part := await reader.read(65536):
        writer.write(part)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()
