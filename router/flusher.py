"""Takes in what workers generated and writes what streams have to say, all together, as often as the event
loop can afford.

Alone, a token is written in the moment it comes. With hundreds of streams, handling each token by itself
would take most of the loop's time; so the next round waits for some multiple of what the last one took, and
what came meanwhile is handled, and goes out, as one piece.
"""

import asyncio
import time
from collections.abc import Callable

SHARE = 3.0
"""From one round to the next, as a multiple of what it took: rounds get a quarter of the loop's time."""

WAIT_S_MAX = 0.04
"""A token waits no longer than this for others."""


def _nothing() -> None:
    pass


class Flusher:
    """One per event loop."""

    def __init__(
        self, clock: Callable[[], float] = time.perf_counter, take_in: Callable[[], None] = _nothing
    ) -> None:
        """`clock`: uvloop's own stands still while it calls us. `take_in` begins each round: what becomes due
        by it is written in the same one."""
        self._clock, self._take_in = clock, take_in
        self._loop = asyncio.get_running_loop()
        self._due: list[Callable[[], None]] = []
        self._not_before_s = 0.0
        self._is_called = False
        """A round comes, and has not begun to write."""

    def add(self, flush: Callable[[], None]) -> None:
        """It is called once, soon, after whatever else happens now."""
        self._due.append(flush)
        self.wake()

    def wake(self) -> None:
        """A round soon: there is something to take in."""
        if self._is_called:
            return
        self._is_called = True
        if self._not_before_s <= self._loop.time():
            self._loop.call_soon(self._run)
        else:
            self._loop.call_at(self._not_before_s, self._run)

    def _run(self) -> None:
        began_s = self._clock()
        self._take_in()
        due, self._due = self._due, []
        self._is_called = False
        for flush in due:
            flush()
        took_s = self._clock() - began_s
        self._not_before_s = self._loop.time() + min(WAIT_S_MAX, took_s * SHARE)
