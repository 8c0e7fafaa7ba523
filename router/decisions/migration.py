"""The choice of the streams that leave a draining worker before it ends, or a parked one. Pure.

A migration is the cluster's own choice, so it may never harm the stream: it is not counted as an attempt, it
is charged to no budget, and it is made only where the stream goes on at once with the same weights. A
sequence without a first token stays, because its worker soon has the token and another worker would compute
the prompt again. It moves when it decodes, or is placed again when its worker ends, which is not counted
either.
"""

from collections.abc import Mapping

from baton.core.ids import SequenceId, WorkerId
from router.decisions.cluster.worker import WorkerView
from router.decisions.flow import Flow
from router.decisions.placement.interface import Placement
from router.decisions.request_state import RequestState

MIGRATIONS_AT_ONCE = 8
"""Largest number of streams that move away from a draining worker per load report, so that the other workers
are not flooded with prompts."""
LOOKED_AT_ONCE = 32
"""Largest number of streams for which a place is looked for per load report."""


PARKED_S = 5.0
"""The streams of a parked worker get no tokens, so they move after this time at the latest. Ranks that were
lost are mostly back sooner."""


class Departures:
    """Since when workers drain or are parked."""

    def __init__(self, *, migrate_after_s: float) -> None:
        self._migrate_after_s = migrate_after_s
        self._since_s: dict[WorkerId, float] = {}

    def is_time_to_migrate(self, worker: WorkerView, now_s: float) -> bool:
        """Whether the worker has drained, or been parked, for so long that its streams should move to other
        workers."""
        if not (worker.is_leaving or worker.is_parked):
            self._since_s.pop(worker.worker_id, None)
            return False
        since_s = self._since_s.setdefault(worker.worker_id, now_s)
        limit_s = min(self._migrate_after_s, PARKED_S) if worker.is_parked else self._migrate_after_s
        return now_s - since_s >= limit_s

    def lost(self, worker_id: WorkerId) -> None:
        self._since_s.pop(worker_id, None)


def movable(worker: WorkerView, flows: Mapping[SequenceId, Flow]) -> list[Flow]:
    """Return the streams at the worker that may move, the shortest first.

    Where no place is found for one of them, none is found for those behind it.
    """
    found = [flows[name] for name in worker.load.reservations]
    may = [f for f in found if f.state is RequestState.DECODING and f.generated and not f.is_last_token]
    return sorted(may, key=lambda flow: (flow.token_count, flow.arrival))[:LOOKED_AT_ONCE]


def keeps_weights(flow: Flow, found: Placement) -> bool:
    """Whether the stream would go on with the weights that began it."""
    return found.prefill.facts.fingerprint == flow.fingerprint


def ends_sooner_here(flow: Flow, worker: WorkerView, found: Placement) -> bool:
    """Whether the worker would generate the rest before the first token came from elsewhere."""
    report, forecast = worker.load.report, found.forecast
    if worker.is_parked or report is None or forecast is None or report.step_s <= 0:
        return False
    left = flow.submit.sampling.max_tokens - len(flow.generated)
    left = min(left, worker.hello.max_model_tokens - flow.token_count)
    return left * report.step_s / max(1.0, report.tokens_per_step) <= forecast.ttft_s
