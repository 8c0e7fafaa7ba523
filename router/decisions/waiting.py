"""Sequences without a place: the line, those that rest between two attempts, and what becomes of them. Pure.

`router.decisions.admission` decides about values; this applies it to flows. Sequences are held here as long
as that is better than placing them: while the worker that suits one best has enough to do already, its order
can still change here, and there it could not (late binding). Policies that predict nothing hold nothing.
"""

import math
from collections.abc import Callable, Mapping
from enum import Enum, auto

from baton.config.router import RouterConfig, SloConfig
from baton.core.ids import SequenceId
from router.decisions.admission.attainment import Attainment, attainment
from router.decisions.admission.drain_rate import RETRY_AFTER_S_MAX, DrainRate, Ends, retry_after_s
from router.decisions.admission.fair_shares import GENERATED_TOKEN_COST
from router.decisions.admission.queue import LOOK_AHEAD, AdmissionQueue, Full, Waiter
from router.decisions.admission.retry_reservations import RetryReservations
from router.decisions.admission.tenant_usage import TenantUsage
from router.decisions.events import FailureKind, RouterAction
from router.decisions.flow import Flow, RequestState
from router.decisions.placement.interface import NoPlace, Placement
from router.decisions.placing import Placing
from router.decisions.prediction.forecast import Forecast

HELD_MAX = 4
"""Sequences that are held though there is room, passed by one look at most: those behind them would be,
too."""
TIMELY_MIN = 0.5
"""A sequence that meets its objectives with less than this probability goes behind the others. The earliest
deadline first is a bad order under overload: everybody would be served when it is just too late."""
LATE_LEAVES_SHARE = 0.25
"""Share of a worker's blocks: late sequences are placed only while so much stays free."""
WAIT_FOR_SPEED_SHARE = 0.5
"""Share of the time until its first token is due, for decode to become fast enough; then it is late."""
BURST_S = 2.0
"""Seconds of all service: what a tenant that had less than its share lately may have before the others."""
BLIND_STEPS = 2
"""Steps of prompts that a worker is given ahead while predictions are not trusted."""
HOLD_S_MIN = 0.01
"""Between two looks for no other reason than that time has passed."""
LOOK_S = 0.004
"""Between two looks of which the first held somebody. Hundreds of things happen per second that might make
room, and trying the same sequences anew after each would take a router's whole time."""

Start = Callable[[Flow, Placement], list[RouterAction]]
Settle = Callable[[Flow], None]


class Outcome(Enum):
    PLACED = auto()
    ENDED = auto()
    NO_ROOM = auto()
    HELD = auto()
    LATE = auto()
    """It will hardly meet its objectives: those that will go before it."""
    HOPELESS = auto()
    """It will not, and its class says that it is of no use then."""


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
        """`start` begins an attempt of a flow; `settle` makes all accounts follow what a flow became."""
        self._config, self._placing, self._flows = config, placing, flows
        self._start, self._settle = start, settle
        self._queue = AdmissionQueue(
            new_max=config.queue_requests_max,
            class_max={name: one.queue_max for name, one in slo.classes.items()},
            tenant_max=config.queue_tenant_max,
        )
        self._resting: set[SequenceId] = set()
        self._drain_rate, self._ends = DrainRate(), Ends()
        self._retries = RetryReservations()
        self._usage = TenantUsage()
        self._expected_back: set[SequenceId] = set()
        """Came back when they were told to: let in, whatever the line looks like."""
        self._join_late: set[SequenceId] = set()
        self._had_a_turn: SequenceId | None = None
        """It was tried as it came, found no room, and joins next."""
        self._held_until_s: float | None = None
        """Somebody is held, and time alone may end that by then."""
        self._is_short_of_room = False
        """The last look passed sequences for want of room."""
        self._look_after_s = 0.0
        self.wants_look = False
        """Something changed since the last look along the line."""
        self.waits_for = "no worker takes new sequences"

    def __len__(self) -> int:
        """Sequences without a place."""
        return len(self._queue) + len(self._resting)

    def __contains__(self, seq_id: SequenceId) -> bool:
        return seq_id in self._queue or seq_id in self._resting

    @property
    def next_tick_s(self) -> float | None:
        due_s, held_s = self._queue.next_due_s, self._held_until_s
        if self.wants_look and len(self._queue):
            held_s = self._look_after_s
        if due_s is None or held_s is None:
            return held_s if due_s is None else due_s
        return min(due_s, held_s)

    def is_due(self, now_s: float) -> bool:
        """Whether to look along the line now."""
        if self.wants_look and not len(self._queue):
            return True
        return (next_s := self.next_tick_s) is not None and next_s <= now_s

    def counts(self) -> Mapping[tuple[str, str], int]:
        """(class, tenant) -> sequences in the line that were never placed."""
        return self._queue.counts()

    # --- coming and going -------------------------------------------------------------------------

    def arrive(self, flow: Flow, *, now_s: float) -> list[RouterAction]:
        """A new sequence: placed, refused, or left queued for `settle` to put it into the line."""
        waiter = self._waiter(flow)
        self._usage.asked(waiter.tenant, waiter.weight, now_s)
        if self._retries.take(waiter.tenant, self._reservation_key(flow), now_s):
            self._expected_back.add(waiter.seq_id)
        outcome, forecast = None, None
        if self._may_be_tried(now_s):
            outcome, actions, forecast = self._try(flow, now_s=now_s)
            if flow.state is not RequestState.QUEUED:
                return actions
        self._had_a_turn = waiter.seq_id if outcome is Outcome.NO_ROOM else None
        if outcome is Outcome.LATE:
            self._join_late.add(waiter.seq_id)
        elif (refusal := self._refuse_at_the_door(flow, waiter, forecast, now_s)) is not None:
            return refusal
        return self._make_room(flow, waiter, now_s)

    def _may_be_tried(self, now_s: float) -> bool:
        """Though others wait: they were held for other workers than those it may find free, or found no room
        where there may be some for it. Whoever is due to be looked at goes first."""
        if not len(self._queue):
            return True
        return self._queue.may_be_passed(is_short_of_room=self._is_short_of_room) and not self.is_due(now_s)

    def _make_room(self, flow: Flow, waiter: Waiter, now_s: float) -> list[RouterAction]:
        room = self._queue.room_for(waiter)
        if room is None:
            return []
        leaves = flow if isinstance(room, Full) else self._flows[room]
        reason = room.reason if isinstance(room, Full) else "the line is full, and others have less in it"
        if leaves is flow:
            self._join_late.discard(waiter.seq_id)
        hint_s = self._hint_s(leaves, None, now_s=now_s)
        actions = leaves.refuse(FailureKind.QUEUE_FULL, reason, now_s=now_s, retry_after_s=hint_s)
        if leaves is not flow:
            self._settle(leaves)
        return actions

    def settle(self, flow: Flow, *, now_s: float) -> None:
        """Line and rest follow what the flow became."""
        seq_id = flow.name
        if flow.phases:
            self._usage.placed(seq_id, flow.submit.tenant, flow.token_count)
        else:
            self._usage.left(seq_id)
        if flow.is_over or flow.state is not RequestState.QUEUED:
            self._leave(seq_id, now_s)
            self._resting.discard(seq_id)
            if flow.is_over:
                self._expected_back.discard(seq_id)
                if flow.was_placed:
                    self._ends.ended(now_s)
        elif flow.rest_until_s > now_s:
            self._resting.add(seq_id)
        elif seq_id not in self._queue:
            self._resting.discard(seq_id)
            if not len(self._queue):
                self._drain_rate.began(now_s)
            is_late = seq_id in self._join_late
            self._join_late.discard(seq_id)
            credit_tokens = BURST_S * (self._drain_rate.tokens_per_s(now_s) or 0.0)
            self._queue.add(self._waiter(flow), is_late=is_late, credit_tokens=credit_tokens)
            if self._had_a_turn == seq_id:
                self._queue.missed(seq_id)
            # A late one was not placed yet only because others may come before it.
            self.wants_look = self.wants_look or flow.was_placed or is_late

    def generated(self, flow: Flow, count: int) -> None:
        """So many of its tokens were delivered."""
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
        )

    # --- looking ----------------------------------------------------------------------------------

    def look(self, *, now_s: float) -> list[RouterAction]:
        """Place those that can be, in order."""
        if not len(self._queue):
            self.wants_look, self._held_until_s, self._is_short_of_room = False, None, False
            return []
        self.wants_look, self._held_until_s, self._is_short_of_room = False, None, False
        actions = self._end_overdue(now_s)
        misses = held = 0
        smallest_miss: dict[bool, int] = {}
        for seq_id in self._queue.candidates():
            flow = self._flows[seq_id]
            # Room only shrinks during one look: what is no shorter than a miss is a miss.
            missed_tokens = smallest_miss.get(flow.is_last_token)
            outcome = Outcome.NO_ROOM
            if missed_tokens is None or flow.token_count < missed_tokens:
                outcome, more, _ = self._try(flow, now_s=now_s)
                actions += more
                self._settle(flow)
                if flow.state is not RequestState.QUEUED:
                    continue
                if outcome is Outcome.NO_ROOM:
                    smallest_miss[flow.is_last_token] = flow.token_count
            if outcome is Outcome.LATE:
                self._queue.make_late(seq_id)
                continue
            misses += 1
            if outcome is Outcome.HELD:
                held += 1
            else:
                self._queue.missed(seq_id)
                self._is_short_of_room = True
            if misses >= LOOK_AHEAD or held >= HELD_MAX or self._queue.is_starving(seq_id):
                break
        if held:
            self._look_after_s = now_s + LOOK_S
        return actions

    def _end_overdue(self, now_s: float) -> list[RouterAction]:
        actions: list[RouterAction] = []
        for seq_id in self._queue.take_overdue(now_s):
            flow = self._flows[seq_id]
            if flow.submit.refuse_late and flow.submit.ttft_slo_s > 0:
                reason = f"no first token is possible any more within {flow.submit.ttft_slo_s:g} s"
                actions += self._refuse_late(flow, None, reason, now_s=now_s)
                self._settle(flow)
        return actions

    def _try(self, flow: Flow, *, now_s: float) -> tuple[Outcome, list[RouterAction], Forecast | None]:
        is_beyond = self._is_beyond(flow, now_s)
        found = self._placing.find(flow, leaves_room=is_beyond, now_s=now_s)
        if isinstance(found, NoPlace):
            self.waits_for = found.reason
            if not found.is_final:
                # Passed by tenants that have less than their share, it does not begin to starve.
                return Outcome.HELD if is_beyond else Outcome.NO_ROOM, [], None
            actions = flow.refuse(FailureKind.TOO_LONG, self._too_long(flow), now_s=now_s)
            return Outcome.ENDED, actions, None
        forecast = found.forecast
        if forecast is not None and not flow.was_placed:
            outcome, reason = self._judge(flow, found, forecast, now_s=now_s)
            if outcome is Outcome.HOPELESS:
                return Outcome.ENDED, self._refuse_late(flow, forecast, reason, now_s=now_s), forecast
            if outcome is not Outcome.PLACED:
                self.waits_for = reason
                return outcome, [], forecast
        elif self._placing.is_blind and not flow.was_placed and self._has_steps_enough(flow, found):
            self.waits_for = "the worker that suits it has enough to do"
            return Outcome.HELD, [], None
        self._count_placed(flow, found, now_s)
        return Outcome.PLACED, self._start(flow, found), forecast

    def _has_steps_enough(self, flow: Flow, placement: Placement) -> bool:
        """Without trusted predictions, tokens say that a worker will not idle soon. Once placed there,
        a sequence would stay there when they are trusted again."""
        worker = placement.prefill
        is_busy = worker.prediction.backlog.tokens >= BLIND_STEPS * worker.facts.step_tokens_max
        return is_busy and not self._queue.is_starving(flow.name)

    def _count_placed(self, flow: Flow, placement: Placement, now_s: float) -> None:
        worker = placement.prefill
        cached = placement.cached_blocks.get(worker.worker_id, 0) * worker.facts.block_tokens
        computed = 0 if flow.was_placed else max(1, flow.token_count - cached)
        self._drain_rate.placed(flow.token_count, now_s)
        self._queue.placed(self._waiter(flow), computed)
        if not len(self._queue):
            self._drain_rate.ended(now_s)
            self._held_until_s = None

    def _too_long(self, flow: Flow) -> str:
        return (
            f"No worker here can hold a sequence of more than {self._placing.longest_tokens} tokens, and "
            f"this one has {flow.token_count}; at least one must be left for the answer."
        )

    # --- judging ----------------------------------------------------------------------------------

    def _judge(
        self, flow: Flow, placement: Placement, forecast: Forecast, *, now_s: float
    ) -> tuple[Outcome, str]:
        """The outcome for a sequence that could be placed now: PLACED, HELD or LATE."""
        seq_id = flow.name
        if seq_id not in self._expected_back and self._has_objectives(flow):
            found = self._attainment(flow, forecast, now_s=now_s)
            is_hopeless = self._is_hopeless(flow, found)
            is_late = found.both < TIMELY_MIN and not self._queue.is_late(seq_id)
            waits = is_late and found.ttft >= 0.5 and self._may_get_faster(flow, placement, now_s)
            if waits and (not is_hopeless or self._is_owed(flow, now_s)):
                return Outcome.HELD, f"decode would take {forecast.tpot_s:.3f} s per token"
            if is_hopeless:
                return Outcome.HOPELESS, _unmet(flow, forecast, found)
            if is_late:
                return Outcome.LATE, _unmet(flow, forecast, found)
        if self._queue.is_late(seq_id) and self._takes_the_last_room(flow, placement):
            return Outcome.HELD, "the room that is left is kept for requests in time"
        hold_above_s = self._config.hold_above_s
        if 0 < hold_above_s < forecast.wait_s and not self._queue.is_starving(seq_id):
            self._hold(forecast.wait_s - hold_above_s, now_s)
            return Outcome.HELD, f"the worker that suits it is busy for {forecast.wait_s:.2f} s"
        return Outcome.PLACED, ""

    def _is_owed(self, flow: Flow, now_s: float) -> bool:
        """Others are active, and its tenant has less than its share."""
        is_contended = self._placing.keeps_room and self._usage.is_contended(now_s)
        return is_contended and not self._is_beyond(flow, now_s)

    def _is_beyond(self, flow: Flow, now_s: float) -> bool:
        """Its tenant holds more than its share. Whose turn it is because nobody may starve takes what there
        is, and who was served before goes on."""
        if not self._placing.keeps_room or flow.was_placed or self._queue.has_right(flow.name):
            return False
        return self._usage.is_beyond(flow.submit.tenant, now_s)

    def _takes_the_last_room(self, flow: Flow, placement: Placement) -> bool:
        """Blocks are held until a sequence ends: what comes in time later would wait for those that were
        late. A worker that has nothing else to do takes anything."""
        worker = placement.decode or placement.prefill
        left = worker.load.free_blocks - worker.blocks_for(flow.token_count)
        return worker.load.sequences > 0 and left < LATE_LEAVES_SHARE * worker.facts.block_count

    def _is_hopeless(self, flow: Flow, found: Attainment) -> bool:
        return flow.submit.refuse_late and found.both < self._config.reject_below

    def _has_objectives(self, flow: Flow) -> bool:
        return flow.submit.ttft_slo_s > 0 or flow.submit.tpot_slo_s > 0

    def _may_get_faster(self, flow: Flow, placement: Placement, now_s: float) -> bool:
        """Others decode where the sequence would, and may end while there is time."""
        waiter = self._waiter(flow)
        has_time = now_s < flow.arrived_s + WAIT_FOR_SPEED_SHARE * (waiter.due_s - flow.arrived_s)
        worker = placement.decode or placement.prefill
        return has_time and worker.load.sequences > 0

    def _hold(self, seconds: float, now_s: float) -> None:
        until_s = now_s + max(HOLD_S_MIN, seconds)
        self._held_until_s = min(until_s, self._held_until_s or math.inf)

    def _attainment(self, flow: Flow, forecast: Forecast, *, now_s: float, line_s: float = 0.0) -> Attainment:
        submit = flow.submit
        left_s = flow.arrived_s + submit.ttft_slo_s - now_s if submit.ttft_slo_s > 0 else math.inf
        return attainment(forecast, left_s=left_s, tpot_slo_s=submit.tpot_slo_s, line_s=line_s)

    def _refuse_at_the_door(
        self, flow: Flow, waiter: Waiter, forecast: Forecast | None, now_s: float
    ) -> list[RouterAction] | None:
        """The refusal of one that has to wait, or None after noting whether it is late already. `forecast`:
        if it was tried, and one was made."""
        if not self._has_objectives(flow) or waiter.seq_id in self._expected_back:
            return None
        line_s = self._queue_s(waiter, now_s)
        if line_s is None:
            return None
        if forecast is None:
            found = self._placing.find(flow, now_s=now_s)
            if not isinstance(found, Placement) or found.forecast is None:
                return None
            forecast = found.forecast
        chance = self._attainment(flow, self._as_when_placed(forecast), now_s=now_s, line_s=line_s)
        if chance.ttft >= 0.5 and self._is_owed(flow, now_s):
            return None  # room is made for it, see `_judge`
        if not self._is_hopeless(flow, chance):
            if chance.both < TIMELY_MIN:
                self._join_late.add(waiter.seq_id)
            return None
        reason = f"about {line_s:.1f} s in the line; then " + _unmet(flow, forecast, chance)
        return self._refuse_late(flow, forecast, reason, now_s=now_s)

    def _as_when_placed(self, forecast: Forecast) -> Forecast:
        """The worker's own line is short by then: sequences are held here instead."""
        hold_above_s = self._config.hold_above_s
        if hold_above_s <= 0:
            return forecast
        return forecast._replace(wait_s=min(forecast.wait_s, hold_above_s))

    def _queue_s(self, waiter: Waiter, now_s: float) -> float | None:
        """Until the sequence would be placed if it joined the line now; None: not known."""
        is_owed = self._is_owed(self._flows[waiter.seq_id], now_s)
        line_s = self._drain_rate.takes_s(self._queue.tokens_before(waiter, goes_first=is_owed), now_s)
        return None if line_s is None else line_s + self._retries.expected_s(waiter.tenant, now_s + line_s)

    # --- refusing ---------------------------------------------------------------------------------

    def _refuse_late(
        self, flow: Flow, forecast: Forecast | None, reason: str, *, now_s: float
    ) -> list[RouterAction]:
        wait_s = self._hint_s(flow, forecast, now_s=now_s)
        return flow.refuse(FailureKind.UNMET, reason, now_s=now_s, retry_after_s=wait_s)

    def hint_s(self, flow: Flow, *, now_s: float) -> float:
        """What to tell the client of one whose wait is over, should it be refused now."""
        return self._hint_s(flow, None, now_s=now_s)

    def _hint_s(self, flow: Flow, forecast: Forecast | None, *, now_s: float) -> float:
        """Seconds after which a request like this will be let in, see `retry_reservations`."""
        submit = flow.submit
        waiter = self._waiter(flow)
        line_s = self._queue_s(waiter, now_s)
        work_s = self._drain_rate.takes_s(waiter.tokens, now_s)
        if line_s is None or work_s is None:  # nothing was placed from the line lately
            line_s, work_s = self._ends.interval_s * (len(self._queue) + 1), self._ends.interval_s
        ttft_s = 0.0 if forecast is None else forecast.ttft_s
        least_s = 0.0 if forecast is None else forecast.ttft_s - forecast.wait_s
        may_wait_s = self._config.queue_wait_s
        if submit.ttft_slo_s > 0:
            may_wait_s = min(may_wait_s, submit.ttft_slo_s)
            if least_s >= submit.ttft_slo_s:  # not even alone: no time is better than another
                return RETRY_AFTER_S_MAX
        wait_s = max(line_s + ttft_s - may_wait_s, work_s)
        if 0 < submit.tpot_slo_s < (0.0 if forecast is None else forecast.tpot_s):
            wait_s, work_s = max(wait_s, self._ends.interval_s), max(work_s, self._ends.interval_s)
        booked_s = self._retries.book(
            waiter.tenant,
            self._reservation_key(flow),
            wait_s=wait_s,
            work_s=work_s,
            now_s=now_s,
            most_s=RETRY_AFTER_S_MAX,
        )
        return retry_after_s(booked_s)

    def _reservation_key(self, flow: Flow) -> str:
        submit = flow.submit
        return f"{submit.slo_class}\n{submit.request_digest}" if submit.request_digest else ""

    # --- audit ------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises AssertionError if the accounts disagree."""
        self._queue.check()
        self._retries.check()
        placed = {seq_id for seq_id, flow in self._flows.items() if flow.phases}
        self._usage.check(placed)
        assert self._resting <= self._flows.keys()
        assert self._expected_back <= self._flows.keys()
        assert not self._join_late
        for seq_id, flow in self._flows.items():
            places = (seq_id in self._queue, seq_id in self._resting, bool(flow.phases))
            assert sum(places) == 1, f"{seq_id} is in {places}"
            assert not (seq_id in self._queue and self._queue[seq_id].is_new and flow.was_placed)
        if not self._flows:
            assert not len(self)
            assert self.next_tick_s is None


def _unmet(flow: Flow, forecast: Forecast, found: Attainment) -> str:
    submit = flow.submit
    parts: list[str] = []
    if submit.ttft_slo_s > 0:
        parts.append(
            f"first token {forecast.ttft_s:.2f} s after being placed, objective {submit.ttft_slo_s:g} s"
        )
    if submit.tpot_slo_s > 0:
        parts.append(f"{forecast.tpot_s:.3f} s per token, objective {submit.tpot_slo_s:g} s")
    return f"predicted: {'; '.join(parts)}: met with a probability of {found.both:.0%}"
