"""Sequences that wait for placement: in the admission queue, or in back-off between two attempts. Pure.

`router.decisions.admission` decides about plain values, and this module applies it to flows. A sequence is
held in the queue while its best worker has enough to do already, because its order can still change here and
not at the worker (late binding). Policies that predict nothing hold nothing.
"""

import math
from collections.abc import Callable, Mapping
from enum import Enum, auto

from baton.config.router import RouterConfig, SloConfig
from baton.core.ids import SequenceId, WorkerId
from router.decisions.admission.attainment import Attainment, attainment, unmet_objectives
from router.decisions.admission.fair_shares import GENERATED_TOKEN_COST
from router.decisions.admission.queue import SCAN_MISSES_MAX, AdmissionQueue, Full, Waiter
from router.decisions.admission.retry_reservations import RetryReservations
from router.decisions.admission.tenant_usage import TenantUsage
from router.decisions.events import FailureKind, RouterAction
from router.decisions.flow import Flow, RequestState
from router.decisions.placement.interface import NoPlace, Placement
from router.decisions.placement.room import takes_the_last_room
from router.decisions.placing import Placing
from router.decisions.prediction.forecast import Forecast
from router.decisions.retry_hints import RetryHints

HELD_MAX = 4
"""A scan ends after so many held sequences, or when every worker is waited for: the others would be held."""
TIMELY_MIN = 0.5
"""A sequence that meets its objectives with less than this probability is late and goes behind the others.
Earliest deadline first is a bad order under overload, since every sequence would be served just too late."""
WAIT_FOR_SPEED_SHARE = 0.5
"""Part of the time until its first token is due that a sequence may wait for decode to become fast enough.
After that it is late."""
BURST_S = 2.0
"""Credit of a tenant that had less than its share lately, in seconds of the cluster's whole service."""
UNTRUSTED_STEPS = 2
"""While predictions are not trusted, a worker gets prompts for at most this many steps ahead."""
HOLD_SHARE_MIN, HOLD_S_MIN = 0.2, 0.01
"""Least time between two scans whose only reason is that time has passed: a part of `hold_above_s`, and s."""
SCAN_INTERVAL_S = 0.004
"""Least time after a scan that held a sequence. Hundreds of events per second may free room, and trying the
same sequences after each of them would take all of a router's time."""

Start = Callable[[Flow, Placement], list[RouterAction]]
Settle = Callable[[Flow], None]


class AdmissionOutcome(Enum):
    PLACED = auto()
    ENDED = auto()
    NO_ROOM = auto()
    HELD = auto()
    LATE = auto()
    """The sequence is unlikely to meet its objectives, so those that can meet theirs go first."""
    HOPELESS = auto()
    """The sequence will miss its objectives, and its class asks for a refusal in that case."""


class Waiting:
    def __init__(
        self,
        *,
        config: RouterConfig,
        slo: SloConfig,
        placing: Placing,
        flows: Mapping[SequenceId, Flow],
        start: Start,
        settle: Settle,
    ) -> None:
        """`start` begins an attempt of a flow. `settle` updates all accounts after a flow changed."""
        self._config, self._placing, self._flows = config, placing, flows
        self._start, self._settle = start, settle
        places, of_tenant = config.queue_requests_max, config.queue_tenant_max
        of_class = {name: one.queue_max for name, one in slo.classes.items()}
        self._queue = AdmissionQueue(new_max=places, class_max=of_class, tenant_max=of_tenant)
        self._resting: set[SequenceId] = set()
        self._hints = RetryHints(
            self._queue,
            queue_wait_s=config.queue_wait_s,
            reservations=RetryReservations(places_max=places, tenant_max=of_tenant, class_max=of_class),
        )
        self._drain_rate = self._hints.drain_rate
        self._usage = TenantUsage()
        self._joins_late: set[SequenceId] = set()
        self._tried_on_arrival: SequenceId | None = None
        """The sequence that was tried on arrival, found no room, and joins the queue next."""
        self._held_until_s: float | None = None
        """When to scan again because a sequence is held that the passing of time may release."""
        self._awaited: set[WorkerId] = set()
        """Workers that sequences wait for, which the last scan has passed."""
        self._is_short_of_room = False
        """True if the last scan passed sequences for lack of room."""
        self._scan_after_s = 0.0
        self.wants_scan = False
        """True if something changed since the last scan of the queue."""
        self.waits_for = "no worker takes new sequences"

    def __len__(self) -> int:
        """Number of sequences that wait for placement."""
        return len(self._queue) + len(self._resting)

    def __contains__(self, seq_id: SequenceId) -> bool:
        return seq_id in self._queue or seq_id in self._resting

    @property
    def next_tick_s(self) -> float | None:
        due_s, held_s = self._queue.next_due_s, self._held_until_s
        if self.wants_scan and len(self._queue):
            held_s = self._scan_after_s
        if due_s is None or held_s is None:
            return held_s if due_s is None else due_s
        return min(due_s, held_s)

    def is_due(self, now_s: float) -> bool:
        """Whether the queue is to be scanned now."""
        if self.wants_scan and not len(self._queue):
            return True
        return (next_s := self.next_tick_s) is not None and next_s <= now_s

    def counts(self) -> Mapping[tuple[str, str], int]:
        """Return (class, tenant) -> number of queued sequences that were never placed."""
        return self._queue.counts()

    # --- coming and going -------------------------------------------------------------------------

    def arrive(self, flow: Flow, *, now_s: float) -> list[RouterAction]:
        """Place or refuse a new sequence, or leave it queued, so that `settle` puts it into the queue."""
        self._hints.arrived(flow.name, flow.submit, now_s)
        waiter = self._waiter(flow)
        self._usage.on_request(waiter.tenant, waiter.weight, now_s)
        outcome, forecast = None, None
        if self._may_try_on_arrival(now_s):
            outcome, actions, forecast = self._try(flow, now_s=now_s)
            if flow.state is not RequestState.QUEUED:
                return actions
        self._tried_on_arrival = waiter.seq_id if outcome is AdmissionOutcome.NO_ROOM else None
        if outcome is AdmissionOutcome.LATE:
            self._joins_late.add(waiter.seq_id)
        elif (refusal := self._refuse_on_arrival(flow, waiter, forecast, now_s)) is not None:
            return refusal
        return self._make_room(flow, waiter, now_s)

    def _may_try_on_arrival(self, now_s: float) -> bool:
        """Whether a new sequence may be tried though others wait.

        The others may be held for other workers, or be too large for the room that there is. A due scan of
        the queue comes first.
        """
        if not len(self._queue):
            return True
        return self._queue.may_be_passed(is_short_of_room=self._is_short_of_room) and not self.is_due(now_s)

    def _make_room(self, flow: Flow, waiter: Waiter, now_s: float) -> list[RouterAction]:
        actions: list[RouterAction] = []
        while (room := self._queue.room_for(waiter)) is not None:
            leaves = flow if isinstance(room, Full) else self._flows[room]
            if isinstance(room, Full):
                reason = room.reason
                self._joins_late.discard(waiter.seq_id)
            else:
                reason = "the admission queue is full, and others go before this request"
            hint_s = self._hint_s(leaves, None, now_s=now_s)
            actions += leaves.refuse(FailureKind.QUEUE_FULL, reason, now_s=now_s, retry_after_s=hint_s)
            if leaves is flow:
                break
            self._settle(leaves)
        return actions

    def settle(self, flow: Flow, *, now_s: float) -> None:
        """Update the queue and the set of resting sequences after the flow changed."""
        seq_id = flow.name
        if flow.phases:
            self._usage.placed(seq_id, flow.submit.tenant, flow.token_count)
        else:
            self._usage.left(seq_id)
        if flow.is_over or flow.state is not RequestState.QUEUED:
            self._leave(seq_id, now_s)
            self._resting.discard(seq_id)
            if flow.is_over:
                self._hints.ended(seq_id, was_placed=flow.was_placed, now_s=now_s)
        elif flow.rest_until_s > now_s:
            self._resting.add(seq_id)
        elif seq_id not in self._queue:
            self._resting.discard(seq_id)
            if not len(self._queue):
                self._drain_rate.began(now_s)
            is_late = seq_id in self._joins_late
            self._joins_late.discard(seq_id)
            credit_tokens = BURST_S * (self._drain_rate.tokens_per_s(now_s) or 0.0)
            self._queue.add(self._waiter(flow), is_late=is_late, credit_tokens=credit_tokens)
            if self._tried_on_arrival == seq_id:
                self._queue.missed(seq_id)
            # A late sequence is not placed yet only because others may go before it.
            self.wants_scan = self.wants_scan or flow.was_placed or is_late

    def generated(self, flow: Flow, count: int) -> None:
        """Charge the tenant for `count` generated tokens."""
        submit = flow.submit
        self._queue.shares.charge(submit.tenant, GENERATED_TOKEN_COST * count, submit.weight)

    def _leave(self, seq_id: SequenceId, now_s: float) -> None:
        if seq_id not in self._queue:
            return
        self._queue.remove(seq_id)
        if not len(self._queue):
            self._drain_rate.ended(now_s)
            self._held_until_s = None

    def _waiter(self, flow: Flow) -> Waiter:
        submit = flow.submit
        has_objective = submit.ttft_slo_s > 0
        return Waiter(
            seq_id=flow.name,
            arrival=flow.arrival,
            tokens=flow.token_count,
            due_s=flow.arrived_s + (submit.ttft_slo_s if has_objective else self._config.queue_wait_s),
            tenant=submit.tenant,
            weight=submit.weight,
            slo_class=submit.slo_class,
            priority=submit.priority,
            is_new=not flow.was_placed,
            is_promised=self._hints.is_returning(flow.name),
        )

    # --- scanning ----------------------------------------------------------------------------------

    def scan(self, *, now_s: float) -> list[RouterAction]:
        """Place the queued sequences that can be placed, in order."""
        self.wants_scan, self._held_until_s, self._is_short_of_room = False, None, False
        self._awaited.clear()
        if not len(self._queue):
            return []
        actions = self._end_overdue(now_s)
        misses = held = 0
        smallest_miss: dict[bool, int] = {}
        for seq_id in self._queue.candidates():
            flow = self._flows[seq_id]
            # Room only shrinks during one scan, so a sequence no shorter than one that found none finds none.
            missed_tokens = smallest_miss.get(flow.is_last_token)
            outcome = AdmissionOutcome.NO_ROOM
            if missed_tokens is None or flow.token_count < missed_tokens:
                outcome, more, _ = self._try(flow, now_s=now_s)
                actions += more
                self._settle(flow)
                if flow.state is not RequestState.QUEUED:
                    continue
                if outcome is AdmissionOutcome.NO_ROOM:
                    smallest_miss[flow.is_last_token] = flow.token_count
            if outcome is AdmissionOutcome.LATE:
                self._queue.make_late(seq_id)
                continue
            misses += 1
            if outcome is AdmissionOutcome.HELD:
                held += 1
            else:
                self._queue.missed(seq_id)
                self._is_short_of_room = True
            is_last = misses >= SCAN_MISSES_MAX or held >= HELD_MAX or self._queue.is_starving(seq_id)
            if is_last or self._is_waited_for_everywhere():
                break
        if held:
            self._scan_after_s = now_s + SCAN_INTERVAL_S
        return actions

    def _is_waited_for_everywhere(self) -> bool:
        """Whether sequences wait for every worker, so that those behind would be held, too. Who starves would
        not."""
        if not self._awaited or self._placing.takes_new_beside(self._awaited):
            return False
        return self._queue.may_be_passed(is_short_of_room=False)

    def _end_overdue(self, now_s: float) -> list[RouterAction]:
        actions: list[RouterAction] = []
        for seq_id in self._queue.take_overdue(now_s):
            flow = self._flows[seq_id]
            if flow.submit.refuse_late and flow.submit.ttft_slo_s > 0:
                reason = f"a first token within {flow.submit.ttft_slo_s:g} s is no longer possible"
                actions += self._refuse_late(flow, None, reason, now_s=now_s)
                self._settle(flow)
        return actions

    def _try(
        self, flow: Flow, *, now_s: float
    ) -> tuple[AdmissionOutcome, list[RouterAction], Forecast | None]:
        is_over_share = self._is_over_share(flow, now_s)
        found = self._placing.find(flow, leaves_room=is_over_share, now_s=now_s)
        if isinstance(found, NoPlace):
            self.waits_for = found.reason
            if not found.is_final:
                # A sequence that leaves room to tenants below their share does not count as starving.
                return AdmissionOutcome.HELD if is_over_share else AdmissionOutcome.NO_ROOM, [], None
            actions = flow.refuse(FailureKind.TOO_LONG, self._too_long(flow), now_s=now_s)
            return AdmissionOutcome.ENDED, actions, None
        forecast = found.forecast
        if forecast is not None and not flow.was_placed:
            outcome, reason = self._judge(flow, found, forecast, now_s=now_s)
            if outcome is AdmissionOutcome.HOPELESS:
                return (
                    AdmissionOutcome.ENDED,
                    self._refuse_late(flow, forecast, reason, now_s=now_s),
                    forecast,
                )
            if outcome is not AdmissionOutcome.PLACED:
                self.waits_for = reason
                return outcome, [], forecast
        elif (
            self._placing.distrusts_predictions and not flow.was_placed and self._has_enough_work(flow, found)
        ):
            self.waits_for = "its best worker has enough prompts for the next steps"
            return AdmissionOutcome.HELD, [], None
        self._count_placed(flow, found, now_s)
        return AdmissionOutcome.PLACED, self._start(flow, found), forecast

    def _has_enough_work(self, flow: Flow, placement: Placement) -> bool:
        """Whether the worker will not idle soon, judged by tokens because predictions are not trusted.

        A sequence that was placed there would stay there once predictions are trusted again.
        """
        worker = placement.prefill
        is_busy = worker.prediction.backlog.tokens >= UNTRUSTED_STEPS * worker.facts.step_tokens_max
        return is_busy and not self._queue.is_starving(flow.name)

    def _count_placed(self, flow: Flow, placement: Placement, now_s: float) -> None:
        worker = placement.prefill
        cached = placement.cached_blocks.get(worker.worker_id, 0) * worker.facts.block_tokens
        computed = 0 if flow.was_placed else max(1, flow.token_count - cached)
        self._drain_rate.placed(flow.token_count, now_s)
        self._queue.placed(self._waiter(flow), computed)
        self._hints.placed(flow.name)
        if not len(self._queue):
            self._drain_rate.ended(now_s)
            self._held_until_s = None

    def _too_long(self, flow: Flow) -> str:
        return (
            f"The request has {flow.token_count} tokens, and no worker here can hold a sequence of more than "
            f"{self._placing.longest_tokens}; at least one must be left for the answer."
        )

    # --- judging ----------------------------------------------------------------------------------

    def _judge(
        self, flow: Flow, placement: Placement, forecast: Forecast, *, now_s: float
    ) -> tuple[AdmissionOutcome, str]:
        """Return the outcome for a sequence that could be placed now, with the reason if it is not placed."""
        seq_id = flow.name
        if not self._hints.is_returning(seq_id) and self._has_objectives(flow):
            found = self._attainment(flow, forecast, now_s=now_s)
            is_hopeless = self._is_hopeless(flow, found)
            is_late = found.both < TIMELY_MIN and not self._queue.is_late(seq_id)
            waits = is_late and found.ttft >= 0.5 and self._may_get_faster(flow, placement, now_s)
            if waits and (not is_hopeless or self._is_under_share(flow, now_s)):
                reason = f"decode would take {forecast.tpot_s:.3f} s per token, and may get faster"
                return AdmissionOutcome.HELD, reason
            if is_hopeless:
                return AdmissionOutcome.HOPELESS, unmet_objectives(flow.submit, forecast, found)
            if is_late:
                return AdmissionOutcome.LATE, unmet_objectives(flow.submit, forecast, found)
        decode = placement.decode or placement.prefill
        if self._queue.is_late(seq_id) and takes_the_last_room(decode, flow.token_count):
            return AdmissionOutcome.HELD, "the remaining room is kept for those that can meet objectives"
        if not self._queue.is_starving(seq_id):
            hold_above_s, worker_id = self._config.hold_above_s, placement.prefill.worker_id
            if 0 < hold_above_s < forecast.wait_s:
                self._hold(max(forecast.wait_s - hold_above_s, HOLD_SHARE_MIN * hold_above_s), now_s)
                self._awaited.add(worker_id)
                return AdmissionOutcome.HELD, f"its best worker is busy for another {forecast.wait_s:.2f} s"
            if worker_id in self._awaited and len(self._queue):
                # It would wait less there than one whose turn it is, because it is more urgent. Urgency
                # counts among the sequences of one tenant, and they are in that order already.
                return AdmissionOutcome.HELD, "a sequence whose turn comes before waits for its best worker"
        return AdmissionOutcome.PLACED, ""

    def _is_under_share(self, flow: Flow, now_s: float) -> bool:
        """Whether other tenants are active and the sequence's tenant holds less than its share."""
        is_contended = self._placing.keeps_room and self._usage.is_contended(now_s)
        return is_contended and not self._is_over_share(flow, now_s)

    def _is_over_share(self, flow: Flow, now_s: float) -> bool:
        """Whether the sequence's tenant holds more than its share.

        A sequence whose turn came because nobody may starve, and one that was placed before, are exempt. So
        is a tenant where all those below their share wait here and have had more service for their weights.
        On a few seats, shares cannot be met exactly: one seat of three may be too much for a third, and a
        tenant that always rounds down would fall behind for ever.
        """
        if not self._placing.keeps_room or flow.was_placed or self._queue.has_right(flow.name):
            return False
        tenant = flow.submit.tenant
        if not self._usage.is_over_share(tenant, now_s):
            return False
        return not self._queue.is_behind_all(tenant, self._usage.below_share(now_s))

    def _is_hopeless(self, flow: Flow, found: Attainment) -> bool:
        return flow.submit.refuse_late and found.both < self._config.reject_below

    def _has_objectives(self, flow: Flow) -> bool:
        return flow.submit.ttft_slo_s > 0 or flow.submit.tpot_slo_s > 0

    def _may_get_faster(self, flow: Flow, placement: Placement, now_s: float) -> bool:
        """Whether other sequences decode at that worker and may end while there is time."""
        waiter = self._waiter(flow)
        has_time = now_s < flow.arrived_s + WAIT_FOR_SPEED_SHARE * (waiter.due_s - flow.arrived_s)
        worker = placement.decode or placement.prefill
        return has_time and worker.load.sequences > 0

    def _hold(self, seconds: float, now_s: float) -> None:
        until_s = now_s + max(HOLD_S_MIN, seconds)
        self._held_until_s = min(until_s, self._held_until_s or math.inf)

    def _attainment(
        self, flow: Flow, forecast: Forecast, *, now_s: float, queue_s: float = 0.0
    ) -> Attainment:
        submit = flow.submit
        left_s = flow.arrived_s + submit.ttft_slo_s - now_s if submit.ttft_slo_s > 0 else math.inf
        return attainment(forecast, left_s=left_s, tpot_slo_s=submit.tpot_slo_s, queue_s=queue_s)

    def _refuse_on_arrival(
        self, flow: Flow, waiter: Waiter, forecast: Forecast | None, now_s: float
    ) -> list[RouterAction] | None:
        """Return the refusal of a sequence that has to wait and is hopeless; None if it may wait.

        It is noted whether the sequence joins the queue as a late one. `forecast` is None if it was not
        tried.
        """
        if not self._has_objectives(flow) or self._hints.is_returning(waiter.seq_id):
            return None
        queue_s = self._queue_s(waiter, now_s)
        if queue_s is None:
            return None
        if forecast is None:
            found = self._placing.find(flow, now_s=now_s)
            if not isinstance(found, Placement) or found.forecast is None:
                return None
            forecast = found.forecast
        likely = self._attainment(flow, self._as_when_placed(forecast), now_s=now_s, queue_s=queue_s)
        if likely.ttft >= 0.5 and self._is_under_share(flow, now_s):
            return None  # tenants below their share are given room, see `_judge`
        if not self._is_hopeless(flow, likely):
            if likely.both < TIMELY_MIN:
                self._joins_late.add(waiter.seq_id)
            return None
        reason = unmet_objectives(flow.submit, forecast, likely)
        reason = f"about {queue_s:.1f} s in the admission queue, then {reason}"
        return self._refuse_late(flow, forecast, reason, now_s=now_s)

    def _as_when_placed(self, forecast: Forecast) -> Forecast:
        """Return the forecast with a short wait at the worker, since sequences are held in the queue
        instead."""
        hold_above_s = self._config.hold_above_s
        if hold_above_s <= 0:
            return forecast
        return forecast._replace(wait_s=min(forecast.wait_s, hold_above_s))

    def _queue_s(self, waiter: Waiter, now_s: float) -> float | None:
        goes_first = self._is_under_share(self._flows[waiter.seq_id], now_s)
        return self._hints.queue_s(waiter, goes_first=goes_first, now_s=now_s)

    # --- refusing ---------------------------------------------------------------------------------

    def _refuse_late(
        self, flow: Flow, forecast: Forecast | None, reason: str, *, now_s: float
    ) -> list[RouterAction]:
        wait_s = self._hint_s(flow, forecast, now_s=now_s)
        return flow.refuse(FailureKind.UNMET, reason, now_s=now_s, retry_after_s=wait_s)

    def hint_s(self, flow: Flow, *, now_s: float) -> float:
        """Return the Retry-After for the client of a sequence that waited too long."""
        return self._hint_s(flow, None, now_s=now_s)

    def _hint_s(self, flow: Flow, forecast: Forecast | None, *, now_s: float) -> float:
        return self._hints.retry_after_s(
            flow.submit,
            self._waiter(flow),
            forecast,
            goes_first=self._is_under_share(flow, now_s),
            now_s=now_s,
        )

    # --- audit ------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise AssertionError if the accounts disagree."""
        self._queue.check()
        placed = {seq_id for seq_id, flow in self._flows.items() if flow.phases}
        self._usage.check(placed)
        assert self._resting <= self._flows.keys()
        self._hints.check(set(self._flows))
        assert not self._joins_late
        for seq_id, flow in self._flows.items():
            places = (seq_id in self._queue, seq_id in self._resting, bool(flow.phases))
            assert sum(places) == 1, f"{seq_id} is in {places}"
            assert not (seq_id in self._queue and self._queue[seq_id].is_new and flow.was_placed)
        if not self._flows:
            assert not len(self)
            assert self.next_tick_s is None
