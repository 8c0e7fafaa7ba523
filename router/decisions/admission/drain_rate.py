"""How fast the line moves: what a sequence that joins it has to expect. Pure."""

import math

REMEMBERED_S = 5.0
"""Seconds of time in which somebody waited: the rate is that of about so long."""
RETRY_AFTER_S_MIN, RETRY_AFTER_S_MAX = 1.0, 60.0
"""Clients of OpenAI's libraries do not wait for longer than a minute."""
SMOOTHING = 0.1
COUNT_MIN = 3.0
"""Placings that make a rate."""


class DrainRate:
    """Tokens placed per second while somebody waits. While nobody does, nothing is learnt: places are taken
    as fast as requests come, which says nothing of how fast they could be."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._time_s = 0.0
        self._count = 0.0
        self._since_s: float | None = None

    def began(self, now_s: float) -> None:
        """Somebody waits, and nobody did."""
        self._since_s = now_s

    def ended(self, now_s: float) -> None:
        """Nobody waits any more."""
        self._passed(now_s)
        self._since_s = None

    def placed(self, tokens: int, now_s: float) -> None:
        """A sequence of so many tokens was placed."""
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
        """None: too little was seen. A line that stands still slows down as one looks at it."""
        self._passed(now_s)
        if self._count < COUNT_MIN * math.exp(-2.0) or self._time_s <= 0:
            return None
        return self._tokens / self._time_s

    def takes_s(self, tokens: float, now_s: float) -> float | None:
        """Until so many tokens are placed; None: not known."""
        rate = self.tokens_per_s(now_s)
        if tokens <= 0:
            return 0.0
        return None if rate is None or rate <= 0 else tokens / rate


class CompletionInterval:
    """How fast sequences end: what the line goes by while nothing was placed from it."""

    def __init__(self) -> None:
        self.interval_s = 0.0
        """Smoothed, between two ends."""
        self._last_s: float | None = None

    def ended(self, now_s: float) -> None:
        if self._last_s is not None:
            self.interval_s += SMOOTHING * (now_s - self._last_s - self.interval_s)
        self._last_s = now_s


def retry_after_s(seconds: float) -> float:
    return min(RETRY_AFTER_S_MAX, max(RETRY_AFTER_S_MIN, seconds))
