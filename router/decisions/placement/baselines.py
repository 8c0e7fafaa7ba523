"""Baselines, for honest comparison: none of them looks at the prefix caches."""

from collections.abc import Sequence
from random import Random

from baton.core.ids import WorkerId
from baton.core.messages import Phase
from router.decisions.placement.views import Choice, Matched, WorkerView


class RandomChoice:
    uses_prefix = False

    def choose(self, phase: Phase, workers: Sequence[WorkerView], matched: Matched, rng: Random) -> Choice:
        return Choice(rng.choice(workers), "random")


class RoundRobin:
    """The next worker in order of ids, counted apart for each phase; robust to joins and losses."""

    uses_prefix = False

    def __init__(self) -> None:
        self._last: dict[Phase, WorkerId] = {}

    def choose(self, phase: Phase, workers: Sequence[WorkerView], matched: Matched, rng: Random) -> Choice:
        ordered = sorted(workers, key=lambda w: w.worker_id)
        last = self._last.get(phase, WorkerId(""))
        chosen = next((w for w in ordered if w.worker_id > last), ordered[0])
        self._last[phase] = chosen.worker_id
        return Choice(chosen, "round robin")


class LeastLoaded:
    """Ties go to the lower id."""

    uses_prefix = False

    def choose(self, phase: Phase, workers: Sequence[WorkerView], matched: Matched, rng: Random) -> Choice:
        chosen = min(workers, key=lambda w: (w.load, w.worker_id))
        return Choice(chosen, f"least load {chosen.load:.0f}")
