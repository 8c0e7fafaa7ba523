"""A flusher takes in the tokens of workers and writes the events of streams, all together, as often as the
event loop can afford.

Alone, a token is written in the moment it comes. With hundreds of streams, handling each token by itself
would take most of the loop's time. So the next round waits for some multiple of the last round's duration,
and the tokens that came meanwhile are handled and written as one piece. A round of many streams is cut into
slices with the wait spread between them: a new request or a first token needs several turns of the loop, and
would meet an uncut round at each of them.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable

SHARE = 3.0
"""Pause after each slice, as a multiple of its duration: rounds get a quarter of the loop's time."""

WAIT_S_MAX = 0.04
"""Longest time that a token waits for others, summed over the slices of a round."""

SLICE_S = 0.00025
"""Duration of a slice, after which other work of the loop has its turn."""


def _nothing() -> bool:
    return False


class Flusher:
    """A flusher per event loop."""

    def __init__(
        self, clock: Callable[[], float] = time.perf_counter, take_in: Callable[[], bool] = _nothing
    ) -> None:
        """`clock` is not the loop's: uvloop's clock stands still during a callback. `take_in` takes in some
        of the tokens that came and returns whether there were any. It is called until there are none; that
        begins each round, and events that become due by it are written in the same round."""
        self._clock, self._take_in = clock, take_in
        self._loop = asyncio.get_running_loop()
        self._due: list[Callable[[], None]] = []
        self._round: deque[Callable[[], None]] = deque()
        """Streams that this round has not written yet."""
        self._took_s = self._rested_s = 0.0
        """Time of this round so far, at work and between its slices."""
        self._not_before_s = 0.0
        self._is_called = False
        """True if a round is due or under way."""
        self._has_more = False
        """True if something became due while a round was writing."""

    def add(self, flush: Callable[[], None]) -> None:
        """Add a stream. It is called once, soon, after whatever else happens now."""
        self._due.append(flush)
        self.wake()

    def wake(self) -> None:
        """Begin a round soon, since there are tokens to take in."""
        if self._is_called:
            self._has_more = True
            return
        self._is_called = True
        if self._not_before_s <= self._loop.time():
            self._loop.call_soon(self._take)
        else:
            self._loop.call_at(self._not_before_s, self._take)

    def _take(self) -> None:
        began_s = self._clock()
        # Some tokens are written even if they come faster than they are taken in.
        is_full = self._took_s >= WAIT_S_MAX
        while not is_full and self._take_in():
            if self._clock() - began_s > SLICE_S:
                self._pause(began_s, self._take)
                return
        self._round.extend(self._due)
        self._due, self._has_more = [], is_full
        self._write(began_s)

    def _go_on(self) -> None:
        self._write(self._clock())

    def _write(self, began_s: float) -> None:
        while self._round:
            if self._clock() - began_s > SLICE_S:
                self._pause(began_s, self._go_on)
                return
            try:
                self._round.popleft()()
            except BaseException:  # A defect of one stream, or a library's panic, must not stop the others.
                self._pause(began_s, self._go_on)
                raise
        self._not_before_s = self._loop.time() + self._rest_s(self._clock() - began_s)
        self._took_s = self._rested_s = 0.0
        self._is_called = False
        if self._has_more:
            self.wake()

    def _pause(self, began_s: float, then: Callable[[], None]) -> None:
        slice_s = self._clock() - began_s
        rest_s = self._rest_s(slice_s)
        self._took_s += slice_s
        self._rested_s += rest_s
        if rest_s > 0:
            self._loop.call_later(rest_s, then)
        else:
            self._loop.call_soon(then)

    def _rest_s(self, slice_s: float) -> float:
        """Return the pause after a slice that took so long."""
        return max(0.0, min(slice_s * SHARE, WAIT_S_MAX - self._rested_s))
