"""How fast the admission queue drains, which tells a sequence that joins how long it will wait. Pure."""

import math

REMEMBERED_S = 5.0
"""The rate is an average over about this many seconds during which sequences waited."""
RETRY_AFTER_S_MIN, RETRY_AFTER_S_MAX = 1.0, 60.0
"""OpenAI's client libraries do not wait for longer than a minute."""
SMOOTHING = 0.1
COUNT_MIN = 3.0
"""Number of placements that make a rate."""


class DrainRate:
    """Tokens placed per second while sequences wait.

    Nothing is learnt while none waits, since requests are then placed as fast as they come.
    """

    def __init__(self) -> None:
        self._tokens = 0.0
        self._time_s = 0.0
        self._count = 0.0
        self._since_s: float | None = None

    def began(self, now_s: float) -> None:
        """Note that the queue is no longer empty."""
        self._since_s = now_s

    def ended(self, now_s: float) -> None:
        """Note that the queue is empty."""
        self._passed(now_s)
        self._since_s = None

    def placed(self, tokens: int, now_s: float) -> None:
        """Note that a sequence of this many tokens was placed."""
        if self._since_s is None:
            return
        self._passed(now_s)
        self._tokens += tokens
        self._count += 1.0

    def _passed(self, now_s: float) -> None:
        if self._since_s is None:
            return
        passed_s = max(0.0, now_s - self._since_s)
        self._since_s = now_s
        kept = math.exp(-passed_s / REMEMBERED_S)
        self._tokens *= kept
        self._count *= kept
        # The integral of what is remembered over the time that passed.
        self._time_s = self._time_s * kept + REMEMBERED_S * (1.0 - kept)

    def tokens_per_s(self, now_s: float) -> float | None:
        """Return the rate; None if too little was observed. It falls while nothing is placed."""
        self._passed(now_s)
        if self._count < COUNT_MIN * math.exp(-2.0) or self._time_s <= 0:
            return None
        return self._tokens / self._time_s

    def takes_s(self, tokens: float, now_s: float) -> float | None:
        """Return the seconds until this many tokens are placed; None if that is not known."""
        rate = self.tokens_per_s(now_s)
        if tokens <= 0:
            return 0.0
        return None if rate is None or rate <= 0 else tokens / rate


class CompletionInterval:
    """The usual time between two sequences that end. It stands in while nothing was placed from the queue."""

    def __init__(self) -> None:
        self.interval_s = 0.0
        """Smoothed seconds between two sequences that end."""
        self._last_s: float | None = None

    def ended(self, now_s: float) -> None:
        if self._last_s is not None:
            self.interval_s += SMOOTHING * (now_s - self._last_s - self.interval_s)
        self._last_s = now_s


def retry_after_s(seconds: float) -> float:
    return min(RETRY_AFTER_S_MAX, max(RETRY_AFTER_S_MIN, seconds))
