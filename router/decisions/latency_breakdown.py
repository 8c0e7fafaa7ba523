"""The latency breakdown of a sequence, from the router's clock and the timings that workers report."""

import copy
from collections.abc import Mapping

import msgspec

from baton.core.costs import PhaseTimings
from baton.core.ids import WorkerId
from baton.core.messages import Phase
from router.decisions.events import LatencyBreakdown, Served
from router.decisions.prediction.forecast import Forecast


class LatencyClock:
    """The clock of one sequence. Its methods are called in the order of events, with the router's time."""

    __slots__ = (
        "_are_timings_due",
        "_decodes_s",
        "_first_s",
        "_placed_s",
        "_queue_s",
        "_retries_s",
        "_second_s",
        "_since_s",
        "_submitted_s",
        "_timings",
    )

    def __init__(self, submitted_s: float) -> None:
        self._submitted_s = self._since_s = submitted_s
        self._placed_s: float | None = None
        self._queue_s = self._retries_s = 0.0
        self._timings: PhaseTimings | None = None
        self._are_timings_due = True
        self._first_s: float | None = None
        self._decodes_s: float | None = None
        self._second_s: float | None = None

    def fork(self) -> "LatencyClock":
        """A copy for a second attempt that begins while the first one runs."""
        return copy.copy(self)

    @property
    def has_first_token(self) -> bool:
        return self._first_s is not None

    @property
    def first_s(self) -> float | None:
        """When the client had its first token."""
        return self._first_s

    def placed(self, now_s: float) -> None:
        if self._first_s is None:
            self._queue_s += now_s - self._since_s
            self._placed_s = self._since_s = now_s

    def lost(self, now_s: float) -> None:
        """Note that the attempt is over and the sequence waits for a place again."""
        if self._first_s is None:
            self._retries_s += now_s - self._since_s
            self._placed_s, self._since_s = None, now_s
            self._timings = None
        elif self._timings is None:
            self._are_timings_due = False  # a later attempt's are not the first token's

    def on_timings(self, timings: PhaseTimings) -> None:
        """Note the prefill worker's timings, which may come after the decode worker sent the first token."""
        if self._timings is None and self._are_timings_due:
            self._timings = timings

    def decodes(self, now_s: float) -> None:
        """Note that the decode worker has all it needs. The first time counts."""
        if self._decodes_s is None and self._first_s is not None:
            self._decodes_s = now_s

    def delivered(self, token_count: int, now_s: float) -> None:
        """Note that the client has this many tokens."""
        if self._first_s is None:
            self._first_s = now_s
        if self._second_s is None and token_count > 1:
            self._second_s = now_s

    def latency_breakdown(self) -> LatencyBreakdown | None:
        """Return the breakdown; None before the first token, or if its worker reported no timings."""
        if self._first_s is None or self._placed_s is None or self._timings is None:
            return None
        left_s = self._first_s - self._placed_s
        # The worker's parts and the router's are measured on two clocks, so the parts are cut to fit the sum.
        wait_s = min(self._timings.wait_s, left_s)
        load_s = min(self._timings.load_s, left_s - wait_s)
        prefill_s = min(self._timings.compute_s, left_s - wait_s - load_s)
        transfer_s, first_decode_s = self._after_first(self._first_s)
        return LatencyBreakdown(
            queue_s=self._queue_s,
            retries_s=self._retries_s,
            wait_s=wait_s,
            load_s=load_s,
            prefill_s=prefill_s,
            first_hop_s=max(0.0, left_s - wait_s - load_s - prefill_s),
            transfer_s=transfer_s,
            first_decode_s=first_decode_s,
        )

    def _after_first(self, first_s: float) -> tuple[float, float]:
        second_s = self._second_s
        joined_s = first_s if self._decodes_s is None else self._decodes_s
        if second_s is None:
            return joined_s - first_s, 0.0
        joined_s = min(joined_s, second_s)
        return joined_s - first_s, second_s - joined_s


def served_by(
    before: Served,
    phases: Mapping[WorkerId, Phase],
    forecast: Forecast | None,
    waited_s: float,
    *,
    is_begun: bool,
) -> Served:
    """Return `before` with one more attempt, which began `waited_s` after the request's arrival.

    `is_begun`: the client has tokens already.
    """
    attempts = before.attempts + 1
    prefill = next(w for w, phase in phases.items() if phase is not Phase.DECODE)
    decode = next((w for w, phase in phases.items() if phase is Phase.DECODE), prefill)
    if is_begun:
        return msgspec.structs.replace(before, decode_worker=decode, attempts=attempts)
    if forecast is None:
        return Served(prefill, decode, None, None, attempts)
    return Served(
        prefill,
        decode,
        waited_s + forecast.ttft_s,
        forecast.seen_tpot_s,
        attempts,
        waited_s + forecast.ttft_quantile_s(0.9),
        forecast.tpot_quantile_s(0.9),
        forecast.meets,
    )
