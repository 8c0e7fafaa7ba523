"""Stops a run of a search early once its goal is out of reach. Pure."""

from dataclasses import dataclass, field

from loadgen.records import RequestOutcome, RequestRecord
from loadgen.search import is_hopeless
from loadgen.slo import ClassObjectives


@dataclass(slots=True)
class GoalWatch:
    """Watches a run for the point from which the goal is out of reach. The caller has the clock."""

    objectives: ClassObjectives
    planned: int
    attain: float
    warm_up: int = 0
    sees_tokens: bool = True
    """True if records of running requests show their tokens, which they do not if other processes send."""
    missed: int = 0
    gave_up: bool = False
    """True once `wants_stop` has returned True."""
    _running: dict[int, RequestRecord] = field(default_factory=dict[int, RequestRecord])

    def sent(self, record: RequestRecord) -> None:
        if record.index >= self.warm_up:
            self._running[record.index] = record

    def ended(self, record: RequestRecord) -> None:
        if record.index < self.warm_up:
            return
        self._running.pop(record.index, None)
        self.missed += record.outcome is not RequestOutcome.CANCELLED and not self.objectives.is_met(record)

    def wants_stop(self, *, now_s: float) -> bool:
        self.gave_up = self.gave_up or self.is_hopeless(now_s=now_s)
        return self.gave_up

    def is_hopeless(self, *, now_s: float) -> bool:
        overdue = sum(self._is_overdue(r, now_s) for r in self._running.values()) if self.sees_tokens else 0
        return is_hopeless(self.missed + overdue, self.planned - self.warm_up, attain=self.attain)

    def _is_overdue(self, record: RequestRecord, now_s: float) -> bool:
        target_s = self.objectives.of(record).ttft_s
        return target_s is not None and not record.token_instants_s and now_s > record.planned_s + target_s
