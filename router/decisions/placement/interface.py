"""The one interface of placement: `place(request, snapshot)` answers with a placement and its reason, or with
the reason why there is none.

A policy is made once per router, from `PolicyTools`, and may remember things of its own. It decides on what
it is given: a frozen snapshot of the cluster and one request. Policies are listed in `baton.core.policies`.
"""

from collections.abc import Callable, Mapping
from random import Random
from typing import NamedTuple, Protocol

from baton.config.router import RouterConfig
from baton.core.ids import WorkerId
from baton.core.messages import Phase
from router.decisions.cluster.snapshot import ClusterSnapshot, WorkerSnapshot
from router.decisions.prediction.forecast import Forecast, Prediction, SequenceNeeds
from router.decisions.prediction.predictor import Predictor

CachedTokens = Mapping[WorkerId, int]
"""Leading tokens of the sequence in each worker's prefix cache; no entry: none."""
NOBODY: frozenset[WorkerId] = frozenset()


class PlacementRequest(NamedTuple):
    """One sequence that looks for a place."""

    needs: SequenceNeeds
    is_last_token: bool
    """Whether one token is left to generate, so that there is no decode phase."""
    matched: Callable[[str, int], CachedTokens]
    """(fingerprint, block tokens) -> cached tokens at each worker of that fingerprint. The look-up takes
    time, so it is done on the first call."""
    avoid: frozenset[WorkerId] = NOBODY
    """Workers that took part in the sequence's last attempt, which failed."""
    fingerprint: str = ""
    """Fingerprint of the workers that computed the sequence so far; empty if none did."""
    siblings_at: frozenset[WorkerId] = NOBODY
    """Where sequences of the same group run, which share its prompt."""
    adapter_at: frozenset[WorkerId] | None = None
    """Workers that have its adapter loaded; None if it needs none."""
    kept: frozenset[WorkerId] = NOBODY
    """Workers whose last room is kept for others, see `router.decisions.placement.room`."""

    def cached_tokens(self, worker: WorkerSnapshot) -> int:
        facts = worker.facts
        return self.matched(facts.fingerprint, facts.block_tokens).get(worker.worker_id, 0)


NO_BLOCKS: Mapping[WorkerId, int] = {}


class Placement(NamedTuple):
    """Where a sequence runs. If `decode` is None, `prefill` runs both phases (aggregated)."""

    prefill: WorkerSnapshot
    decode: WorkerSnapshot | None
    reason: str
    is_fallback: bool = False
    """No pair of workers was possible, and one of them runs both phases instead."""
    forecast: Forecast | None = None
    """None if the policy does not predict, or if its predictions are not trusted."""
    predicted: Prediction | None = None
    """What the forecast was made of, to be compared with what happens."""
    cached_blocks: Mapping[WorkerId, int] = NO_BLOCKS
    """Leading blocks of the sequence that each worker of the prefill worker's fingerprint holds. Filled in by
    whoever asked the policy."""

    @property
    def phases(self) -> dict[WorkerId, Phase]:
        if self.decode is None:
            return {self.prefill.worker_id: Phase.AGGREGATED}
        return {self.prefill.worker_id: Phase.PREFILL, self.decode.worker_id: Phase.DECODE}


class NoPlace(NamedTuple):
    reason: str
    is_final: bool = False
    """The sequence is too long for every worker."""


class PolicyTools(NamedTuple):
    """What policies are made from."""

    config: RouterConfig
    predictor: Predictor
    rng: Random


class PlacementPolicy(Protocol):
    @property
    def uses_prefix(self) -> bool:
        """False: it never looks at prefix caches, so no prompt is hashed for it."""
        ...

    def place(self, request: PlacementRequest, snapshot: ClusterSnapshot) -> Placement | NoPlace:
        """Return where the sequence would run now. Only the policy's own memory may change."""
        ...


MakePolicy = Callable[[PolicyTools], PlacementPolicy]
