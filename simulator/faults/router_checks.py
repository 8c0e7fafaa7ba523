"""What one router owes, seen from outside: bounded queues, deadlines, fair shares, true counts."""

from collections import Counter

from router.decisions.events import Note, RouterEvent, WorkerLost
from simulator.faults.client import SimClient, SimSequence
from simulator.faults.failure_checks import FailureChecker
from simulator.faults.observed_processes import ObservedRouter
from simulator.faults.run_context import RunContext, Violation
from simulator.faults.scenario import Scenario


class RouterChecks:
    """The checks of one life of a router."""

    def __init__(self, run: RunContext, scenario: Scenario, name: str) -> None:
        self._run, self._scenario, self._name = run, scenario, name
        self.failures = FailureChecker(run, scenario.router)
        self._waiting: dict[str, SimSequence] = {}
        """Sequences that wait for their first placement."""
        self._live: dict[str, SimSequence] = {}

    def submitted(self, sequence: SimSequence) -> None:
        self._waiting[sequence.seq_id] = self._live[sequence.seq_id] = sequence

    def observe(self, event: RouterEvent) -> None:
        match event:
            case WorkerLost(_, reason) if reason.startswith("silent"):
                self._run.counts["workers lost by silence"] += 1
            case _:
                pass

    def noted(self, note: Note, sequence: SimSequence) -> None:
        self.failures.noted(note, is_begun=bool(sequence.received))

    def answered(self, client: SimClient) -> None:
        pass

    def after_event(self, router: ObservedRouter) -> None:
        self.failures.observe_router(router)
        self._are_queues_bounded()

    def _are_queues_bounded(self) -> None:
        """Check invariant 6: no more sequences wait for a first placement than the configuration allows."""
        self._waiting = {name: one for name, one in self._waiting.items() if one.is_waiting}
        self._live = {name: one for name, one in self._live.items() if one.ending is None}
        config = self._scenario.router
        waiting = self._waiting.values()
        if len(waiting) > config.queue_requests_max:
            raise Violation(6, f"{self._name}: {len(waiting)} wait, at most {config.queue_requests_max} may")
        if config.queue_tenant_max:
            tenant, count = _most([one.submit.tenant for one in waiting])
            if count > config.queue_tenant_max:
                raise Violation(6, f"{self._name}: {count} of tenant {tenant} wait")
        for name, chosen in self._scenario.slo.classes.items():
            count = sum(one.submit.slo_class == name for one in waiting) if chosen.queue_max else 0
            if count > chosen.queue_max:
                raise Violation(6, f"{self._name}: {count} of class {name} wait")

    def rested(self, router: ObservedRouter) -> None:
        pass


def _most(names: list[str]) -> tuple[str, int]:
    return Counter(names).most_common(1)[0] if names else ("", 0)
