"""The first error that must end a process, shared by everything in it that can fail."""

import asyncio


class NativePanic(Exception):
    """A native library gave up in the middle of something. Its error is chained. It is no Exception (that of
    a library in Rust is `pyo3_runtime.PanicException`), and would pass by whoever cleans up after errors."""


class Crash:
    """Cores, engine threads and background tasks report here; the process's main coroutine waits here."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        """The first error that was reported. Later ones are mostly its consequences, and are dropped."""
        self._reported = asyncio.Event()

    def report(self, error: BaseException) -> None:
        if self.error is None:
            self.error = error if isinstance(error, Exception) else _named(error)
            self._reported.set()

    async def wait(self) -> BaseException:
        """Wait for an error, and return it."""
        await self._reported.wait()
        assert self.error is not None
        return self.error

    async def race(self, *events: asyncio.Event, timeout_s: float | None = None) -> None:
        """Wait until an event is set or the time is up. Raises the error that is reported before."""
        waits = [asyncio.create_task(event.wait()) for event in (*events, self._reported)]
        try:
            await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        if self.error is not None:
            raise self.error


def _named(error: BaseException) -> NativePanic:
    panic = NativePanic(f"{type(error).__name__}: {error}")
    panic.__cause__ = error
    return panic
