"""Looks at the cluster of a drill from outside: what is missing, what is held, how much memory is used."""

import asyncio
import contextlib
import time
from typing import Any

import httpx
import psutil

from baton.config import StoreConfig
from baton.core.operate import ReplicaState
from baton.core.store_admin import AskStatus, NodeStatus
from baton.wire.client import worker_status
from baton.wire.link import LinkBroken
from baton.wire.store_nodes import ask_node
from benchmarks.chaos.cluster import ChaosCluster
from benchmarks.chaos.outcomes import ProcessSample
from benchmarks.chaos.schedule import CONTROL, DASHBOARD, REDIS, ROUTERS, STORES, WORKER
from benchmarks.faults import ClusterWatch
from kv_store.directory.connect import connect
from kv_store.directory.interface import Directory, DirectoryLost

LOOK_S, SAMPLE_S = 0.5, 10.0
ANSWER_S = 2.0
WORKER_HELD = (
    *("held_blocks", "quarantined_blocks", "running_count", "waiting_count"),
    *("lease_count", "receiver_count", "reads_in_flight"),
)
STORE_HELD = ("loads_open", "writes_open", "fetches_open", "leases_open", "io_in_flight")
"""Accounts that are 0 when no request is around."""


class Watch:
    def __init__(self, cluster: ChaosCluster, *, worker_count: int) -> None:
        self._cluster, self._worker_count = cluster, worker_count
        self.control = ClusterWatch(cluster.control_address)
        self._http = httpx.AsyncClient(trust_env=False, timeout=ANSWER_S)
        self._directory: Directory | None = None
        self.seen: list[tuple[float, frozenset[str]]] = []
        """The parts that were missing, by monotonic instant, whenever that changed."""
        self.samples: list[ProcessSample] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        store = StoreConfig(directory=self._cluster.redis_url)
        self._directory = await connect(store, control_address="")
        self._tasks = [asyncio.create_task(run()) for run in (self.control.run, self._look, self._sample)]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._http.aclose()
        if self._directory is not None:
            await self._directory.close()

    async def _look(self) -> None:
        while True:
            missing = await self.missing()
            if not self.seen or self.seen[-1][1] != missing:
                self.seen.append((time.monotonic(), missing))
            await asyncio.sleep(LOOK_S)

    async def missing(self) -> frozenset[str]:
        """The parts that are not as they should be."""
        looked = await asyncio.gather(
            self._control_missing(), self._stores_missing(), *(self._router_missing(r) for r in ROUTERS)
        )
        return frozenset().union(*looked)

    def explain(self, part: str) -> str:
        """What is known of a part that is missing."""
        state = self.control.state
        if part != WORKER or state is None:
            return part
        running = [r for r in state.replicas if r.state is not ReplicaState.RUNNING]
        texts = [f"{r.name} is {r.state} for {r.for_s:.0f} s ({r.reason})" for r in running]
        return f"{WORKER} ({len(state.replicas)} of {self._worker_count}; {'; '.join(texts)})"

    async def _control_missing(self) -> set[str]:
        found: set[str] = set()
        with contextlib.suppress(httpx.HTTPError):
            await self._http.get(self._cluster.dashboard_url)
            found.add(DASHBOARD)
        state = self.control.state
        if state is not None and self.control.is_connected:
            found.add(CONTROL)
            if state.is_settled and len(state.replicas) == self._worker_count:
                found.add(WORKER)
        return {DASHBOARD, CONTROL, WORKER} - found

    async def _stores_missing(self) -> set[str]:
        assert self._directory is not None
        try:
            hosts = {m.node.address.rpartition(":")[0] for m in await self._directory.members()}
        except DirectoryLost:
            return {REDIS, *STORES}
        return {name for name, host in STORES.items() if self._cluster.hosts[host].address not in hosts}

    async def _router_missing(self, name: str) -> set[str]:
        with contextlib.suppress(httpx.HTTPError, ValueError):
            health = await self.health(name)
            workers = [worker for pool in health["workers"].values() for worker in pool]
            is_whole = len(workers) == self._worker_count and not any(
                w["stale"] or w["draining"] for w in workers
            )
            return set() if is_whole and health["directory"] == "current" else {name}
        return {name}

    async def health(self, router: str) -> dict[str, Any]:
        """Raises httpx.HTTPError, ValueError."""
        return (await self._http.get(f"{self._cluster.routers[router]}/health")).json()

    # --- what is held -------------------------------------------------------------------------------

    async def held(self) -> dict[str, dict[str, float]]:
        """Everything that a request holds anywhere, by the process that has it. Parts that do not answer are
        named too."""
        found: dict[str, dict[str, float]] = {}
        for router in ROUTERS:
            try:
                health = await self.health(router)
            except (httpx.HTTPError, ValueError):
                found[router] = {"silent": 1}
                continue
            found[router] = dict(health["sequences"])
            for worker in (w for pool in health["workers"].values() for w in pool):
                load = {name: worker[name] for name in ("in_flight", "in_flight_elsewhere")}
                found[f"{worker['id']} as {router} sees it"] = load
                found[worker["id"]] = await self._held_by_worker(worker["address"])
        found |= await self._held_by_stores()
        return {
            name: {k: n for k, n in held.items() if n} for name, held in found.items() if any(held.values())
        }

    async def _held_by_worker(self, address: str) -> dict[str, float]:
        try:
            accounts = (await worker_status(address)).accounts
        except LinkBroken:
            return {"silent": 1}
        return {name: accounts.get(name, 0) for name in WORKER_HELD}

    async def _held_by_stores(self) -> dict[str, dict[str, float]]:
        assert self._directory is not None
        found: dict[str, dict[str, float]] = {}
        try:
            for member in await self._directory.members():
                reply = await ask_node(member.node.address, AskStatus())
                assert isinstance(reply, NodeStatus)
                pinned = [name for name in reply.accounts if name.endswith(".pinned_blocks")]
                found[str(reply.node_id)] = {
                    name: reply.accounts.get(name, 0) for name in (*STORE_HELD, *pinned)
                }
        except (DirectoryLost, LinkBroken):
            found["store nodes"] = {"silent": 1}
        return found

    # --- memory and descriptors ---------------------------------------------------------------------

    async def _sample(self) -> None:
        while True:
            self._take_samples(time.monotonic())
            await asyncio.sleep(SAMPLE_S)

    def _take_samples(self, now_s: float) -> None:
        named = [(name, self._cluster.process(name)) for name in (*ROUTERS, *STORES, CONTROL, DASHBOARD)]
        named += [(WORKER, process) for process in self._cluster.workers()]
        for name, process in named:
            if process is None:
                continue
            with contextlib.suppress(psutil.Error):
                memory, descriptors = process.memory_info(), process.num_fds()
                self.samples.append(
                    ProcessSample(now_s, name, process.pid, memory.rss - memory.shared, descriptors)
                )
