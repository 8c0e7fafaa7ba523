"""Which clusters are worth simulating, cheapest first, until one serves the trace and another one could.

Phases give a first guess of how many replicas each pool needs. A cluster that fails in the simulator gets
one more replica where its objectives were missed and goes back into the line, dearer than before. So the
first one that passes is the cheapest of all that were tried, and what is left in the line costs more.
"""

import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from baton.core.messages import Role
from baton.sim.hardware import Node

OPTIMISM = 0.75
"""The first guess is this share of what phases say: waiting smooths out over several replicas."""
REPLICAS_MAX = 4096
"""Of all pools together: a router follows no more workers."""
GROWTH = 10
VAIN_GROWTH = 1.5
"""A cluster that has grown so much and serves no better will not serve by growing."""
GAIN_MIN = 0.005
"""Share of requests; less is chance."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What one replica of a pool is."""

    node: Node
    price_per_gpu_hour: float

    @property
    def price_per_hour(self) -> float:
        return self.node.gpu_count * self.price_per_gpu_hour

    @property
    def name(self) -> str:
        parts = f"TP{self.node.tensor}"
        parts += f" PP{self.node.pipeline}" if self.node.pipeline > 1 else ""
        return f"{self.node.gpu_count} × {self.node.gpu.name} ({parts})"


class Option(NamedTuple):
    """A shape in a role, and the rate that one replica of it takes, requests per second."""

    shape: Shape
    role: Role
    rate: float

    @property
    def price_per_request_s(self) -> float:
        """Dollars per hour for one request per second."""
        return self.shape.price_per_hour / self.rate


@dataclass(frozen=True, slots=True)
class Pool:
    shape: Shape
    count: int

    @property
    def price_per_hour(self) -> float:
        return self.count * self.shape.price_per_hour

    @property
    def gpu_count(self) -> int:
        return self.count * self.shape.node.gpu_count


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """Either prefill and decode, or both."""

    prefill: Pool | None = None
    decode: Pool | None = None
    both: Pool | None = None

    @property
    def pools(self) -> dict[Role, Pool]:
        named = {Role.PREFILL: self.prefill, Role.DECODE: self.decode, Role.BOTH: self.both}
        return {role: pool for role, pool in named.items() if pool is not None}

    @property
    def price_per_hour(self) -> float:
        return sum(pool.price_per_hour for pool in self.pools.values())

    @property
    def gpu_count(self) -> int:
        return sum(pool.gpu_count for pool in self.pools.values())

    @property
    def replica_count(self) -> int:
        return sum(pool.count for pool in self.pools.values())

    @property
    def kind(self) -> tuple[tuple[Role, str], ...]:
        """Shapes, whatever the counts."""
        return tuple((role, pool.shape.name) for role, pool in self.pools.items())

    def with_more(self, role: Role) -> "ClusterPlan":
        """One replica more, or a tenth of a pool that is large."""
        pool = self.pools[role]
        more = max(1, pool.count // GROWTH)
        return replace(self, **{role.value: replace(pool, count=pool.count + more)})


class Verdict(NamedTuple):
    """What the simulator says of one cluster: shares of all offered requests."""

    met: float
    ttft_met: float
    tpot_met: float


Verify = Callable[[ClusterPlan], Verdict]


class Tried(NamedTuple):
    plan: ClusterPlan
    verdict: Verdict
    passed: bool


@dataclass(frozen=True, slots=True)
class Found:
    best: ClusterPlan | None
    """None: nothing that was tried serves the trace."""
    runner_up: ClusterPlan | None
    """The cheapest of other shapes that does."""
    tried: tuple[Tried, ...]


def first_plans(options: Iterable[Option], *, rate: float, keep: int = 4) -> list[ClusterPlan]:
    """Pairs of the `keep` cheapest shapes of each phase, and the `keep` cheapest for both legs, with as many
    replicas as `rate` (requests per second) needs by the phases alone. All shapes have one element type: KV
    moves between no others."""
    by_role: dict[Role, list[Option]] = {}
    for option in sorted(options, key=lambda o: o.price_per_request_s if o.rate > 0 else math.inf):
        if option.rate > 0:
            by_role.setdefault(option.role, []).append(option)
    prefills, decodes, boths = (by_role.get(r, [])[:keep] for r in (Role.PREFILL, Role.DECODE, Role.BOTH))
    plans = [ClusterPlan(prefill=_pool(p, rate), decode=_pool(d, rate)) for p in prefills for d in decodes]
    return plans + [ClusterPlan(both=_pool(b, rate)) for b in boths]


def _pool(option: Option, rate: float) -> Pool:
    wanted = max(1, math.floor(OPTIMISM * rate / option.rate))
    return Pool(option.shape, min(wanted, REPLICAS_MAX))


def search(
    plans: Sequence[ClusterPlan],
    verify: Verify,
    *,
    attain: float,
    simulations_max: int,
    on_tried: Callable[[Tried], None] = lambda _: None,
) -> Found:
    """At most `simulations_max` calls of `verify`. Ends when two plans of different shapes passed."""
    able = [plan for plan in plans if plan.replica_count <= REPLICAS_MAX]
    line = [(plan.price_per_hour, number, plan) for number, plan in enumerate(able)]
    heapq.heapify(line)
    number = len(line)
    tried: list[Tried] = []
    best: ClusterPlan | None = None
    gained: dict[tuple[tuple[Role, str], ...], tuple[float, int]] = {}
    """By shapes: the most requests served, and with how many replicas."""
    while line and len(tried) < simulations_max:
        _, _, plan = heapq.heappop(line)
        if best is not None and plan.kind == best.kind:
            continue
        verdict = verify(plan)
        one = Tried(plan, verdict, verdict.met >= attain)
        tried.append(one)
        on_tried(one)
        if one.passed and best is not None:
            return Found(best, plan, tuple(tried))
        if one.passed:
            best = plan
            continue
        met, replicas = gained.get(plan.kind, (-1.0, 0))
        if verdict.met > met + GAIN_MIN:
            replicas = plan.replica_count
            gained[plan.kind] = (verdict.met, replicas)
        grown = plan.with_more(_lacking(plan, verdict))
        number += 1
        if grown.replica_count <= REPLICAS_MAX and grown.replica_count < 2 + VAIN_GROWTH * replicas:
            heapq.heappush(line, (grown.price_per_hour, number, grown))
    return Found(best, None, tuple(tried))


def _lacking(plan: ClusterPlan, verdict: Verdict) -> Role:
    """The pool whose objective was missed more often."""
    if plan.both is not None:
        return Role.BOTH
    return Role.PREFILL if verdict.ttft_met <= verdict.tpot_met else Role.DECODE
