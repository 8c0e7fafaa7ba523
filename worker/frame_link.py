"""Messages between the event loops of a worker's leader and of its followers on other hosts.

They travel over a star of connections (`engine.parallel.mesh`), which tells when the other end is gone.
"""

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable

from baton.wire.options import MESSAGE_BYTES_MAX
from engine.parallel.group import GroupBroken
from engine.parallel.mesh import FrameLimit, Mesh

log = logging.getLogger(__name__)

LOOK_S = 0.5
"""A message is waited for in pieces of this length. Between them a rank is missed that has only left."""
SEND_S = 5.0
"""The longest time for a message to leave, or to arrive once it has begun."""
MESSAGE = FrameLimit("a message about KV", MESSAGE_BYTES_MAX)
"""A read and a peer's offers came to the worker in one message each."""
UNSENT_MAX = 8192
"""Messages that wait to be sent. One more breaks the link."""


class FrameLink:
    """One end. It belongs to the event loop, and has a thread for each direction.

    `on_frame(rank, data)` and, once, `on_end(reason)` are called in the loop.
    """

    def __init__(
        self, mesh: Mesh, *, on_frame: Callable[[int, bytes], None], on_end: Callable[[str], None]
    ) -> None:
        """Take a mesh over whose ranks are all there."""
        self._mesh, self._on_frame, self._on_end = mesh, on_frame, on_end
        self._loop = asyncio.get_running_loop()
        self._unsent: queue.Queue[tuple[int, bytes] | None] = queue.Queue(UNSENT_MAX)
        self._threads = [
            threading.Thread(target=self._receive, name="link-receive", daemon=True),
            threading.Thread(target=self._send, name="link-send", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def send(self, rank: int, data: bytes) -> None:
        """Messages to a rank arrive in order. One that cannot be sent ends the link, which is told soon."""
        try:
            self._unsent.put_nowait((rank, data))
        except queue.Full:
            self._break(f"{UNSENT_MAX} messages wait to be sent")

    def _deliver(self, rank: int, data: bytes) -> None:
        try:
            self._on_frame(rank, data)
        except Exception as error:
            log.exception("a message of rank %d cannot be handled", rank)
            self._break(f"a message of rank {rank} cannot be handled: {type(error).__name__}: {error}")

    def _break(self, reason: str) -> None:
        """Give up without waiting until the other end knows."""
        threading.Thread(target=self._mesh.abort, args=(reason,), name="link-break", daemon=True).start()

    async def abort(self, reason: str) -> None:
        """Give up, and tell the other end why."""
        await asyncio.to_thread(self._mesh.abort, reason)

    async def close(self) -> None:
        """Say goodbye. Idempotent."""
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        self._mesh.close()
        with contextlib.suppress(queue.Full):  # then the thread finds the end by itself
            self._unsent.put_nowait(None)
        for thread in self._threads:
            thread.join()

    def _receive(self) -> None:
        try:
            while not (reason := self._mesh.end_reason()):
                if (found := self._mesh.receive_frame(LOOK_S, SEND_S, MESSAGE)) is not None:
                    self._call_soon(self._deliver, found[0], bytes(found[1]))
        except GroupBroken as error:
            reason = str(error)
        except Exception as error:
            log.exception("the link to other hosts fails")
            self._mesh.abort(reason := f"the link fails: {type(error).__name__}: {error}")
        self._call_soon(self._on_end, reason)

    def _send(self) -> None:
        try:
            while (message := self._unsent.get()) is not None:
                self._mesh.send_frame(*message, time.monotonic() + SEND_S, MESSAGE)
        except GroupBroken:
            return  # the other thread tells
        except Exception as error:
            log.exception("the link to other hosts fails")
            self._mesh.abort(f"the link fails: {type(error).__name__}: {error}")

    def _call_soon(self, call: Callable[..., None], *arguments: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(call, *arguments)
