"""Notices at once when a process of the Ray that we started dies: Ray itself takes minutes."""

import asyncio
import contextlib
import ctypes
import logging
import os
from collections.abc import Callable

import psutil

log = logging.getLogger(__name__)

ESSENTIAL = ("gcs_server", "raylet")
"""Names of the processes without which Ray does nothing any more."""

_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """From now on, processes whose parent below us dies become our children, so that none is lost sight
    of at the end (Linux)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1)


class RayWatch:
    """`on_death(text)` is called once for each essential process that dies while it is watched."""

    def __init__(self, on_death: Callable[[str], None]) -> None:
        self._on_death = on_death
        self._files: set[int] = set()

    def start(self) -> None:
        """After Ray has started."""
        for process in psutil.Process().children():
            with contextlib.suppress(psutil.NoSuchProcess):
                if (name := process.name()) in ESSENTIAL:
                    self._follow(process.pid, name)

    def _follow(self, pid: int, name: str) -> None:
        try:
            file = os.pidfd_open(pid)  # readable once the process has ended
        except OSError as error:
            log.warning("cannot watch Ray's %s (process %d): %s", name, pid, error)
            return
        self._files.add(file)
        asyncio.get_running_loop().add_reader(file, self._ended, file, f"Ray's {name} (process {pid}) died")

    def _ended(self, file: int, text: str) -> None:
        self._forget(file)
        self._on_death(text)

    def _forget(self, file: int) -> None:
        self._files.discard(file)
        asyncio.get_running_loop().remove_reader(file)
        os.close(file)

    def close(self) -> None:
        """Idempotent."""
        for file in list(self._files):
            self._forget(file)
