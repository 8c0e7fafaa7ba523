"""What one router owes, seen from outside."""

from router.decisions.events import Failed, FailureKind, Note, RouterEvent, WorkerLost
from simulator.faults.admission_checks import AdmissionChecks
from simulator.faults.client import SimClient, SimSequence
from simulator.faults.count_checks import CountChecks
from simulator.faults.failure_checks import FailureChecker
from simulator.faults.observed_processes import ObservedRouter
from simulator.faults.run_context import RunContext, Violation
from simulator.faults.scenario import Scenario
from simulator.faults.staleness import StalenessChecker

ON_ARRIVAL = (FailureKind.QUEUE_FULL, FailureKind.UNMET)
"""Failures by which a router refuses a request when it comes."""


class RouterChecks:
    """The checks of one life of a router."""

    def __init__(self, run: RunContext, scenario: Scenario, name: str) -> None:
        self._run, self._name = run, name
        self.failures = FailureChecker(run, scenario.router)
        self.counts = CountChecks(run, scenario, name)
        self._admission = AdmissionChecks(run, scenario, name)
        self._staleness = StalenessChecker(run, silence_s=scenario.router.worker_silence_s)
        self.refused_count = 0
        """Requests that were told when to come again."""

    def submitted(self, sequence: SimSequence) -> None:
        self._admission.submitted(sequence)
        self.counts.submitted(sequence)

    def observe(self, event: RouterEvent) -> None:
        self._staleness.observe(event)
        match event:
            case WorkerLost(_, reason) if reason.startswith("silent"):
                self._run.counts["workers lost by silence"] += 1
            case _:
                pass

    def noted(self, router: ObservedRouter, note: Note, sequence: SimSequence) -> None:
        self.failures.noted(note, is_begun=bool(sequence.received))
        self.counts.noted(note)
        if note.what in ("placed", "fallback"):
            self._admission.placed(sequence)
            self._staleness.placed(router, note, sequence)

    def failed(self, action: Failed, sequence: SimSequence) -> None:
        """Check that a client which comes back when it was told to is not refused again on arrival."""
        self.failures.failed(action)
        client, now_s = sequence.client, self._run.clock.now_s
        is_on_arrival = action.kind in ON_ARRIVAL and now_s == sequence.submitted_s
        is_promised = client.promised_by == self._name
        if is_promised and is_on_arrival and len(client.sequences) == 1:
            raise Violation(
                6,
                f"{client.name} comes back when it was told to, and is refused again: {action.message}",
                seq_id=action.seq_id,
            )

    def answered(self, client: SimClient) -> None:
        self.counts.answered(client)

    def rested(self, router: ObservedRouter) -> None:
        self.counts.rested(router)
        if self._run.clock.now_s > router.thawed_s + 1.0:
            self._admission.rested()

    def after_event(self, router: ObservedRouter) -> None:
        self.failures.observe_router(router)
        self._admission.after_event()
