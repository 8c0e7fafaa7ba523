"""The router's decisions, broken on purpose."""

import msgspec

from baton.core.budgets import Ask, Grant, Ledger
from baton.core.ids import BlockHash, SequenceId
from baton.core.messages import Role, WorkerHello
from router.decisions import breaker
from router.decisions import core as router_core
from router.decisions.admission import queue
from router.decisions.admission.fair_shares import FairShares
from router.decisions.admission.queue import AdmissionQueue, Waiter
from router.decisions.admission.retry_reservations import RetryReservations
from router.decisions.arrival_counters import ArrivalCounters
from router.decisions.breaker import BreakerState, Circuit
from router.decisions.cluster.snapshot import ClusterSnapshot, WorkerFacts
from router.decisions.core import RouterCore
from router.decisions.events import Submit
from router.decisions.flow import Flow
from router.decisions.peer_loads import PeerBook
from router.decisions.placing import Placing
from router.decisions.retry_budgets import CreditBudget, WindowBudget
from router.decisions.token_order import TokenOrder
from router.decisions.waiting import Waiting
from router.http import streaming
from router.http.observe import RequestRecorder
from router.http.sequence_group import OutputCollector
from router.http.service import Service
from router.http.streaming import ResponseStream
from router.live.driver import Driver
from router.openai.responses import Usage
from router.text.detokenizer import StopFinder
from tests.simulator.mutant import Mutant, Patch


def _cache_ignores_the_salt(patch: Patch) -> None:
    """All tenants share one hash chain."""
    patch.setattr(router_core, "root_hash", lambda fingerprint, salt: BlockHash(bytes(16)))


def _epoch_does_not_rise(patch: Patch) -> None:
    """A new attempt looks like the old one."""
    requeue = Flow._requeue

    def same_epoch(self: Flow, *args: object, **kwargs: object) -> list[object]:
        actions = requeue(self, *args, **kwargs)
        self.epoch -= 1
        return actions

    patch.setattr(Flow, "_requeue", same_epoch)


def _router_ignores_indices(patch: Patch) -> None:
    """Whatever a worker says is new: stale outputs and the repeated first token go to the client."""

    def accept(self: TokenOrder, output: object) -> object:
        self.generated.extend(output.tokens)
        return output.finish

    patch.setattr(TokenOrder, "accept", accept)


def _lost_worker_is_not_noticed(patch: Patch) -> None:
    """The router waits for a worker that is gone."""
    lose = RouterCore._lose

    def only_new_sessions(self: RouterCore, worker_id: object, reason: str) -> list[object]:
        return lose(self, worker_id, reason) if reason == "a new session began" else []

    patch.setattr(RouterCore, "_lose", only_new_sessions)


def _weights_are_not_compared(patch: Patch) -> None:
    """During an upgrade old and new workers are paired."""
    of = WorkerFacts.of

    def all_alike(hello: WorkerHello, role: Role, *, is_draining: bool) -> WorkerFacts:
        return of(hello, role, is_draining=is_draining)._replace(fingerprint="any")

    patch.setattr(WorkerFacts, "of", all_alike)


def _losers_of_hedges_are_heard(patch: Patch) -> None:
    """The slower one of two attempts is not cancelled."""

    def decide(self: RouterCore, winner: Flow) -> list[object]:
        self._hedging.decided(winner.name, winner.submit.seq_id, wasted_tokens=0)
        winner.become_primary()
        return []

    patch.setattr(RouterCore, "_decide", decide)


def _load_of_hedges_is_kept(patch: Patch) -> None:
    """A second attempt that is over counts at its workers for ever."""
    settle = Placing.settle

    def keeps(self: Placing, flow: Flow, *, now_s: float) -> bool:
        return False if "~" in flow.name and flow.is_over else settle(self, flow, now_s=now_s)

    patch.setattr(Placing, "settle", keeps)


def _breakers_never_close(patch: Patch) -> None:
    """A worker that was kept out once stays out."""
    patch.setattr(
        Circuit, "state", lambda self, now_s: BreakerState.OPEN if self.is_open else BreakerState.CLOSED
    )


def _breakers_take_whole_pools(patch: Patch) -> None:
    """All workers of a pool may be kept out."""
    patch.setattr(breaker, "_may_be_out", lambda count, share_max: count)


def _retries_have_no_budget(patch: Patch) -> None:
    patch.setattr(WindowBudget, "take", lambda self, now_s, **_: True)


def _hedges_have_no_budget(patch: Patch) -> None:
    patch.setattr(CreditBudget, "has_credit", True)
    patch.setattr(CreditBudget, "take", lambda self: None)


def _no_deadline(patch: Patch) -> None:
    """Requests may take as long as they like."""
    submit = RouterCore._submit

    def for_ever(self: RouterCore, event: Submit) -> list[object]:
        return submit(self, msgspec.structs.replace(event, deadline_s=event.deadline_s + 1000.0))

    patch.setattr(RouterCore, "_submit", for_ever)


def _other_phase_runs_on(patch: Patch) -> None:
    """What is left of a lost attempt is not cancelled."""
    requeue = Flow._requeue

    def quietly(self: Flow, *args: object, **kwargs: object) -> list[object]:
        requeue(self, *args, **kwargs)
        return []

    patch.setattr(Flow, "_requeue", quietly)


def _queue_without(patch: Patch, **bounds: object) -> None:
    init = AdmissionQueue.__init__
    patch.setattr(AdmissionQueue, "__init__", lambda self, **given: init(self, **{**given, **bounds}))


def _queue_has_no_bound(patch: Patch) -> None:
    _queue_without(patch, new_max=10**9)


def _queue_of_a_tenant_has_no_bound(patch: Patch) -> None:
    _queue_without(patch, tenant_max=0)


def _queue_of_a_class_has_no_bound(patch: Patch) -> None:
    _queue_without(patch, class_max={})


def _oldest_has_no_turn(patch: Patch) -> None:
    """Whoever is more urgent goes first, for ever."""
    patch.setattr(queue, "OLDEST_EVERY", 10**9)
    patch.setattr(queue, "OVERTAKEN_MAX", 10**9)


def _shares_are_ignored(patch: Patch) -> None:
    """All tenants have had the same service."""
    patch.setattr(FairShares, "level", lambda self, tenant: 0.0)


def _weights_of_tenants_are_ignored(patch: Patch) -> None:
    charge = FairShares.charge
    patch.setattr(
        FairShares, "charge", lambda self, tenant, tokens, weight: charge(self, tenant, tokens, 1.0)
    )


def _priorities_are_reversed(patch: Patch) -> None:
    patch.setattr(
        Waiter, "key", property(lambda self: (-self.priority, self.due_s, self.arrival, self.seq_id))
    )


def _silence_means_idle(patch: Patch) -> None:
    """What a worker said last holds, however long ago that was."""
    patch.setattr(ClusterSnapshot, "is_stale", lambda self, worker: False)


def _limits_of_tenants_are_ignored(patch: Patch) -> None:
    take = Ledger.take

    def all_of_it(self: Ledger, ask: Ask, *, now_s: float) -> Grant:
        bare = msgspec.structs.replace(ask, requests_per_minute=0, tokens_per_minute=0, concurrent_max=0)
        return take(self, bare, now_s=now_s)

    patch.setattr(Ledger, "take", all_of_it)


def _any_number_at_once(patch: Patch) -> None:
    take = Ledger.take
    patch.setattr(
        Ledger,
        "take",
        lambda self, ask, *, now_s: take(self, msgspec.structs.replace(ask, concurrent_max=0), now_s=now_s),
    )


def _tokens_are_not_given_back(patch: Patch) -> None:
    """A tenant pays for what a request might have used."""
    settle = Ledger.settle
    patch.setattr(
        Ledger,
        "settle",
        lambda self, done, *, now_s: settle(
            self, msgspec.structs.replace(done, refund_tokens=0), now_s=now_s
        ),
    )


def _hash_without_the_adapter(patch: Patch) -> None:
    salt = Service.salt
    patch.setattr(Service, "salt", lambda self, adapter, tenant_salt=b"": salt(self, None, tenant_salt))


def _hash_without_the_tenant(patch: Patch) -> None:
    salt = Service.salt
    patch.setattr(Service, "salt", lambda self, adapter, tenant_salt=b"": salt(self, adapter))


def _lost_peers_still_count(patch: Patch) -> None:
    """The load of a router that is gone stays."""
    patch.setattr(PeerBook, "expire", lambda self, now_s: None)
    patch.setattr(PeerBook, "lost", lambda self, router_id: None)
    patch.setattr(PeerBook, "next_tick_s", property(lambda self: None))


def _late_requests_wait_on(patch: Patch) -> None:
    """A class that asks for a refusal is served late."""
    patch.setattr(Waiting, "_is_hopeless", lambda self, flow, found: False)
    patch.setattr(Waiting, "_end_overdue", lambda self, now_s: [])


def _requests_are_counted_twice(patch: Patch) -> None:
    arrived = ArrivalCounters.arrived

    def twice(self: ArrivalCounters, slo_class: str, prompt_tokens: int) -> None:
        arrived(self, slo_class, prompt_tokens)
        arrived(self, slo_class, prompt_tokens)

    patch.setattr(ArrivalCounters, "arrived", twice)


def _reservations_are_forgotten(patch: Patch) -> None:
    """Whoever comes back at the time it was given is a stranger."""
    patch.setattr(RetryReservations, "take", lambda self, *_, **__: False)


def _stop_strings_are_overlooked(patch: Patch) -> None:
    patch.setattr(StopFinder, "push", lambda self, text: text)


def _done_after_an_error(patch: Patch) -> None:
    error_event = streaming.error_event
    patch.setattr(streaming, "error_event", lambda error: error_event(error) + streaming.DONE)


def _done_in_place_of_an_error(patch: Patch) -> None:
    patch.setattr(streaming, "error_event", lambda error: streaming.DONE)


def _groups_outlive_their_request(patch: Patch) -> None:
    """Sequences of a beam search run on when one of them failed."""
    client_gone = Driver.client_gone

    def only_streams(self: Driver, seq_id: SequenceId) -> bool:
        return not isinstance(self._sinks.get(seq_id), OutputCollector) and client_gone(self, seq_id)

    patch.setattr(Driver, "client_gone", only_streams)


def _clients_that_left_are_served(patch: Patch) -> None:
    patch.setattr(Driver, "client_gone", lambda self, seq_id: False)


def _usage_is_counted_twice(patch: Patch) -> None:
    on_usage = RequestRecorder.on_usage

    def twice(self: RequestRecorder, usage: Usage, *, took_s: float) -> None:
        on_usage(self, usage, took_s=took_s)
        on_usage(self, usage, took_s=took_s)

    patch.setattr(RequestRecorder, "on_usage", twice)


def _usage_forgets_choices(patch: Patch) -> None:
    """Only the first choice of a prompt is charged."""
    usage = ResponseStream.usage

    def of_first(self: ResponseStream) -> Usage:
        choices, self.choices = self.choices, self.choices[:1]
        found = usage(self)
        self.choices = choices
        return found

    patch.setattr(ResponseStream, "usage", of_first)


MUTANTS = (
    Mutant("cache ignores the salt", _cache_ignores_the_salt, {7}),
    Mutant("the epoch does not rise", _epoch_does_not_rise, {6}),
    Mutant("the router ignores indices", _router_ignores_indices, {2}),
    Mutant("a lost worker is not noticed", _lost_worker_is_not_noticed, {0, 6, 8}),
    Mutant("weights are not compared", _weights_are_not_compared, {7}),
    Mutant("the loser of a hedge is heard", _losers_of_hedges_are_heard, {0, 1, 2, 6}),
    Mutant("load of a hedge is not taken back", _load_of_hedges_is_kept, {0, 8}),
    Mutant("a breaker never closes", _breakers_never_close, {11}),
    Mutant("breakers take whole pools", _breakers_take_whole_pools, {11}),
    Mutant("retries have no budget", _retries_have_no_budget, {12}),
    Mutant("hedges have no budget", _hedges_have_no_budget, {12}),
    Mutant("no deadline at the router", _no_deadline, {6}),
    Mutant("the other phase is not cancelled", _other_phase_runs_on, {3, 6}),
    Mutant("the admission queue has no bound", _queue_has_no_bound, {6}),
    Mutant("a tenant's queue has no bound", _queue_of_a_tenant_has_no_bound, {6}),
    Mutant("a class's queue has no bound", _queue_of_a_class_has_no_bound, {6}),
    Mutant("the oldest at the router has no turn", _oldest_has_no_turn, {6}),
    Mutant("shares of tenants are ignored", _shares_are_ignored, {6}),
    Mutant("weights of tenants are ignored", _weights_of_tenants_are_ignored, {6}),
    Mutant("priorities are reversed", _priorities_are_reversed, {6}),
    Mutant("silence means idle", _silence_means_idle, {10}),
    Mutant("limits of tenants are ignored", _limits_of_tenants_are_ignored, {6, 8}),
    Mutant("any number of requests at once", _any_number_at_once, {6}),
    Mutant("tokens are not given back", _tokens_are_not_given_back, {8}),
    Mutant("the hash leaves out the adapter", _hash_without_the_adapter, {2, 7}),
    Mutant("the hash leaves out the tenant", _hash_without_the_tenant, {2, 7}),
    Mutant("lost peers still count", _lost_peers_still_count, {8, 9}),
    Mutant("late requests wait on", _late_requests_wait_on, {6}),
    Mutant("requests are counted twice", _requests_are_counted_twice, {9}),
    Mutant("reservations are forgotten", _reservations_are_forgotten, {6}),
    Mutant("stop strings are overlooked", _stop_strings_are_overlooked, {2}),
    Mutant("[DONE] after an error", _done_after_an_error, {1}),
    Mutant("[DONE] in place of an error", _done_in_place_of_an_error, {1, 2}),
    Mutant("groups outlive their request", _groups_outlive_their_request, {6, 8}),
    Mutant("clients that left are served", _clients_that_left_are_served, {6, 8}),
    Mutant("usage is counted twice", _usage_is_counted_twice, {9}),
    Mutant("usage forgets choices", _usage_forgets_choices, {2}),
)
