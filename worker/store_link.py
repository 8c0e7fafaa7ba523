"""A worker's session with the store node of its host, opened again for as long as the worker lives."""

import asyncio
import logging
from typing import Protocol

from baton.core.store import StoreHello, StoreToWorker, StoreWelcome, WorkerToStore
from baton.wire.link import LinkBroken
from baton.wire.local import StoreRefusal, StoreSession, WorkerSide, store_session

log = logging.getLogger(__name__)

RETRY_FIRST_S, RETRY_MAX_S = 0.1, 2.0
"""The time between two attempts, which doubles while nobody answers."""

LAST_COPY_S = 10.0
"""The time at a session's end for the copies under way."""


class StoreSink(Protocol):
    """The receiver of what the store says. Every `store_joined` is followed by one `store_lost`."""

    def store_joined(self, welcome: StoreWelcome) -> None: ...

    def from_store(self, message: StoreToWorker) -> None: ...

    def store_lost(self) -> None: ...


class ArenaUser(Protocol):
    """Copies between the pool and the arena (`store_copier.StoreCopier`)."""

    def attach(self, descriptor: int, welcome: StoreWelcome) -> None:
        """Map the arena; the descriptor stays the caller's. Raises OSError or ValueError."""
        ...

    async def detach(self) -> None:
        """Return when no copy is or will be under way. Idempotent."""
        ...


class StoreLink:
    """Holds the session. `run` is one task, and cancelling it ends the session. Nothing here waits for the
    store or fails a request: while it is away, the core gets StoreLost and nothing else.

    The socket is closed after the last copy: its end tells the node that its slots are its own again.
    """

    def __init__(self, path: str, *, hello: StoreHello, sink: StoreSink, arena_user: ArenaUser) -> None:
        self._path, self._hello, self._sink, self._arena_user = path, hello, sink, arena_user
        self._link: WorkerSide | None = None
        self._reading: asyncio.Future[None] | None = None
        self.trouble = ""
        """Why there is no session; empty while there is one, or before the first attempt has failed."""
        self.session_count = 0
        self._logged = ""
        """The trouble that was logged last."""

    @property
    def is_joined(self) -> bool:
        return self._link is not None

    def send(self, message: WorkerToStore) -> None:
        """Send a message, or drop it if the session is gone. A store node that does not read loses the
        session."""
        if self._link is None or self._reading is None:
            return
        try:
            self._link.send(message)
        except LinkBroken as error:
            self.trouble = str(error)
            self._reading.cancel()

    async def run(self) -> None:
        delay_s = RETRY_FIRST_S
        while True:
            began = self.session_count
            try:
                async with store_session(self._path, self._hello) as session:
                    await self._serve(session)
                trouble = self.trouble or "it closed the session"
            except (LinkBroken, StoreRefusal) as error:
                trouble = str(error)
            delay_s = RETRY_FIRST_S if self.session_count > began else min(RETRY_MAX_S, 2 * delay_s)
            self._log_trouble(trouble)
            await asyncio.sleep(delay_s)

    def _log_trouble(self, trouble: str) -> None:
        """Log each new reason once."""
        if trouble != self._logged:
            log.warning("the store is away, and what it may hold is computed: %s", trouble)
        self.trouble = self._logged = trouble

    async def _serve(self, session: StoreSession) -> None:
        """Serve until the session ends. Raises LinkBroken."""
        welcome = session.welcome
        try:
            self._arena_user.attach(session.descriptor, welcome)
        except (OSError, ValueError) as error:
            raise LinkBroken(f"{welcome.node_id}: its arena cannot be mapped: {error}") from None
        self._link, self.trouble, self._logged = session.link, "", ""
        self.session_count += 1
        log.info(
            "store node %s: %d slots of %d bytes", welcome.node_id, welcome.slot_count, welcome.slot_bytes
        )
        self._reading = asyncio.ensure_future(self._read(session.link))
        try:
            self._sink.store_joined(welcome)
            await asyncio.wait({self._reading})
        finally:
            reading, self._link, self._reading = self._reading, None, None
            reading.cancel()
            self._sink.store_lost()
            await self._let_go(session)
        if not reading.cancelled():
            reading.result()

    async def _let_go(self, session: StoreSession) -> None:
        """End a session. It must not be interrupted: a copy may be under way."""
        detaching = asyncio.ensure_future(self._arena_user.detach())
        ends_s = asyncio.get_running_loop().time() + LAST_COPY_S
        is_cancelled = False
        while not detaching.done() and (left_s := ends_s - asyncio.get_running_loop().time()) > 0:
            try:
                await asyncio.wait({detaching}, timeout=left_s)
            except asyncio.CancelledError:
                is_cancelled = True
        if not detaching.done():
            log.error("a copy to or from the store hangs: the session stays open while this process lives")
            session.keep_open()
        if is_cancelled:
            raise asyncio.CancelledError

    async def _read(self, link: WorkerSide) -> None:
        async for message in link:
            self._sink.from_store(message)
