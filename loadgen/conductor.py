"""Several sending processes, from the side of the parent: begun at one instant, heard, and stopped."""

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
from loadgen.records import Record
from loadgen.runner import START_AFTER_S, Observer

READY = "ready"
STOP = "stop"
END_TIMEOUT_S = 10.0


@dataclass(slots=True)
class News:
    """From a child, a few times per second; after the last, its health."""

    sent: list[Record]
    ended: list[Record]


@dataclass(slots=True)
class _Child:
    process: BaseProcess
    link: "Connection[object, object]"
    is_ready: bool = False
    is_over: bool = False
    health: ClientHealth | None = None


class Conductor:
    """`run` ends when all children have; `stop` makes that soon; `close` leaves none behind."""

    def __init__(
        self,
        jobs: Sequence[object],
        child_main: Callable[[Any, "Connection[object, object]"], None],
        observer: Observer,
        *,
        timeout_s: float,
    ) -> None:
        """`timeout_s`: until the last child must be ready."""
        self.records: list[Record] = []
        self.is_stopped = False
        self._observer = observer
        self._timeout_s = timeout_s
        self._ready, self._over = asyncio.Event(), asyncio.Event()
        self._children: list[_Child] = []
        context = get_context("spawn")
        with _interrupts_ignored():  # by the children, which inherit it: the parent hears them, and tells
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
        """Raises SetupError: a child did not start, or ended before its requests did."""
        loop = asyncio.get_running_loop()
        for child in self._children:
            loop.add_reader(child.link.fileno(), self._hear, child)
            # Sockets that end with an error (the child had not read all) are not reported by uvloop.
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
        """Requests that run are cut off; the children end by themselves."""
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
                with suppress(OSError):  # it is gone, which is heard as well
                    child.link.send(what)

    def _hear(self, child: _Child) -> None:
        try:
            told = child.link.recv()
        except (EOFError, OSError):
            told = None
        if isinstance(told, News):
            for record in told.sent:
                self._observer.on_sent(record)
            for record in told.ended:
                self._observer.on_ended(record)
            self.records += told.ended
        elif told == READY:
            child.is_ready = True
            if all(c.is_ready for c in self._children):
                self._ready.set()
        else:
            self._ended(child, told if isinstance(told, ClientHealth) else None)

    def _gone(self, child: _Child) -> None:
        """Its process is over: what it still said is read, and then nothing more comes."""
        while not child.is_over:
            self._hear(child)
        asyncio.get_running_loop().remove_reader(child.process.sentinel)

    def _ended(self, child: _Child, health: ClientHealth | None) -> None:
        asyncio.get_running_loop().remove_reader(child.link.fileno())
        child.is_over = True
        child.health = health
        if health is None:  # without its share the rest is not worth sending
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
