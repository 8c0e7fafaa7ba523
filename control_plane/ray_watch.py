"""Immediate notice when a process of our own Ray dies; Ray itself takes minutes."""

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable

import psutil

log = logging.getLogger(__name__)

ESSENTIAL = ("gcs_server", "raylet")
"""Names of the processes without which Ray cannot work."""


class RayWatch:
    """A watch on Ray's essential processes. `on_death(text)` is called once for each that dies."""

    def __init__(self, on_death: Callable[[str], None]) -> None:
        self._on_death = on_death
        self._files: set[int] = set()

    def start(self) -> None:
        """Begin to watch; Ray must have started."""
        for process in psutil.Process().children():
            with contextlib.suppress(psutil.NoSuchProcess):
                if (name := process.name()) in ESSENTIAL:
                    self._follow(process.pid, name)

    def _follow(self, pid: int, name: str) -> None:
        try:
            file = os.pidfd_open(pid)  # readable once the process has ended
        except OSError as error:
            log.warning("Ray's %s (process %d) cannot be watched: %s", name, pid, error)
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
        """Stop watching. Idempotent."""
        for file in list(self._files):
            self._forget(file)
