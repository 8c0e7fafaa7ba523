"""The one thread that touches the device."""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from baton.wire.slices import compute_long

P = ParamSpec("P")
R = TypeVar("R")


class EngineThread:
    """Calls run in order, each to its end; the event loop only awaits them.

    Cancelling `run` does not stop a call that has begun: its result is dropped. Loading runs here as well,
    because a CUDA context and torch's thread settings belong to the thread that made them. It has the usual
    slice of a core, and so have the threads that it starts: the event loop's is shorter.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine", initializer=compute_long)

    async def run(self, call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run `call` on the thread. Raises what `call` raises."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, lambda: call(*args, **kwargs))

    async def close(self, *, timeout_s: float) -> bool:
        """Wait for the call under way. False means that it goes on for longer than `timeout_s`: what it uses
        must not be freed, and the process should end without further ceremony."""
        ended = asyncio.Event()
        loop = asyncio.get_running_loop()

        def wait() -> None:
            self._pool.shutdown(wait=True)
            with contextlib.suppress(RuntimeError):  # nobody waits any more: the loop is closed
                loop.call_soon_threadsafe(ended.set)

        # A daemon thread: a call that hangs for ever must not keep the process from ending.
        threading.Thread(target=wait, name="engine-close", daemon=True).start()
        try:
            async with asyncio.timeout(timeout_s):
                await ended.wait()
        except TimeoutError:
            return False
        return True
