"""A process of a host, and the supervisor that starts it again, as systemd would."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import psutil

from baton.core.errors import SetupError
from benchmarks.chaos.namespaces import Host

AGAIN_S = 0.5
"""Time from the end of a process to its next start."""

STOP_S = 45.0
LOG_CHARS = 2000


class Supervised:
    """One process that runs until `stop`. Its log is kept over all starts."""

    def __init__(
        self, name: str, host: Host, argv: tuple[str, ...], environment: Mapping[str, str], folder: Path
    ) -> None:
        self.name, self.host, self._argv = name, host, argv
        self._environment = environment
        self.log = folder / f"{name.replace(' ', '-')}.log"
        self.deaths_s: list[float] = []
        """Monotonic instants at which it ended without being asked to."""
        self._process: asyncio.subprocess.Process | None = None
        self._task: asyncio.Task[None] | None = None
        self._may_run = asyncio.Event()

    def start(self) -> None:
        """Start it without waiting, and start it again whenever it ends."""
        self._may_run.set()
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name=self.name)

    async def _run(self) -> None:
        while True:
            await self._may_run.wait()
            with self.log.open("ab") as log:
                self._process = process = await self.host.spawn(
                    *self._argv, environment=self._environment, log=log.fileno()
                )
            await process.wait()
            self.deaths_s.append(time.monotonic())
            await asyncio.sleep(AGAIN_S)

    def hold(self) -> None:
        """Do not start it again until `start`: its host is away."""
        self._may_run.clear()

    def process(self) -> psutil.Process | None:
        """The process itself, which is the child of `nsenter`."""
        if self._process is None or self._process.returncode is not None:
            return None
        with contextlib.suppress(psutil.NoSuchProcess):
            children = psutil.Process(self._process.pid).children()
            return children[0] if children else None
        return None

    def said(self, text: str) -> bool:
        return text in self.log.read_text(errors="replace")

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-LOG_CHARS:] if self.log.exists() else ""

    async def stop(self, number: signal.Signals = signal.SIGTERM, *, timeout_s: float = STOP_S) -> bool:
        """Send a signal and wait; then kill. Returns whether it ended by itself. Idempotent."""
        task, self._task = self._task, None
        if task is None:
            return True
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        child, process = self.process(), self._process
        if child is None or process is None:
            return True
        with contextlib.suppress(psutil.NoSuchProcess):
            child.send_signal(number)
        try:
            await asyncio.wait_for(process.wait(), timeout_s)
        except TimeoutError:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
            await asyncio.wait_for(process.wait(), timeout_s)
            return False
        return True


async def end_all(hosts: Iterable[Host], supervised: Collection[Supervised]) -> None:
    """End all hosts at once with what runs on them. Idempotent."""
    for process in supervised:
        process.hold()
    for host in hosts:
        await host.kill()
    for process in supervised:
        await process.stop(signal.SIGKILL)


def freeze(process: psutil.Process) -> None:
    """Raises psutil.NoSuchProcess."""
    process.send_signal(signal.SIGSTOP)


def thaw(process: psutil.Process) -> None:
    """`nsenter` stops with its child, and is continued first. Raises psutil.NoSuchProcess."""
    with contextlib.suppress(psutil.NoSuchProcess):
        parent = process.parent()
        if parent is not None and parent.name() == "nsenter":
            parent.send_signal(signal.SIGCONT)
    process.send_signal(signal.SIGCONT)


async def first_line(process: Supervised, text: str, *, timeout_s: float) -> None:
    """Wait until its log has `text`. Raises SetupError with the log's end."""
    ends_s = time.monotonic() + timeout_s
    while not (process.log.exists() and process.said(text)):
        if time.monotonic() > ends_s or len(process.deaths_s) > 2:
            raise SetupError(f"{process.name} does not start: {process.tail()}")
        await asyncio.sleep(0.2)


def environment_without(prefix: str) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(prefix)}
