"""Applies the events of a schedule to the cluster."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Awaitable, Callable, Sequence

import psutil

from baton.core.errors import SetupError
from baton.core.messages import Role
from baton.core.operate import (
    Action,
    DrainWorker,
    Order,
    ReplicaState,
    ReplicaStatus,
    RollOut,
    SwitchRole,
    Version,
)
from baton.wire.link import LinkBroken
from baton.wire.operate import OperateClient
from benchmarks.chaos.cluster import ChaosCluster
from benchmarks.chaos.links import BLACKHOLE
from benchmarks.chaos.outcomes import Applied
from benchmarks.chaos.processes import freeze, thaw
from benchmarks.chaos.schedule import WORKER, Event, FaultKind
from benchmarks.chaos.watch import Watch

AWAY = "it was away already"
FILLER = "filler"
VERSION_SETTING = "engine.waiting_sequences_max=128"
"""What the rolling upgrade changes: something that no answer depends on."""


class Injector:
    def __init__(self, cluster: ChaosCluster, watch: Watch, on_applied: Callable[[str], None]) -> None:
        self._cluster, self._watch, self._say = cluster, watch, on_applied
        self.applied: list[Applied] = []
        self._frozen: list[psutil.Process] = []

    async def run(self, events: Sequence[Event], *, origin_s: float) -> None:
        """Apply every event at its instant. Events may overlap."""
        tasks: list[asyncio.Task[None]] = []
        try:
            for event in events:
                await asyncio.sleep(max(0.0, origin_s + event.at_s - time.monotonic()))
                tasks.append(asyncio.create_task(self._one(event)))
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _one(self, event: Event) -> None:
        began_s = time.monotonic()
        try:
            what = await self._apply(event)
        except (SetupError, LinkBroken, psutil.NoSuchProcess, OSError) as error:
            what = f"not applied: {error}"
        self.applied.append(Applied(event, what, began_s, time.monotonic(), None))
        self._say(f"{event.number:4d}  {event.text}  {what}")

    async def _apply(self, event: Event) -> str:
        apply: dict[FaultKind, Callable[[Event], Awaitable[str]]] = {
            FaultKind.KILL: self._kill,
            FaultKind.FREEZE: self._freeze,
            FaultKind.LOSE_HOST: self._lose_host,
            FaultKind.FILL_DISK: self._fill_disk,
            FaultKind.CUT: self._disturb,
            FaultKind.ONE_WAY: self._disturb,
            FaultKind.SLOW: self._disturb,
            FaultKind.CLOCK: self._step_clock,
            FaultKind.FLUSH: self._flush,
            FaultKind.DRAIN: self._drain,
            FaultKind.SWITCH: self._switch,
            FaultKind.ROLL_OUT: self._roll_out,
        }
        return await apply[event.fault](event)

    # --- processes ----------------------------------------------------------------------------------

    def _process(self, event: Event) -> psutil.Process | None:
        if event.target != WORKER:
            return self._cluster.process(event.target)
        workers = self._cluster.workers()
        return workers[event.pick % len(workers)] if workers else None

    async def _kill(self, event: Event) -> str:
        process = self._process(event)
        if process is None:
            return AWAY
        text = self._cluster.describe(process)
        process.kill()
        return text

    async def _freeze(self, event: Event) -> str:
        process = self._process(event)
        if process is None:
            return AWAY
        text = self._cluster.describe(process)
        freeze(process)
        self._frozen.append(process)
        try:
            await asyncio.sleep(event.for_s)
            is_alive = process.is_running()
        finally:
            self._frozen.remove(process)
            with contextlib.suppress(psutil.NoSuchProcess):
                thaw(process)
        return text if is_alive else f"{text}, which was killed meanwhile"

    async def _lose_host(self, event: Event) -> str:
        count = len(self._cluster.hosts[event.target].processes())
        await self._cluster.lose(event.target)
        return f"{count} processes"

    # --- machines -----------------------------------------------------------------------------------

    async def _fill_disk(self, event: Event) -> str:
        folder = self._cluster.disk(event.target)
        filler = folder / FILLER
        space = os.statvfs(folder)
        free = space.f_bavail * space.f_bsize
        try:
            with filler.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, free)
            await asyncio.sleep(event.for_s)
        finally:
            filler.unlink(missing_ok=True)
        return f"{free >> 20} MiB were free"

    async def _disturb(self, event: Event) -> str:
        links = self._cluster.links
        how = links.slow(event.amount) if event.fault is FaultKind.SLOW else BLACKHOLE
        if event.fault is FaultKind.ONE_WAY:
            ways = [tuple(event.target.split(">"))]
        else:
            a, b = event.target.split("-")
            ways = [(a, b), (b, a)]
        for a, b in ways:
            await links.break_(a, b, how)
        try:
            await asyncio.sleep(event.for_s)
        finally:
            for a, b in ways:
                await links.mend(a, b, how)
        return how[0]

    async def _step_clock(self, event: Event) -> str:
        clocks = self._cluster.clocks
        if clocks.why_not:
            return f"not applied: {clocks.why_not}"
        before_s = clocks.offsets_s[event.target]
        clocks.step(event.target, event.amount)
        return f"it was {before_s:+.0f} s"

    async def _flush(self, event: Event) -> str:
        return await self._cluster.redis_command("FLUSHALL")

    # --- orders -------------------------------------------------------------------------------------

    async def _order(self, action: Action) -> str:
        client = OperateClient(self._cluster.control_address)
        try:
            decision = await client.order(Order(action, "drill", "a drill"))
        finally:
            await client.close()
        return f"{decision.outcome}: {decision.text}"

    def _replica(self, event: Event) -> ReplicaStatus | None:
        state = self._watch.control.state
        running = [r for r in state.replicas if r.state is ReplicaState.RUNNING] if state else []
        return sorted(running, key=lambda r: r.name)[event.pick % len(running)] if running else None

    async def _drain(self, event: Event) -> str:
        replica = self._replica(event)
        return AWAY if replica is None else f"{replica.name}, {await self._order(DrainWorker(replica.name))}"

    async def _switch(self, event: Event) -> str:
        replica = self._replica(event)
        if replica is None:
            return AWAY
        other = Role.DECODE if replica.role is Role.PREFILL else Role.PREFILL
        there = await self._order(SwitchRole(replica.name, other))
        await asyncio.sleep(event.for_s)
        back = await self._order(SwitchRole(replica.name, replica.role))
        return f"{replica.name} to {other}, {there}; and back, {back}"

    async def _roll_out(self, event: Event) -> str:
        return await self._order(RollOut(Version(f"drill-{event.number}", (VERSION_SETTING,))))

    async def undo_all(self) -> None:
        """Thaw and mend what an interrupted drill left."""
        for process in self._frozen:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGCONT)
        await self._cluster.links.mend_all()
