"""What a router reports to the outside, compared with what its clients saw."""

from collections import Counter

from baton.telemetry import catalogue as c
from router.decisions.events import Note
from simulator.faults.answers import read_stream, read_whole
from simulator.faults.client import Ending, RequestKind, SimClient, SimSequence
from simulator.faults.observed_processes import ObservedRouter
from simulator.faults.run_context import RunContext, Violation
from simulator.faults.scenario import MODEL_NAME, Scenario

OUTCOMES = {
    "invalid_request_error": "invalid",
    "overloaded_error": "refused",
    "tokens": "refused",
    "requests": "refused",
    "server_error": "failed",
    "timeout_error": "failed",
}
"""How a request ended, by the type of the error that its client got."""


class CountChecks:
    """The counts of one life of a router."""

    def __init__(self, run: RunContext, scenario: Scenario, name: str) -> None:
        self._run, self._scenario, self._name = run, scenario, name
        self._outcomes: Counter[str] = Counter()
        self._placed: Counter[str] = Counter()
        self._retried: Counter[str] = Counter()
        self._prompt_tokens = self._generated_tokens = 0
        self._left = 0
        """Clients that left. The router may have known how their requests would end."""
        self._requests: set[str] = set()
        self._prompts: Counter[str] = Counter()
        """Requests of which a sequence was submitted, by their class."""

    def submitted(self, sequence: SimSequence) -> None:
        client = sequence.client
        if client.name not in self._requests:
            self._requests.add(client.name)
            self._prompts[sequence.submit.slo_class] += 1

    def noted(self, note: Note) -> None:
        match note.what:
            case "placed":
                self._placed["split" if len(note.worker_ids) > 1 else "aggregated"] += 1
            case "fallback":
                self._placed["fallback"] += 1
            case "retried":
                self._retried[str(note.cause)] += 1
            case _:
                pass

    def answered(self, client: SimClient) -> None:
        if client.ending is Ending.GONE:
            self._left += 1
        else:
            self._outcomes[_outcome_of(client)] += 1
        if client.ending is not Ending.FINISHED:
            return
        self._prompt_tokens += sum(map(len, client.prompts))
        if client.kind is not RequestKind.EMBEDDING:
            self._generated_tokens += client.completion_tokens

    def rested(self, router: ObservedRouter) -> None:
        """Compare the gauges, at any time."""
        live = sum(
            sequence.ending is None for client in router.live.values() for sequence in client.sequences
        )
        if router.driver.in_flight_count != live:
            raise Violation(
                8, f"{self._name} has {router.driver.in_flight_count} in flight, its clients {live}"
            )

    def at_rest(self, router: ObservedRouter) -> None:
        """Compare the totals when nothing is under way."""
        meter, model = router.meter, MODEL_NAME
        unclear = self._left
        for outcome in ("completed", "refused", "failed", "cancelled", "invalid"):
            got = int(meter.value(c.REQUESTS, model=model, outcome=outcome))
            seen = self._outcomes[outcome]
            excess = min(max(0, got - seen), unclear) if outcome != "completed" else 0
            unclear -= excess
            self._compare(f"requests {outcome}", got - excess, seen)
        self._compare("requests of clients that left too few,", unclear, 0)
        self._compare("prompt tokens", meter.value(c.PROMPT_TOKENS, model=model), self._prompt_tokens)
        generated = meter.value(c.GENERATED_TOKENS, model=model)
        self._compare("generated tokens", generated, self._generated_tokens)
        for kind in ("split", "aggregated", "fallback"):
            got = meter.value(c.PLACEMENTS, model=model, kind=kind)
            self._compare(f"placements {kind}", got, self._placed[kind])
        for cause, count in self._retried.items():
            self._compare(f"retries {cause}", meter.value(c.RETRIES, model=model, cause=cause), count)
        status = router.core.status()
        self._compare("queued sequences", status.queued, 0)
        for worker in status.workers:
            elsewhere = router.core.peers.total(worker.worker_id)
            self._compare(f"tokens of others at {worker.worker_id}", elsewhere.tokens, 0)
            self._compare(f"sequences of others at {worker.worker_id}", elsewhere.sequences, 0)
        self._are_arrivals_true(router)

    def _are_arrivals_true(self, router: ObservedRouter) -> None:
        """Compare the report to the autoscaler: a request is one arrival, whatever it consists of."""
        report = router.driver.demand(router.router_id)
        for name in {*report.classes, *self._prompts}:
            load = report.classes.get(name)
            arrived = 0 if load is None else sum(one.requests for one in load.arrived.values())
            self._compare(f"arrivals of class {name!r} for the autoscaler", arrived, self._prompts[name])
            if load is not None and load.started > arrived:
                raise Violation(9, f"{self._name}: {load.started} of {arrived} requests started")

    def _compare(self, what: str, got: float, want: float) -> None:
        if got != want:
            raise Violation(9, f"{self._name} reports {got:g} {what}, its clients saw {want:g}")


def _outcome_of(client: SimClient) -> str:
    exchange = client.exchange
    assert exchange is not None
    if client.ending is Ending.FINISHED:
        return "completed"
    if exchange.is_broken_off:
        return "cancelled"
    is_stream = client.is_stream and exchange.status == 200
    error = (read_stream if is_stream else read_whole)(exchange.text).error
    assert error is not None
    return OUTCOMES[error["type"]]
