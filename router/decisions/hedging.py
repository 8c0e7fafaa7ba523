"""Hedged requests: when a sequence gets a backup attempt, how many may run, and which attempt wins. Pure.

A sequence whose first token is overdue gets a backup attempt beside its primary attempt. The backup attempt
is a flow with a name of its own (`NAME~N`), so workers see two unrelated sequences with unrelated epochs. The
first of the two that produces a token, or ends, serves the client from then on. The other one is cancelled,
and none of its tokens reach the client. See "The Tail at Scale" (Dean, Barroso 2013).
"""

from bisect import bisect_left, insort
from collections import deque

from baton.config.router import RouterConfig
from baton.core.ids import SequenceId
from router.decisions.prediction.forecast import Forecast
from router.decisions.retry_budgets import CreditBudget

SAVED_MAX = 5.0
"""Largest number of backup attempts that an idle time can save up."""
SAMPLES, SAMPLES_MIN = 256, 16
SIGMA_MIN = 0.25
"""Least spread assumed of predictions, even if all were accurate so far."""


def submitted_name(name: SequenceId) -> SequenceId:
    """Return the client's name of the sequence that the attempt serves."""
    return SequenceId(name.partition("~")[0])


class RecentQuantiles:
    """Quantiles over the last `SAMPLES` values."""

    def __init__(self) -> None:
        self._in_time: deque[float] = deque()
        self._sorted: list[float] = []

    def add(self, value: float) -> None:
        self._in_time.append(value)
        insort(self._sorted, value)
        if len(self._in_time) > SAMPLES:
            del self._sorted[bisect_left(self._sorted, self._in_time.popleft())]

    def quantile(self, q: float) -> float | None:
        """Return the quantile; None if there are fewer than `SAMPLES_MIN` values."""
        count = len(self._sorted)
        return None if count < SAMPLES_MIN else self._sorted[min(count - 1, int(q * count))]


class Hedging:
    """The backup attempts of one router."""

    def __init__(self, config: RouterConfig) -> None:
        self._share, self._least_s = config.hedge_share, config.hedge_after_s
        self._quantile = config.hedge_quantile
        self._budget = CreditBudget(share=config.hedge_share, saved_max=SAVED_MAX)
        self._recent = RecentQuantiles()
        self._paired: dict[SequenceId, SequenceId] = {}
        """The other attempt of each of two that run at once, both ways."""
        self._serves: dict[SequenceId, SequenceId] = {}
        """The client's name of a sequence -> the name of the backup attempt that serves it."""
        self._client_of: dict[SequenceId, SequenceId] = {}
        """The inverse of `_serves`."""
        self._numbers = 0
        self.started_count = self.won_count = self.wasted_tokens = 0
        """Totals since the start. `wasted_tokens` counts the prompt tokens that cancelled attempts had left
        to compute."""

    @property
    def is_on(self) -> bool:
        return self._share > 0

    @property
    def has_credit(self) -> bool:
        return self._budget.has_credit

    @property
    def was_ever_used(self) -> bool:
        return self.started_count > 0

    @property
    def racing_count(self) -> int:
        return len(self._paired) // 2

    @property
    def is_idle(self) -> bool:
        return not self._paired and not self._serves

    def placed(self) -> None:
        """Note that a sequence was placed for the first time, which earns budget."""
        self._budget.earn()

    def observe_first_token(self, after_s: float) -> None:
        """Note the time from the placement of a sequence to its first token."""
        if self.is_on:
            self._recent.add(after_s)

    def delay_s(self, forecast: Forecast | None) -> float | None:
        """Return how long after placement a backup attempt is due; None if there shall be none, because
        hedging is off or nothing is known of usual times."""
        if not self.is_on:
            return None
        if forecast is not None:
            sigma = max(SIGMA_MIN, forecast.ttft_sigma)
            usual_s = forecast.ttft_errors.quantile_s(self._quantile, forecast.ttft_s, sigma)
            return max(self._least_s, usual_s)
        usual_s = self._recent.quantile(self._quantile)
        return None if usual_s is None else max(self._least_s, usual_s)

    def new_name(self, seq_id: SequenceId) -> SequenceId:
        self._numbers += 1
        return SequenceId(f"{seq_id}~{self._numbers}")

    def began(self, name: SequenceId, hedge: SequenceId) -> None:
        self._budget.take()
        self.started_count += 1
        self._paired[name], self._paired[hedge] = hedge, name

    def other_attempt_of(self, name: SequenceId) -> SequenceId | None:
        return self._paired.get(name)

    def decided(self, winner: SequenceId, seq_id: SequenceId, *, wasted_tokens: int) -> None:
        """Note that `winner` serves the client's `seq_id`. The caller cancels the other attempt."""
        self._unpair(winner)
        self.wasted_tokens += wasted_tokens
        if winner != seq_id:
            self.won_count += 1
            self._serves[seq_id] = winner
            self._client_of[winner] = seq_id

    def ended(self, name: SequenceId) -> SequenceId | None:
        """Note that the attempt is over; return the other attempt, which then serves the client, if there is
        one."""
        other = self._unpair(name)
        client = self._client_of.pop(name, None)
        if client is not None:
            del self._serves[client]
        return other

    def takes_over(self, name: SequenceId, seq_id: SequenceId) -> None:
        """Note that the backup attempt serves the client, since the primary one failed."""
        self._serves[seq_id] = name
        self._client_of[name] = seq_id

    def serving_attempt_of(self, seq_id: SequenceId) -> SequenceId:
        """Return the name of the attempt that serves the client's sequence. While two run it is the
        primary."""
        return self._serves.get(seq_id, seq_id)

    def check(self) -> None:
        assert all(self._paired[other] == name for name, other in self._paired.items())
        assert not self._paired.keys() & self._serves.values()
        assert self._client_of == {name: client for client, name in self._serves.items()}

    def _unpair(self, name: SequenceId) -> SequenceId | None:
        other = self._paired.pop(name, None)
        if other is not None:
            del self._paired[other]
        return other
