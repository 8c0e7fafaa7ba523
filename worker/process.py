"""A whole worker in one process: engine, KV pool, transfer, sessions, heartbeats, metrics."""

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from typing import Any

import grpc.aio
import msgspec

from baton.config import Config
from baton.config.served_models import served_name
from baton.core import garbage
from baton.core.errors import SetupError
from baton.core.experts import group_name
from baton.core.ids import WorkerId, replica_name
from baton.core.messages import (
    INFO_NOTE,
    Member,
    PeerHello,
    Role,
)
from baton.core.shape import Shape
from baton.core.steps import StepPlan, StepResult
from baton.core.store import StoreHello
from baton.telemetry.exporter import MetricsServer
from baton.telemetry.tracing import spans_for
from baton.wire.address import host_port, reachable_host
from baton.wire.background import Background
from baton.wire.core_driver import CoreDriver, Performers, performer, performers
from baton.wire.crash import Crash
from baton.wire.link import FLUSH_S
from baton.wire.server import start_server
from baton.wire.services import WorkerStatusReply
from baton.wire.slices import answer_soon
from decode_worker.reader import KVReader
from engine.execution.executor import Executor
from engine.execution.executor_timing import time_executor
from engine.execution.spread import Reach, Spread
from engine.execution.team import Launch
from engine.experts.access import ExpertAccess
from engine.parallel.collectives import collectives_of
from kv_transfer.part_transfer import OwnPart, PartTransfer
from kv_transfer.read import BlockRead
from prefill_worker.service import ReaderSessions
from worker import events as e
from worker.core import WorkerCore
from worker.core_sink import CoreSink
from worker.engine_thread import EngineThread
from worker.expert_rows import ExpertRows
from worker.expert_watch import ExpertWatch
from worker.memory_note import memory_note, with_pool_size
from worker.metrics import WorkerMetrics
from worker.notes import member_notes
from worker.preparation import StartPreparation
from worker.preparers import (
    THREADS,
    AdapterPreparer,
    EngineAdapters,
    GrammarPreparer,
    compiling_threads,
    warm_compiler,
)
from worker.registration import Registration
from worker.remote_parts import RemoteParts, remote_ranks
from worker.role_switch import RoleSwitcher
from worker.service import RouterSessions
from worker.spans import PhaseSpans
from worker.stage_hosts import PlacedStages
from worker.step_runner import StepRunner
from worker.store import WorkerStore
from worker.store_pool import choose_later, copies_of, stream_copies, usual_moves
from worker.transfer import grant_sender, part_transfer

log = logging.getLogger(__name__)

LAST_READ_S = 3.0
"""The longest time that the end of a worker waits for routers to read what was said last."""
LAST_STEP_S = 10.0
"""The time at the end for the step under way."""


def expert_access(
    config: Config, worker_id: WorkerId, role: Role, control_address: str
) -> ExpertAccess | None:
    """What a worker that is started in this role needs to reach the pool's expert ranks; None: it holds all
    experts itself. Raises SetupError."""
    if config.experts.parallel == "off":
        return None
    if not control_address:
        raise SetupError(
            f"experts.parallel={config.experts.parallel} needs a control plane, which says where experts "
            "are: name it with --control, or set experts.parallel=off"
        )
    group = group_name(served_name(config), role)
    start_timeout_s = config.cluster.start_timeout_s
    return ExpertAccess(control_address, group, worker_id, f"{worker_id}/0", config.experts, start_timeout_s)


class WorkerCrashed(Exception):
    """A bug or a broken device: the process must end. The cause is chained."""


class RanksLost(Exception):
    """A rank of this worker died, hangs or failed."""


class WorkerProcess:
    """A worker. Call `run` once. The clock of all decisions is `time.monotonic`."""

    def __init__(
        self,
        worker_id: WorkerId,
        role: Role,
        config: Config,
        *,
        control_address: str = "",
        port: int = 0,
        node: str = "",
        version: str = "",
        stages: PlacedStages | None = None,
        gpus: float = 0.0,
    ) -> None:
        """An empty `control_address` means no directory, `port` 0 `cluster.worker_port`. `stages`: where
        they are, if on several hosts. `gpus`: see `with_pool_size`. The others go into `Member`."""
        self._worker_id, self._role, self._config = worker_id, role, config.settled()
        self._node, self._version, self._stages, self._gpus = node, version, stages, gpus
        self._control_address, self._port = control_address, port or config.cluster.worker_port
        self._crash = Crash()
        self._idle = asyncio.Event()
        """Set while the core holds nothing for anybody."""
        self._background = Background(self._crash.report)
        self._engine, self._finishing = EngineThread(), EngineThread()
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="prepare")
        self._compiling = compiling_threads()
        self._role_now: Callable[[], Role] = lambda: role

    @property
    def role(self) -> Role:
        """The role that the worker has now."""
        return self._role_now()

    async def run(
        self, *, stop: asyncio.Event, stop_now: asyncio.Event, on_ready: Callable[[Member], None]
    ) -> None:
        """Serve until `stop` is set, drain for at most `drain_timeout_s` or until `stop_now`, clean up.

        Raises SetupError (model, device, port, transfer) before `on_ready`; WorkerCrashed afterwards.
        """
        self._loop = asyncio.get_running_loop()
        answer_soon()
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._close_engine)
            stack.callback(self._threads.shutdown, wait=False, cancel_futures=True)
            stack.callback(self._compiling.shutdown, wait=False, cancel_futures=True)
            self._config = await self._engine.run(with_pool_size, self._config, self._gpus)
            model, engine = self._config.model, self._config.engine
            self._host = reachable_host(self._config.cluster.worker_host, towards=self._control_address)
            spread, launch = self._place_ranks(stack)
            self._threads.submit(stream_copies)  # beside the load: it may compile a library
            access = expert_access(self._config, self._worker_id, self._role, self._control_address)
            executor = await self._engine.run(
                Executor.load, model, engine, spread=spread, launch=launch, access=access
            )
            stack.callback(executor.grammars.close)
            stack.push_async_callback(asyncio.to_thread, executor.close)
            executor.watch_ranks(self._on_ranks_lost)
            await self._engine.run(executor.pin)
            if not executor.on_cpu:  # a CPU is warm once it has timed itself
                self._compiling.submit(warm_compiler, executor.grammars)
                await self._engine.run(executor.warm_up)
            self._measured = await self._engine.run(time_executor, executor, engine.self_timing_s)
            self._moves = await asyncio.to_thread(usual_moves) if self._config.store.socket else None
            transfer = await self._start_transfer(stack, executor)
            self._spans = spans_for(
                self._worker_id, self._config.telemetry, facts={"baton.worker.shape": engine.shape}
            )
            stack.push_async_callback(asyncio.to_thread, self._spans.shutdown)
            self._assemble(executor, transfer)
            stack.callback(self._store.close)
            stack.push_async_callback(self._background.cancel)
            stack.callback(self._driver.close)
            stack.callback(self._kv_reader.close)
            garbage.spare_what_stays()
            self._memory_note = memory_note(executor)
            member = await self._open_doors(stack, executor)
            executor.kv.populate_in_background()
            on_ready(member)
            stack.callback(choose_later(self._moves, self._threads))
            if executor.on_cpu:  # until here the model had all of it
                self._compiling.submit(warm_compiler, executor.grammars)
            await self._serve(stop, stop_now)

    def _place_ranks(self, stack: AsyncExitStack) -> tuple[Spread | None, Launch | None]:
        """Say where stages are that are on several hosts, and how ranks of this host start that have KV which
        only they reach. Raises SetupError."""
        if self._stages is None and (ranks := remote_ranks(self._config)):
            reach = Reach(self._config.cluster.worker_host, self._host)
            parts = RemoteParts.create(self._worker_id, ranks, reach, self._config.transfer)
            self._stages = PlacedStages(None, parts)
        if self._stages is None:
            return None, None
        spread, parts = self._stages
        stack.push_async_callback(parts.close)
        are_own = collectives_of(self._config.engine.collectives, self._config.model.device) == "torch"
        return spread, parts.launch if are_own else None

    async def _start_transfer(self, stack: AsyncExitStack, executor: Executor) -> PartTransfer:
        whole, others = executor.whole_geometry, list[OwnPart]()
        if self._stages is not None:
            far = self._stages.parts
            await far.join(executor.generations, self._on_ranks_lost)
            stack.push_async_callback(far.close)  # before the followers are told to end
            others = far.parts(whole, block_count=executor.kv.block_count)
        transfer = part_transfer(
            self._worker_id, executor.parts, whole, self._config, host=self._host, others=others
        )
        stack.push_async_callback(transfer.close)
        await transfer.start()
        return transfer

    def _assemble(self, executor: Executor, transfer: PartTransfer) -> None:
        self._executor, self._transfer = executor, transfer
        self._metrics = WorkerMetrics(self._worker_id)
        counts = executor.expert_counts
        report = executor.experts.report_counts if executor.experts is not None else None
        self._experts = ExpertWatch(counts, self._engine, report) if counts is not None else None
        self._rows = ExpertRows(executor.experts) if executor.experts is not None else None
        if executor.experts is not None:
            executor.experts.watch_parking(self._on_parked)
        core = self._core = self._make_core(executor)
        self._role_now = lambda: core.status().role
        self._driver: CoreDriver[e.WorkerEvent, e.WorkerAction] = CoreDriver(
            self._core,
            tick=e.WorkerTick(),
            performers=self._performers(),
            crash=self._crash,
            observers=(PhaseSpans(self._spans, replica_name(self._worker_id)), self._metrics),
            on_handled=self._note_idle,
        )
        sink = CoreSink(self._driver.post, on_read=self._metrics.read)
        preparation = self._make_preparation(executor, sink)
        self._role_switcher = RoleSwitcher(self._driver.post, self._idle, spawn=self._background.spawn)
        self._steps = StepRunner(
            self._step,
            post=self._driver.post,
            spawn=self._background.spawn,
            crash=self._crash,
            timeout_s=self._config.engine.step_timeout_s,
            stalled_s=self._rows.stalled_s if self._rows is not None else lambda: 0.0,
        )
        self._routers = RouterSessions(
            sink=preparation, status=self._status, set_role=self._role_switcher.ask
        )
        preparation.answer = self._routers.send
        self._readers = ReaderSessions(hello=self._hello, sink=sink)
        self._kv_reader = KVReader(
            hello=self._hello,
            transfer=transfer,
            sink=sink,
            spawn=self._background.spawn,
            connect_timeout_s=self._config.transfer.read_timeout_s,
        )
        self._store = self._make_store(executor)
        self._to_reader = grant_sender(
            executor.parts,
            executor.whole_geometry,
            self._config,
            self._readers.send,
            spawn=self._background.spawn,
        )

    def _performers(self) -> Performers:
        return performers(
            e.WorkerAction,
            performer(e.ToRouter, lambda a: self._routers.send(a.router_id, a.message)),
            performer(e.ToReader, lambda a: self._to_reader(a.reader, a.message)),
            performer(e.ToOwner, lambda a: self._kv_reader.send(a.source, a.message)),
            performer(BlockRead, lambda a: self._kv_reader.start_read(a)),
            performer(e.RunStep, lambda a: self._steps.start(a)),
            performer(e.ToStore, lambda a: self._store.send(a.message)),
            performer(e.CopyToStore, lambda a: self._store.copy_to_store(a)),
            performer(e.CopyFromStore, lambda a: self._store.copy_from_store(a)),
        )

    def _note_idle(self) -> None:
        (self._idle.set if self._core.is_idle else self._idle.clear)()

    def _make_store(self, executor: Executor) -> WorkerStore:
        parts, whole = executor.parts, executor.whole_geometry
        return WorkerStore(
            "" if executor.has_remote_parts else self._config.store.socket,
            hello=StoreHello(self._worker_id, executor.fingerprint, whole.block_bytes),
            open_copies=copies_of(parts, whole, self._moves),
            block_count=executor.kv.block_count,
            post=self._driver.post,
        )

    def _make_preparation(self, executor: Executor, core: CoreSink) -> StartPreparation:
        engine = self._config.engine
        loader = EngineAdapters(executor, self._engine)
        adapters = AdapterPreparer(
            loader, self._threads, count_max=engine.adapters_max, in_use=self._core.adapters_in_use
        )
        return StartPreparation(
            core,
            (GrammarPreparer(executor.grammars, self._compiling, prepare_s=engine.prepare_s), adapters),
            spawn=self._background.spawn,
            prepare_s=engine.prepare_s,
            pending_max=engine.waiting_sequences_max,
            is_draining=lambda: self._core.status().is_draining,
        )

    def _make_core(self, executor: Executor) -> WorkerCore:
        cluster = self._config.cluster
        return WorkerCore(
            worker_id=self._worker_id,
            role=self._role,
            model=executor.model_name,
            fingerprint=executor.fingerprint,
            block_tokens=executor.geometry.block_tokens,
            block_bytes=executor.whole_geometry.block_bytes,
            block_count=executor.kv.block_count,
            max_model_tokens=executor.max_model_tokens,
            engine=self._config.engine,
            transfer=self._config.transfer,
            store=self._config.store,
            router_grace_s=cluster.router_grace_s,
            heartbeat_s=cluster.heartbeat_s,
            generations=executor.generations,
            now_s=time.monotonic(),
            host=socket.gethostname(),
            measured=self._measured,
            floor_s=executor.floor_s,
        )

    async def _open_doors(self, stack: AsyncExitStack, executor: Executor) -> Member:
        host = self._config.cluster.worker_host
        server, port = await start_server(host, self._port, worker=self._routers, peer=self._readers)
        stack.push_async_callback(self._stop_server, server)
        metrics = MetricsServer(
            render=self._render_metrics,
            health=self._health,
            is_ready=lambda: self._core.status().state == "ok",
        )
        await metrics.start(host, self._config.cluster.worker_metrics_port)
        stack.push_async_callback(metrics.close)
        self._member = Member(
            worker_id=self._worker_id,
            role=self._role,
            address=host_port(self._host, port),
            model=executor.model_name,
            fingerprint=executor.fingerprint,
            metrics_address=host_port(self._host, metrics.port),
            host=socket.gethostname(),
            pid=os.getpid(),
            notes=self._notes(),
            node=self._node,
            version=self._version,
            shape=self._config.engine.shape,
        )
        if self._control_address:
            registration = Registration(
                self._control_address, self._current_member, period_s=self._config.cluster.heartbeat_s
            )
            stack.push_async_callback(registration.leave)
            stack.callback(self._background.spawn(registration.run()).cancel)
        if self._store.is_configured:
            self._background.spawn(self._store.run())
        if self._experts is not None:
            self._background.spawn(self._experts.run())
        return self._member

    async def _serve(self, stop: asyncio.Event, stop_now: asyncio.Event) -> None:
        await self._until(stop)
        log.info("the worker drains for at most %g s", self._config.cluster.drain_timeout_s)
        self._role_switcher.close()
        self._driver.post(e.Drain())
        try:
            async with asyncio.timeout(self._config.cluster.drain_timeout_s):
                await self._until(self._idle, stop_now)
        except TimeoutError:
            log.warning("the worker is not drained in time: %s", self._core.status())

    async def _until(self, *events: asyncio.Event) -> None:
        """Wait for one of them. Raises WorkerCrashed, with its cause, when core, engine or a task fails."""
        try:
            await self._crash.race(*events)
        except Exception as cause:
            raise WorkerCrashed(f"{type(cause).__name__}: {cause}") from cause

    async def _step(self, plan: StepPlan) -> StepResult:
        result = await self._engine.run(self._executor.begin, plan)
        if not isinstance(result, StepResult):  # other stages go on with it while this one begins the next
            result = await self._finishing.run(self._executor.finish, result)
        if self._rows is not None:
            result = self._rows.timed(result)
            self._metrics.expert_wait(self._rows.waited_s())
        self._metrics.step(plan, result)
        return result

    # --- what others ask --------------------------------------------------------------------------

    def _hello(self) -> PeerHello:
        return PeerHello(self._worker_id, self._executor.fingerprint, self._transfer.offers())

    def _current_member(self) -> Member:
        status = self._core.status()
        return msgspec.structs.replace(
            self._member, role=status.role, is_draining=status.is_draining, notes=self._notes()
        )

    def _status(self) -> WorkerStatusReply:
        status = self._core.status()
        return WorkerStatusReply(
            worker_id=self._worker_id,
            role=status.role,
            is_draining=status.is_draining,
            fingerprint=self._executor.fingerprint,
            accounts=self._accounts(),
            notes=self._notes(),
        )

    def _notes(self) -> tuple[str, ...]:
        parked = self._rows.notes() if self._rows is not None else ()
        engine = (*parked, *self._executor.notes, *self._store.notes(), self._memory_note)
        if self._executor.has_remote_parts:
            engine += (f"{INFO_NOTE}KV is on several hosts or devices: none is stored",)
        return member_notes(engine, self._transfer.left_out)

    def _accounts(self) -> dict[str, float]:
        status = self._core.status()
        facts: dict[str, Any] = msgspec.structs.asdict(status)
        accounts = {name: float(value) for name, value in facts.items() if isinstance(value, int)}
        accounts["pid"] = os.getpid()
        shape = Shape.parse(self._config.engine.shape)
        accounts["rank_count"], accounts["context_rank_count"] = shape.rank_count, shape.context
        accounts["weight_loads"] = Executor.load_count
        accounts["block_count"] = self._executor.kv.block_count
        accounts["block_bytes"] = self._executor.whole_geometry.block_bytes
        accounts["source_count"] = self._kv_reader.owner_count
        accounts["reader_count"] = self._readers.reader_count
        if self._executor.offloading is not None:
            accounts |= self._executor.offloading.accounts()
        accounts |= self._metrics.totals() | self._store.accounts() | status.store.accounts()
        if self._experts is not None:
            accounts |= self._experts.load.accounts()
        if self._rows is not None:
            accounts |= self._rows.accounts()
        for backend, counters in self._transfer.counters.items():
            accounts[f"transfer.{backend}.bytes_read"] = counters.bytes_read
            accounts[f"transfer.{backend}.reads_ok"] = counters.reads_ok
            accounts[f"transfer.{backend}.reads_failed"] = counters.reads_failed + counters.reads_stale
            accounts[f"transfer.{backend}.reads_corrupt"] = counters.reads_corrupt
        for backend, count in self._transfer.peer_counts.items():
            accounts[f"transfer.{backend}.peers"] = count
        return accounts

    def _render_metrics(self) -> bytes:
        self._metrics.accounts(self._accounts(), self._transfer.counters)
        if self._experts is not None:
            self._metrics.experts(self._experts.load)
        return self._metrics.meter.render()

    def _health(self) -> dict[str, object]:
        return {"status": self._core.status().state, "worker_id": self._worker_id}

    # --- tasks ------------------------------------------------------------------------------------

    async def _stop_server(self, server: grpc.aio.Server) -> None:
        """Stop the server. Messages sent last are still delivered, for at most LAST_READ_S and FLUSH_S."""
        await self._routers.end(LAST_READ_S)
        self._readers.hang_up()
        await server.stop(FLUSH_S)

    def _on_parked(self, is_parked: bool) -> None:
        """Another thread calls it."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: the worker ends anyway
            self._loop.call_soon_threadsafe(lambda: self._driver.post(e.SetParked(is_parked)))

    def _on_ranks_lost(self, reason: str) -> None:
        """Ranks die together, and the control plane starts them anew as one worker. Any thread may call."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: the worker ends anyway
            self._loop.call_soon_threadsafe(self._ranks_lost, reason)

    def _ranks_lost(self, reason: str) -> None:
        if self._stages is not None:
            self._stages.parts.lost(reason)  # reads into them end now
        self._crash.report(RanksLost(reason))

    async def _close_engine(self) -> None:
        for thread in (self._finishing, self._engine):
            if not await thread.close(timeout_s=LAST_STEP_S):
                log.error("the engine thread hangs and is left behind")
