"""Checks of admission at a router where many wait: queues are bounded, nobody starves, tenants have shares.

The queue is rebuilt here from what clients sent and what the router said it placed, and not from its own.
"""

from collections import Counter, defaultdict

from router.decisions.admission.queue import OLDEST_EVERY, OVERTAKEN_MAX
from router.decisions.events import SequencePart
from simulator.faults.client import SimSequence
from simulator.faults.run_context import RunContext, Violation
from simulator.faults.scenario import Scenario

PASSED_MAX = OLDEST_EVERY + OVERTAKEN_MAX + 4
"""Placements that may pass the oldest sequence: until its turn comes, and after that for want of room. A few
are placed in one scan."""
PASSED_SCANS_MAX = 2
"""Scans of the queue in which one that is less urgent may go first. A tenant that has had its share leaves
room to others. It may have its turn again in the same scan, which goes on behind the one that left room."""
CLOCK_SLACK = 1.02
LATE_SLACK_S = 0.3
"""Time within which a router refuses a sequence that cannot meet its objective any more."""
GENERATED_COST = 2.0
"""A generated token counts as so many tokens of a prompt."""
SHARE_SLACK = 330.0
"""Tokens of service, for its weight, by which a tenant that waits may be behind another one that waits.

Placed prompts are charged at once and generated tokens when they come, so this is what runs at one time."""


class AdmissionChecks:
    """The admission queue of one router."""

    def __init__(self, run: RunContext, scenario: Scenario, name: str) -> None:
        self._run, self._scenario, self._name = run, scenario, name
        self._waiting: dict[str, SimSequence] = {}
        """Sequences that wait for their first placement, in order of arrival."""
        self._arrivals: dict[str, int] = {}
        self._placings = 0
        self._placings_before: dict[str, int] = {}
        """Placements of any sequence before this one arrived."""
        self._may_anybody_starve = False
        self._running: dict[str, SimSequence] = {}
        self._oldest: SimSequence | None = None
        self._passed = 0
        self._passed_s: defaultdict[str, set[float]] = defaultdict(set)
        """Instants at which less urgent ones of its tenant were placed, by sequence."""
        self._served: defaultdict[str, float] = defaultdict(float)

    def submitted(self, sequence: SimSequence) -> None:
        self._waiting[sequence.seq_id] = sequence
        self._arrivals[sequence.seq_id] = len(self._arrivals)
        self._placings_before[sequence.seq_id] = self._placings

    def placed(self, sequence: SimSequence) -> None:
        """A sequence was placed. It still counts as waiting here if it is its first placement."""
        self._placings += 1
        if self._waiting.pop(sequence.seq_id, None) is None:
            return
        # Whoever was passed too often goes first, whatever its tenant and its priority.
        passed = self._placings - self._placings_before[sequence.seq_id]
        self._may_anybody_starve |= passed >= OVERTAKEN_MAX
        self._drop_ended()
        if self._waiting and self._scenario.shape == "flood":
            self._is_oldest_in_time(sequence)
        if self._scenario.shape == "burst" and not self._may_anybody_starve:
            self._running[sequence.seq_id] = sequence
            self._served[sequence.submit.tenant] += len(sequence.submit.prompt)
            self._is_its_turn(sequence)
            self._are_shares_kept(sequence)

    def _drop_ended(self) -> None:
        self._waiting = {name: one for name, one in self._waiting.items() if one.is_waiting}

    def after_event(self) -> None:
        """Check invariant 6: no more wait for a first placement than the configuration allows."""
        self._drop_ended()
        waiting, config = self._waiting.values(), self._scenario.router
        if len(waiting) > config.queue_requests_max:
            raise Violation(6, f"{self._name}: {len(waiting)} wait, {config.queue_requests_max} may")
        if config.queue_tenant_max:
            tenants = Counter(one.submit.tenant for one in waiting).most_common(1)
            if tenants and tenants[0][1] > config.queue_tenant_max:
                raise Violation(6, f"{self._name}: {tenants[0]} wait, {config.queue_tenant_max} may")
        for name, chosen in self._scenario.slo.classes.items():
            if chosen.queue_max and sum(o.submit.slo_class == name for o in waiting) > chosen.queue_max:
                raise Violation(6, f"{self._name}: more than {chosen.queue_max} of class {name} wait")

    def rested(self) -> None:
        """Check that who is to be refused when late does not wait on."""
        now_s = self._run.clock.now_s
        for one in self._waiting.values():
            submit = one.submit
            if not (submit.refuse_late and submit.ttft_slo_s and one.is_waiting):
                continue
            if submit.part is not SequencePart.REQUEST or one.client.is_returning:
                continue  # whoever comes back at its time is served, however late
            if any(other.received or other.ending is not None for other in one.client.sequences):
                continue  # the request has its first token, or its first embedding
            late_s = now_s - one.client.arrived_s - submit.ttft_slo_s * CLOCK_SLACK
            if late_s > LATE_SLACK_S:
                raise Violation(
                    6,
                    f"{self._name}: {one.seq_id} waits {late_s:.2f} s after its first token was due, and its "
                    "class asks for a refusal",
                    seq_id=one.seq_id,
                )

    def _is_oldest_in_time(self, placed: SimSequence) -> None:
        oldest = next(iter(self._waiting.values()))
        if oldest is not self._oldest:
            self._oldest, self._passed = oldest, 0
        if not self._is_older(oldest, placed):
            return
        self._passed += 1
        self._run.counts["placements that passed the oldest"] += 1
        if self._passed > PASSED_MAX:
            raise Violation(
                6,
                f"{self._name}: {self._passed} were placed while {oldest.seq_id} is the oldest that waits",
                seq_id=oldest.seq_id,
            )

    def _is_older(self, one: SimSequence, other: SimSequence) -> bool:
        return self._arrivals[one.seq_id] < self._arrivals[other.seq_id]

    def _is_its_turn(self, placed: SimSequence) -> None:
        """Check that nobody of the same tenant who is more urgent, and no larger, was passed."""
        if placed.submitted_s == self._run.clock.now_s or not self._waiting:
            return  # it was placed on arrival, before the queue had formed
        mine = placed.submit
        if not self._is_older(next(iter(self._waiting.values())), placed):
            return
        for one in self._waiting.values():
            other = one.submit
            is_urgent = other.tenant == mine.tenant and other.priority < mine.priority
            is_like = len(other.prompt) <= len(mine.prompt) and _is_short(one) == _is_short(placed)
            if not (is_urgent and is_like):
                continue
            passed_s = self._passed_s[one.seq_id]
            passed_s.add(self._run.clock.now_s)
            if len(passed_s) > PASSED_SCANS_MAX:
                raise Violation(
                    6,
                    f"{self._name}: {placed.seq_id} (priority {mine.priority}) is placed before "
                    f"{one.seq_id} (priority {other.priority})",
                    seq_id=one.seq_id,
                )

    def _are_shares_kept(self, placed: SimSequence) -> None:
        """Check that no tenant which waits is far behind the one that was served now."""
        served = dict(self._served)
        for one in self._running.values():
            served[one.submit.tenant] += GENERATED_COST * len(one.received)
        tenants = self._scenario.tenants
        mine = placed.submit.tenant
        level = served.get(mine, 0.0) / tenants[mine].weight
        for name in {one.submit.tenant for one in self._waiting.values()} - {mine}:
            behind = level - served.get(name, 0.0) / tenants[name].weight
            counts = self._run.counts
            counts["tokens behind by share"] = max(counts["tokens behind by share"], int(behind))
            if behind > SHARE_SLACK:
                raise Violation(
                    6,
                    f"{self._name}: {mine} is served again, and {name}, who waits, is {behind:.0f} tokens "
                    "behind it for its weight",
                    seq_id=placed.seq_id,
                )


def _is_short(sequence: SimSequence) -> bool:
    return sequence.submit.sampling.max_tokens <= 1
