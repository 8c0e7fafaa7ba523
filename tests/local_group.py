"""Groups whose ranks are threads of one process: for tests of whatever talks to a group."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from engine.parallel.group import (
    GroupBroken,
    check_in_place,
    check_peer,
    check_reducible,
    check_root,
    parts_along,
    parts_of_rows,
)


@dataclass
class _Meeting:
    """One collective call: what each rank called, and with what."""

    calls: dict[int, tuple[Any, ...]] = field(default_factory=dict)
    tensors: dict[int, Tensor] = field(default_factory=dict)
    left: int = 0


class LocalHub:
    """What the ranks of one group share."""

    def __init__(self, size: int, *, deadline_s: float) -> None:
        self.size, self.deadline_s = size, deadline_s
        self.changed = threading.Condition()
        self.meetings: dict[int, _Meeting] = {}
        self.messages: dict[tuple[int, int], list[Tensor]] = {}
        self.gone: set[int] = set()
        self.reason = ""

    def wait_for(self, ready: Callable[[], bool], rank: int, call: str) -> None:
        """Wait, with the lock held. Raises GroupBroken."""
        is_in_time = self.changed.wait_for(lambda: ready() or self.reason or self.gone, self.deadline_s)
        if ready():
            return
        if rank in self.gone:
            raise GroupBroken("this rank has left the group")
        if not self.reason and self.gone:
            raise GroupBroken(f"rank {min(self.gone)} has left the group")
        if not is_in_time:
            self.give_up(f"a rank was not there in time: rank {rank} waited in {call}")
        raise GroupBroken(self.reason)

    def give_up(self, reason: str) -> None:
        self.reason = self.reason or reason
        self.changed.notify_all()


class LocalGroup:
    """See `engine.parallel.group.Group`."""

    def __init__(self, hub: LocalHub, rank: int) -> None:
        self.rank, self.size, self._hub = rank, hub.size, hub
        self._sequence = 0

    def all_reduce_(self, x: Tensor) -> Tensor:
        check_reducible(x)
        check_in_place(x)
        return x.copy_(_sum(self._meet(x, "all_reduce", x.numel(), x.dtype)))

    def all_gather(self, x: Tensor, dim: int = 0, *, sizes: Sequence[int] | None = None) -> Tensor:
        parts = parts_along(x, dim, sizes, rank=self.rank, size=self.size)
        return torch.cat(self._meet(x, "all_gather", parts, dim, x.dtype), dim)

    def gather(
        self, x: Tensor, dim: int = 0, *, sizes: Sequence[int] | None = None, to: int = 0
    ) -> Tensor | None:
        check_root(self.size, to)
        parts = parts_along(x, dim, sizes, rank=self.rank, size=self.size)
        tensors = self._meet(x, "gather", parts, dim, x.dtype, to)
        return torch.cat(tensors, dim) if to == self.rank else None

    def reduce_scatter(self, x: Tensor, *, sizes: Sequence[int] | None = None) -> Tensor:
        check_reducible(x)
        parts = parts_of_rows(x, sizes, size=self.size)
        total = _sum(self._meet(x, "reduce_scatter", parts, x.shape[1:], x.dtype))
        return total.split(list(parts))[self.rank].clone()

    def broadcast_(self, x: Tensor, *, source: int = 0) -> Tensor:
        check_root(self.size, source)
        check_in_place(x)
        return x.copy_(self._meet(x, "broadcast", x.nbytes, source)[source].view(x.shape))

    def send(self, x: Tensor, to: int) -> None:
        check_peer(self.rank, self.size, to)
        with self._hub.changed:
            self._check()
            self._hub.messages.setdefault((self.rank, to), []).append(x.contiguous().clone())
            self._hub.changed.notify_all()

    def recv(self, shape: Sequence[int], dtype: torch.dtype, source: int) -> Tensor:
        check_peer(self.rank, self.size, source)
        with self._hub.changed:
            self._check()
            queue = self._hub.messages.setdefault((source, self.rank), [])
            self._hub.wait_for(lambda: bool(queue), self.rank, "recv")
            x = queue.pop(0)
            if x.shape != torch.Size(shape) or x.dtype is not dtype:
                self._hub.give_up(
                    f"ranks call different things: sent {tuple(x.shape)}, wanted {tuple(shape)}"
                )
                raise GroupBroken(self._hub.reason)
            return x

    def settle(self) -> None:
        pass

    def be_strict(self) -> None:
        pass

    def abort(self, reason: str) -> None:
        with self._hub.changed:
            self._hub.give_up(reason)

    def close(self) -> None:
        with self._hub.changed:
            self._hub.gone.add(self.rank)
            self._hub.changed.notify_all()

    def _check(self) -> None:
        if self.rank in self._hub.gone:
            raise GroupBroken("this rank has left the group")
        if self._hub.reason:
            raise GroupBroken(self._hub.reason)

    def _meet(self, x: Tensor, *call: Any) -> list[Tensor]:
        """The tensors of all ranks, when all have made the same call."""
        hub, self._sequence = self._hub, self._sequence + 1
        with hub.changed:
            self._check()
            meeting = hub.meetings.setdefault(self._sequence, _Meeting())
            if any(other != call for other in meeting.calls.values()):
                hub.give_up(f"ranks call different things: rank {self.rank} {call}, others {meeting.calls}")
                raise GroupBroken(hub.reason)
            meeting.calls[self.rank], meeting.tensors[self.rank] = call, x.contiguous().clone()
            hub.changed.notify_all()
            hub.wait_for(lambda: len(meeting.calls) == self.size, self.rank, str(call[0]))
            meeting.left += 1
            if meeting.left == self.size:
                del hub.meetings[self._sequence]
            return [meeting.tensors[rank] for rank in range(self.size)]


def local_groups(size: int, *, deadline_s: float) -> list[LocalGroup]:
    hub = LocalHub(size, deadline_s=deadline_s)
    return [LocalGroup(hub, rank) for rank in range(size)]


def _sum(tensors: list[Tensor]) -> Tensor:
    total = tensors[0].float().clone()
    for x in tensors[1:]:
        total += x.float()
    return total.to(tensors[0].dtype)
