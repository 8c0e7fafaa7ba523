"""A store node in one process: size classes, local socket, peers, directory and metrics around the pure
core."""

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable, MutableSequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from typing import cast

import grpc.aio
import numpy as np
import numpy.typing as npt

from baton.config import Config
from baton.core import garbage
from baton.core.errors import IncompatiblePeer, SetupError
from baton.core.ids import NodeId, WorkerId
from baton.core.store import (
    NodeHello,
    NodeRef,
    StoreHello,
    StoreMember,
    TakeBlocks,
    WorkerToStore,
)
from baton.core.store_admin import AskClear, AskDrain, AskStatus, Declined, Done, StoreReply, StoreRequest
from baton.core.store_admin import NodeStatus as StatusReply
from baton.telemetry.exporter import MetricsServer
from baton.wire.address import host_port, reachable_host
from baton.wire.background import Background
from baton.wire.core_driver import CoreDriver, Performers, performer, performers
from baton.wire.crash import Crash
from baton.wire.link import FLUSH_S
from baton.wire.server import start_server
from baton.wire.slices import answer_soon
from baton.wire.store_nodes import NodeEnd
from kv_store.arena import check_room
from kv_store.directory.interface import Directory
from kv_store.directory.registration import StoreRegistration
from kv_store.node import events as e
from kv_store.node.core import NodeCore
from kv_store.process.local import LocalServer, LocalSessions
from kv_store.process.metrics import StoreMetrics, accounts
from kv_store.process.peers import READER_MESSAGES, Answering, Asking
from kv_store.process.size_class import SizeClassMemory
from kv_store.process.ssd import Disks, within_disk
from kv_store.ssd.errors import DiskError
from kv_transfer.backend import KVMemory
from kv_transfer.manager import TransferManager
from kv_transfer.read import BlockRead
from kv_transfer.registry import BackendSite, build_backends

log = logging.getLogger(__name__)

PEERS_OPEN_MAX = 8
"""Sessions with so many peers are kept open; with others they are opened at need."""
DIAL_S = 3.0
"""The time between attempts at sessions that are not open."""
CLEAR_S = 4.0
"""The time that the disk has when an operator clears; then the answer says that it goes on."""
DIRECTORY_STARTS_S = 60.0
"""A control plane may be started together with its stores, and takes longer."""
DRAIN_LOOK_S = 0.1
"""The time between two looks whether the peers have taken what they want."""


class StoreCrashed(Exception):
    """A bug, or no memory left: the process must end. The cause is chained."""


class StoreProcess:
    """A store node. Call `run` once. The clock of all decisions is `time.monotonic`."""

    def __init__(
        self, node_id: NodeId, config: Config, *, directory: Directory | None, towards: str = ""
    ) -> None:
        """`towards` is the host:port of the directory, by which the address for peers is chosen."""
        self._node_id, self._config, self._directory = node_id, config, directory
        self._towards = towards
        self._began_s = time.monotonic()
        self._is_draining = False
        self._crash = Crash()
        self._background = Background(self._crash.report)
        self._size_classes: dict[int, SizeClassMemory] = {}
        self._generations: dict[int, npt.NDArray[np.uint64]] = {}
        self._answering = Answering(post=lambda event: self._driver.post(event))
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="store")

    async def run(
        self, *, stop: asyncio.Event, stop_now: asyncio.Event, on_ready: Callable[[StatusReply], None]
    ) -> None:
        """Serve until `stop` is set, offer the blocks to the peers for at most `drain_timeout_s` or until
        `stop_now`, clean up.

        Raises SetupError (socket, port, folder, memory) before `on_ready`; StoreCrashed afterwards.
        """
        answer_soon()
        check_room(self._config.store.host_bytes)
        async with AsyncExitStack() as stack:
            stack.callback(self._threads.shutdown, wait=False, cancel_futures=True)
            stack.push_async_callback(self._close_size_classes)
            await self._open_doors(stack)
            self._assemble()
            stack.push_async_callback(self._disks.close)
            stack.push_async_callback(self._background.cancel)
            stack.callback(self._driver.close)
            stack.callback(self._asking.close)
            local = LocalServer(
                self._config.store.socket,
                sessions=self._workers,
                answer=self.answer,
                spawn=self._background.spawn,
            )
            garbage.spare_what_stays()  # before anybody can wait for it
            local.open()
            stack.callback(local.close)
            self._disks.open_found()
            self._background.spawn(local.run())
            stack.push_async_callback(self._registration.leave)
            stack.callback(self._background.spawn(self._registration.run()).cancel)
            stack.callback(self._background.spawn(self._keep_peers_open()).cancel)
            on_ready(self.status())
            await self._serve(stop, stop_now)
            self._workers.hang_up()

    async def _open_doors(self, stack: AsyncExitStack) -> None:
        """Open gRPC and metrics, so that their ports are known before anything else is told of this node."""
        cluster = self._config.cluster
        self._host = reachable_host(cluster.worker_host, towards=self._towards)
        ports = self._config.store
        server, port = await start_server(cluster.worker_host, ports.port, store=self)
        stack.push_async_callback(self._stop_server, server)
        self._node = NodeRef(self._node_id, host_port(self._host, port))
        metrics = MetricsServer(render=self._render, health=self._health)
        await metrics.start(cluster.worker_host, ports.metrics_port)
        stack.push_async_callback(metrics.close)
        self._metrics_address = host_port(self._host, metrics.port)

    def _assemble(self) -> None:
        store = within_disk(self._config.store)
        self._metrics = StoreMetrics()
        self._core = NodeCore(
            self._node, store, make_generations=self._make_generations, now_s=time.monotonic()
        )
        self._driver: CoreDriver[e.NodeEvent, e.NodeAction] = CoreDriver(
            self._core,
            tick=e.StoreTick(),
            performers=self._performers(),
            crash=self._crash,
            observers=(self._metrics,),
        )
        post = self._driver.post
        self._workers = LocalSessions(sink=self, arena_descriptor=self._arena_of)
        self._disks = Disks(
            store,
            arena=lambda block_bytes: self._size_classes[block_bytes].arena,
            post=post,
            spawn=self._background.spawn,
        )
        self._asking = Asking(
            size_class=self._size_classes.__getitem__, post=post, spawn=self._background.spawn
        )
        self._registration = StoreRegistration(
            self._directory,
            member=self._member,
            post=post,
            spawn=self._background.spawn,
            lease_s=self._config.cluster.member_lease_s,
            patience_s=DIRECTORY_STARTS_S,
        )

    def _performers(self) -> Performers:
        return performers(
            e.NodeAction,
            performer(e.OpenSizeClass, self._open_size_class),
            performer(e.ToStoreClient, self._to_worker),
            performer(e.DropStoreClient, lambda a: self._workers.drop(a.worker_id, a.message)),
            performer(e.ToPeer, self._to_peer),
            performer(e.ReadSsd, self._read_ssd),
            performer(e.WriteSsd, lambda a: self._disks.write(a)),
            performer(e.ForgetSsd, lambda a: self._disks.forget(a)),
            performer(e.ForgetHost, lambda a: self._size_classes[a.size_class].forget(a.slot)),
            performer(BlockRead, self._read_peer),
            performer(e.LookUp, lambda a: self._registration.look_up(a)),
            performer(e.Publish, lambda a: self._registration.publish(a.changes)),
        )

    async def _keep_peers_open(self) -> None:
        """Keep sessions open, so that the first fetch from a peer is as quick as the next."""
        while True:
            for size_class in list(self._size_classes):
                for peer in self._registration.peers[:PEERS_OPEN_MAX]:
                    self._asking.open(size_class, peer)
            await asyncio.sleep(DIAL_S)

    async def _serve(self, stop: asyncio.Event, stop_now: asyncio.Event) -> None:
        await self._until(stop)
        budget = self._config.store.drain_bytes
        self._drain()
        if not self._registration.peers or not budget:
            return
        timeout_s = self._config.cluster.drain_timeout_s
        log.info(
            "the node offers up to %d bytes to %d peers, for at most %g s",
            budget,
            len(self._registration.peers),
            timeout_s,
        )
        ends_s = time.monotonic() + timeout_s
        while not self._core.is_drained and not stop_now.is_set() and time.monotonic() < ends_s:
            await self._until(stop_now, timeout_s=DRAIN_LOOK_S)

    async def _until(self, event: asyncio.Event, *, timeout_s: float | None = None) -> None:
        """Wait for it, or until the time is up. Raises StoreCrashed, with its cause, when the core or a task
        fails."""
        try:
            await self._crash.race(event, timeout_s=timeout_s)
        except SetupError:
            raise
        except Exception as cause:
            raise StoreCrashed(f"{type(cause).__name__}: {cause}") from cause

    # --- workers ----------------------------------------------------------------------------------

    def worker_joined(self, hello: StoreHello) -> None:
        self._driver.post(e.StoreClientJoined(hello))

    def from_worker(self, worker_id: WorkerId, message: WorkerToStore) -> None:
        self._driver.post(e.FromStoreClient(worker_id, message))

    def worker_lost(self, worker_id: WorkerId) -> None:
        self._driver.post(e.StoreClientLost(worker_id))

    def _arena_of(self, hello: StoreHello) -> int:
        return self._size_classes[hello.block_bytes].arena.fd

    # --- actions ----------------------------------------------------------------------------------

    def _open_size_class(self, action: e.OpenSizeClass) -> None:
        for other in self._size_classes.values():
            other.give_back_unused()
        self._size_classes[action.size_class] = SizeClassMemory(
            action,
            node=self._node,
            generations=self._generations[action.size_class],
            is_first=not self._size_classes,
            make_transfer=self._make_transfer,
            threads=self._threads,
            spawn=self._background.spawn,
        )
        self._disks.open(action)

    def _to_worker(self, action: e.ToStoreClient) -> None:
        if isinstance(action.message, TakeBlocks):
            size_class = self._worker_size_class(action.worker_id)
            if size_class is not None:
                size_class.use([place.slot for place in action.message.places])
        self._workers.send(action.worker_id, action.message)

    def _to_peer(self, action: e.ToPeer) -> None:
        if isinstance(action.message, READER_MESSAGES):
            self._asking.send(action.size_class, action.peer, action.message)
        else:
            self._answering.send(action.size_class, action.peer, action.message)

    def _read_ssd(self, action: e.ReadSsd) -> None:
        self._size_classes[action.size_class].use([action.slot])
        self._disks.read(action)

    def _read_peer(self, read: BlockRead) -> None:
        self._size_classes[read.block_bytes].use(read.local_blocks)
        self._asking.read(read)

    def _worker_size_class(self, worker_id: WorkerId) -> SizeClassMemory | None:
        hello = self._workers.hello(worker_id)
        return self._size_classes.get(hello.block_bytes) if hello is not None else None

    def _make_generations(self, size_class: int, slot_count: int) -> MutableSequence[int]:
        table = np.zeros(slot_count, dtype=np.uint64)
        self._generations[size_class] = table
        return cast(MutableSequence[int], table)

    def _make_transfer(self, node_id: NodeId, memory: KVMemory) -> TransferManager:
        name = WorkerId(f"{node_id}/{memory.block_bytes}")
        site = BackendSite(name, memory, self._host)
        return TransferManager(build_backends(self._config.transfer.backends, site), memory=memory)

    # --- peers, as `baton.wire.store_nodes.StoreHandler` ------------------------------------------

    async def hello(self, theirs: NodeHello) -> NodeHello:
        size_class = self._size_classes.get(theirs.block_bytes)
        if size_class is None:
            raise IncompatiblePeer(f"{self._node_id} has no blocks of {theirs.block_bytes} bytes")
        try:
            return size_class.hello(await size_class.transfer())
        except SetupError as error:
            raise IncompatiblePeer(str(error)) from None

    async def serve_peer(self, theirs: NodeHello, link: NodeEnd) -> None:
        await self._answering.serve(theirs, link)

    # --- what others ask --------------------------------------------------------------------------

    async def answer(self, request: StoreRequest) -> StoreReply:
        match request:
            case AskStatus():
                return self.status()
            case AskClear():
                return await self._clear(request)
            case AskDrain():
                self._drain()
                return Done("draining: nothing new is taken")

    def status(self) -> StatusReply:
        core = self._core.status()
        return StatusReply(
            node_id=self._node_id,
            host=socket.gethostname(),
            pid=os.getpid(),
            address=self._node.address,
            socket=self._config.store.socket,
            metrics_address=self._metrics_address,
            uptime_s=time.monotonic() - self._began_s,
            policy=self._config.store.policy,
            is_draining=core.is_draining,
            is_drained=self._core.is_drained,
            accounts={**accounts(core), "pid": os.getpid()},
            tenants=core.tenants,
            peers=tuple((peer.node_id, peer.address) for peer in self._registration.peers),
            notes=self._notes(),
        )

    async def _clear(self, asked: AskClear) -> StoreReply:
        """Clear a tier. It waits for files that are still being read, and for what is forgotten to be
        erased."""
        gone = 0
        try:
            async with asyncio.timeout(CLEAR_S):
                await self._disks.until_open()
                before = self._block_count()
                self._driver.post(e.Clear(asked.tier, asked.tenant))
                gone = before - self._block_count()
                await self._disks.flush()
        except TimeoutError:
            return Declined(f"the disk is busy: {gone} blocks are gone so far; ask again in a moment")
        except DiskError as error:
            return Declined(f"{gone} blocks are gone, but may be found again after a crash: {error}")
        return Done(f"{gone} blocks are gone")

    def _drain(self) -> None:
        self._is_draining = True
        self._driver.post(e.DrainStore(self._config.store.drain_bytes))

    def _block_count(self) -> int:
        return sum(tier.block_count for tier in self._core.status().tiers.values())

    def _notes(self) -> tuple[str, ...]:
        arenas = {note: None for size_class in self._size_classes.values() for note in size_class.arena.notes}
        trouble = (f"directory: {self._registration.trouble}",) if self._registration.trouble else ()
        return (*self._core.status().notes, *trouble, *self._disks.notes(), *arenas)

    def _member(self) -> StoreMember:
        store = self._config.store
        return StoreMember(
            self._node,
            host=socket.gethostname(),
            pid=os.getpid(),
            is_draining=self._is_draining,
            host_bytes=store.host_bytes,
            ssd_bytes=store.ssd_bytes if store.ssd_dir else 0,
            metrics_address=self._metrics_address,
        )

    def _render(self) -> bytes:
        return self._metrics.render(self._core.status())

    def _health(self) -> dict[str, object]:
        return {"status": "draining" if self._is_draining else "ok", "node_id": self._node_id}

    # --- tasks ------------------------------------------------------------------------------------

    async def _close_size_classes(self) -> None:
        for size_class in self._size_classes.values():
            await size_class.close()

    async def _stop_server(self, server: grpc.aio.Server) -> None:
        self._answering.hang_up()
        await server.stop(FLUSH_S)
