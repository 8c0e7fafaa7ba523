"""Room that is kept for tenants that use less than their fair share.

`router.decisions.admission.tenant_usage` says who they are.
"""

from collections.abc import Sequence
from heapq import nlargest

from baton.core.geometry import blocks_for
from baton.core.ids import WorkerId
from router.decisions.cluster_view import Worker

KEPT_SHARE = 0.25
"""Of a worker's blocks, for one long prompt or a few usual ones. What ends makes room anew every second."""
KEPT_EVERY = 2
"""One of so many workers that decode keeps room."""


def kept_for_others(pool: Sequence[Worker], tokens: int) -> frozenset[WorkerId]:
    """Workers of `pool` that may not take so many tokens: those with most room, where the rest has too
    little and so would they. A sequence needs its room on one worker, so little on many would not do. A
    worker that has nothing else to do takes anything."""
    count = -(-len(pool) // KEPT_EVERY)
    emptiest = nlargest(count + 1, pool, key=_free_share)
    if len(emptiest) > count and _free_share(emptiest[count]) >= KEPT_SHARE:
        return frozenset()
    keep = (w for w in emptiest[:count] if w.in_flight.sequences and _left(w, tokens) < KEPT_SHARE)
    return frozenset(w.worker_id for w in keep)


def _free_share(worker: Worker) -> float:
    return worker.free_blocks / worker.hello.block_count


def _left(worker: Worker, tokens: int) -> float:
    # One more than known: the place of the token that is sampled next.
    need = blocks_for(tokens + 1, worker.hello.block_tokens)
    return (worker.free_blocks - need) / worker.hello.block_count
