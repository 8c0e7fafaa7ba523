"""The desired state of a cluster, and how orders change it. Pure.

`Operations` is the interface that autoscaler, dashboard and command line use to operate a cluster. Its values
are those of `baton.core.operate`.
"""

from collections import deque
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from typing import Protocol, assert_never

import msgspec

from baton.core.messages import Role
from baton.core.operate import (
    Action,
    ClusterState,
    Decision,
    DrainExpertRank,
    DrainNode,
    DrainWorker,
    NodeState,
    Order,
    Outcome,
    Pool,
    RebalanceExperts,
    ReplicaState,
    ReplicaStatus,
    Resize,
    RollOut,
    Scale,
    ScaleExperts,
    SwitchRole,
    Version,
)
from control_plane.expert_orders import OrderRefused, describe_experts, group_for

__all__ = ("DecisionLog", "Operations", "OrderRefused", "describe", "node_of", "pool_after")

REPLICAS_MAX = 1024
"""Most replicas of one role of one model."""

DECISIONS_MAX = 256
"""Number of decisions kept; the oldest is dropped."""

TEXT_CHARS_MAX = 400
"""Longest requester, reason and text of a decision, so that the log is bounded in bytes too."""


class Operations(Protocol):
    """The interface for operating a cluster, implemented by `plane.ControlPlane` and over gRPC by
    `baton.wire.operate.OperateClient`."""

    def order(self, order: Order) -> Decision:
        """Give an order. An order that cannot be followed never raises: the decision says REFUSED, with the
        reason."""
        ...

    def state(self) -> ClusterState: ...

    def changes(self) -> AsyncIterator[ClusterState]:
        """Yield the state now, after every change, and at least once a second."""
        ...


# --- changes of the desired state -------------------------------------------------------------


def pool_after(action: Action, state: ClusterState) -> Pool | None:
    """Return the pool as the action changes it, or None if no pool changes. Raises OrderRefused."""
    match action:
        case Scale(role, count, model):
            return _resized(_pool(state, model), {role: count})
        case Resize(counts, model):
            return _resized(_pool(state, model), counts)
        case SwitchRole(worker, role):
            replica = _replica(state, worker)
            if replica.role is role:
                raise OrderRefused(f"{replica.name} is a {role} worker already")
            if replica.state is not ReplicaState.RUNNING:
                raise OrderRefused(
                    f"{replica.name} is {replica.state}: only a running worker can switch its role"
                )
            pool = _pool(state, replica.model)
            moved = {replica.role: max(0, pool.count(replica.role) - 1), role: pool.count(role) + 1}
            return _resized(pool, moved)
        case DrainWorker(worker, is_replaced):
            replica = _replica(state, worker)
            if replica.state not in (ReplicaState.RUNNING, ReplicaState.SUSPECT):
                raise OrderRefused(f"{replica.name} is {replica.state}: there is nothing to drain")
            if is_replaced:
                return None
            pool = _pool(state, replica.model)
            return _resized(pool, {replica.role: max(0, pool.count(replica.role) - 1)})
        case DrainNode(node):
            node_of(state, node)
            return None
        case RollOut(version, model, surge_max, unavailable_max):
            return _rolled(_pool(state, model), version, surge_max, unavailable_max)
        case RebalanceExperts() | DrainExpertRank() | ScaleExperts():
            group_for(action, state)
            return None
        case _:
            assert_never(action)


NOT_OF_WORKERS = frozenset({"router", "slo", "autoscale", "dashboard", "access"})
"""Sections of the configuration that only processes other than workers read."""


def _resized(pool: Pool, counts: dict[Role, int]) -> Pool:
    if wrong := {role: n for role, n in counts.items() if not 0 <= n <= REPLICAS_MAX}:
        raise OrderRefused(f"a role can have 0 to {REPLICAS_MAX} replicas, not {_counts(wrong)}")
    merged = {**pool.counts, **counts}
    return msgspec.structs.replace(pool, counts={r: n for r, n in merged.items() if n})


def _rolled(pool: Pool, version: Version, surge_max: int, unavailable_max: int) -> Pool:
    if not version.name:
        raise OrderRefused("the version has no name; give it one")
    if unread := [one for one in version.sets if one.split(".", 1)[0] in NOT_OF_WORKERS]:
        raise OrderRefused(
            f"{unread[0]}: workers do not read this setting; change it where the process that does is started"
        )
    if version.name == pool.version.name and version != pool.version:
        raise OrderRefused(f"version {version.name} exists with other settings: choose another name")
    if surge_max < 0 or unavailable_max < 0 or surge_max + unavailable_max == 0:
        raise OrderRefused(
            "surge_max and unavailable_max may not be negative, nor both 0: no worker could be replaced; "
            "set one of them to at least 1"
        )
    return msgspec.structs.replace(
        pool, version=version, surge_max=surge_max, unavailable_max=unavailable_max
    )


def _pool(state: ClusterState, model: str) -> Pool:
    if pool := state.pool(model):
        return pool
    names = ", ".join(p.model for p in state.pools)
    missing = f"there is no model {model!r}" if model else "the order names no model, and there are several"
    raise OrderRefused(f"{missing}; choose one of: {names}")


def _replica(state: ClusterState, worker: str) -> ReplicaStatus:
    if replica := state.replica(worker):
        return replica
    names = ", ".join(r.name for r in state.replicas[:20]) or "none"
    raise OrderRefused(f"there is no worker {worker!r}; the workers are: {names}")


def node_of(state: ClusterState, name: str) -> NodeState:
    """Find a node by its id, a prefix of its id, or a host name that only one node has. Raises
    OrderRefused."""
    found = [n for n in state.nodes if n.node == name]
    found = found or [n for n in state.nodes if name and (n.node.startswith(name) or n.host == name)]
    if len(found) == 1:
        return found[0]
    names = ", ".join(f"{n.node[:12]} ({n.host})" for n in state.nodes[:20]) or "none"
    raise OrderRefused(
        f"{'several nodes match' if found else 'no node matches'} {name!r}; the nodes are: {names}"
    )


def _counts(counts: dict[Role, int]) -> str:
    return ", ".join(f"{n} {role}" for role, n in counts.items())


def describe(action: Action) -> str:
    """Return the action in words, for the log."""
    match action:
        case Scale(role, count, model):
            return f"scale {role}{_of(model)} to {count}"
        case Resize(counts, model):
            return f"resize{_of(model)} to {_counts(counts)}"
        case SwitchRole(worker, role):
            return f"switch {worker} to {role}"
        case DrainWorker(worker, is_replaced):
            return f"drain {worker}" if is_replaced else f"drain {worker} without a replacement"
        case DrainNode(node, is_undone):
            return f"use node {node} again" if is_undone else f"drain node {node}"
        case RollOut(version, model):
            with_sets = f" with {', '.join(version.sets)}" if version.sets else ""
            return f"roll out version {version.name}{_of(model)}{with_sets}"
        case RebalanceExperts() | DrainExpertRank() | ScaleExperts():
            return describe_experts(action)
        case _:
            assert_never(action)


def _of(model: str) -> str:
    return f" of {model}" if model else ""


# --- the log ----------------------------------------------------------------------------------------


@dataclass(slots=True)
class DecisionLog:
    """The latest decisions, oldest first. A finished decision does not change any more."""

    count_max: int = DECISIONS_MAX
    _entries: deque[Decision] = field(default_factory=deque[Decision])
    _last: int = 0

    @property
    def entries(self) -> tuple[Decision, ...]:
        return tuple(self._entries)

    def restore(self, entries: Iterable[Decision]) -> None:
        """Restore the decisions of an earlier control plane. Call this before any is added."""
        assert not self._entries, "decisions were made already"
        self._entries.extend(entries)
        self._trim()
        self._last = max((d.number for d in self._entries), default=0)

    def add(self, order: Order, outcome: Outcome, text: str, *, at_s: float) -> Decision:
        """Add a decision on an order. `at_s` is Unix time."""
        self._last += 1
        who, reason = _short(order.who), _short(order.reason)
        decision = Decision(self._last, at_s, who, reason, order.action, outcome, _short(text))
        self._entries.append(decision)
        self._trim()
        return decision

    def finish(self, number: int, outcome: Outcome, text: str, *, at_s: float) -> Decision | None:
        """Finish an accepted decision. None: it is finished already, or no longer kept."""
        for index, decision in enumerate(self._entries):
            if decision.number == number and decision.outcome is Outcome.ACCEPTED:
                ended = msgspec.structs.replace(
                    decision, outcome=outcome, text=_short(text), done_after_s=max(0.0, at_s - decision.at_s)
                )
                self._entries[index] = ended
                return ended
        return None

    def _trim(self) -> None:
        while len(self._entries) > self.count_max:
            self._entries.popleft()


def _short(text: str) -> str:
    return text if len(text) <= TEXT_CHARS_MAX else text[: TEXT_CHARS_MAX - 2] + " …"
