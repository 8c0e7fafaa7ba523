"""How long loads of experts take, and how long one may take. Pure."""

from control_plane.experts.rollout_values import RolloutLimits

TIMES_MAX = 8.0
"""A load may take so many times as long as others took lately: ranks load several at once, and read them from
disks that others use."""
FORGET = 0.05
"""A shorter time counts so much, a longer one at once."""


class LoadTimes:
    """The times of one group's loads, from their order to their announcement."""

    def __init__(self, limits: RolloutLimits) -> None:
        self._limits = limits
        self._typical_s: float | None = None

    def took(self, duration_s: float) -> None:
        """A load has ended well."""
        before_s = self._typical_s
        if before_s is None or duration_s >= before_s:
            self._typical_s = duration_s
        else:
            self._typical_s = before_s + FORGET * (duration_s - before_s)

    def timeout_s(self, failures: int) -> float:
        """Return how long a load may take that has failed so often: it doubles every time, in case all loads
        have become slow."""
        most_s = self._limits.load_timeout_s
        if self._typical_s is None:
            return most_s
        least_s = min(most_s, self._limits.load_timeout_min_s)
        return min(most_s, max(least_s, TIMES_MAX * self._typical_s) * 2.0 ** min(failures, 30))
