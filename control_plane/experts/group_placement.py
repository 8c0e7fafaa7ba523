"""When the experts of one group are placed anew, and on which of its ranks. Pure.

Ranks use as many slots as the number of wanted ranks asks for. Where ranks are missing, the others hold more
than their slots for a while, so that every expert has a replica: never more than their memory holds. If all
of it does not do, nothing is placed until another rank has come, and callers that need what is missing wait.
"""

from collections.abc import Sequence

import numpy as np

from baton.core.ids import NodeId
from control_plane.experts.group_ranks import ExpertRankBook, ExpertRankEntry, ExpertRankLife
from control_plane.experts.group_speed import ExpertRankSpeeds
from control_plane.experts.group_values import ExpertGroupPolicy
from control_plane.experts.place import balance_of, place
from control_plane.experts.rollout import ExpertRollout
from control_plane.experts.rollout_values import TargetSet
from control_plane.experts.values import ExpertMap, ExpertRank, ExpertRankState, Loads, RankId

LOAD_MIN = 1e-3
"""Experts that got no tokens count as if they had got so many."""
SLOTS_FACTOR_MAX = 2
"""Slow ranks give up their experts only if no other rank has to hold so many times its slots for that."""


class ExpertPlacer:
    def __init__(
        self, layer_count: int, expert_count: int, *, group_count: int, policy: ExpertGroupPolicy
    ) -> None:
        self.sizes = layer_count, expert_count
        self._group_count = group_count
        self.speeds = ExpertRankSpeeds(policy)
        self.rebalances = 0
        self._policy = policy
        self._target: ExpertMap | None = None
        self._is_wanted = False
        self._look_s: float | None = None
        self._short_until_s: float | None = None
        """When a placement waits no longer for more ranks."""

    def want(self) -> None:
        """Place at the next `look`, however small the gain."""
        self._is_wanted = True

    @property
    def next_tick_s(self) -> float | None:
        dues = [self._look_s, self._short_until_s if self._is_wanted else None]
        return min((due for due in dues if due is not None), default=None)

    def fits(self, serving: Sequence[ExpertRankEntry]) -> bool:
        """Whether these ranks can hold all experts, if need be with more than their slots."""
        return self._fits(serving, self._policy.overcommit_max)

    def look(
        self, ranks: ExpertRankBook, loads: Loads, rollout: ExpertRollout, *, is_first: bool, now_s: float
    ) -> TargetSet | None:
        """Return the map to reach, if the experts are to be placed anew. `loads` is [L, E]."""
        is_due = self._look_s is not None and now_s >= self._look_s
        if not (self._is_wanted or is_due):
            return None
        if is_due or self._look_s is None:
            self._look_s = now_s + self._policy.rebalance_s
        if is_due:
            counters = {e.rank_id: (e.rows, e.busy_s) for e in ranks.serving if e.rank_id is not None}
            self._is_wanted |= self.speeds.look(counters, now_s=now_s)
        chosen = self._choose(ranks, now_s)
        if chosen is None:
            return None
        loads = np.maximum(loads, LOAD_MIN)
        found = place(loads, chosen, current=rollout.map, group_count=self._group_count)
        if not self._is_wanted and not self._is_better(loads, found.balance):
            return None
        self._is_wanted, self._target = False, found.map
        self.rebalances += 1
        return TargetSet(found.map, chosen, loads, is_first)

    def _is_better(self, loads: Loads, balance: Loads) -> bool:
        if self._target is None:
            return True
        gain = float(balance.mean() - balance_of(loads, self._target.slots).mean())
        return gain >= self._policy.gain_min

    def _choose(self, ranks: ExpertRankBook, now_s: float) -> tuple[ExpertRank, ...] | None:
        """All ranks that serve, with their slots, of which those that shall hold experts are ready. None:
        there are too few, and others are coming."""
        serving = ranks.serving
        ready = [entry for entry in serving if entry.state is ExpertRankLife.READY]
        fast = [entry for entry in ready if entry.rank_id not in self.speeds.slow]
        used = fast if self._fits(fast, SLOTS_FACTOR_MAX) else ready
        if not used or (ranks.coming and self._nominal(used, ranks.wanted) < self.sizes[1]):
            used = [*used, *(entry for entry in serving if entry.state is ExpertRankLife.DRAINING)]
        if not self._is_enough(used, is_coming=ranks.coming > 0, now_s=now_s):
            return None
        return tuple(self._rank(entry, used, ranks.wanted) for entry in serving)

    def _is_enough(self, used: Sequence[ExpertRankEntry], *, is_coming: bool, now_s: float) -> bool:
        if self.fits(used):
            self._short_until_s = None
            return True
        if self.lacks_memory(used):
            self._short_until_s = None
            return False
        if self._short_until_s is None:
            self._short_until_s = now_s + self._policy.first_wait_s
        if is_coming and now_s < self._short_until_s:
            return False
        self._short_until_s = None
        return bool(used)

    def lacks_memory(self, entries: Sequence[ExpertRankEntry]) -> bool:
        """Whether these ranks cannot hold all experts, whatever they are asked to."""
        return bool(entries) and sum(map(self._slots_max, entries)) < self.sizes[1]

    def _slots_max(self, entry: ExpertRankEntry) -> int:
        most = entry.hello.slots_max if entry.hello is not None else 0
        return min(most, self.sizes[1]) if most else self.sizes[1]

    def _fits(self, entries: Sequence[ExpertRankEntry], factor: float) -> bool:
        slots = sum(
            min(factor * entry.hello.slots, self._slots_max(entry))
            for entry in entries
            if entry.hello is not None
        )
        return bool(entries) and slots >= self.sizes[1]

    def _rank(self, entry: ExpertRankEntry, used: Sequence[ExpertRankEntry], wanted: int) -> ExpertRank:
        assert entry.hello is not None
        assert entry.rank_id is not None
        slots = min(self._slots_max(entry), self._level(used, wanted))
        state = ExpertRankState.READY if entry in used else ExpertRankState.DRAINING
        return ExpertRank(RankId(entry.rank_id), NodeId(entry.hello.node), slots, state)

    def _level(self, used: Sequence[ExpertRankEntry], wanted: int) -> int:
        """The slots of each rank with memory for so many. It is more than the usual number where that does
        not do for all experts."""
        level, most = self._slots(wanted), sorted(map(self._slots_max, used))
        left, above = self.sizes[1], len(most)
        for size in most:
            if size * above >= left:
                break
            left, above = left - size, above - 1
        return max(level, -(-left // above)) if above else level

    def _nominal(self, entries: Sequence[ExpertRankEntry], wanted: int) -> int:
        return sum(min(self._slots(wanted), self._slots_max(entry)) for entry in entries)

    def _slots(self, wanted: int) -> int:
        """Slots that each rank uses if no rank is missing, whatever number of ranks it was started for."""
        share = -int(-self.sizes[1] * self._policy.replicas // max(1, wanted))
        return max(1, min(self.sizes[1], share))
