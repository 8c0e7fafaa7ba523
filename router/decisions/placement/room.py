"""Room that is kept: for tenants that use less than their fair share, and for timely sequences.

`router.decisions.admission.tenant_usage` says who those tenants are.
"""

from collections.abc import Sequence
from heapq import nlargest

from baton.core.ids import WorkerId
from router.decisions.cluster.snapshot import WorkerSnapshot

KEPT_SHARE = 0.25
"""Share of a worker's blocks, for one long prompt or a few usual ones. What ends makes room anew every
second."""
KEPT_EVERY = 2
"""One of so many workers that decode keeps room."""
LATE_LEAVES_SHARE = 0.25
"""Late sequences are placed only while this part of a worker's blocks stays free."""


def kept_for_others(pool: Sequence[WorkerSnapshot], tokens: int) -> frozenset[WorkerId]:
    """Workers of `pool` that may not take so many tokens: those with most room, where the rest has too
    little and so would they. A sequence needs its room on one worker, so little on many would not do. A
    worker that has nothing else to do takes anything."""
    count = -(-len(pool) // KEPT_EVERY)
    emptiest = nlargest(count + 1, pool, key=_free_share)
    if len(emptiest) > count and _free_share(emptiest[count]) >= KEPT_SHARE:
        return frozenset()
    keep = (w for w in emptiest[:count] if w.load.sequences and _left(w, tokens) < KEPT_SHARE)
    return frozenset(w.worker_id for w in keep)


def takes_the_last_room(worker: WorkerSnapshot, tokens: int) -> bool:
    """Whether a late sequence of so many tokens would use room that is kept for timely ones.

    Blocks are held until a sequence ends, so timely sequences would wait for late ones. An idle worker takes
    any sequence.
    """
    return worker.load.sequences > 0 and _left(worker, tokens) < LATE_LEAVES_SHARE


def _free_share(worker: WorkerSnapshot) -> float:
    return worker.load.free_blocks / worker.facts.block_count


def _left(worker: WorkerSnapshot, tokens: int) -> float:
    return (worker.load.free_blocks - worker.blocks_for(tokens)) / worker.facts.block_count
