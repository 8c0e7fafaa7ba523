"""Second attempts at sequences whose first token is overdue: when, how many, and which attempt won. Pure.

A hedge is a flow of its own under a name of its own (`NAME~N`), so that to workers the two have nothing to
do with each other: no epoch of one says anything about the other. The first of the two that brings a token,
or ends, serves the client from then on; the other is cancelled before anything it says could be heard. See
"The Tail at Scale" (Dean, Barroso 2013), hedged requests.
"""

from bisect import bisect_left, insort
from collections import deque
from math import exp
from statistics import NormalDist

from baton.config.router import RouterConfig
from baton.core.ids import SequenceId
from router.decisions.prediction.forecast import Forecast
from router.decisions.retry_budgets import CreditBudget

SAVED_MAX = 5.0
"""Hedges that may be made at once, however long none was needed."""
SAMPLES, SAMPLES_MIN = 256, 16
SIGMA_MIN = 0.25
"""A predictor that was always right so far is still not trusted to a quarter."""


def submitted_name(name: SequenceId) -> SequenceId:
    """The name of the sequence that a flow with this name serves."""
    return SequenceId(name.partition("~")[0])


class Recent:
    """Quantiles of the last `SAMPLES` values."""

    def __init__(self) -> None:
        self._in_time: deque[float] = deque()
        self._sorted: list[float] = []

    def add(self, value: float) -> None:
        self._in_time.append(value)
        insort(self._sorted, value)
        if len(self._in_time) > SAMPLES:
            del self._sorted[bisect_left(self._sorted, self._in_time.popleft())]

    def quantile(self, q: float) -> float | None:
        """None: too few."""
        count = len(self._sorted)
        return None if count < SAMPLES_MIN else self._sorted[min(count - 1, int(q * count))]


class Hedging:
    """The backup attempts of one router."""

    def __init__(self, config: RouterConfig) -> None:
        self._share, self._least_s = config.hedge_share, config.hedge_after_s
        self._quantile = config.hedge_quantile
        self._z = NormalDist().inv_cdf(config.hedge_quantile)
        self._budget = CreditBudget(share=config.hedge_share, saved_max=SAVED_MAX)
        self._recent = Recent()
        self._other: dict[SequenceId, SequenceId] = {}
        """Each attempt's rival, of two that race."""
        self._serves: dict[SequenceId, SequenceId] = {}
        """Client's name of a sequence -> the name of the hedge that serves it."""
        self._client_of: dict[SequenceId, SequenceId] = {}
        """The other way round."""
        self._numbers = 0
        self.started_count = self.won_count = self.wasted_tokens = 0
        """Since the start. Tokens: of prompts that losers were to compute, at most."""

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
        return len(self._other) // 2

    @property
    def is_idle(self) -> bool:
        return not self._other and not self._serves

    def placed(self) -> None:
        """A sequence was, for the first time."""
        self._budget.earn()

    def saw_first_token(self, after_s: float) -> None:
        """So long after it was placed."""
        if self.is_on:
            self._recent.add(after_s)

    def delay_s(self, forecast: Forecast | None) -> float | None:
        """After placing; None: not to be hedged, nothing is known of how long it takes."""
        if not self.is_on:
            return None
        if forecast is not None:
            usual_s = forecast.ttft_s * exp(self._z * max(SIGMA_MIN, forecast.ttft_sigma))
            return max(self._least_s, usual_s)
        usual_s = self._recent.quantile(self._quantile)
        return None if usual_s is None else max(self._least_s, usual_s)

    def new_name(self, seq_id: SequenceId) -> SequenceId:
        self._numbers += 1
        return SequenceId(f"{seq_id}~{self._numbers}")

    def began(self, name: SequenceId, hedge: SequenceId) -> None:
        self._budget.take()
        self.started_count += 1
        self._other[name], self._other[hedge] = hedge, name

    def rival_of(self, name: SequenceId) -> SequenceId | None:
        return self._other.get(name)

    def decided(self, winner: SequenceId, seq_id: SequenceId, *, wasted_tokens: int) -> None:
        """`winner` serves the client's `seq_id`; its rival is about to be cancelled."""
        self._part(winner)
        self.wasted_tokens += wasted_tokens
        if winner != seq_id:
            self.won_count += 1
            self._serves[seq_id] = winner
            self._client_of[winner] = seq_id

    def ended(self, name: SequenceId) -> SequenceId | None:
        """The flow is over. If it raced, its rival serves the client from now on: its name."""
        rival = self._part(name)
        client = self._client_of.pop(name, None)
        if client is not None:
            del self._serves[client]
        return rival

    def takes_over(self, name: SequenceId, seq_id: SequenceId) -> None:
        """The hedge serves the client, since the first attempt failed."""
        self._serves[seq_id] = name
        self._client_of[name] = seq_id

    def server_of(self, seq_id: SequenceId) -> SequenceId:
        """Name of the flow that serves the client's sequence; of two that race, the first."""
        return self._serves.get(seq_id, seq_id)

    def check(self) -> None:
        assert all(self._other[rival] == name for name, rival in self._other.items())
        assert not self._other.keys() & self._serves.values()
        assert self._client_of == {name: client for client, name in self._serves.items()}

    def _part(self, name: SequenceId) -> SequenceId | None:
        rival = self._other.pop(name, None)
        if rival is not None:
            del self._other[rival]
        return rival
