"""The parent's side of several sender processes: it starts them at one instant, receives their updates, and
stops them."""

import asyncio
import signal
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from baton.core.errors import SetupError
from loadgen.health import ClientHealth
from loadgen.records import RequestRecord
from loadgen.runner import START_AFTER_S, ReplayObserver

READY = "ready"
STOP = "stop"
END_TIMEOUT_S = 10.0


@dataclass(slots=True)
class SenderUpdate:
    """An update that a sender process sends a few times per second. After the last one it sends its
    health."""

    sent: list[RequestRecord]
    ended: list[RequestRecord]


@dataclass(slots=True)
class _Child:
    process: BaseProcess
    link: "Connection[object, object]"
    is_ready: bool = False
    is_over: bool = False
    health: ClientHealth | None = None


class SenderProcesses:
    """Sender processes. `run` ends when all of them have ended, `stop` makes that happen soon, and `close`
    leaves none behind."""

    def __init__(
        self,
        jobs: Sequence[object],
        child_main: Callable[[Any, "Connection[object, object]"], None],
        observer: ReplayObserver,
        *,
        timeout_s: float,
    ) -> None:
        """`timeout_s` is the time until the last process must be ready."""
        self.records: list[RequestRecord] = []
        self.is_stopped = False
        self._observer = observer
        self._timeout_s = timeout_s
        self._ready, self._over = asyncio.Event(), asyncio.Event()
        self._children: list[_Child] = []
        context = get_context("spawn")
        # the children inherit this; only the parent handles Ctrl-C and stops them
        with _interrupts_ignored():
            for job in jobs:
                ours, theirs = context.Pipe()
                process = context.Process(target=child_main, args=(job, theirs), daemon=True)
                process.start()
                theirs.close()
                self._children.append(_Child(process, ours))

    @property
    def healths(self) -> list[ClientHealth]:
        return [c.health for c in self._children if c.health is not None]

    async def run(self) -> None:
        """Raises SetupError if a child did not start, or ended before its requests did."""
        loop = asyncio.get_running_loop()
        for child in self._children:
            loop.add_reader(child.link.fileno(), self._hear, child)
            # uvloop does not report sockets that end with an error, such as a child that left data unread.
            loop.add_reader(child.process.sentinel, self._gone, child)
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._ready.wait()
        except TimeoutError:
            raise SetupError(f"a sending process did not start within {self._timeout_s:g} s") from None
        if not self.is_stopped:
            self._tell(time.monotonic() + START_AFTER_S)
        await self._over.wait()
        for child in self._children:
            loop.remove_reader(child.process.sentinel)
        if len(self.healths) < len(self._children) and not self.is_stopped:
            raise SetupError("a sending process ended before its requests did; nothing is reported")

    def stop(self) -> None:
        """Stop the children: requests that are running are cut off, and each process ends by itself."""
        if not self.is_stopped:
            self.is_stopped = True
            self._ready.set()
            self._tell(STOP)

    def close(self) -> None:
        for child in self._children:
            child.link.close()
            child.process.join(END_TIMEOUT_S)
            if child.process.is_alive():
                child.process.kill()
                child.process.join()

    def _tell(self, what: object) -> None:
        for child in self._children:
            if not child.is_over:
                with suppress(OSError):  # the child is gone, which is noticed elsewhere
                    child.link.send(what)

    def _hear(self, child: _Child) -> None:
        try:
            message = child.link.recv()
        except (EOFError, OSError):
            message = None
        if isinstance(message, SenderUpdate):
            for record in message.sent:
                self._observer.on_sent(record)
            for record in message.ended:
                self._observer.on_ended(record)
            self.records += message.ended
        elif message == READY:
            child.is_ready = True
            if all(c.is_ready for c in self._children):
                self._ready.set()
        else:
            self._ended(child, message if isinstance(message, ClientHealth) else None)

    def _gone(self, child: _Child) -> None:
        """A child has ended. Its last messages are read first."""
        while not child.is_over:
            self._hear(child)
        asyncio.get_running_loop().remove_reader(child.process.sentinel)

    def _ended(self, child: _Child, health: ClientHealth | None) -> None:
        asyncio.get_running_loop().remove_reader(child.link.fileno())
        child.is_over = True
        child.health = health
        if health is None:  # a run without this child's share is of no use
            self._ready.set()
            self._tell(STOP)
        if all(c.is_over for c in self._children):
            self._over.set()


@contextmanager
def _interrupts_ignored() -> Generator[None]:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
