"""Orders change the desired state and are followed until they are done. Pure."""

from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, field
from typing import assert_never

import msgspec

from baton.core.experts import ExpertGroupState
from baton.core.ids import WorkerId
from baton.core.messages import Role
from baton.core.operate import (
    ClusterState,
    Decision,
    DrainExpertRank,
    DrainNode,
    DrainWorker,
    Order,
    Outcome,
    Pool,
    RebalanceExperts,
    ReplicaState,
    Resize,
    RollOut,
    Scale,
    ScaleExperts,
    SwitchRole,
)
from control_plane.autoscaler.values import AutoscalerMemory
from control_plane.desired import DecisionLog, OrderRefused, describe, node_of, pool_after
from control_plane.expert_orders import end_of_experts, group_for, is_of_experts, wanted_after
from control_plane.reconcile_events import DrainWanted, ReconcileEvent, SetDesired


class ControlRecord(msgspec.Struct, frozen=True):
    """State that must outlive the control plane because no other process knows it."""

    pools: tuple[Pool, ...]
    avoid: tuple[str, ...] = ()
    decisions: tuple[Decision, ...] = ()
    configured: tuple[Pool, ...] = ()
    """Pools of the configuration at that time. Orders for a model are kept while its configuration is
    unchanged."""
    memories: dict[str, AutoscalerMemory] = {}
    """The autoscaler's memory by model."""
    expert_ranks: dict[str, int] = {}
    """Ordered numbers of expert ranks, by group."""


@dataclass(slots=True)
class _PendingOrder:
    decision: Decision
    name: str = ""
    """Name of the replica that the order is for."""
    worker_id: WorkerId | None = None
    """Worker id of that replica when the order came."""
    node: str = ""
    group: ExpertGroupState | None = None
    """Group of expert ranks that the order is for, as it was when the order came."""


@dataclass(slots=True)
class Orders:
    log: DecisionLog = field(default_factory=DecisionLog)
    pools: tuple[Pool, ...] = ()
    avoid: frozenset[str] = frozenset()
    _configured: tuple[Pool, ...] = ()
    memories: dict[str, AutoscalerMemory] = field(default_factory=dict[str, AutoscalerMemory])
    expert_ranks: dict[str, int] = field(default_factory=dict[str, int])
    """Ordered numbers of expert ranks, by group. Groups that are left out have what is configured."""
    _pending: dict[int, _PendingOrder] = field(default_factory=dict[int, _PendingOrder])

    def begin(self, pools: Iterable[Pool], record: ControlRecord | None) -> SetDesired:
        """Start with the configured `pools`; call this first. A `record` of an earlier control plane takes
        precedence for models whose configuration has not changed. Orders that it had not finished count as
        failed."""
        self.pools = self._configured = tuple(pools)
        if record is not None:
            same = (pool for pool in record.pools if _is_as_configured(pool, record, self.pools))
            kept = {pool.model: pool for pool in same}
            self.pools = tuple(kept.get(pool.model, pool) for pool in self.pools)
            self.avoid, self.memories = frozenset(record.avoid), record.memories
            self.expert_ranks = dict(record.expert_ranks)
            self.log.restore(_interrupted(record.decisions))
        return SetDesired(self.pools, self.avoid)

    def record(self) -> ControlRecord:
        avoid, log = tuple(sorted(self.avoid)), self.log.entries
        ranks = dict(self.expert_ranks)
        return ControlRecord(self.pools, avoid, log, self._configured, dict(self.memories), ranks)

    def take(
        self, order: Order, state: ClusterState, *, at_s: float, note: str = ""
    ) -> tuple[Decision, list[ReconcileEvent]]:
        """Decide on an order, and return the decision with the events for the reconciler. `at_s` is Unix
        time. `note` goes into the decision's text."""
        try:
            pool = pool_after(order.action, state)
        except OrderRefused as error:
            return self.refuse(order, str(error), at_s=at_s), []
        words = f"{describe(order.action)}; but {note}" if note else describe(order.action)
        if order.is_advice:
            return self.log.add(order, Outcome.ADVISED, f"would {words}", at_s=at_s), []
        decision = self.log.add(order, Outcome.ACCEPTED, words, at_s=at_s)
        if pool is not None:
            self.pools = tuple(pool if p.model == pool.model else p for p in self.pools)
        pending = self._pending[decision.number] = self._followed(decision, state)
        if len(self._pending) > self.log.count_max:  # the log has dropped the oldest too
            del self._pending[min(self._pending)]
        return decision, list(self._events(order, pending))

    def refuse(self, order: Order, text: str, *, at_s: float) -> Decision:
        return self.log.add(order, Outcome.REFUSED, text, at_s=at_s)

    def _followed(self, decision: Decision, state: ClusterState) -> _PendingOrder:
        match decision.action:
            case SwitchRole(worker) | DrainWorker(worker):
                replica = state.replica(worker)
                assert replica is not None, worker
                return _PendingOrder(decision, replica.name, replica.worker_id)
            case DrainNode(node, is_undone):
                node_id = node_of(state, node).node
                self.avoid = self.avoid - {node_id} if is_undone else self.avoid | {node_id}
                return _PendingOrder(decision, node=node_id)
            case Scale() | Resize() | RollOut():
                return _PendingOrder(decision)
            case RebalanceExperts() | DrainExpertRank() | ScaleExperts():
                group = group_for(decision.action, state)
                if (wanted := wanted_after(decision.action, group)) is not None:
                    self.expert_ranks[group.group] = wanted
                return _PendingOrder(decision, group=group)
            case _:
                assert_never(decision.action)

    def _events(self, order: Order, pending: _PendingOrder) -> Iterator[ReconcileEvent]:
        roles: dict[str, Role] = {}
        leaving: frozenset[WorkerId] = frozenset()
        reason = f"ordered by {order.who}{': ' + order.reason if order.reason else ''}"
        if is_of_experts(order.action):
            return
        match order.action:
            case SwitchRole(_, role):
                roles = {pending.name: role}
            case DrainWorker(_, is_replaced):
                assert pending.worker_id is not None
                if is_replaced:
                    yield DrainWanted(pending.worker_id, reason)
                    return
                leaving = frozenset({pending.worker_id})
            case _:
                pass
        yield SetDesired(self.pools, self.avoid, roles, leaving)

    @property
    def is_any_pending(self) -> bool:
        return bool(self._pending)

    def progress(self, state: ClusterState, *, at_s: float) -> list[Decision]:
        """Return the decisions that are finished now."""
        ended: list[Decision] = []
        for number, pending in list(self._pending.items()):
            if (end := _end_of(pending, state, self.avoid)) is None:
                continue
            del self._pending[number]
            if decision := self.log.finish(number, *end, at_s=at_s):
                ended.append(decision)
        return ended


def _is_as_configured(pool: Pool, record: ControlRecord, configured: Iterable[Pool]) -> bool:
    """Return whether a model's configuration is unchanged. A changed configuration is an order too, and a
    later one."""
    then = [p for p in record.configured if p.model == pool.model]
    return not then or then == [p for p in configured if p.model == pool.model]


_INTERRUPTED = "the control plane restarted before this was done: the desired state is kept"


def _interrupted(decisions: Iterable[Decision]) -> Iterator[Decision]:
    for decision in decisions:
        if decision.outcome is Outcome.ACCEPTED:
            yield msgspec.structs.replace(decision, outcome=Outcome.FAILED, text=_INTERRUPTED)
        else:
            yield decision


def _end_of(pending: _PendingOrder, state: ClusterState, avoid: Container[str]) -> tuple[Outcome, str] | None:
    action = pending.decision.action
    match action:
        case Scale(role, count, model):
            return _end_of_sizes(state, model, {role: count})
        case Resize(counts, model):
            return _end_of_sizes(state, model, counts)
        case SwitchRole(_, role):
            return _end_of_switch(pending, state, role)
        case DrainWorker():
            is_there = any(r.worker_id == pending.worker_id for r in state.replicas)
            return None if is_there else (Outcome.DONE, f"{pending.worker_id} is gone")
        case DrainNode(_, is_undone):
            left = [r.name for r in state.replicas if r.node == pending.node and r.worker_id]
            if left and not is_undone:
                # Workers may start there again, so the node need never become empty.
                was_undone = pending.node not in avoid
                return (Outcome.FAILED, "the drain was undone since") if was_undone else None
            return (
                Outcome.DONE,
                "the node may be used again" if is_undone else "no worker runs there any more",
            )
        case RollOut(version, model):
            pool = state.pool(model)
            if pool is None or pool.version.name != version.name:
                return (Outcome.FAILED, "another version was ordered since")
            return (
                (Outcome.DONE, f"all replicas run version {version.name}") if has_all(pool, state) else None
            )
        case RebalanceExperts() | DrainExpertRank() | ScaleExperts():
            assert pending.group is not None
            return end_of_experts(action, pending.group, state)
        case _:
            assert_never(action)


def _end_of_sizes(state: ClusterState, model: str, counts: dict[Role, int]) -> tuple[Outcome, str] | None:
    pool = state.pool(model)
    if pool is None or any(pool.count(role) != count for role, count in counts.items()):
        return (Outcome.FAILED, "another size was ordered since")
    return (Outcome.DONE, "all replicas serve") if has_all(pool, state) else None


def _end_of_switch(pending: _PendingOrder, state: ClusterState, role: Role) -> tuple[Outcome, str] | None:
    replica = state.replica(pending.name)
    if replica is None or replica.role is not role:
        return (Outcome.FAILED, "another order for the worker came since")
    if replica.state is not ReplicaState.RUNNING:
        return None
    if replica.worker_id != pending.worker_id:
        return (Outcome.DONE, f"the worker died; {replica.worker_id} has the role")
    return (Outcome.DONE, f"{replica.worker_id} has the role; its weights stayed loaded")


def has_all(pool: Pool, state: ClusterState) -> bool:
    """Return whether every replica of the pool serves in its version, and there is none too many."""
    mine = [r for r in state.replicas if r.model == pool.model]
    serve = all(r.state is ReplicaState.RUNNING and r.version == pool.version.name for r in mine)
    return serve and all(sum(r.role is role for r in mine) == pool.count(role) for role in Role)
