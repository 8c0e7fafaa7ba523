"""A group that misbehaves on purpose, around one that does not: for tests of whoever computes with one.

What happens to a call is drawn from a seeded generator, or taken from a script, so a failure repeats.
"""

import os
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum, auto
from random import Random
from typing import TypeVar

import torch
from torch import Tensor

from engine.parallel.group import Group, GroupBroken

T = TypeVar("T")


class GroupFault(StrEnum):
    NONE = auto()
    DELAY = auto()
    """This rank calls `delay_s` late."""
    DROP = auto()
    """This rank never makes the call: the others wait until their deadline."""
    ABORT = auto()
    """This rank gives the group up instead."""
    OTHER = auto()
    """This rank calls something else."""
    KILL = auto()
    """This rank's process is killed. It is drawn only if the plan names it."""


GROUP_FAULTS = (GroupFault.DELAY, GroupFault.DROP, GroupFault.ABORT, GroupFault.OTHER)


@dataclass(frozen=True, slots=True)
class GroupFaultPlan:
    """`script` first, one entry per call; then a fault with `probability`, any of `faults` alike."""

    seed: int = 0
    probability: float = 0.0
    faults: tuple[GroupFault, ...] = GROUP_FAULTS
    script: tuple[GroupFault, ...] = ()
    delay_s: float = 0.01


class FaultyGroup:
    """See `engine.parallel.group.Group`."""

    def __init__(self, inner: Group, plan: GroupFaultPlan) -> None:
        self.rank, self.size = inner.rank, inner.size
        self.happened: dict[GroupFault, int] = dict.fromkeys(GroupFault, 0)
        self._inner, self._plan = inner, plan
        # Ranks of one plan misbehave each in its own way.
        self._random = Random(plan.seed * 1_000_003 + inner.rank)
        self._script = iter(plan.script)

    def all_reduce_(self, x: Tensor) -> Tensor:
        return self._through(lambda: self._inner.all_reduce_(x))

    def all_gather(self, x: Tensor, dim: int = 0, *, sizes: Sequence[int] | None = None) -> Tensor:
        return self._through(lambda: self._inner.all_gather(x, dim, sizes=sizes))

    def gather(
        self, x: Tensor, dim: int = 0, *, sizes: Sequence[int] | None = None, to: int = 0
    ) -> Tensor | None:
        return self._through(lambda: self._inner.gather(x, dim, sizes=sizes, to=to))

    def reduce_scatter(self, x: Tensor, *, sizes: Sequence[int] | None = None) -> Tensor:
        return self._through(lambda: self._inner.reduce_scatter(x, sizes=sizes))

    def broadcast_(self, x: Tensor, *, source: int = 0) -> Tensor:
        return self._through(lambda: self._inner.broadcast_(x, source=source))

    def send(self, x: Tensor, to: int) -> None:
        self._through(lambda: self._inner.send(x, to))

    def recv(self, shape: Sequence[int], dtype: torch.dtype, source: int) -> Tensor:
        return self._through(lambda: self._inner.recv(shape, dtype, source))

    def settle(self) -> None:
        self._inner.settle()

    def be_strict(self) -> None:
        self._inner.be_strict()

    def abort(self, reason: str) -> None:
        self._inner.abort(reason)

    def close(self) -> None:
        self._inner.close()

    def _through(self, call: Callable[[], T]) -> T:
        fault = self._draw()
        self.happened[fault] += 1
        match fault:
            case GroupFault.DELAY:
                threading.Event().wait(self._plan.delay_s)
            case GroupFault.DROP:
                raise GroupBroken(f"rank {self.rank} was made to drop a call")
            case GroupFault.ABORT:
                self._inner.abort(f"rank {self.rank} was made to give up")
            case GroupFault.OTHER:
                self._inner.broadcast_(torch.zeros(3))
            case GroupFault.KILL:
                os.kill(os.getpid(), signal.SIGKILL)
            case _:
                pass
        return call()

    def _draw(self) -> GroupFault:
        scripted = next(self._script, None)
        if scripted is not None:
            return scripted
        if self._random.random() < self._plan.probability:
            return self._random.choice(self._plan.faults)
        return GroupFault.NONE
