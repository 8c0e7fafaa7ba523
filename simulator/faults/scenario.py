"""The cluster, the load and the faults of one seed."""

from dataclasses import dataclass

from baton.config import EngineConfig, StoreConfig, TransferConfig
from baton.config.router import RouterConfig, SloConfig
from baton.core.geometry import KVGeometry
from baton.core.messages import Role
from baton.core.shape import Shape
from router.tenants.keys import Tenant

MODEL_NAME = "sim"
PAGE_BYTES = 4096
"""Bytes of a slot of the store; a simulated block is smaller."""
GEOMETRY = KVGeometry(layer_count=2, kv_head_count=2, head_dim=2, block_tokens=4, dtype="float32")

FAULTS = (
    "worker_crash",
    "worker_freeze",
    "worker_suspend",
    "host_crash",
    "session_break",
    "partition",
    "peer_stall",
    "repeats",
    "slow_network",
    "slow_worker",
    "sick_worker",
    "straggler",
    "read_fail",
    "read_hang",
    "read_late",
    "small_pool",
    "router_crash",
    "router_freeze",
    "reports_lost",
    "drain",
    "role_switch",
    "control_outage",
    "upgrade",
    "store_crash",
    "store_freeze",
    "store_hang_up",
    "store_clear",
    "disk_full",
    "disk_slow",
    "disk_error",
    "disk_flip",
    "memory_flip",
    "directory_outage",
    "directory_flush",
)
"""Every fault class. A seed enables each with `Scenario.fault_chance`."""

STORE_FAULTS = ("store_", "disk_", "memory_", "directory_")
"""Beginnings of the names of the store's own faults."""

ARRIVALS_S = 4.0
"""Requests arrive, and faults strike, in this span."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """One small cluster, its load and its faults. Seconds are virtual."""

    roles: tuple[Role, ...]
    router_count: int
    request_count: int
    tenants: dict[str, Tenant]
    slo: SloConfig
    adapter_count: int
    hasty_s: float
    """Deadline of the service that hasty clients use."""
    prefix_count: int
    faults: frozenset[str]
    block_tokens: int
    block_count: int
    max_model_tokens: int
    engine: EngineConfig
    transfer: TransferConfig
    router: RouterConfig
    """Requests of patient clients have its deadline."""
    store: StoreConfig
    host_count: int
    """Count of machines; workers are spread over them."""
    presses_store: bool
    """The seed is shaped so that the store is used, and fails, much."""
    step_base_s: float
    step_token_s: float
    network_latency_s: float
    read_latency_s: float
    read_block_s: float
    worker_shapes: tuple[Shape, ...] = (Shape(),)
    """The ranks of workers: those of one replica after another, and round again."""
    shape: str = ""
    """What the seed presses on, where checkers need to know it."""
    swap_block_s: float = 0.0001
    copy_block_s: float = 0.0002
    """Time of one copy between a pool and the store's arena."""
    store_lease_s: float = 0.9
    """Lease of a store node's entries in the directory."""
    router_grace_s: float = 0.6
    heartbeat_s: float = 0.15
    member_lease_s: float = 1.2
    connect_timeout_s: float = 0.8
    restart_s: float = 0.4
    prefix_chance: float = 0.7
    """Chance that a prompt begins as others do."""
    choices_chance: float = 0.1
    """Chance that a request wants several choices."""
    beam_chance: float = 0.02
    class_chance: float = 0.5
    """Chance that a request names a service class, if one is drawn for it."""
    leave_chance: float = 0.15
    """Chance that a client leaves early."""
    strikes_max: int = 4
    """Most times that one fault class strikes."""
    read_fault_chance: float = 0.0
    """Chance per read and enabled kind of read fault; 0 means that it is drawn."""
    drain_timeout_s: float = 2.0
    arrivals_s: float = ARRIVALS_S
    ends_within_s: float = 30.0
    """Every request ends this long after faults stopped (invariant 6)."""
    lingers_s: float = 4.5
    """Time for which something may be held although nobody waits for it: two leases and a little."""
    settles_within_s: float = 7.0
    """Everything is idle this long after the last request ended (invariants 3 and 8)."""

    @property
    def store_slot_count(self) -> int:
        """Slots of one node's arena; 0 means no store."""
        return self.store.host_bytes // PAGE_BYTES

    @property
    def context_max(self) -> int:
        """Most tokens of one sequence: the model's limit, or all that fits a worker's pool."""
        return min(self.max_model_tokens, self.block_count * self.block_tokens)
