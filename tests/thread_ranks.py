"""Ranks of one worker as threads of this process, with the sums of `engine.parallel.group.Group`."""

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from engine.parallel.group import GroupBroken

DEADLINE_S = 120.0
T = TypeVar("T")


class ThreadGroup:
    """One rank's end. Implements `Group`."""

    def __init__(
        self,
        rank: int,
        size: int,
        barrier: threading.Barrier,
        parts: list[Any],
        messages: dict[tuple[int, int], "queue.SimpleQueue[Tensor]"],
    ) -> None:
        """messages: (from, to)."""
        self.rank, self.size = rank, size
        self._barrier, self._parts, self._messages = barrier, parts, messages

    def _exchange(self, part: Any) -> list[Any]:
        try:
            self._parts[self.rank] = part
            self._barrier.wait(DEADLINE_S)
            found = list(self._parts)
            self._barrier.wait(DEADLINE_S)
        except threading.BrokenBarrierError as error:
            raise GroupBroken("a rank failed or called too late") from error
        return found

    def all_reduce_(self, x: Tensor) -> Tensor:
        assert x.is_contiguous()
        parts = self._exchange(x.clone())
        assert len({(part.shape, part.dtype) for part in parts}) == 1, "ranks sum different things"
        total = torch.zeros(x.shape)
        for part in parts:
            total += part.float()
        return x.copy_(total)

    def all_gather(self, x: Tensor, dim: int, *, sizes: Sequence[int] | None = None) -> Tensor:
        assert sizes is None or x.shape[dim] == sizes[self.rank]
        return torch.cat(self._exchange(x.clone()), dim)

    def gather(
        self, x: Tensor, dim: int, *, sizes: Sequence[int] | None = None, to: int = 0
    ) -> Tensor | None:
        """Every rank gets the whole here, and not rank `to` alone: each thread is an executor that samples,
        and tests compare what they sample."""
        return self.all_gather(x, dim, sizes=sizes)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def broadcast_(self, x: Tensor, *, source: int = 0) -> Tensor:
        return x.copy_(self._exchange(x.clone())[source])

    def send(self, x: Tensor, to: int) -> None:
        self._messages[self.rank, to].put(x.clone())

    def recv(self, shape: tuple[int, ...], dtype: torch.dtype, source: int) -> Tensor:
        x = self.take(self._messages[source, self.rank])
        assert (tuple(x.shape), x.dtype) == (tuple(shape), dtype)
        return x

    def take(self, messages: "queue.SimpleQueue[T]") -> T:
        """The next message. Raises GroupBroken if a rank fails."""
        for _ in range(int(DEADLINE_S)):
            try:
                return messages.get(timeout=1)
            except queue.Empty:
                if self._barrier.broken:
                    break
        raise GroupBroken("a rank failed or sent nothing")

    def settle(self) -> None:
        pass

    def be_strict(self) -> None:
        pass

    def abort(self, reason: str) -> None:
        self._barrier.abort()

    def close(self) -> None:
        self._barrier.abort()


class LedThreadGroup(ThreadGroup):
    """As in production only one rank gets what is gathered: the one that samples."""

    def gather(
        self, x: Tensor, dim: int, *, sizes: Sequence[int] | None = None, to: int = 0
    ) -> Tensor | None:
        whole = self.all_gather(x, dim, sizes=sizes)
        return whole if self.rank == to else None


def run_ranks(
    size: int, work: Callable[[ThreadGroup], T], *, kind: type[ThreadGroup] = ThreadGroup
) -> list[T]:
    """What `work` returns on each rank. Raises the first rank's error."""
    barrier, parts = threading.Barrier(size), [None] * size
    messages = {(i, j): queue.SimpleQueue[Tensor]() for i in range(size) for j in range(size)}
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = work(kind(rank, size, barrier, parts, messages))
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results
