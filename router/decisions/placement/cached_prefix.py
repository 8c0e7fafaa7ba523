"""Longest cached prefix under a load bound.

A bounded-load rule in the manner of consistent hashing with bounded loads (Mirrokni, Thorup,
Zadimoghaddam 2018): affinity decides, except for workers loaded well above the mean.
"""

from collections.abc import Sequence

from baton.core.messages import Phase
from router.decisions.cluster.load_account import SEQUENCE_TOKENS
from router.decisions.cluster.snapshot import ClusterSnapshot
from router.decisions.placement.interface import PlacementPolicy, PlacementRequest, PolicyTools
from router.decisions.placement.ranked import Candidate, RankedChoice, RankedPolicy

IDLE_SLACK_TOKENS = 4 * SEQUENCE_TOKENS
"""Excess load that never counts: the mean of an idle cluster is near 0, and says nothing."""


class CachedPrefix:
    uses_prefix = True

    def __init__(self, *, load_bound: float) -> None:
        self._load_bound = load_bound

    def choose(
        self,
        phase: Phase,
        candidates: Sequence[Candidate],
        request: PlacementRequest,
        snapshot: ClusterSnapshot,
    ) -> RankedChoice:
        """Most cached tokens among the workers under the bound; then least load, then lower id.

        A worker may exceed the bound by the tokens it saves, since waiting for that much work costs no
        more than doing it again elsewhere. Not so for decode: there a match saves bytes, not steps.
        """
        mean = sum(c.load_tokens for c in candidates) / len(candidates)
        bound = self._load_bound * mean + IDLE_SLACK_TOKENS
        credit = 0 if phase is Phase.DECODE else 1
        # Never empty: the least loaded worker is at or below the mean.
        under = [c for c in candidates if c.load_tokens <= bound + credit * c.cached_tokens]
        chosen = min(under, key=lambda c: (-c.cached_tokens, c.load_tokens, c.worker_id))
        tokens, passed_over = chosen.cached_tokens, len(candidates) - len(under)
        reason = f"{tokens} tokens cached" if tokens else f"least load {chosen.load_tokens:.0f}"
        return RankedChoice(
            chosen, reason + (f", {passed_over} workers above the load bound" if passed_over else "")
        )


def cached_prefix(tools: PolicyTools) -> PlacementPolicy:
    return RankedPolicy(CachedPrefix(load_bound=tools.config.load_bound), tools)
