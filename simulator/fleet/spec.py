"""The description of a simulated cluster: workers, their links, and how the cluster is run."""

from dataclasses import dataclass, field

from baton.config import EngineConfig, TransferConfig
from baton.config.router import RouterConfig
from baton.core.costs import StepCosts
from baton.core.messages import Role
from baton.core.policies import DEFAULT_EVICTION


@dataclass(frozen=True, slots=True)
class StoreSpec:
    """The KV store of one host, used by all workers there. Rates are those of the paths, in bytes per
    second."""

    host_bytes: float = 0.0
    """Bytes of host memory; 0 means no store."""
    ssd_bytes: float = 0.0
    host_bytes_s: float = 50e9
    """Rate between host memory and a worker's pool."""
    ssd_read_bytes_s: float = 6.5e9
    ssd_latency_s: float = 1e-4
    peer_bytes_s: float = 25e9
    """Rate from another host's store."""
    policy: str = DEFAULT_EVICTION
    """Eviction policy, by its name in `EVICTION_POLICIES`."""
    workers_per_host: int = 1


@dataclass(frozen=True, slots=True)
class FleetWorkerSpec:
    """One kind of worker. Block tokens are the same in the whole cluster."""

    role: Role
    costs: StepCosts
    block_tokens: int
    block_count: int
    kv_token_bytes: float
    max_model_tokens: int
    engine: EngineConfig
    transfer: TransferConfig = field(default_factory=TransferConfig)
    send_bytes_s: float = 50e9
    receive_bytes_s: float = 50e9


@dataclass(frozen=True, slots=True)
class FleetSpec:
    """A cluster and how it is run."""

    workers: tuple[tuple[FleetWorkerSpec, int], ...]
    """Kinds of workers, and how many there are of each."""
    router: RouterConfig
    heartbeat_s: float = 0.25
    hop_s: float = 0.0002
    """Time of one message between two processes."""
    cells: int = 1
    """The cluster is split into so many parts with a router each; conversations stay in theirs."""
    store: StoreSpec = StoreSpec()
    seed: int = 0
    sample_s: float = 1.0
    """Time between two samples of the pools' load."""
    slo_classes: dict[str, tuple[float, float]] = field(default_factory=dict[str, tuple[float, float]])
    """TTFT and TPOT objectives in seconds by name of the class, 0 for none; "" names requests without a
    class."""

    refuses_late: bool = False
    """The meaning is that of `slo.late`: requests that will miss their objectives are refused, not served
    last."""

    @property
    def worker_count(self) -> int:
        return sum(count for _, count in self.workers)
