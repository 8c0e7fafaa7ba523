"""Decayed counts of the tokens that a pool's workers send to each expert."""

import numpy as np
import numpy.typing as npt

from control_plane.experts.values import Loads


class DecayedCounts:
    """Counts that lose half their weight in every `half_life_s`. One pool's, summed over its workers."""

    def __init__(self, layer_count: int, expert_count: int, *, half_life_s: float) -> None:
        assert half_life_s > 0
        self._half_life_s = half_life_s
        self._loads: Loads = np.zeros((layer_count, expert_count))
        self._as_of_s: float | None = None

    def add(self, tokens: npt.NDArray[np.int64], *, now_s: float) -> None:
        """`tokens` is [L, E]: what came since the last report of the same worker. Clocks that go backwards
        decay nothing."""
        self._loads = self.loads(now_s=now_s) + tokens
        self._as_of_s = now_s if self._as_of_s is None else max(now_s, self._as_of_s)

    def loads(self, *, now_s: float) -> Loads:
        """[L, E], as of now."""
        if self._as_of_s is None:
            return self._loads.copy()
        age_s = max(0.0, now_s - self._as_of_s)
        return self._loads * 0.5 ** (age_s / self._half_life_s)
