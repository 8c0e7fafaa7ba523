"""A worker's accounts at one moment."""

import msgspec

from baton.core.messages import LoadReport, Role
from engine.scheduling.scheduler import Scheduler
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
    is_parked: bool = False
    """Rows wait for experts that no rank holds."""

    @property
    def state(self) -> str:
        """What keeps new sequences away: draining | parked; ok if nothing does."""
        return "draining" if self.is_draining else "parked" if self.is_parked else "ok"


def load_report(
    scheduler: Scheduler,
    *,
    role: Role,
    is_draining: bool,
    is_parked: bool,
    free_blocks: int,
    incoming_count: int,
    step_s: float,
) -> LoadReport:
    """What routers are told. `incoming_count` decode phases were accepted whose KV has not all arrived."""
    decoding = scheduler.decoding()
    return LoadReport(
        role=role,
        is_draining=is_draining,
        free_blocks=free_blocks,
        running_count=scheduler.running_count,
        waiting_count=scheduler.waiting_count + incoming_count,
        waiting_tokens=scheduler.waiting_token_count(),
        step_s=step_s,
        costs=scheduler.times.seen_costs,
        decoding_count=len(decoding),
        context_tokens=sum(seq.computed_count for seq in decoding),
        tokens_per_step=scheduler.tokens_per_step,
        incoming_count=incoming_count,
        is_parked=is_parked,
    )
