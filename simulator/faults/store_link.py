"""The local socket between a worker and the store node of its host, and the worker's copying thread.

A local socket never stalls by itself and loses nothing: what was sent before an end died still arrives, then
end of file. The worker's adapter closes it only when no copy is under way, so that its end means that the
worker touches no slot any more.
"""

from collections import deque
from collections.abc import Callable
from typing import Protocol

from baton.core.ids import WorkerId
from baton.core.store import StoreHello, StoreToWorker, StoreWelcome, WorkerToStore
from simulator.faults.memory import WHOLE, DeviceMemory
from simulator.faults.run_context import RunContext
from worker.events import CopyDone, CopyFromStore, CopyToStore, FromStore, StoreJoined, StoreLost, WorkerEvent

SOCKET_S = 0.0002
RECONNECT_S = 0.15


class LinkedWorker(Protocol):
    """A worker, as its adapter to the store sees it."""

    run: RunContext
    name: str
    worker_id: WorkerId
    fingerprint: str
    memory: DeviceMemory

    @property
    def store(self) -> "SimStoreLink": ...

    @property
    def block_bytes(self) -> int: ...

    @property
    def copy_block_s(self) -> float: ...

    def post(self, happening: Callable[[], None]) -> None: ...

    def feed(self, event: WorkerEvent) -> None: ...


class LinkedNode(Protocol):
    """A store node, as the workers of its host see it."""

    is_alive: bool
    arena: DeviceMemory
    sessions: "list[LocalSession]"

    def post(self, happening: Callable[[], None]) -> None: ...

    def on_worker_message(self, session: "LocalSession", message: WorkerToStore) -> None: ...

    def on_worker_closed(self, session: "LocalSession") -> None: ...


class LinkedHost(Protocol):
    """A machine, as its workers see it: the store node of the moment."""

    @property
    def node(self) -> LinkedNode | None: ...


class LocalSession:
    """One connection, ordered in both directions."""

    __slots__ = ("_last_s", "_run", "arena", "is_open", "node", "worker")

    def __init__(self, run: RunContext, worker: LinkedWorker, node: LinkedNode) -> None:
        self._run = run
        self.worker, self.node = worker, node
        self.arena: DeviceMemory | None = None
        """The arena, mapped with the welcome; it outlives the node."""
        self.is_open = True
        self._last_s = [0.0, 0.0]

    def to_node(self, message: WorkerToStore) -> None:
        if self.is_open:
            self._deliver(1, lambda: self.node.on_worker_message(self, message))

    def to_worker(self, message: StoreToWorker) -> None:
        if self.is_open:
            self._deliver(0, lambda: self.worker.store.on_message(self, message))

    def close(self) -> None:
        """Close the connection, because an end died or the worker's adapter wants it. The other end first
        reads what came before."""
        if not self.is_open:
            return
        self.is_open = False
        self._deliver(1, lambda: self.node.on_worker_closed(self))
        self._deliver(0, lambda: self.worker.store.on_closed(self))

    def _deliver(self, to_end: int, happening: Callable[[], None]) -> None:
        process = self.node if to_end else self.worker
        at_s = max(self._run.clock.now_s + SOCKET_S, self._last_s[to_end])
        self._last_s[to_end] = at_s
        self._run.clock.at(at_s, lambda: process.post(happening))


class SimStoreLink:
    """The worker's adapter. It keeps a session with its host's node, and makes one copy after another."""

    __slots__ = ("_copies", "_has_checksums", "_host", "_is_closing", "_rng", "_run", "_session", "_worker")

    def __init__(self, worker: LinkedWorker, host: LinkedHost | None) -> None:
        self._worker, self._host = worker, host
        self._run = worker.run
        self._rng = worker.run.stream(f"copies/{worker.name}")
        self._session: LocalSession | None = None
        self._copies: deque[tuple[CopyToStore | CopyFromStore, DeviceMemory | None]] = deque()
        self._is_closing = False
        self._has_checksums = True
        self._connect_later(0.0)

    # --- session ------------------------------------------------------------------------------------

    def _connect_later(self, delay_s: float) -> None:
        if self._host is not None:
            self._run.clock.after(delay_s + SOCKET_S, lambda: self._worker.post(self._connect))

    def _connect(self) -> None:
        assert self._host is not None
        node = self._host.node
        if self._session is not None:
            return
        if node is None or not node.is_alive:
            self._connect_later(RECONNECT_S)
            return
        worker = self._worker
        self._session = LocalSession(self._run, worker, node)
        node.sessions.append(self._session)
        self._session.to_node(StoreHello(worker.worker_id, worker.fingerprint, worker.block_bytes))

    def on_message(self, session: LocalSession, message: StoreToWorker) -> None:
        if session is not self._session or self._is_closing:
            return
        if isinstance(message, StoreWelcome):
            session.arena = session.node.arena
            self._has_checksums = message.has_checksums
            self._worker.feed(StoreJoined(message))
        else:
            self._worker.feed(FromStore(message))

    def on_closed(self, session: LocalSession) -> None:
        """Take note that the node closed the connection, or died."""
        if session is self._session:
            self._session = None
            if not self._is_closing:
                self._worker.feed(StoreLost())
            self._is_closing = False
            self._connect_later(RECONNECT_S)

    def break_off(self) -> None:
        """Fail with an error on the socket: told at once, closed when no copy is under way."""
        if self._session is not None and not self._is_closing:
            self._is_closing = True
            self._worker.feed(StoreLost())
            self._close_if_calm()

    def _close_if_calm(self) -> None:
        if self._is_closing and not self._copies and self._session is not None:
            self._session.close()

    def send(self, message: WorkerToStore) -> None:
        if self._session is not None and not self._is_closing:
            self._session.to_node(message)

    def process_died(self) -> None:
        if self._session is not None:
            self._session.close()

    # --- copies -------------------------------------------------------------------------------------

    def copy(self, action: CopyToStore | CopyFromStore) -> None:
        arena = self._session.arena if self._session is not None else None
        self._copies.append((action, arena))
        if len(self._copies) == 1:
            self._begin()

    def slots_being_written(self) -> set[int]:
        return {slot for copy, _ in self._copies if isinstance(copy, CopyToStore) for slot in copy.slots}

    def copies_with(self, arena: DeviceMemory, slot: int) -> bool:
        """Return whether a copy that is not over reads or writes this slot."""
        return any(mapped is arena and slot in copy.slots for copy, mapped in self._copies)

    def _begin(self) -> None:
        """Begin the oldest copy. Half of the blocks move somewhere in the middle, the rest at the end, with
        the content that they have then."""
        action, arena = self._copies[0]
        seconds = self._worker.copy_block_s * len(action.blocks) * (0.5 + self._rng.random())
        half = len(action.blocks) // 2
        self._run.clock.after(
            seconds / 2, lambda: self._worker.post(lambda: self._move(action, arena, 0, half))
        )
        self._run.clock.after(
            seconds, lambda: self._worker.post(lambda: self._end(action, arena, half, seconds))
        )

    def _move(
        self, action: CopyToStore | CopyFromStore, arena: DeviceMemory | None, first: int, end: int
    ) -> None:
        if arena is None:
            return
        pool = self._worker.memory
        for slot, block in zip(action.slots[first:end], action.blocks[first:end], strict=True):
            if isinstance(action, CopyToStore):
                arena.copy_block(pool, block, slot)
            else:
                pool.copy_block(arena, slot, block)

    def _end(
        self, action: CopyToStore | CopyFromStore, arena: DeviceMemory | None, first: int, seconds: float
    ) -> None:
        self._move(action, arena, first, len(action.blocks))
        self._copies.popleft()
        done = self._done(action, arena, seconds)
        if self._copies:
            self._begin()
        self._worker.feed(done)
        self._close_if_calm()

    def _done(
        self, action: CopyToStore | CopyFromStore, arena: DeviceMemory | None, seconds: float
    ) -> CopyDone:
        if arena is None:
            return CopyDone(action.copy_id, error="the store is gone", seconds=seconds)
        counts, count = self._run.counts, len(action.blocks)
        if isinstance(action, CopyToStore):
            counts["blocks copied to the store"] += count
            sums = tuple(arena.checksum_of(s) if self._has_checksums else 0 for s in action.slots)
            return CopyDone(action.copy_id, checksums=sums, seconds=seconds)
        corrupt = tuple(
            i for i, wanted in enumerate(action.checksums) if wanted and self._sum(action, i, arena) != wanted
        )
        counts["blocks copied from the store"] += count - len(corrupt)
        counts["corrupt blocks noticed by a worker"] += len(corrupt)
        return CopyDone(action.copy_id, corrupt=corrupt, seconds=seconds)

    def _sum(self, action: CopyFromStore, index: int, arena: DeviceMemory) -> int:
        """Return the checksum of a block that was loaded: of the bytes that arrived, or of the slot where the
        block went to several parts."""
        pool = self._worker.memory
        if pool.places == WHOLE:
            return pool.checksum_of(action.blocks[index])
        return arena.checksum_of(action.slots[index])
