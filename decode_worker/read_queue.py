"""The order in which granted blocks are read: bounded in bytes, and fair between the requests that wait.
Pure."""

from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

SessionT = TypeVar("SessionT")


@dataclass(slots=True, eq=False)
class Chunk(Generic[SessionT]):
    """Blocks read in one go: source_blocks[i] is the session's block `first_block` + i."""

    session: SessionT
    first_block: int
    source_blocks: tuple[int, ...]
    generations: tuple[int, ...]
    checksums: tuple[int, ...] = ()
    attempts: int = 0


@dataclass(slots=True, eq=False)
class _Backlog(Generic[SessionT]):
    """The chunks of one session that wait, in order."""

    waiting: deque[Chunk[SessionT]]
    blocks_in_flight: int = 0
    served_at: int = 0
    """Number of the turn it had last."""


class ReadQueue(Generic[SessionT]):
    """The session with the fewest bytes in flight is next, among equals the one that has waited longest.

    One session has at most half of the bytes in flight, and a chunk is at most a quarter of them: a short
    prompt beside a long one waits for one chunk at most, however much the long one has been granted.
    A chunk that would exceed the limit waits, unless nothing else is in flight.
    """

    def __init__(self, *, reads_max: int, bytes_max: int, block_bytes: int) -> None:
        self._reads_max = reads_max
        self._blocks_max = max(1, bytes_max // block_bytes)
        self._session_blocks_max = max(1, self._blocks_max // 2)
        self._chunk_blocks_max = max(1, self._blocks_max // 4)
        self._backlogs: dict[SessionT, _Backlog[SessionT]] = {}
        self._reads_in_flight = 0
        self._blocks_in_flight = 0
        self._turn = 0

    def add(self, chunk: Chunk[SessionT]) -> int:
        """Put it behind the session's other chunks. Returns as how many chunks it will be read."""
        backlog, step = self._backlog(chunk.session), self._chunk_blocks_max
        starts = range(0, len(chunk.source_blocks), step)
        for start in starts:
            part = slice(start, start + step)
            backlog.waiting.append(
                Chunk(
                    chunk.session,
                    chunk.first_block + start,
                    chunk.source_blocks[part],
                    chunk.generations[part],
                    chunk.checksums[part],
                )
            )
        return len(starts)

    def add_again(self, chunk: Chunk[SessionT]) -> None:
        """Put a chunk that `next` gave before the session's others."""
        self._backlog(chunk.session).waiting.appendleft(chunk)

    def next(self) -> Chunk[SessionT] | None:
        """The chunk to read now; it is in flight until `ended`."""
        if self._reads_in_flight >= self._reads_max:
            return None
        able = [backlog for backlog in self._backlogs.values() if self._may_start(backlog)]
        if not able:
            return None
        backlog = min(able, key=lambda backlog: (backlog.blocks_in_flight, backlog.served_at))
        count = len(backlog.waiting[0].source_blocks)
        if self._blocks_in_flight and self._blocks_in_flight + count > self._blocks_max:
            return None  # it is this one's turn: smaller ones do not overtake it for ever
        self._turn += 1
        backlog.served_at = self._turn
        backlog.blocks_in_flight += count
        self._blocks_in_flight += count
        self._reads_in_flight += 1
        return backlog.waiting.popleft()

    def _may_start(self, backlog: _Backlog[SessionT]) -> bool:
        if not backlog.waiting:
            return False
        count = len(backlog.waiting[0].source_blocks)
        return not backlog.blocks_in_flight or backlog.blocks_in_flight + count <= self._session_blocks_max

    def ended(self, chunk: Chunk[SessionT]) -> None:
        """It is not in flight any more."""
        backlog, count = self._backlogs[chunk.session], len(chunk.source_blocks)
        backlog.blocks_in_flight -= count
        self._blocks_in_flight -= count
        self._reads_in_flight -= 1
        self._drop_if_empty(chunk.session)

    def forget(self, session: SessionT) -> None:
        """The session's waiting chunks are not wanted any more."""
        backlog = self._backlogs.get(session)
        if backlog is not None:
            backlog.waiting.clear()
            self._drop_if_empty(session)

    def check(self, *, reads_in_flight: int) -> None:
        assert self._reads_in_flight == reads_in_flight <= self._reads_max
        assert self._blocks_in_flight == sum(backlog.blocks_in_flight for backlog in self._backlogs.values())
        assert all(backlog.waiting or backlog.blocks_in_flight for backlog in self._backlogs.values())

    def _backlog(self, session: SessionT) -> _Backlog[SessionT]:
        if session not in self._backlogs:
            self._backlogs[session] = _Backlog(deque())
        return self._backlogs[session]

    def _drop_if_empty(self, session: SessionT) -> None:
        backlog = self._backlogs[session]
        if not backlog.waiting and not backlog.blocks_in_flight:
            del self._backlogs[session]
