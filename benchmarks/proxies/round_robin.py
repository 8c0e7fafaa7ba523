"""Forwards connections to several servers in turn, byte by byte.

`python -m benchmarks.proxies.round_robin --port 8000 --to 127.0.0.1:8001 --to 127.0.0.1:8002`

This is the cheapest balancer possible: it parses nothing, so it suits clients that use one connection per
request, as `baton replay` does. It stands for "replicas behind round robin" at the least cost to the servers.
"""

import argparse
import asyncio
import itertools
from collections.abc import Iterator
from typing import cast

import uvloop

CONNECT_S = 10.0

Address = tuple[str, int]


class Half(asyncio.Protocol):
    """One side of a pair; data that arrives here leaves at the other side."""

    def __init__(self) -> None:
        self.other: Half | None = None
        self.transport: asyncio.Transport | None = None
        self._early: list[bytes] = []
        """Data that came before the other side was connected. Reading is paused, so it is at most one
        read."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        if self.other is None or self.other.transport is None:
            self._early.append(data)
        else:
            self.other.transport.write(data)

    def join(self, other: "Half") -> None:
        """Both sides are connected: send the data that waited."""
        self.other, other.other = other, self
        assert other.transport is not None
        for data in self._early:
            other.transport.write(data)
        self._early.clear()

    def pause_writing(self) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.close()


class ProxiedClient(Half):
    """The client's side; it chooses a server when it is made."""

    def __init__(self, turns: Iterator[Address], dialling: set[asyncio.Task[None]]) -> None:
        super().__init__()
        self._turns = turns
        self._dialling = dialling

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        assert self.transport is not None
        self.transport.pause_reading()
        task = asyncio.get_running_loop().create_task(self._dial())
        self._dialling.add(task)
        task.add_done_callback(self._dialling.discard)

    async def _dial(self) -> None:
        """Connect to the next server. One that does not answer loses its turn, and the client's connection is
        closed."""
        assert self.transport is not None
        host, port = next(self._turns)
        try:
            async with asyncio.timeout(CONNECT_S):
                _, half = await asyncio.get_running_loop().create_connection(Half, host, port)
        except (OSError, TimeoutError):
            self.transport.close()
            return
        if self.transport.is_closing():
            assert half.transport is not None
            half.transport.close()
            return
        self.join(half)
        self.transport.resume_reading()


def address(text: str) -> Address:
    host, _, port = text.rpartition(":")
    return host, int(port)


async def serve(host: str, port: int, servers: list[Address]) -> None:
    """Serve until cancelled."""
    turns = itertools.cycle(servers)
    dialling: set[asyncio.Task[None]] = set()
    server = await asyncio.get_running_loop().create_server(
        lambda: ProxiedClient(turns, dialling), host, port
    )
    async with server:
        await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--to", action="append", type=address, required=True, metavar="HOST:PORT")
    asked = parser.parse_args()
    uvloop.run(serve(asked.host, asked.port, asked.to))


if __name__ == "__main__":
    main()
