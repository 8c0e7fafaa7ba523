"""The Unix socket where a host's workers, and its operator, find the store node."""

import asyncio
import contextlib
import fcntl
import logging
import os
import socket
import stat
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Protocol

from baton.core.errors import SetupError
from baton.core.ids import WorkerId
from baton.core.store import StoreHello, StoreRefused, StoreToWorker, StoreWelcome, WorkerToStore
from baton.core.store_admin import Declined, StoreReply, StoreRequest
from baton.wire.decoding import WireError
from baton.wire.link import END, LinkBroken
from baton.wire.local import FrameSocket, StoreSide
from baton.wire.store_codec import FROM_STORE, FROM_WORKER, OPENING, REPLY

log = logging.getLogger(__name__)

HELLO_S = 5.0
"""The time from connecting to the first frame; also for an older session of the same worker to end."""

CONNECTIONS_MAX = 512
"""Open connections, at most. One more is closed."""

ACCEPT_AGAIN_S = 1.0
"""The pause after a connection could not be accepted."""

PATH_BYTES_MAX = 107
"""The length of a Unix socket's address on Linux."""


class WorkerSink(Protocol):
    """The receiver of what workers say. `worker_joined` is answered through `LocalSessions.send`, at once,
    by a welcome or a refusal."""

    def worker_joined(self, hello: StoreHello) -> None: ...

    def from_worker(self, worker_id: WorkerId, message: WorkerToStore) -> None: ...

    def worker_lost(self, worker_id: WorkerId) -> None: ...


class _WorkerSession:
    def __init__(self, hello: StoreHello, link: StoreSide, frames: FrameSocket) -> None:
        self.hello, self.link, self.frames = hello, link, frames
        self.is_dropped = False
        """The worker is not listened to any more: only its end counts."""
        self.was_refused = False
        self.ended = asyncio.Event()


class LocalSessions:
    """One session per worker. It ends when the worker closes its socket, and not before: until then the
    worker may still write into the slots it was given. From our side only its writing half is closed."""

    def __init__(self, *, sink: WorkerSink, arena_descriptor: Callable[[StoreHello], int]) -> None:
        """`arena_descriptor` returns the descriptor for a worker that is being welcomed."""
        self._sink, self._arena_descriptor = sink, arena_descriptor
        self._sessions: dict[WorkerId, _WorkerSession] = {}

    @property
    def count(self) -> int:
        return len(self._sessions)

    def hello(self, worker_id: WorkerId) -> StoreHello | None:
        """The worker's hello; None if it has no session."""
        session = self._sessions.get(worker_id)
        return session.hello if session is not None else None

    async def serve(self, hello: StoreHello, frames: FrameSocket) -> None:
        """Serve until the worker has closed its end."""
        worker_id = hello.worker_id
        if not await self._predecessor_ended(worker_id):
            await frames.write(FROM_STORE.encode(StoreRefused("its former session is still open")))
            return
        session = _WorkerSession(hello, self._link(hello, frames), frames)
        self._sessions[worker_id] = session
        try:
            self._sink.worker_joined(hello)
            if session.was_refused:
                await session.link.close()
            else:
                log.info("worker %s joined", worker_id)
                await self._read(worker_id, session)
        finally:
            del self._sessions[worker_id]
            session.ended.set()
            if not session.was_refused:
                log.info("worker %s left", worker_id)
                self._sink.worker_lost(worker_id)
            await session.link.close()

    def send(self, worker_id: WorkerId, message: StoreToWorker) -> None:
        """Send a message, or drop it if the session is gone. A worker that does not read loses its
        session."""
        session = self._sessions.get(worker_id)
        if session is None or session.is_dropped:
            return
        session.was_refused |= isinstance(message, StoreRefused)
        try:
            session.link.send(message)
        except LinkBroken as error:
            self.drop(worker_id, str(error))

    def drop(self, worker_id: WorkerId, reason: str) -> None:
        """Tell the worker, by end of file, that the session is over; its own end is awaited as ever."""
        session = self._sessions.get(worker_id)
        if session is not None and not session.is_dropped:
            log.warning("worker %s dropped: %s", worker_id, reason)
            session.is_dropped = True
            session.frames.end_writing()

    def hang_up(self) -> None:
        """End all sessions: this node ends."""
        for session in self._sessions.values():
            session.is_dropped = True
            session.frames.end_writing()

    async def _predecessor_ended(self, worker_id: WorkerId) -> bool:
        predecessor = self._sessions.get(worker_id)
        if predecessor is None:
            return True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HELLO_S):
                await predecessor.ended.wait()
        return worker_id not in self._sessions

    async def _read(self, worker_id: WorkerId, session: _WorkerSession) -> None:
        try:
            async for message in session.link:
                if session.is_dropped:
                    break
                self._sink.from_worker(worker_id, message)
            else:
                return
        except LinkBroken as error:
            self.drop(worker_id, str(error))
        await session.frames.read_to_end()

    def _link(self, hello: StoreHello, frames: FrameSocket) -> StoreSide:
        def encode(message: StoreToWorker) -> tuple[bytes, int | None]:
            is_welcome = isinstance(message, StoreWelcome)
            return FROM_STORE.encode(message), self._arena_descriptor(hello) if is_welcome else None

        async def write(frame: tuple[bytes, int | None]) -> None:
            await frames.write(*frame)

        return StoreSide(
            peer=hello.worker_id, read=frames.read, write=write, encode=encode, decode=FROM_WORKER.decode
        )


class LocalServer:
    """Accepts connections: the first frame shows who is there."""

    def __init__(
        self,
        path: str,
        *,
        sessions: LocalSessions,
        answer: Callable[[StoreRequest], Awaitable[StoreReply]],
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
    ) -> None:
        self._path, self._sessions, self._answer, self._spawn = path, sessions, answer, spawn
        self._listener: socket.socket | None = None
        self._lock: int | None = None
        self._connections: set[asyncio.Task[None]] = set()

    def open(self) -> None:
        """Open the socket. Raises SetupError if it cannot be made, or another store node serves there."""
        if len(os.fsencode(self._path)) > PATH_BYTES_MAX:
            raise SetupError(f"store.socket={self._path}: longer than {PATH_BYTES_MAX} bytes")
        self._lock = _locked(f"{self._path}.lock")
        try:
            _remove_stale(self._path)
            self._listener = _listening(self._path)
        except BaseException:
            self.close()
            raise

    async def run(self) -> None:
        assert self._listener is not None, "open first"
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(self._listener)
            except OSError as error:  # no descriptor left, most likely; some will be closed
                log.warning("store.socket=%s: no further connection for now: %s", self._path, error)
                await asyncio.sleep(ACCEPT_AGAIN_S)
                continue
            if len(self._connections) >= CONNECTIONS_MAX:
                connection.close()
                continue
            task = self._spawn(self._serve(connection))
            self._connections.add(task)
            task.add_done_callback(self._connections.discard)

    def close(self) -> None:
        """Close the socket, after `run` has ended. The file goes; the lock's file stays, so that two nodes
        never lock two."""
        if self._listener is not None:
            self._listener.close()
            with contextlib.suppress(OSError):
                os.unlink(self._path)
            self._listener = None
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    async def _serve(self, connection: socket.socket) -> None:
        frames = FrameSocket(connection)
        try:
            opening = await self._opening(frames)
            if isinstance(opening, StoreHello):
                await self._sessions.serve(opening, frames)
            elif opening is not None:
                await frames.write(REPLY.encode(await self._answer(opening)))
        except (OSError, WireError) as error:
            log.debug("local connection: %s", error)
        finally:
            frames.close()

    async def _opening(self, frames: FrameSocket) -> StoreHello | StoreRequest | None:
        """Read the first frame; None if nothing comes, or nothing that is understood."""
        try:
            async with asyncio.timeout(HELLO_S):
                payload = await frames.read()
            return None if payload is END else OPENING.decode(payload)
        except TimeoutError:
            return None
        except WireError as error:
            log.warning("local connection: %s", error)
            await frames.write(REPLY.encode(Declined(str(error))))
            return None


def _locked(path: str) -> int:
    """A descriptor that holds the lock for as long as this process lives, however it ends."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise SetupError(f"{path}: {error.strerror or error}") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise SetupError(f"another store node holds {path}: choose another store.socket") from None
    return descriptor


def _listening(path: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    mask = os.umask(0o177)
    try:
        listener.bind(path)
        listener.listen(CONNECTIONS_MAX)
    except OSError as error:
        listener.close()
        raise SetupError(f"store.socket={path}: {error.strerror or error}") from None
    finally:
        os.umask(mask)
    listener.setblocking(False)
    return listener


def _remove_stale(path: str) -> None:
    """Remove what a killed node left behind; the lock shows that it is dead. Nothing but a socket is
    removed."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise SetupError(f"store.socket={path}: there is something else than a socket")
    os.unlink(path)
