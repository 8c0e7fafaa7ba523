"""A measure of a peer's silence, on a clock that stands still while this process could not listen."""

import asyncio
from collections.abc import Callable

TICK_S_MAX = 0.25
TICKS_PER_SILENCE = 8
"""Number of checks during the longest allowed silence."""


class SilenceClock:
    """A clock of silence. Pure.

    Time between two checks counts at most twice what it should have been. Beyond that the listener itself was
    held up, and messages that came meanwhile still wait to be read.
    """

    def __init__(self, silence_s: float, *, tick_s: float, now_s: float) -> None:
        self._silence_s, self._tick_s = silence_s, tick_s
        self._looked_s = now_s
        self._quiet_s = 0.0

    def observe(self) -> None:
        self._quiet_s = 0.0

    def look(self, now_s: float) -> bool:
        """Return whether the silence is long enough. It must be called every `tick_s`."""
        self._quiet_s += min(now_s - self._looked_s, 2 * self._tick_s)
        self._looked_s = now_s
        return self._quiet_s >= self._silence_s


class SilenceWatch:
    """A watch that calls `on_silent` once when nothing came for `silence_s` of this loop's own running time.
    Use it within `with`."""

    def __init__(self, silence_s: float, on_silent: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._tick_s = min(TICK_S_MAX, silence_s / TICKS_PER_SILENCE)
        self._quiet = SilenceClock(silence_s, tick_s=self._tick_s, now_s=self._loop.time())
        self._on_silent = on_silent
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> "SilenceWatch":
        self._timer = self._loop.call_later(self._tick_s, self._look)
        return self

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def observe(self) -> None:
        self._quiet.observe()

    def _look(self) -> None:
        if self._quiet.look(self._loop.time()):
            self._timer = None
            self._on_silent()
        else:
            self._timer = self._loop.call_later(self._tick_s, self._look)
