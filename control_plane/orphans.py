"""Orphans: descendants whose own parent died. A process that adopts them takes leave of them, too (Linux).

A worker is a grandchild, since Ray starts it. What a killed worker had started would be left behind for good
without an adopter, and as a zombie if its adopter does not ask for its exit status.
"""

import asyncio
import contextlib
import ctypes
import os

import psutil

LOOK_S = 1.0

_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Make this process the parent of descendants whose own parent dies, so that none is lost track of at the
    end. Process 1 of a container adopts them without being asked."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1)


class OrphanWatch:
    """Takes the exit status of orphans that have ended.

    Children of our own are left to those who started them: the ones that run when the watch is made may be
    asked for their status at any time, and later ones before the second look after their end. asyncio asks
    for that of its children at once.
    """

    def __init__(self) -> None:
        self._spared = {child.pid for child in _children() if not _has_ended(child)}
        self._ended: set[int] = set()
        """What had ended at the last look."""

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            self.look()

    def look(self) -> None:
        ended = {child.pid for child in _children() if _has_ended(child)} if _any_has_ended() else set[int]()
        for pid in (ended & self._ended) - self._spared:
            with contextlib.suppress(ChildProcessError):  # somebody asked just now
                os.waitpid(pid, os.WNOHANG)
        self._ended = ended


def _any_has_ended() -> bool:
    """Whether the status of some child waits to be asked for: one call, where a list of children reads all
    processes of the machine."""
    try:
        return os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return False


def _children() -> list[psutil.Process]:
    return psutil.Process().children()


def _has_ended(child: psutil.Process) -> bool:
    try:
        return child.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
