"""Made-up snapshots of workers, for tests of decisions on snapshots."""

from collections.abc import Mapping

from baton.core.costs import StepCosts
from baton.core.ids import WorkerId
from baton.core.messages import LoadReport, Role, WorkerHello
from router.decisions.cluster.snapshot import ClusterSnapshot, WorkerSnapshot
from router.decisions.cluster.view import ClusterView
from router.decisions.placement.interface import PlacementRequest
from router.decisions.prediction.forecast import SequenceNeeds

COSTS = StepCosts(0.004, 1e-4, 5e-4, 1e-7, 1e-9)


def worker_snapshot(
    name: str,
    role: Role = Role.PREFILL,
    load: int = 0,
    *,
    fingerprint: str = "f",
    block_tokens: int = 16,
    block_count: int = 1000,
    free_blocks: int | None = None,
    sequences: int = 0,
    is_draining: bool = False,
    is_refusing: bool = False,
    is_stale: bool = False,
) -> WorkerSnapshot:
    """Return a snapshot. `load` is the number of prompt tokens that wait there."""
    cluster = ClusterView(silence_s=1e9)
    hello = WorkerHello(
        WorkerId(name), role, fingerprint, "m", block_tokens, block_count, 16_000, costs=COSTS
    )
    cluster.join(hello, f"{name}:1")
    worker = cluster[WorkerId(name)]
    free = block_count if free_blocks is None else free_blocks
    if not is_stale:
        worker.on_report(LoadReport(role, is_draining, free, 0, 0, load, 0.01), now_s=0.0)
    if is_refusing:
        worker.refused(is_draining=False)
    found = worker.snapshot
    return found._replace(load=found.load._replace(sequences=sequences, load_tokens=load))


def cluster_snapshot(
    *workers: WorkerSnapshot, suspended: frozenset[WorkerId] = frozenset(), now_s: float = 0.0
) -> ClusterSnapshot:
    """Return a snapshot as a `ClusterView` of these workers would freeze it."""
    cluster = ClusterView(silence_s=1e9)
    for worker in workers:
        facts = worker.facts
        hello = WorkerHello(
            worker.worker_id,
            facts.role,
            facts.fingerprint,
            "m",
            facts.block_tokens,
            facts.block_count,
            16_000,
        )
        cluster.join(hello, "host:1")
        cluster[worker.worker_id].update(facts.role, is_draining=facts.is_draining)
    frozen = cluster.snapshot(now_s, suspended)
    own = {worker.worker_id: worker for worker in workers}
    pools = type(frozen.pools)(*(tuple(own[w.worker_id] for w in pool) for pool in frozen.pools))
    return frozen._replace(workers=own, pools=pools)


def request_of(
    tokens: int = 100,
    *,
    cached: Mapping[str, int] | None = None,
    is_last_token: bool = False,
    avoid: frozenset[WorkerId] = frozenset(),
    fingerprint: str = "",
    kept: frozenset[WorkerId] = frozenset(),
) -> PlacementRequest:
    held = {WorkerId(name): count for name, count in (cached or {}).items()}
    return PlacementRequest(
        SequenceNeeds(tokens, 0, 100, 0.0, 0.0, 0.0),
        is_last_token,
        lambda fingerprint, block_tokens: held,
        avoid,
        fingerprint,
        kept=kept,
    )
