"""What a placement policy sees, and what it answers."""

from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import NamedTuple, Protocol

from baton.core.ids import WorkerId
from baton.core.messages import Phase, Role
from router.decisions.prediction.forecast import Forecast, Predicted

SEQUENCE_TOKENS = 64
"""Load is counted in prompt tokens still to compute; a sequence in flight weighs as much as this many."""


class WorkerView(NamedTuple):
    """One worker, as one sequence that looks for a place sees it."""

    worker_id: WorkerId
    role: Role
    fingerprint: str
    block_tokens: int
    load: float
    """Prompt tokens to compute + SEQUENCE_TOKENS per sequence, those just placed included."""
    is_draining: bool
    is_refusing: bool
    """It refused a sequence for want of room, and has not reported since."""
    fits: bool
    """The sequence can run there when nothing else does."""
    has_room: bool
    """Free blocks, less those promised since, suffice now; never while it refuses."""
    is_stale: bool
    """No report for too long: unknown, assumed busy."""
    is_avoided: bool
    """Took part in the sequence's last attempt, which failed."""
    is_foreign: bool
    """Another fingerprint than the one that computed the sequence's tokens so far."""
    is_suspended: bool = False
    """Its circuit breaker is open: it gets nothing while any other worker can."""
    is_preferred: bool = False
    """The sequence's siblings are there, or its adapter is."""


Matched = Mapping[WorkerId, int]
"""Leading tokens of the sequence in each worker's prefix cache; no entry: none."""


class RequestView(NamedTuple):
    is_last_token: bool
    """One token is left to generate: no decode phase."""
    matched: Callable[[str, int], Matched]
    """(fingerprint, block_tokens) -> what the workers of that fingerprint hold."""


class Choice(NamedTuple):
    worker: WorkerView
    reason: str


class Policy(Protocol):
    uses_prefix: bool
    """False: `matched` is always empty, and no prompt is hashed."""

    def choose(self, phase: Phase, workers: Sequence[WorkerView], matched: Matched, rng: Random) -> Choice:
        """One of `workers`, which is never empty."""
        ...


NO_BLOCKS: Mapping[WorkerId, int] = {}


class Placement(NamedTuple):
    """Where a sequence runs: prefill and decode on two workers, or `decode` None: whole on `prefill`."""

    prefill: WorkerView
    decode: WorkerView | None
    reason: str
    is_fallback: bool = False
    cached_blocks: Mapping[WorkerId, int] = NO_BLOCKS
    """Leading blocks of the sequence that each worker holds, of the prefill worker's fingerprint."""
    forecast: Forecast | None = None
    """None: the policy predicts nothing, or what it predicts is not to be trusted."""
    predicted: Predicted | None = None
    """To be compared with what happens."""

    @property
    def phases(self) -> dict[WorkerId, Phase]:
        if self.decode is None:
            return {self.prefill.worker_id: Phase.AGGREGATED}
        return {self.prefill.worker_id: Phase.PREFILL, self.decode.worker_id: Phase.DECODE}


class NoPlace(NamedTuple):
    reason: str
    is_final: bool = False
    """The sequence is too long for every worker."""
