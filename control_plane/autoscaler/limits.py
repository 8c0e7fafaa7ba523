"""Bounds on replicas, and the budget of hours of ranks."""

from collections import deque
from collections.abc import Mapping, Sequence

from baton.core.messages import Role
from control_plane.autoscaler.values import AutoscalerSettings

DAY_S = 86_400.0
BUCKET_S = 900.0
FREE_SHARE = 0.5


class RankHoursBudget:
    """A budget of hours of ranks over any 24 hours; 0 means no budget."""

    def __init__(self, per_day: float) -> None:
        self._per_day = per_day
        self._buckets: deque[tuple[float, float]] = deque()
        """Quarters of an hour: (start, hours spent in it)."""

    def add(self, at_s: float, interval_s: float, ranks: int) -> None:
        if not self._per_day:
            return
        hours = ranks * interval_s / 3600
        if self._buckets and at_s - self._buckets[-1][0] < BUCKET_S:
            start_s, before = self._buckets[-1]
            self._buckets[-1] = (start_s, before + hours)
        else:
            self._buckets.append((at_s, hours))
        while self._buckets[0][0] < at_s - DAY_S:
            self._buckets.popleft()

    @property
    def used(self) -> float:
        return sum(hours for _, hours in self._buckets)

    def history(self, at_s: float) -> tuple[tuple[float, float], ...]:
        """Return the hours spent as (seconds ago, hours), oldest first."""
        return tuple((at_s - start_s, hours) for start_s, hours in self._buckets)

    def restore(self, spent: Sequence[tuple[float, float]], at_s: float) -> None:
        self._buckets = deque((at_s - ago_s, hours) for ago_s, hours in spent if ago_s < DAY_S)

    def allowed(self, at_s: float) -> int | None:
        """Return how many ranks may run at once, or None for any number. The budget does not bind while
        more than `FREE_SHARE` of it is left. After that, the rest is spread over the time until the oldest
        spent hours are a day old."""
        left = self._per_day - self.used
        if not self._per_day or left >= FREE_SHARE * self._per_day:
            return None
        lasts_s = max(BUCKET_S, self._buckets[0][0] + DAY_S - at_s)
        return max(1, int(left * 3600 / lasts_s))


def within(
    wanted: Mapping[Role, int],
    needed: Mapping[Role, int],
    settings: AutoscalerSettings,
    *,
    ranks_max: int,
    reasons: list[str],
) -> dict[Role, int]:
    """Keep each role within its bounds, and the ranks of all together within `ranks_max` (0: any) or the sum
    of the minima. A shortage hits all roles alike, since the pool with less than its part would hold up the
    other."""
    held: dict[Role, int] = {}
    for role, count in wanted.items():
        bound = settings.bounds[role]
        held[role] = min(bound.most, max(bound.least, count))
        if held[role] < count:
            reasons.append(f"{role}: limited to its maximum of {bound.most}, {count} wanted")
        elif held[role] > count:
            reasons.append(f"{role}: kept at its minimum of {bound.least}")
    total = settings.cost(held)
    if not ranks_max or total <= ranks_max:
        return held
    is_plain = not settings.expert_ranks and all(count == 1 for count in settings.ranks.values())
    unit = "" if is_plain else " ranks"
    reasons.append(f"all roles: limited to {ranks_max}{unit} by the budget, {total} wanted")
    return _shared(held, needed, settings, ranks_max)


def _shared(
    held: Mapping[Role, int], needed: Mapping[Role, int], settings: AutoscalerSettings, ranks_max: int
) -> dict[Role, int]:
    given = {role: min(held[role], max(settings.bounds[role].least, 1 if held[role] else 0)) for role in held}
    while True:
        left = ranks_max - settings.cost(given)
        able = [role for role in held if given[role] < held[role] and settings.ranks.get(role, 1) <= left]
        if not able:
            return given
        # The role that has the smallest part of what it needs gets one more.
        poorest = min(able, key=lambda role: (given[role] / max(1, needed[role]), role))
        given[poorest] += 1
