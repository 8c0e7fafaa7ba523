"""Where the time comes from. Only adapters hold a clock; decisions get `now_s` as an argument."""

import time
from typing import Protocol


class Clock(Protocol):
    def monotonic_s(self) -> float:
        """Seconds on this process's monotonic clock: for durations and deadlines."""
        ...

    def unix_s(self) -> float:
        """Seconds since 1970: for people and for logs, never for decisions."""
        ...


class SystemClock:
    def monotonic_s(self) -> float:
        return time.monotonic()

    def unix_s(self) -> float:
        return time.time()
