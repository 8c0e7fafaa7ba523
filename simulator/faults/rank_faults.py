"""Shapes of workers, and the loss of their ranks. What is drawn here shifts nothing that others draw."""

import random
from collections.abc import Callable
from dataclasses import replace

from baton.core.messages import Role
from baton.core.shape import Shape
from simulator.faults.control import Cluster
from simulator.faults.ranks import RequestPoint, SimRanks
from simulator.faults.scenario import Scenario
from simulator.faults.shapes import lease_storm

RANKED_SHARE = 0.3
"""Share of the seeds in which workers have several ranks."""
STORMS_SHARE = 0.25
"""Share of those in which many reads of parts are late, each for itself, and most requests are split."""
SHAPES = (Shape(), Shape(2), Shape(1, 2), Shape(2, 2), Shape(4))
"""One rank, tensor ranks, stages, both, and more tensor ranks than heads."""
SHAPES_MAX = 4
RANK_FAULTS = ("rank_crash", "rank_stop")


def with_ranks(scenario: Scenario, rng: random.Random) -> Scenario:
    """Give workers of some scenarios several ranks. No rank is lost in scenarios whose checkers count on
    every worker."""
    if rng.random() >= RANKED_SHARE:
        return scenario
    shapes = tuple(rng.choice(SHAPES) for _ in range(SHAPES_MAX))
    faults = frozenset(name for name in RANK_FAULTS if rng.random() < 0.7)
    if not scenario.faults or scenario.shape:
        faults = frozenset()
    elif rng.random() < STORMS_SHARE:
        roles = (Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE)
        storm = lease_storm(replace(scenario, roles=roles, router_count=1))
        return replace(
            storm, worker_shapes=shapes, faults=frozenset({"peer_stall", "read_late", "small_pool"})
        )
    return replace(scenario, worker_shapes=shapes, faults=scenario.faults | faults)


class RankFaults:
    """Faults of single ranks, now or when a request is at some point of its life."""

    __slots__ = ("_cluster", "_rng")

    def __init__(self, cluster: Cluster, rng: random.Random) -> None:
        self._cluster, self._rng = cluster, rng

    def schedule(self, ends_s: float, strike: Callable[[str, Callable[[], None]], None]) -> None:
        """Let every enabled fault happen a few times until `ends_s`, each by way of `strike`."""
        kinds = {"rank_crash": self._crash, "rank_stop": self._stop}
        for name in sorted(kinds.keys() & self._cluster.scenario.faults):
            for _ in range(self._rng.randint(2, 5)):
                at_s = self._rng.uniform(0.3, ends_s)
                self._cluster.run.clock.at(at_s, lambda n=name: strike(n, kinds[n]))

    def stop(self) -> None:
        """Heal what can be healed."""
        for worker in self._cluster.workers:
            worker.ranks.strike = None
            for rank in worker.ranks.followers:
                worker.ranks.go_on(rank)

    def _crash(self) -> None:
        self._aim(lambda ranks, rank: ranks.die(rank))

    def _stop(self) -> None:
        span_s = self._rng.choice((0.1, 0.8, 1.4, 2.5, 4.0))  # shorter and longer than the others' patience

        def stop(ranks: SimRanks, rank: int) -> None:
            ranks.stop(rank)
            self._cluster.run.clock.after(span_s, lambda: ranks.go_on(rank))

        self._aim(stop)

    def _aim(self, fault: Callable[[SimRanks, int], None]) -> None:
        """Strike a follower at once, or at a point of some request of its worker."""
        ranked = [worker.ranks for worker in self._cluster.workers if worker.ranks.followers]
        if not ranked:
            return
        ranks = self._rng.choice(ranked)
        rank = self._rng.choice(ranks.followers)
        point = self._rng.choice((None, *RequestPoint))
        if point is None:
            fault(ranks, rank)
        else:
            ranks.strike = (point, lambda: fault(ranks, rank))
