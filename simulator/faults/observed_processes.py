"""Processes as the checkers see them, from outside."""

from collections.abc import Callable
from typing import Protocol

from baton.core.ids import RouterId, WorkerId
from baton.telemetry.metrics import Meter
from kv_store.node.core import NodeCore
from router.decisions.core import RouterCore
from router.live.driver import Driver
from simulator.faults.client import SimClient
from simulator.faults.network import LocalClock, SimSession
from simulator.faults.ranks import SimRanks
from simulator.faults.reads import Generations
from worker.core import WorkerCore


class ObservedWorker(Protocol):
    """A worker process, from outside."""

    core: WorkerCore
    worker_id: WorkerId
    name: str
    is_alive: bool
    clock_trusted_from_s: float
    runs_since_s: float
    local_clock: LocalClock
    generations: Generations
    ranks: SimRanks

    @property
    def is_computing(self) -> bool: ...

    def router_session(self, router_id: RouterId) -> SimSession | None: ...

    def post(self, happening: Callable[[], None]) -> None: ...


class ObservedRouter(Protocol):
    """A router process, from outside."""

    driver: Driver
    meter: Meter
    name: str
    router_id: RouterId
    live: dict[str, SimClient]
    is_alive: bool
    is_frozen: bool
    thawed_s: float

    @property
    def core(self) -> RouterCore: ...


class ObservedStoreNode(Protocol):
    """A store node process, from outside."""

    core: NodeCore
    name: str

    def audit(self) -> None: ...
