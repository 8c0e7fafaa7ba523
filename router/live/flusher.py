"""Takes in what workers generated and writes what streams have to say, all together, as often as the event
loop can afford.

Alone, a token is written in the moment it comes. With hundreds of streams, handling each token by itself
would take most of the loop's time; so the next round waits for some multiple of what the last one took, and
what came meanwhile is handled, and goes out, as one piece. A round of many streams is cut into slices with
the wait spread between them: a new request or a first token needs several turns of the loop, and would meet
a round in one piece at each of them.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable

SHARE = 3.0
"""After each slice, as a multiple of what it took: rounds get a quarter of the loop's time."""

WAIT_S_MAX = 0.04
"""A token waits no longer than this for others: the sum over the slices of a round."""

SLICE_S = 0.00025
"""Of a round, before whatever else happened has its turn."""


def _nothing() -> bool:
    return False


class Flusher:
    """One per event loop."""

    def __init__(
        self, clock: Callable[[], float] = time.perf_counter, take_in: Callable[[], bool] = _nothing
    ) -> None:
        """`clock`: uvloop's own stands still while it calls us. `take_in` takes in some of what has come,
        and says whether there was any: called until there is none, it begins each round, and what becomes
        due by it is written in the same one."""
        self._clock, self._take_in = clock, take_in
        self._loop = asyncio.get_running_loop()
        self._due: list[Callable[[], None]] = []
        self._round: deque[Callable[[], None]] = deque()
        """What this round has not written yet."""
        self._took_s = self._rested_s = 0.0
        """This round, so far: at work, and between its slices."""
        self._not_before_s = 0.0
        self._is_called = False
        """A round comes, or is under way."""
        self._has_more = False
        """Something became due while a round was writing."""

    def add(self, flush: Callable[[], None]) -> None:
        """It is called once, soon, after whatever else happens now."""
        self._due.append(flush)
        self.wake()

    def wake(self) -> None:
        """A round soon: there is something to take in."""
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
        # Where tokens come faster than they are taken in, some are written nevertheless.
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
            except Exception:  # a defect of one stream: the others go on
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
        """After a slice that took so long."""
        return max(0.0, min(slice_s * SHARE, WAIT_S_MAX - self._rested_s))
