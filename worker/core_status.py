"""A worker's accounts at one moment."""

import msgspec

from baton.core.messages import Role
from worker.core_store import StoreStatus


class WorkerStatus(msgspec.Struct, frozen=True):
    """Counts at one moment, for metrics, tests and the simulator's checkers."""

    role: Role
    is_draining: bool
    free_blocks: int
    held_blocks: int
    quarantined_blocks: int
    """Held by reads that were given up and may yet write; part of `held_blocks`."""
    running_count: int
    waiting_count: int
    """At the scheduler, for a seat or for blocks."""
    attempt_count: int
    """Accepted and not answered for good."""
    lease_count: int
    receiver_count: int
    reads_in_flight: int
    router_count: int
    preemption_count: int
    """Since the worker started."""
    swap_count: int
    """Of those, the ones that kept their KV in host memory."""
    drafted_count: int
    """Guessed tokens that were verified, since the worker started."""
    accepted_count: int
    """Of those, the ones that were right."""
    expired_lease_count: int
    """Since the worker started: leases that ended without a release."""
    store: StoreStatus
