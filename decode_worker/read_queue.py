"""Which granted blocks are read next: bounded in bytes, and fair between the requests that wait. Pure."""

from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

PullT = TypeVar("PullT")


@dataclass(slots=True, eq=False)
class Chunk(Generic[PullT]):
    """Blocks read in one go, for one pull: source_blocks[i] for its block `first_block` + i."""

    pull: PullT
    first_block: int
    source_blocks: tuple[int, ...]
    generations: tuple[int, ...]
    checksums: tuple[int, ...] = ()
    attempts: int = 0


@dataclass(slots=True, eq=False)
class _Line(Generic[PullT]):
    """One pull's chunks, in order."""

    waiting: deque[Chunk[PullT]]
    blocks_in_flight: int = 0
    served_at: int = 0
    """Number of the turn it had last."""


class ReadQueue(Generic[PullT]):
    """The pull with the fewest bytes in flight is next, among equals the one that has waited longest.

    One pull has at most half of the bytes in flight, and a chunk is at most a quarter of them: a short
    prompt beside a long one waits for one chunk at most, however much the long one has been granted.
    A chunk that would exceed the limit waits, unless nothing else is in flight.
    """

    def __init__(self, *, reads_max: int, bytes_max: int, block_bytes: int) -> None:
        self._reads_max = reads_max
        self._blocks_max = max(1, bytes_max // block_bytes)
        self._pull_blocks_max = max(1, self._blocks_max // 2)
        self._chunk_blocks_max = max(1, self._blocks_max // 4)
        self._lines: dict[PullT, _Line[PullT]] = {}
        self._reads_in_flight = 0
        self._blocks_in_flight = 0
        self._turn = 0

    def add(self, chunk: Chunk[PullT]) -> int:
        """Behind the pull's other chunks. Returns as how many chunks it will be read."""
        line, step = self._line(chunk.pull), self._chunk_blocks_max
        starts = range(0, len(chunk.source_blocks), step)
        for start in starts:
            part = slice(start, start + step)
            line.waiting.append(
                Chunk(
                    chunk.pull,
                    chunk.first_block + start,
                    chunk.source_blocks[part],
                    chunk.generations[part],
                    chunk.checksums[part],
                )
            )
        return len(starts)

    def add_again(self, chunk: Chunk[PullT]) -> None:
        """A chunk that `next` gave: before the pull's others."""
        self._line(chunk.pull).waiting.appendleft(chunk)

    def next(self) -> Chunk[PullT] | None:
        """From now on in flight, until `ended`."""
        if self._reads_in_flight >= self._reads_max:
            return None
        able = [line for line in self._lines.values() if self._may_start(line)]
        if not able:
            return None
        line = min(able, key=lambda line: (line.blocks_in_flight, line.served_at))
        count = len(line.waiting[0].source_blocks)
        if self._blocks_in_flight and self._blocks_in_flight + count > self._blocks_max:
            return None  # it is this one's turn: smaller ones do not overtake it for ever
        self._turn += 1
        line.served_at = self._turn
        line.blocks_in_flight += count
        self._blocks_in_flight += count
        self._reads_in_flight += 1
        return line.waiting.popleft()

    def _may_start(self, line: _Line[PullT]) -> bool:
        if not line.waiting:
            return False
        count = len(line.waiting[0].source_blocks)
        return not line.blocks_in_flight or line.blocks_in_flight + count <= self._pull_blocks_max

    def ended(self, chunk: Chunk[PullT]) -> None:
        """It is not in flight any more."""
        line, count = self._lines[chunk.pull], len(chunk.source_blocks)
        line.blocks_in_flight -= count
        self._blocks_in_flight -= count
        self._reads_in_flight -= 1
        self._drop_if_empty(chunk.pull)

    def forget(self, pull: PullT) -> None:
        """Its waiting chunks are not wanted any more."""
        line = self._lines.get(pull)
        if line is not None:
            line.waiting.clear()
            self._drop_if_empty(pull)

    def check(self, *, reads_in_flight: int) -> None:
        assert self._reads_in_flight == reads_in_flight <= self._reads_max
        assert self._blocks_in_flight == sum(line.blocks_in_flight for line in self._lines.values())
        assert all(line.waiting or line.blocks_in_flight for line in self._lines.values())

    def _line(self, pull: PullT) -> _Line[PullT]:
        if pull not in self._lines:
            self._lines[pull] = _Line(deque())
        return self._lines[pull]

    def _drop_if_empty(self, pull: PullT) -> None:
        line = self._lines[pull]
        if not line.waiting and not line.blocks_in_flight:
            del self._lines[pull]
