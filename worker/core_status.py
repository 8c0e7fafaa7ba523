"""A worker's accounts at one moment."""

import msgspec

from baton.core.messages import Role
from worker.core_store import StoreStatus


class WorkerCounts(msgspec.Struct, frozen=True):
    """Counts at one moment, for metrics, tests and the simulator's checkers."""

    role: Role
    is_draining: bool
    free_blocks: int
    held_blocks: int
    quarantined_blocks: int
    """Blocks held by reads that were given up and may yet write; a part of `held_blocks`."""
    running_count: int
    waiting_count: int
    """Sequences that wait at the scheduler, for a seat or for blocks."""
    attempt_count: int
    """Attempts that are accepted and not answered for good."""
    lease_count: int
    receiver_count: int
    reads_in_flight: int
    router_count: int
    preemption_count: int
    """Preemptions since the worker started."""
    swap_count: int
    """Preemptions that kept their KV in host memory."""
    drafted_count: int
    """Draft tokens that were verified since the worker started."""
    accepted_count: int
    """Draft tokens that were right since the worker started."""
    expired_lease_count: int
    """Leases that ended without a release, since the worker started."""
    store: StoreStatus
