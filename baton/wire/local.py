"""The local session between a worker and the store node of its host: frames over a Unix stream socket.

A frame is its payload's size in four bytes, little endian, and the payload: one message of
`baton.core.store` in MessagePack. The arena's file descriptor travels with the welcome (SCM_RIGHTS).
"""

import asyncio
import contextlib
import socket
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from baton.core.store import StoreHello, StoreRefused, StoreToWorker, StoreWelcome, WorkerToStore
from baton.core.store_admin import StoreReply, StoreRequest
from baton.wire.decoding import WireError
from baton.wire.link import END, Link, LinkBroken
from baton.wire.store_codec import FROM_STORE, FROM_WORKER, OPENING, REPLY

FRAME_BYTES_MAX = 16 * 2**20
"""A longer frame ends the session."""

CONNECT_S = 2.0
"""The longest time from connecting to the store's first answer."""

REQUEST_S = 10.0
"""The longest time for one request of an operator."""

_SIZE_BYTES = 4
_RECEIVE_BYTES = 65_536

WorkerSide = Link[WorkerToStore, StoreToWorker]
StoreSide = Link[StoreToWorker, WorkerToStore]


class StoreRefusal(Exception):
    """The store node is there, and does not want this worker."""


class FrameSocket:
    """Frames over one connected stream socket, with one reader and one writer at a time.

    Reading raises WireError for a frame that is too long or cut off, OSError for a broken connection.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._buffer = bytearray()

    async def read(self) -> Any:
        """The next payload; END when the other side has closed in good order."""
        loop = asyncio.get_running_loop()
        while (payload := self._take()) is None:
            received = await loop.sock_recv(self._socket, _RECEIVE_BYTES)
            if not received:
                if self._buffer:
                    raise WireError("a frame was cut off")
                return END
            self._buffer += received
        return payload

    async def read_with_descriptor(self) -> tuple[Any, int | None]:
        """The first payload of a connection, and the descriptor that came with it. The caller closes it."""
        await self._readable()
        received, descriptors, _, _ = socket.recv_fds(
            self._socket, _RECEIVE_BYTES, 1, socket.MSG_CMSG_CLOEXEC
        )
        descriptor = descriptors[0] if descriptors else None
        try:
            if not received:
                return END, descriptor
            self._buffer += received
            return await self.read(), descriptor
        except BaseException:
            if descriptor is not None:
                socket.close(descriptor)
            raise

    async def write(self, payload: bytes, descriptor: int | None = None) -> None:
        frame = len(payload).to_bytes(_SIZE_BYTES, "little") + payload
        if descriptor is not None:
            # This is a connection's first frame only: the socket's buffer is empty then, and takes it.
            sent = socket.send_fds(self._socket, [frame], [descriptor])
            frame = frame[sent:]
        await asyncio.get_running_loop().sock_sendall(self._socket, frame)

    async def read_to_end(self) -> None:
        """Throw away what comes, until the other side has closed in whatever way."""
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):
            while await loop.sock_recv(self._socket, _RECEIVE_BYTES):
                pass

    def end_writing(self) -> None:
        """Let the other side read END after what was written before."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def keep_open(self) -> None:
        """Keep the connection until this process ends, even after `close`."""
        self._socket.dup().detach()

    def close(self) -> None:
        """Close the socket; reading and writing must have ended."""
        self._socket.close()

    def _take(self) -> bytes | None:
        """The next payload if all of it is here."""
        if len(self._buffer) < _SIZE_BYTES:
            return None
        size = int.from_bytes(self._buffer[:_SIZE_BYTES], "little")
        if size > FRAME_BYTES_MAX:
            raise WireError(f"a frame of {size} bytes")
        end = _SIZE_BYTES + size
        if len(self._buffer) < end:
            return None
        payload = bytes(self._buffer[_SIZE_BYTES:end])
        del self._buffer[:end]
        return payload

    async def _readable(self) -> None:
        loop = asyncio.get_running_loop()
        readable: asyncio.Future[None] = loop.create_future()
        loop.add_reader(self._socket, lambda: readable.done() or readable.set_result(None))
        try:
            await readable
        finally:
            loop.remove_reader(self._socket)


@asynccontextmanager
async def _connected(path: str) -> AsyncGenerator[FrameSocket]:
    """A connection to the socket at `path`. Raises LinkBroken."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(connection, path)
        except OSError as error:
            raise LinkBroken(f"{path}: {error.strerror or error}") from None
        yield FrameSocket(connection)
    finally:
        connection.close()


@dataclass(frozen=True, slots=True)
class StoreSession:
    welcome: StoreWelcome
    descriptor: int
    """The arena's descriptor. It is closed with the session; mappings stay."""
    link: WorkerSide
    keep_open: Callable[[], None]
    """After this call the store does not read our end of file before this process is gone."""


@asynccontextmanager
async def store_session(
    path: str, hello: StoreHello, *, connect_timeout_s: float = CONNECT_S
) -> AsyncGenerator[StoreSession]:
    """A worker's session with its host's store node.

    Leaving the context closes the socket, by which the caller says that it touches no slot any more. Raises
    LinkBroken if there is no store node that answers in time, StoreRefusal if it declines.
    """
    async with _connected(path) as frames:
        welcome, descriptor = await _welcome(path, frames, hello, connect_timeout_s)
        link: WorkerSide = Link(
            peer=welcome.node_id,
            read=frames.read,
            write=frames.write,
            encode=FROM_WORKER.encode,
            decode=FROM_STORE.decode,
        )
        try:
            yield StoreSession(welcome, descriptor, link, frames.keep_open)
        finally:
            socket.close(descriptor)
            await link.close()


async def _welcome(
    path: str, frames: FrameSocket, hello: StoreHello, timeout_s: float
) -> tuple[StoreWelcome, int]:
    descriptor: int | None = None
    try:
        async with asyncio.timeout(timeout_s):
            await frames.write(FROM_WORKER.encode(hello))
            payload, descriptor = await frames.read_with_descriptor()
        if payload is END:
            raise LinkBroken(f"{path}: closed before a welcome")
        match FROM_STORE.decode(payload):
            case StoreWelcome() as welcome if descriptor is not None:
                if welcome.wire_version != hello.wire_version:
                    theirs = f"store version {welcome.wire_version}, ours is {hello.wire_version}"
                    raise StoreRefusal(theirs)
                given, descriptor = descriptor, None
                return welcome, given
            case StoreRefused(message):
                raise StoreRefusal(message)
            case other:
                raise LinkBroken(f"{path}: {type(other).__name__} instead of a welcome with an arena")
    except TimeoutError:
        raise LinkBroken(f"{path}: no answer within {timeout_s:g} s") from None
    except (OSError, WireError) as error:
        raise LinkBroken(f"{path}: {error}") from None
    finally:
        if descriptor is not None:
            socket.close(descriptor)


async def ask_store(path: str, request: StoreRequest, *, timeout_s: float = REQUEST_S) -> StoreReply:
    """Send an operator's request over the local socket. Raises LinkBroken."""
    async with _connected(path) as frames:
        try:
            async with asyncio.timeout(timeout_s):
                await frames.write(OPENING.encode(request))
                payload = await frames.read()
            if payload is END:
                raise LinkBroken(f"{path}: closed without an answer")
            return REPLY.decode(payload)
        except TimeoutError:
            raise LinkBroken(f"{path}: no answer within {timeout_s:g} s") from None
        except (OSError, WireError) as error:
            raise LinkBroken(f"{path}: {error}") from None
