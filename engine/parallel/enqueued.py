"""A watch over calls that a device carries out after they have returned.

Nothing on the host waits for such a call, so nobody there would notice that a peer is gone. A thread looks
several times a second whether all ranks are there, and whether what was enqueued has ended in time.
"""

import threading
import time
from collections.abc import Callable

LOOK_S = 0.1


class EnqueuedCalls:
    """One rank's calls. `look()` says why the group is over, or nothing. `end(reason)` is called once, from
    the watch's thread: it lets the device go on, whatever it waits for."""

    def __init__(
        self,
        look: Callable[[], str],
        end: Callable[[str], None],
        *,
        deadline_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """deadline_s: from the first call that was enqueued until `settled`."""
        self._look, self._end, self._deadline_s, self._clock = look, end, deadline_s, clock
        self._first_s: float | None = None
        self._first_call = ""
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rank-watch", daemon=True)
        self._thread.start()

    def begun(self, call: str) -> None:
        """A call is about to be enqueued."""
        if self._first_s is None:
            self._first_call, self._first_s = call, self._clock()

    def settled(self) -> None:
        """Everything that was enqueued has ended."""
        self._first_s = None

    def close(self) -> None:
        """Idempotent."""
        self._closing.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        while not self._closing.wait(LOOK_S):
            if reason := self._look() or self._late():
                self._end(reason)
                return

    def _late(self) -> str:
        first_s = self._first_s
        if first_s is None or self._clock() - first_s <= self._deadline_s:
            return ""
        return f"a rank was not there in time: {self._first_call} and what followed it took longer than " + (
            f"{self._deadline_s:g} s"
        )
