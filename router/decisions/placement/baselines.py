"""Baselines, for honest comparison: none of them looks at the prefix caches."""

from collections.abc import Sequence
from random import Random

from baton.core.ids import WorkerId
from baton.core.messages import Phase
from router.decisions.cluster.snapshot import ClusterSnapshot
from router.decisions.placement.interface import PlacementPolicy, PlacementRequest, PolicyTools
from router.decisions.placement.ranked import Candidate, RankedChoice, RankedPolicy


class RandomChoice:
    uses_prefix = False

    def __init__(self, rng: Random) -> None:
        self._rng = rng

    def choose(
        self,
        phase: Phase,
        candidates: Sequence[Candidate],
        request: PlacementRequest,
        snapshot: ClusterSnapshot,
    ) -> RankedChoice:
        return RankedChoice(self._rng.choice(candidates), "random")


class RoundRobin:
    """The next worker in order of ids, counted apart for each phase; robust to joins and losses."""

    uses_prefix = False

    def __init__(self) -> None:
        self._last: dict[Phase, WorkerId] = {}

    def choose(
        self,
        phase: Phase,
        candidates: Sequence[Candidate],
        request: PlacementRequest,
        snapshot: ClusterSnapshot,
    ) -> RankedChoice:
        ordered = sorted(candidates, key=lambda c: c.worker_id)
        last = self._last.get(phase, WorkerId(""))
        chosen = next((c for c in ordered if c.worker_id > last), ordered[0])
        self._last[phase] = chosen.worker_id
        return RankedChoice(chosen, "round robin")


class LeastLoaded:
    """Ties go to the lower id."""

    uses_prefix = False

    def choose(
        self,
        phase: Phase,
        candidates: Sequence[Candidate],
        request: PlacementRequest,
        snapshot: ClusterSnapshot,
    ) -> RankedChoice:
        chosen = min(candidates, key=lambda c: (c.load_tokens, c.worker_id))
        return RankedChoice(chosen, f"least load {chosen.load_tokens:.0f}")


def random_choice(tools: PolicyTools) -> PlacementPolicy:
    return RankedPolicy(RandomChoice(tools.rng), tools)


def round_robin(tools: PolicyTools) -> PlacementPolicy:
    return RankedPolicy(RoundRobin(), tools)


def least_loaded(tools: PolicyTools) -> PlacementPolicy:
    return RankedPolicy(LeastLoaded(), tools)
