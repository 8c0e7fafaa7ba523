"""Plans: shapes of a replica, pools of them, and clusters that differ in their counts only."""

from dataclasses import dataclass
from typing import NamedTuple

from baton.core.messages import Role
from simulator.hardware import Node

Counts = tuple[int, ...]
"""Replicas of each pool of a kind, in its order."""
Needs = tuple[float, ...]
"""Replicas of each pool of a kind that a piece of work takes where that pool has all of it."""
ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class ReplicaShape:
    """The GPUs and the parallelism of one replica."""

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


@dataclass(frozen=True, slots=True)
class PlannedPool:
    shape: ReplicaShape
    count: int

    @property
    def price_per_hour(self) -> float:
        return self.count * self.shape.price_per_hour

    @property
    def gpu_count(self) -> int:
        return self.count * self.shape.node.gpu_count


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """A cluster of either a prefill and a decode pool, or one aggregated pool."""

    prefill: PlannedPool | None = None
    decode: PlannedPool | None = None
    aggregated: PlannedPool | None = None

    @property
    def pools(self) -> dict[Role, PlannedPool]:
        named = {Role.PREFILL: self.prefill, Role.DECODE: self.decode, Role.AGGREGATED: self.aggregated}
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


class ClusterVerdict(NamedTuple):
    """The simulator's verdict on one cluster, as shares of all requests."""

    met: float
    """Share that met both objectives. For a run that was given up it is the most that it could have
    become."""
    ttft_met: float
    tpot_met: float
    aborted: bool = False
    so_far: float = 1.0
    """Share of the requests whose fate was known at the end of the run that met both."""


@dataclass(frozen=True, slots=True)
class ClusterKind:
    """Clusters of the same shapes."""

    shapes: tuple[tuple[Role, ReplicaShape], ...]
    """Shapes of prefill and decode, or of the aggregated pool alone."""
    estimate: Counts
    """Counts by what the phases alone say, and never less than the work needs."""
    needs: tuple[Needs, ...] = ()
    """Needs of each piece of work that must be done, wherever."""
    is_doubtful: bool = False
    """The phases say that one of its workers serves no rate at all."""

    @property
    def prices(self) -> tuple[float, ...]:
        """Prices of one replica of each pool, in dollars per hour."""
        return tuple(shape.price_per_hour for _, shape in self.shapes)

    @property
    def name(self) -> str:
        return ", ".join(f"{role.value} on {shape.name}" for role, shape in self.shapes)

    def can_do_the_work(self, counts: Counts) -> bool:
        """Return whether the work fits into the time, were nothing ever waited for."""
        return all(
            sum(count / max(need, ROUNDING) for count, need in zip(counts, needs, strict=True))
            >= 1 - ROUNDING
            for needs in self.needs
        )

    @property
    def least_price(self) -> float:
        """Price in dollars per hour below which no cluster of this kind does the work."""
        return max(
            [
                sum(self.prices),
                *(min(n * each for n, each in zip(needs, self.prices, strict=True)) for needs in self.needs),
            ]
        )

    def price_of(self, counts: Counts) -> float:
        return sum(price * count for price, count in zip(self.prices, counts, strict=True))

    def cluster(self, counts: Counts) -> ClusterPlan:
        pools = {
            role.value: PlannedPool(shape, count)
            for (role, shape), count in zip(self.shapes, counts, strict=True)
        }
        return ClusterPlan(**pools)
