"""Coroutines that run beside a process's main one. If one fails, the process has failed."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any


class Background:
    """Owns its tasks until they end, or until `cancel`."""

    def __init__(self, on_error: Callable[[BaseException], None]) -> None:
        """`on_error` gets the exception of each task that ends by one; cancellation does not count."""
        self._on_error = on_error
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def cancel(self) -> None:
        """Cancel all tasks and wait until they have ended. A second call does nothing."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_error(error)
