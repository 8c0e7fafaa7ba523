"""The collector follows the control plane, scrapes the metrics of every process, and keeps their history.

No request depends on it and nothing waits for it. A process that does not answer is shown as such.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterable
from typing import Literal

import httpx
import msgspec

from baton.config import Config
from baton.core.errors import SetupError
from baton.core.messages import Role
from baton.core.operate import ClusterState, Decision, Order, ReplicaState
from baton.core.recent_requests import RecentRequest, RecentRequestsQuery
from baton.core.store import StoreMember
from baton.telemetry import catalogue as c
from baton.wire.client import worker_status
from baton.wire.link import LinkBroken
from baton.wire.operate import OperateClient
from baton.wire.routers import recent_requests_of
from baton.wire.services import WorkerStatusReply
from control_plane.dashboard.expert_groups import ExpertRankRates, group_table
from control_plane.dashboard.experts import ExpertHistory
from control_plane.dashboard.history import History
from control_plane.dashboard.samples import TEXT_BYTES_MAX, Labels, MetricsReader, Table, frame_of
from kv_store.directory.connect import connect
from kv_store.directory.interface import Directory, DirectoryLost

log = logging.getLogger(__name__)

SCRAPE_S = 2.0
"""Longest time of one scrape of one process."""

SCRAPES_AT_ONCE = 32
RETRY_S = 1.0
STORES_EVERY_S = 10.0
LATE_S = 3.0
"""Silence of the control plane, which reports once a second, after which the dashboard says so."""

PROCESSES_PER_S = 64
"""Most processes scraped per second. A larger cluster is scraped more rarely, so that it does not make its
dashboard busy."""

RECENT_REQUESTS_MAX = 300

Kind = Literal["router", "worker", "store node"]


class ScrapeTarget(msgspec.Struct, frozen=True):
    """A process whose metrics are scraped."""

    kind: Kind
    name: str
    """Name of one life of a process."""
    address: str
    """host:port of its metrics."""


class TargetState(msgspec.Struct):
    """The last scrape of a target."""

    target: ScrapeTarget
    is_new: bool
    """It started while the dashboard ran, so its counters began at zero."""
    table: Table | None = None
    trouble: str = ""
    """Error of the last scrape; empty: it answered."""


class ClusterCollector:
    """The collector of one cluster. `run` ends when it is cancelled. All else may be read at any time in the
    same loop."""

    def __init__(
        self,
        config: Config,
        control_address: str,
        *,
        unix_s: Callable[[], float] = time.time,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.history = History()
        self.experts = ExpertHistory()
        self.rank_rates = ExpertRankRates()
        self.state: ClusterState | None = None
        self.trouble = "not connected yet"
        """Error of the connection to the control plane; empty: it answers."""
        self.seen: dict[str, TargetState] = {}
        self.ticked = asyncio.Event()
        """Event that is set, and replaced, whenever there is new data."""
        self._unix_s, self._now_s = unix_s, now_s
        self._control = OperateClient(control_address)
        self._control_address = control_address
        self._updated_s = now_s()
        self._stores: tuple[StoreMember, ...] = ()
        self._reader = MetricsReader(metric.name for metric in c.CATALOGUE)
        self._scraped_s: float | None = None
        self._groups: Table | None = None
        """Series of the groups of expert ranks at the last scrape."""
        self._is_first = True
        scheme = "https" if config.router.tls_cert else "http"
        self._schemes: dict[Kind, str] = {"router": scheme, "worker": "http", "store node": "http"}

    @property
    def silent_s(self) -> float:
        """Seconds since the last report of the control plane."""
        return self._now_s() - self._updated_s

    @property
    def is_lost(self) -> bool:
        """The shown state of the control plane is out of date."""
        return bool(self.trouble) or self.silent_s > LATE_S

    async def run(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._follow())
                group.create_task(self._scrape_regularly())
                if self.config.store.host_bytes:
                    group.create_task(self._follow_stores())
        finally:
            await self._control.close()

    # --- the control plane ------------------------------------------------------------------------

    async def _follow(self) -> None:
        while True:
            try:
                async with contextlib.aclosing(self._control.changes()) as changes:
                    async for state in changes:
                        self._updated_s, self.trouble = self._now_s(), ""
                        self.state = state
            except LinkBroken as error:
                self.trouble = str(error)
            else:
                self.trouble = "the control plane closed the connection"
            await asyncio.sleep(RETRY_S)

    async def _follow_stores(self) -> None:
        async with _directory(self.config, self._control_address) as directory:
            while directory is not None:
                with contextlib.suppress(DirectoryLost):
                    self._stores = await directory.members()
                await asyncio.sleep(STORES_EVERY_S)

    async def order(self, order: Order) -> Decision:
        """Give an order. Raises LinkBroken."""
        return await self._control.order(order)

    # --- metrics ----------------------------------------------------------------------------------

    async def _scrape_regularly(self) -> None:
        limits = httpx.Limits(max_connections=SCRAPES_AT_ONCE)
        async with httpx.AsyncClient(trust_env=False, verify=False, timeout=SCRAPE_S, limits=limits) as http:
            while True:
                began_s = self._now_s()
                await self._scrape_all(http)
                every_s = max(self.config.dashboard.sample_s, len(self.seen) / PROCESSES_PER_S)
                await asyncio.sleep(max(0.05, every_s - (self._now_s() - began_s)))

    async def _scrape_all(self, http: httpx.AsyncClient) -> None:
        self._follow_targets(_targets(self.state, self._stores))
        asked = list(self.seen.values())
        tables = await asyncio.gather(*(self._scrape(http, seen) for seen in asked))
        now_s = self._now_s()
        span_s, self._scraped_s = now_s - (self._scraped_s or now_s), now_s
        scrapes: list[tuple[Table | None, Table]] = []
        for seen, table in zip(asked, tables, strict=True):
            if table is not None:
                scrapes.append(({} if seen.table is None and seen.is_new else seen.table, table))
                seen.table = table
        self.experts.add(self._unix_s(), scrapes)
        scrapes += self._expert_groups(now_s)
        if span_s > 0:
            self.history.add(frame_of(self._unix_s(), span_s, scrapes, replica_levels(self.state)))
        ticked, self.ticked = self.ticked, asyncio.Event()
        ticked.set()

    def _expert_groups(self, now_s: float) -> list[tuple[Table | None, Table]]:
        """Return what the control plane says of expert ranks, in the form of a scrape."""
        if self.state is None:
            return []
        self.rank_rates.add(now_s, self.state.experts)
        before, self._groups = self._groups, group_table(self.state.experts)
        return [(before, self._groups)]

    def _follow_targets(self, targets: Iterable[ScrapeTarget]) -> None:
        wanted = {f"{target.kind} {target.name}": target for target in targets}
        for key in self.seen.keys() - wanted.keys():
            del self.seen[key]
        for key, target in wanted.items():
            if key not in self.seen:
                self.seen[key] = TargetState(target, is_new=not self._is_first)
        if wanted:
            self._is_first = False

    async def _scrape(self, http: httpx.AsyncClient, seen: TargetState) -> Table | None:
        target = seen.target
        try:
            async with asyncio.timeout(SCRAPE_S):
                text = await _text(http, f"{self._schemes[target.kind]}://{target.address}/metrics")
        except (httpx.HTTPError, TimeoutError, ValueError) as error:
            seen.trouble = str(error) or type(error).__name__
            return None
        seen.trouble = ""
        return self._reader.read(text)

    # --- requests of pages -----------------------------------------------------------------------

    async def recent_requests(self, request_id: str = "") -> tuple[list[RecentRequest], list[str]]:
        """Return the recent requests, newest first, and an error for each router that did not answer."""
        routers = self.state.routers if self.state is not None else ()
        wanted = RecentRequestsQuery(request_id, RECENT_REQUESTS_MAX)
        answers = await asyncio.gather(
            *(recent_requests_of(router.address, wanted) for router in routers), return_exceptions=True
        )
        recent_requests: list[RecentRequest] = []
        troubles: list[str] = []
        for router, answer in zip(routers, answers, strict=True):
            if isinstance(answer, LinkBroken):
                troubles.append(f"{router.router_id}: {answer}")
            elif isinstance(answer, BaseException):
                raise answer
            else:
                recent_requests += answer.recent_requests
        recent_requests.sort(key=lambda record: (record.outcome != "running", -record.arrived_s))
        return recent_requests[:RECENT_REQUESTS_MAX], troubles

    async def worker(self, address: str) -> WorkerStatusReply | None:
        """Return a worker's status, or None if it does not answer."""
        try:
            async with asyncio.timeout(SCRAPE_S):
                return await worker_status(address)
        except (LinkBroken, TimeoutError):
            return None


async def _text(http: httpx.AsyncClient, url: str) -> str:
    """Return the text of a metrics page. Raises ValueError for one that is larger than any of our processes
    writes."""
    parts: list[bytes] = []
    size = 0
    async with http.stream("GET", url) as answer:
        answer.raise_for_status()
        async for part in answer.aiter_bytes():
            parts.append(part)
            size += len(part)
            if size > TEXT_BYTES_MAX:
                raise ValueError(f"its metrics are larger than {TEXT_BYTES_MAX} bytes")
    return b"".join(parts).decode()


def _targets(state: ClusterState | None, stores: Iterable[StoreMember]) -> list[ScrapeTarget]:
    targets: list[ScrapeTarget] = []
    if state is not None:
        targets += [ScrapeTarget("router", r.router_id, r.metrics_address) for r in state.routers]
        targets += [
            ScrapeTarget("worker", replica.worker_id, replica.metrics_address)
            for replica in state.replicas
            if replica.worker_id and replica.metrics_address
        ]
    targets += [ScrapeTarget("store node", s.node.node_id, s.metrics_address) for s in stores]
    return [target for target in targets if target.address]


def replica_levels(state: ClusterState | None) -> dict[str, dict[Labels, float]]:
    """Return the number of replicas by role and state, as the control plane counts them."""
    if state is None:
        return {}
    counts: dict[Labels, float] = {}
    for role in Role:
        for replica_state in ReplicaState:
            count = sum(r.role is role and r.state is replica_state for r in state.replicas)
            if count:
                counts[("role", role.value), ("state", replica_state.value)] = float(count)
    return {c.REPLICAS.name: counts}


@contextlib.asynccontextmanager
async def _directory(config: Config, control_address: str) -> AsyncGenerator[Directory | None]:
    try:
        directory = await connect(config.store, control_address=control_address)
    except SetupError as error:
        log.warning("store nodes are not shown: %s", error)
        yield None
        return
    try:
        yield directory
    finally:
        await directory.close()
