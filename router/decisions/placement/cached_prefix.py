"""Longest cached prefix under a load bound.

A bounded-load rule in the manner of consistent hashing with bounded loads (Mirrokni, Thorup,
Zadimoghaddam 2018): affinity decides, except for workers loaded well above the mean.
"""

from collections.abc import Sequence
from random import Random

from baton.core.messages import Phase
from router.decisions.placement.views import SEQUENCE_TOKENS, Choice, Matched, WorkerView

IDLE_SLACK_TOKENS = 4 * SEQUENCE_TOKENS
"""Excess load that never counts: the mean of an idle cluster is near 0, and says nothing."""


class CachedPrefix:
    uses_prefix = True

    def __init__(self, *, load_bound: float) -> None:
        self._load_bound = load_bound

    def choose(self, phase: Phase, workers: Sequence[WorkerView], matched: Matched, rng: Random) -> Choice:
        """Most matched tokens among the workers under the bound; then least load, then lower id.

        A worker may exceed the bound by the tokens it saves, since waiting for that much work costs no
        more than doing it again elsewhere. Not so for decode: there a match saves bytes, not steps.
        """
        bound = self._load_bound * sum(w.load for w in workers) / len(workers) + IDLE_SLACK_TOKENS
        credit = 0 if phase is Phase.DECODE else 1
        # Never empty: the least loaded worker is at or below the mean.
        under = [w for w in workers if w.load <= bound + credit * matched.get(w.worker_id, 0)]
        chosen = min(under, key=lambda w: (-matched.get(w.worker_id, 0), w.load, w.worker_id))
        tokens = matched.get(chosen.worker_id, 0)
        passed_over = len(workers) - len(under)
        reason = f"{tokens} tokens cached" if tokens else f"least load {chosen.load:.0f}"
        return Choice(chosen, reason + (f", {passed_over} passed over as overloaded" if passed_over else ""))
