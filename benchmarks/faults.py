"""Replays a trace while a node is lost, the control plane is killed, Redis restarts and all workers are
replaced.

Every answer is compared with that of an undisturbed run on one worker: greedy decoding in float32 has only
one answer.
"""

import asyncio
import contextlib
import re
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from baton.config import StoreConfig
from baton.core.errors import SetupError
from baton.core.messages import Role
from baton.core.operate import ClusterState, Decision, Order, Outcome, RollOut, Version
from baton.wire.link import LinkBroken
from baton.wire.operate import OperateClient
from benchmarks.faults_parts import RayNodes, Redis, Serve
from kv_store.directory.connect import connect
from kv_store.directory.interface import Directory, DirectoryLost
from loadgen.files import read_records, read_run
from loadgen.records import RequestRecord
from loadgen.report import Report

HEAL_S = 120.0
"""Longest time after a fault until everything wanted runs again."""

START_S = 30.0
"""Time for the replay to read its trace and to send the first request."""

REPLAY_END_S = 300.0
"""Time for the last answers after the last request was sent."""

SAID_LINES = 40
"""Lines of a failed replay that are shown, at most."""

_PROGRESS = re.compile(r"replay (\d+) s: ")

ASK_AGAIN_S = 0.25
REDIS_AWAY_S = 1.0
NEXT_VERSION = Version("2", ("engine.waiting_sequences_max=128",))
LOG_LINES_MAX = 400
OF_CONTROL = (" control ", " serve ")
"""Processes whose log lines describe decisions."""


@dataclass(frozen=True, slots=True)
class FaultsPlan:
    """The options of the bench."""

    model: str
    trace: str
    """Trace of `baton replay`."""
    replay: tuple[str, ...]
    """Other options of the replay, which select requests and times."""
    reference: tuple[str, ...]
    """Options of the undisturbed run; another rate is possible."""
    counts: dict[Role, int]
    settings: tuple[str, ...]
    """SECTION.FIELD=VALUE settings of both servers."""
    faults_at_s: tuple[float, float, float, float]
    """Seconds after the first request for: node lost, control plane killed, Redis restarted, roll-out. A
    fault waits until the earlier one is healed."""
    length_s: float
    """Longest time from the first request to the last, in either run."""
    html: Path | None = None
    """File of the replay's page."""


class InjectedFault(msgspec.Struct, frozen=True):
    name: str
    what: str
    at_s: float
    """Seconds since the first planned instant of the replay."""
    healed_after_s: float
    """Seconds until everything wanted ran again."""


class FaultsResult(msgspec.Struct, frozen=True):
    report: Report
    faults: tuple[InjectedFault, ...]
    decisions: tuple[Decision, ...]
    placed_again: int
    """Requests that were placed more than once."""
    state: ClusterState
    """The state at the end."""
    log: tuple[str, ...]
    """Log lines of control plane and supervisor about their actions and reasons."""


class ClusterWatch:
    """The cluster's latest state, also across restarts of its control plane."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._changed = asyncio.Event()
        self.state: ClusterState | None = None
        self.is_connected = False
        """The control plane answers, and `state` is of now."""

    async def run(self) -> None:
        while True:
            client = OperateClient(self._address)
            try:
                async for state in client.changes():
                    self.state, self.is_connected = state, True
                    self._changed.set()
                    self._changed = asyncio.Event()
            except LinkBroken:
                pass
            finally:
                self.is_connected = False
                await client.close()
            await asyncio.sleep(ASK_AGAIN_S)

    async def until(self, holds: Callable[[ClusterState], bool], what: str) -> ClusterState:
        """Wait until it holds. Raises SetupError after HEAL_S."""
        try:
            async with asyncio.timeout(HEAL_S):
                while self.state is None or not holds(self.state):
                    await self._changed.wait()
        except TimeoutError:
            raise SetupError(f"{what}: not reached within {HEAL_S:g} s") from None
        return self.state


@dataclass
class _FaultyCluster:
    """The parts that faults are applied to."""

    serve: Serve
    nodes: RayNodes
    redis: Redis
    directory: Directory
    watch: ClusterWatch
    counts: dict[Role, int]
    progress: Callable[[str], None]
    struck: list[tuple[str, str, float, float]] = field(default_factory=list[tuple[str, str, float, float]])
    """Name, description, Unix time, and seconds until healed."""

    async def strike(self, name: str, fault: Callable[[], Awaitable[str]]) -> None:
        self.progress(name)
        at_s, began_s = time.time(), time.monotonic()
        what = await fault()
        healed_s = time.monotonic() - began_s
        self.struck.append((name, what, at_s, healed_s))
        self.progress(f"{name}: {what}; all running again after {healed_s:.1f} s")

    def _is_whole(self, state: ClusterState) -> bool:
        return state.is_settled and len(state.replicas) == sum(self.counts.values())

    async def lose_node(self) -> str:
        state = await self.watch.until(self._is_whole, "all workers")
        victims = sorted((r for r in state.replicas if r.role is not Role.PREFILL), key=lambda r: r.name)
        node = (victims or list(state.replicas))[0].node
        gone = {r.worker_id for r in state.replicas if r.node == node}
        count = await asyncio.to_thread(self.nodes.lose, node)

        def healed(now: ClusterState) -> bool:
            here = {r.worker_id for r in now.replicas}
            return self._is_whole(now) and not gone & here and node not in {r.node for r in now.replicas}

        await self.watch.until(healed, f"all workers, without node {node}")
        return f"{node[:12]} with {', '.join(sorted(map(str, gone)))}, {count} processes"

    async def kill_control_plane(self) -> str:
        state = await self.watch.until(self._is_whole, "all workers")
        process = self.serve.control_process()
        if process is None:
            raise SetupError("the control plane is gone already")
        workers = {r.worker_id for r in state.replicas}
        process.kill()
        after = await self.watch.until(
            lambda now: now.life != state.life and self._is_whole(now), "another control plane"
        )
        kept = workers & {r.worker_id for r in after.replicas}
        return f"process {process.pid}; the next one adopted {len(kept)} of {len(workers)} workers"

    async def restart_redis(self) -> str:
        before = await _members(self.directory)
        await self.redis.kill()
        await asyncio.sleep(REDIS_AWAY_S)
        await self.redis.start()
        try:
            async with asyncio.timeout(HEAL_S):
                while await _members(self.directory) != before:  # noqa: ASYNC110  # Redis sends no notification
                    await asyncio.sleep(ASK_AGAIN_S)
        except TimeoutError:
            raise SetupError(
                f"{len(before)} store nodes did not return to Redis within {HEAL_S:g} s"
            ) from None
        return f"empty after {REDIS_AWAY_S:g} s; store nodes that registered again: {len(before)}"

    async def roll_out(self) -> str:
        client = OperateClient(self.serve.control_address)
        try:
            order = Order(RollOut(NEXT_VERSION), "drill", "a rolling upgrade under load")
            decision = await client.order(order)
        except LinkBroken as error:
            raise SetupError(f"the control plane does not answer: {error}") from None
        finally:
            await client.close()
        if decision.outcome is not Outcome.ACCEPTED:
            raise SetupError(f"the roll-out was {decision.outcome}: {decision.text}")

        def done(now: ClusterState) -> bool:
            versions = {r.version for r in now.replicas}
            return self._is_whole(now) and versions == {NEXT_VERSION.name}

        await self.watch.until(done, f"all workers in version {NEXT_VERSION.name}")
        return f"all workers are version {NEXT_VERSION.name}"


async def _members(directory: Directory) -> set[str]:
    try:
        return {member.node.address for member in await directory.members()}
    except DirectoryLost:
        return set()


async def run(
    drill: FaultsPlan, *, folder: Path, nodes: RayNodes, progress: Callable[[str], None]
) -> FaultsResult:
    """Run the bench in `folder`, which must be empty, for sockets and records. Raises SetupError if something
    does not start, or a fault is not healed."""
    before = folder / "undisturbed.jsonl"
    await _undisturbed(drill, before, progress)
    async with AsyncExitStack() as stack:
        redis = Redis(folder)
        await redis.start()
        stack.push_async_callback(redis.kill)
        workers = [part for role in Role for part in (f"--{role}", str(drill.counts.get(role, 0)))]
        sets = _sets([*drill.settings, f"store.directory={redis.url}"])
        serve = Serve("the cluster", drill.model, [*workers, "--ray-address", nodes.address, *sets])
        stack.push_async_callback(serve.stop)
        progress(f"starting {sum(drill.counts.values())} workers on {len(nodes.nodes)} Ray nodes")
        await serve.start()
        directory = await connect(StoreConfig(directory=redis.url), control_address="")
        stack.push_async_callback(directory.close)
        watch = ClusterWatch(serve.control_address)
        watching = asyncio.create_task(watch.run())
        stack.callback(watching.cancel)
        cluster = _FaultyCluster(serve, nodes, redis, directory, watch, drill.counts, progress)
        records, report = await _disturbed(drill, cluster, folder, before)
        state = await watch.until(lambda now: now.is_settled, "all workers at the end")
    return _result(cluster, records, report, state)


async def _undisturbed(drill: FaultsPlan, records: Path, progress: Callable[[str], None]) -> None:
    progress("the undisturbed run, on one worker without a store")
    sets = _sets([*drill.settings, "store.host_bytes=0"])
    serve = Serve("the undisturbed server", drill.model, ["--aggregated", "1", *sets])
    try:
        await serve.start()
        argv = (drill.trace, *drill.reference, "--url", serve.url, "--records", str(records))
        await _replay(argv, records.with_suffix(".json"), drill.length_s)
    finally:
        await serve.stop()
    lost = [r.index for r in read_records(records) if not r.answer]
    if lost:
        raise SetupError(f"the undisturbed run lost requests {lost[:10]}: give it a lower rate")


async def _disturbed(
    drill: FaultsPlan, cluster: _FaultyCluster, folder: Path, before: Path
) -> tuple[list[RequestRecord], Report]:
    records, report = folder / "disturbed.jsonl", folder / "disturbed.json"
    files = ["--records", str(records), "--same-answers-as", str(before)]
    files += ["--html", str(drill.html)] if drill.html else []
    argv = (drill.trace, *drill.replay, "--url", cluster.serve.url, *files)
    faults = (
        ("node lost", cluster.lose_node),
        ("control plane killed", cluster.kill_control_plane),
        ("Redis restarted", cluster.restart_redis),
        ("rolling upgrade", cluster.roll_out),
    )
    began: asyncio.Future[float] = asyncio.get_running_loop().create_future()

    def on_progress(began_s: float) -> None:
        if not began.done():
            began.set_result(began_s)

    async def strike() -> None:
        # The replay says when it began: how long its start takes depends on what else the machine does.
        began_s = await began
        for at_s, (name, fault) in zip(drill.faults_at_s, faults, strict=True):
            await asyncio.sleep(max(0.0, began_s + at_s - time.monotonic()))
            await cluster.strike(name, fault)

    replay = _replay(argv, report, drill.length_s, on_progress)
    tasks = [asyncio.create_task(replay), asyncio.create_task(strike())]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return read_records(records), read_run(report)


async def _replay(
    argv: Sequence[str], report: Path, length_s: float, on_progress: Callable[[float], None] | None = None
) -> None:
    """on_progress: told when the replay began (by this process's monotonic clock), with each line about its
    progress. Raises SetupError if it made no report. The caller judges its content."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "baton", "replay", *argv, "--json", str(report)),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stderr is not None
    said: deque[str] = deque(maxlen=SAID_LINES)
    try:
        async with asyncio.timeout(START_S + length_s + REPLAY_END_S):
            async for line in process.stderr:
                said.append(line.decode(errors="replace"))
                if on_progress is not None and (progress := _PROGRESS.match(said[-1])):
                    on_progress(time.monotonic() - float(progress[1]))
            await process.wait()
    except TimeoutError:
        raise SetupError(
            f"the replay has not ended {REPLAY_END_S:g} s after its last request left: give it a lower --rate"
        ) from None
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    if not report.exists():  # noqa: ASYNC240  # at once, and nobody else waits
        raise SetupError(f"the replay failed: {''.join(said)[-1000:]}")


def _result(
    cluster: _FaultyCluster, records: list[RequestRecord], report: Report, state: ClusterState
) -> FaultsResult:
    origin_s = report.began_at_s or 0.0
    faults = tuple(
        InjectedFault(n, what, at_s - origin_s, healed_s) for n, what, at_s, healed_s in cluster.struck
    )
    lines = [line for line in cluster.serve.log if any(who in line for who in OF_CONTROL)]
    placed_again = sum((r.attempts or 1) > 1 for r in records)
    log = tuple(lines[-LOG_LINES_MAX:])
    return FaultsResult(report, faults, state.decisions, placed_again, state, log)


def _sets(settings: Sequence[str]) -> list[str]:
    return [part for setting in settings for part in ("--set", setting)]
