"""An asyncio event loop whose time is a simulated process's clock.

The router's HTTP handlers, its driver and what it does about other routers are coroutines. They run here
unchanged: the simulator lets the loop run after everything that happens to the process, and when the next of
its timers is due. Nothing waits for a socket or a thread, so a run is a function of its seed.
"""

import asyncio
from collections.abc import Callable, Coroutine, Generator
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")


class _NoSelector:
    """The place of a selector. No file is ever ready."""

    def select(self, timeout: float | None = None) -> list[Any]:
        return []


class VirtualLoop(asyncio.BaseEventLoop):
    """The event loop of one simulated process."""

    _ready: Any
    _scheduled: Any
    _run_once: Any

    def __init__(self, now_s: Callable[[], float]) -> None:
        super().__init__()
        self._now_s = now_s
        self._selector = _NoSelector()
        self._clock_resolution = 1e-9
        self.errors: list[BaseException] = []
        """Exceptions of callbacks and tasks that nobody took."""
        self.set_exception_handler(self._on_error)

    def time(self) -> float:
        return self._now_s()

    @property
    def next_timer_s(self) -> float | None:
        """Return when the next timer is due; None if there is none."""
        scheduled = self._scheduled
        return scheduled[0].when() if scheduled else None

    @contextmanager
    def entered(self) -> Generator[None]:
        """Let the code of the `with` block see this loop as the running one."""
        asyncio._set_running_loop(self)
        try:
            yield
        finally:
            asyncio._set_running_loop(None)

    def run_due(self) -> None:
        """Run every callback that is ready, and every timer that is due."""
        with self.entered():
            while self._ready or ((next_s := self.next_timer_s) is not None and next_s <= self.time()):
                self._run_once()

    def end_tasks(self) -> None:
        """Cancel all tasks and let them end, so that nothing is left to the garbage collector."""
        with self.entered():
            while tasks := asyncio.all_tasks(self):
                for task in tasks:
                    task.cancel()
                while self._ready:
                    self._run_once()
        self.errors.clear()
        self.close()

    # --- what a selector or a thread would do --------------------------------------------------------

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        """Run at once what production runs in a thread."""
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    def spawn(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        return self.create_task(work, name=name)

    def _process_events(self, event_list: list[Any]) -> None:
        pass

    def _write_to_self(self) -> None:
        pass

    def _on_error(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        self.errors.append(error if error is not None else RuntimeError(str(context.get("message"))))
