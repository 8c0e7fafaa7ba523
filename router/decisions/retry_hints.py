"""How long a sequence waits in the admission queue, and when a refused client should come back. Pure."""

from collections import OrderedDict

from baton.core.ids import RequestId, SequenceId
from router.decisions.admission.drain_rate import (
    RETRY_AFTER_S_MAX,
    CompletionInterval,
    DrainRate,
    retry_after_s,
)
from router.decisions.admission.queue import AdmissionQueue, Waiter
from router.decisions.admission.retry_reservations import RetryReservations
from router.decisions.events import SequencePart, Submit
from router.decisions.prediction.forecast import Forecast

KEPT_MAX = 1024
"""Largest number of requests that came back in time and are remembered, so that their later sequences are
admitted, too."""


class RetryHints:
    """Predicts waits from the drain rate of the admission queue, and reserves places for refused requests."""

    def __init__(
        self, queue: AdmissionQueue, *, queue_wait_s: float, reservations: RetryReservations
    ) -> None:
        self._queue, self._queue_wait_s = queue, queue_wait_s
        self.drain_rate = DrainRate()
        self.completions = CompletionInterval()
        self._reservations = reservations
        self._returning: set[SequenceId] = set()
        """Sequences whose client came back when it was asked to. They are admitted whatever the queue."""
        self._kept: OrderedDict[RequestId, None] = OrderedDict()
        """Requests that came back in time."""

    def is_returning(self, seq_id: SequenceId) -> bool:
        """Whether the client of the sequence came back at the time that it was given."""
        return seq_id in self._returning

    def arrived(self, seq_id: SequenceId, submit: Submit, now_s: float) -> None:
        """Note a new sequence, and use up the reservation of its request if there is one."""
        request_id = submit.request_id
        if submit.part is SequencePart.REQUEST:
            if not self._reservations.take(submit.tenant, _reservation_key(submit), now_s):
                return
            self._kept[request_id] = None
            if len(self._kept) > KEPT_MAX:
                self._kept.popitem(last=False)
        elif request_id not in self._kept:
            return
        self._returning.add(seq_id)
        self._reservations.returned(seq_id, submit.tenant, submit.slo_class)

    def placed(self, seq_id: SequenceId) -> None:
        """Note that a worker has the sequence."""
        self._reservations.placed(seq_id)

    def ended(self, seq_id: SequenceId, *, was_placed: bool, now_s: float) -> None:
        """Note that the sequence is over."""
        self._returning.discard(seq_id)
        self._reservations.placed(seq_id)
        if was_placed:
            self.completions.ended(now_s)

    def queue_s(self, waiter: Waiter, *, goes_first: bool, now_s: float) -> float | None:
        """Return the time until the sequence would be placed if it joined the queue now; None if it is not
        known. `goes_first`: its tenant is served before the others."""
        tokens = self._queue.tokens_before(waiter, goes_first=goes_first)
        queue_s = self.drain_rate.takes_s(tokens, now_s)
        if queue_s is None:
            return None
        return queue_s + self._reservations.expected_s(waiter.tenant, now_s + queue_s)

    def retry_after_s(
        self, submit: Submit, waiter: Waiter, forecast: Forecast | None, *, goes_first: bool, now_s: float
    ) -> float:
        """Return the seconds after which a request like this will be admitted, see `retry_reservations`."""
        queue_s = self.queue_s(waiter, goes_first=goes_first, now_s=now_s)
        work_s = self.drain_rate.takes_s(waiter.tokens, now_s)
        interval_s = self.completions.interval_s
        if queue_s is None or work_s is None:  # nothing was placed from the queue lately
            queue_s, work_s = interval_s * (len(self._queue) + 1), interval_s
        ttft_s = 0.0 if forecast is None else forecast.ttft_s
        least_s = 0.0 if forecast is None else forecast.ttft_s - forecast.wait_s
        may_wait_s = self._queue_wait_s
        if submit.ttft_slo_s > 0:
            may_wait_s = min(may_wait_s, submit.ttft_slo_s)
            if least_s >= submit.ttft_slo_s:  # an idle worker would miss the objective, too
                return RETRY_AFTER_S_MAX
        wait_s = max(queue_s + ttft_s - may_wait_s, work_s)
        if 0 < submit.tpot_slo_s < (0.0 if forecast is None else forecast.tpot_s):
            wait_s, work_s = max(wait_s, interval_s), max(work_s, interval_s)
        reserved_s = self._reservations.book(
            waiter.tenant,
            _reservation_key(submit),
            wait_s=wait_s,
            work_s=work_s,
            now_s=now_s,
            most_s=RETRY_AFTER_S_MAX,
            slo_class=submit.slo_class,
            client=submit.request_id,
        )
        return retry_after_s(reserved_s)

    def check(self, live: set[SequenceId]) -> None:
        """Raise AssertionError if the reservations disagree, or a sequence that is over is still known."""
        self._reservations.check()
        assert self._returning <= live


def _reservation_key(submit: Submit) -> str:
    return f"{submit.slo_class}\n{submit.request_digest}" if submit.request_digest else ""
