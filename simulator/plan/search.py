"""The cheapest cluster that attains the goal, found with as few simulations as that takes. Everything but
`verify` is pure.

The search rests on one thing: more replicas, or faster ones, serve no worse, but for chance. A cluster that
fails clearly rules out all that have no more of any pool, of its own shapes or of slower ones. When that
leaves none that is cheaper than the best, the best is the cheapest. What phases say only orders the search:
where to begin, and what to try next.

1. Until one passes: each kind from its estimate, the cheapest first, growing the pool that was short.
2. From one that passes: half-way to what is ruled out, one pool at a time.
3. Elsewhere: the largest clusters that are cheaper than the best, of its own kind and of the others.
4. Around the best: one replica less of each pool, simulated even where it is ruled out already.
5. While simulations are left: a runner-up of another kind.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from baton.core.messages import Role
from simulator.plan.clusters import ClusterKind, ClusterPlan, ClusterVerdict, Counts
from simulator.plan.region import CENT, Region

RUNNER_UP_SIMULATIONS = 12

Verify = Callable[[ClusterPlan], ClusterVerdict]
IsSlower = Callable[[ClusterKind, ClusterKind], bool]
"""A function that tells whether every worker of the first kind is no better in anything than that of the
second in its place."""


class Tried(NamedTuple):
    plan: ClusterPlan
    verdict: ClusterVerdict
    passed: bool


@dataclass(frozen=True, slots=True)
class Found:
    best: Tried | None
    """The cheapest that passed; None when nothing that was tried serves the trace."""
    runner_up: Tried | None
    """The cheapest that passed of another kind."""
    tried: tuple[Tried, ...]
    is_complete: bool
    """It is known that nothing cheaper than the best passes; False when the simulations ran out before."""
    left_out: tuple[ClusterKind, ...]
    """Kinds of which none was simulated."""


class _OutOfSimulations(Exception):
    pass


class _SearchStep(NamedTuple):
    region: Region
    counts: Counts


class _Search:
    def __init__(
        self, kinds: Sequence[ClusterKind], verify: Verify, *, attain: float, simulations_max: int,
        is_slower: IsSlower, on_tried: Callable[[Tried], None],
    ) -> None:  # fmt: skip
        self.regions = [Region(kind, attain=attain) for kind in kinds]
        self._verify, self._is_slower, self._on_tried = verify, is_slower, on_tried
        self._left = simulations_max
        self.tried: list[Tried] = []
        self.best: _SearchStep | None = None
        self.bias: dict[Role, float] = {}
        """Replicas that the best needs, over what phases say it needs."""

    def price_of(self, step: _SearchStep) -> float:
        return step.region.kind.price_of(step.counts)

    def simulate(self, step: _SearchStep) -> bool:
        """Simulate a cluster; return whether it passes. Raises _OutOfSimulations."""
        if self._left <= 0:
            raise _OutOfSimulations
        self._left -= 1
        cluster = step.region.kind.cluster(step.counts)
        verdict = self._verify(cluster)
        passed = step.region.learn(step.counts, verdict)
        self.tried.append(Tried(cluster, verdict, passed))
        self._on_tried(self.tried[-1])
        if not passed and step.region.is_clear(verdict):
            for region in self.regions:
                if region is not step.region and self._is_slower(region.kind, step.region.kind):
                    region.rule_out(step.counts)
        if passed and (self.best is None or self.price_of(step) < self.price_of(self.best) - CENT):
            self.best = step
            kind = step.region.kind
            for (role, _), count, estimate in zip(kind.shapes, step.counts, kind.estimate, strict=True):
                self.bias[role] = count / estimate
        return passed

    # --- what to simulate next ------------------------------------------------------------------

    def next_of_all(self) -> _SearchStep | None:
        """Return the next cluster to simulate; None when the search is over."""
        if self.best is None:
            return self._first(self.regions)
        region, counts = self.best
        if (between := region.between(counts)) is not None:
            return _SearchStep(region, between)
        if (other := self._elsewhere(self.price_of(self.best))) is not None:
            return other
        return next((_SearchStep(region, less) for less in region.smaller(counts)), None)

    def _first(self, regions: Sequence[Region]) -> _SearchStep | None:
        grown = ((region, region.grown()) for region in regions)
        able = (_SearchStep(region, counts) for region, counts in grown if counts is not None)
        return min(able, key=lambda s: (s.region.kind.is_doubtful, self.price_of(s)), default=None)

    def _elsewhere(self, price: float) -> _SearchStep | None:
        """Return a cluster of the kind that is believed to be the cheapest of those that may still be cheaper
        than `price`."""

        def believed(region: Region) -> tuple[bool, float]:
            wanted, prices = region.wanted(self.bias), region.kind.prices
            return region.kind.is_doubtful, sum(n * each for n, each in zip(wanted, prices, strict=True))

        for region in sorted(self.regions, key=believed):
            if (counts := region.likeliest_below(price, self.bias)) is not None:
                return _SearchStep(region, counts)
        return None

    # --- the runner-up --------------------------------------------------------------------------

    def find_runner_up(self) -> None:
        """Look for a runner-up. Raises _OutOfSimulations."""
        assert self.best is not None
        self._left = min(self._left, RUNNER_UP_SIMULATIONS)
        others = [region for region in self.regions if region is not self.best.region]
        while True:
            passed = self.passed(others)
            step = self._first(others)
            if passed is not None:
                between = passed.region.between(passed.counts)
                step = None if between is None else _SearchStep(passed.region, between)
            if step is None:
                return
            self.simulate(step)

    def passed(self, regions: Sequence[Region]) -> _SearchStep | None:
        """Return the cheapest cluster that passed."""
        steps = (_SearchStep(r, counts) for r in regions for counts in r.verdicts if r.passes(counts))
        return min(steps, key=self.price_of, default=None)

    def tried_at(self, step: _SearchStep | None) -> Tried | None:
        if step is None:
            return None
        plan = step.region.kind.cluster(step.counts)
        return next(one for one in self.tried if one.plan == plan)


def search(
    kinds: Sequence[ClusterKind],
    verify: Verify,
    *,
    attain: float,
    simulations_max: int,
    is_slower: IsSlower = lambda slow, fast: False,
    on_tried: Callable[[Tried], None] = lambda _: None,
) -> Found:
    """Search with at most `simulations_max` calls of `verify`."""
    run = _Search(kinds, verify, attain=attain, simulations_max=simulations_max,
                  is_slower=is_slower, on_tried=on_tried)  # fmt: skip
    is_complete = False
    try:
        while (step := run.next_of_all()) is not None:
            run.simulate(step)
        is_complete = True
        if run.best is not None:
            run.find_runner_up()
    except _OutOfSimulations:
        pass
    best = run.best
    others = [r for r in run.regions if best is not None and r is not best.region]
    return Found(
        run.tried_at(best),
        run.tried_at(run.passed(others)),
        tuple(run.tried),
        is_complete,
        tuple(r.kind for r in run.regions if not r.verdicts),
    )
