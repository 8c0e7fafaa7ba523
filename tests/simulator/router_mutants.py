"""The router's decisions, broken on purpose."""

from baton.core.ids import BlockHash
from baton.core.messages import Role, WorkerHello
from router.decisions import breaker
from router.decisions import core as router_core
from router.decisions.breaker import BreakerState, Circuit
from router.decisions.cluster.snapshot import WorkerFacts
from router.decisions.core import RouterCore
from router.decisions.flow import Flow
from router.decisions.placing import Placing
from router.decisions.retry_budgets import CreditBudget, WindowBudget
from router.decisions.token_order import TokenOrder
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


MUTANTS = (
    Mutant("cache ignores the salt", _cache_ignores_the_salt, {7}, known_seed=3),
    Mutant("the epoch does not rise", _epoch_does_not_rise, {6}),
    Mutant("the router ignores indices", _router_ignores_indices, {2}),
    Mutant("a lost worker is not noticed", _lost_worker_is_not_noticed, {0, 6, 8}, known_seed=12),
    Mutant("weights are not compared", _weights_are_not_compared, {7}, known_seed=111),
    Mutant("the loser of a hedge is heard", _losers_of_hedges_are_heard, {0, 1, 2}, known_seed=2),
    Mutant("load of a hedge is not taken back", _load_of_hedges_is_kept, {0, 8}),
    Mutant("a breaker never closes", _breakers_never_close, {11}, known_seed=2),
    Mutant("breakers take whole pools", _breakers_take_whole_pools, {11}, known_seed=33),
    Mutant("retries have no budget", _retries_have_no_budget, {12}, known_seed=36),
    Mutant("hedges have no budget", _hedges_have_no_budget, {12}, known_seed=3),
)
