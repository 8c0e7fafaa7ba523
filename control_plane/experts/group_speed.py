"""Finds expert ranks that are much slower than the others, by the time that they need for a row. Pure."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from statistics import median

from baton.core.ids import ExpertRankId
from control_plane.experts.group_values import ExpertGroupPolicy


@dataclass(slots=True)
class _Work:
    """A rank's counters at the last look."""

    rows: int
    busy_s: float
    slow_count: int = 0
    slow_until_s: float = 0.0


class ExpertRankSpeeds:
    """Call `look` with the counters of all ranks each time that experts may be placed anew."""

    def __init__(self, policy: ExpertGroupPolicy) -> None:
        self._policy = policy
        self._work: dict[ExpertRankId, _Work] = {}
        self.slow: frozenset[ExpertRankId] = frozenset()
        """Ranks that shall have no experts for now."""

    def forget(self, rank_id: ExpertRankId) -> None:
        self._work.pop(rank_id, None)
        self.slow -= {rank_id}

    def look(self, counters: Mapping[ExpertRankId, tuple[int, float]], *, now_s: float) -> bool:
        """`counters` are rows and busy seconds since each rank started. Return whether `slow` changed."""
        since: dict[ExpertRankId, tuple[int, float]] = {}
        for rank_id, (rows, busy_s) in counters.items():
            before = self._work.setdefault(rank_id, _Work(0, 0.0))
            if rows - before.rows >= self._policy.slow_rows_min:
                since[rank_id] = rows - before.rows, max(0.0, busy_s - before.busy_s)
            before.rows, before.busy_s = rows, busy_s
        for rank_id in self._slowed(since):
            work = self._work[rank_id]
            wait_s = min(self._policy.slow_s * 2.0 ** min(work.slow_count, 60), self._policy.slow_max_s)
            work.slow_count, work.slow_until_s = work.slow_count + 1, now_s + wait_s
        slow = frozenset(rank for rank, work in self._work.items() if work.slow_until_s > now_s)
        has_changed, self.slow = slow != self.slow, slow
        return has_changed

    def _slowed(self, since: Mapping[ExpertRankId, tuple[int, float]]) -> Collection[ExpertRankId]:
        """Ranks that needed far longer for a row. A rank of little load does so too, since it computes few
        rows at a time, but it is not busy for longer than the others."""
        factor = self._policy.slow_factor
        found: list[ExpertRankId] = []
        for rank_id, (rows, busy_s) in since.items():
            others = [work for other, work in since.items() if other != rank_id]
            if not others:
                continue
            is_busy = busy_s > factor / 2 * median(other_s for _, other_s in others)
            if is_busy and busy_s / rows > factor * median(other_s / count for count, other_s in others):
                found.append(rank_id)
        return found
