"""One drill: the undisturbed run, the cluster under faults, and what became of it."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from baton.config import AccessConfig, TlsConfig
from baton.core.errors import SetupError
from baton.wire.transport import secure
from benchmarks.chaos import checks, timeline
from benchmarks.chaos.answers import HeardAnswer
from benchmarks.chaos.checks import DrillFinding
from benchmarks.chaos.client import Clients
from benchmarks.chaos.cluster import ChaosCluster, DrillClusterPlan
from benchmarks.chaos.inject import Injector
from benchmarks.chaos.namespaces import command
from benchmarks.chaos.outcomes import Applied, AskedRequest, End
from benchmarks.chaos.requests import DrillRequest
from benchmarks.chaos.schedule import ROUTERS, Event
from benchmarks.chaos.timeline import ErrorCount, Pause
from benchmarks.chaos.watch import Watch
from benchmarks.parts import BatonProcess

ATTEMPTS_MAX = 60
REFERENCE_IN_FLIGHT = 8
LAST_ANSWERS_S = 300.0
"""Longest time from the last request to the end of the last answer."""
WHOLE_S, IDLE_S = 300.0, 30.0
"""Longest time from the last answer until all parts are back, and then until nothing is held."""
LOOK_S = 0.5
NEWS_S = 30.0


@dataclass(frozen=True, slots=True)
class DrillPlan:
    cluster: DrillClusterPlan
    seed: int
    events: tuple[Event, ...]
    asks: tuple[DrillRequest, ...]


class DrillResult(msgspec.Struct, frozen=True):
    """What became of a drill. Instants count from the first planned request."""

    seed: int
    requests: int
    attempts: dict[End, int]
    kinds: dict[str, int]
    placed_again: int
    """Answers that a router placed more than once, and whose client noticed nothing but a pause."""
    faults: tuple[Applied, ...]
    errors: tuple[ErrorCount, ...]
    longest_pause: Pause | None
    longest_wait: Pause | None
    """The longest time from a request to its first token, or to its end without one."""
    findings: tuple[DrillFinding, ...]
    seconds: float
    folder: str
    """The logs of all processes, and the schedule."""


Progress = Callable[[str], None]


async def run(plan: DrillPlan, *, folder: Path, progress: Progress) -> DrillResult:
    """Run a drill in `folder`, which must be empty. Raises SetupError if something does not start."""
    await command("ip", "link", "set", "lo", "up")
    progress(f"reference: {len(plan.asks)} requests on one worker, undisturbed")
    expected = await _reference(plan, folder, progress)
    cluster = ChaosCluster(plan.cluster, folder)
    secure(TlsConfig(), AccessConfig(token=str(cluster.token_file)))
    if cluster.clocks.why_not:
        progress(f"clocks are not stepped: {cluster.clocks.why_not}")
    try:
        progress("the cluster starts: three hosts, Redis, Ray, control plane, workers, stores, routers")
        await cluster.start()
        return await _Drill(plan, cluster, expected, progress).run()
    finally:
        await cluster.kill()


async def _reference(plan: DrillPlan, folder: Path, progress: Progress) -> dict[int, HeardAnswer]:
    """The answers of one worker without faults. Raises SetupError if it does not answer all."""
    common = ("--model", plan.cluster.model, "--set", "model.dtype=float32")
    common += tuple(part for s in plan.cluster.settings for part in ("--set", s))
    quiet = ("--set", "engine.threads=1", "--set", "store.host_bytes=0", "--set", "engine.self_timing_s=0.1")
    worker = BatonProcess("reference worker", ("worker", *common, *quiet), folder=folder)
    answers: dict[int, HeardAnswer] = {}
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(worker.kill)
        await worker.start()
        wait = ("--set", "router.queue_requests_max=10000")
        argv = ("router", *common, *wait, "--worker", worker.address, "--port", "0")
        router = BatonProcess("reference router", argv, folder=folder)
        stack.push_async_callback(router.kill)
        await router.start()
        clients = Clients([router.address], attempts_max=1)
        stack.push_async_callback(clients.close)
        slots = asyncio.Semaphore(REFERENCE_IN_FLIGHT)

        async def one(ask: DrillRequest) -> None:
            async with slots:
                (attempt,) = (await clients.ask(ask, lambda _: None)).attempts
            if attempt.end is not End.ANSWERED:
                raise SetupError(
                    f"the undisturbed run lost request {ask.index} ({ask.kind}): {attempt.detail}"
                )
            answers[ask.index] = attempt.answer

        tasks = [asyncio.create_task(one(ask)) for ask in plan.asks]
        tasks.append(asyncio.create_task(_news(len(plan.asks), answers, progress)))
        stack.push_async_callback(_cancel, tasks)
        await asyncio.gather(*tasks)
    return answers


async def _cancel(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _news(count: int, answers: dict[int, HeardAnswer], progress: Progress) -> None:
    while len(answers) < count:
        await asyncio.sleep(min(NEWS_S, 2.0))
        if len(answers) < count:
            progress(f"reference: {len(answers)} of {count}")


class _Drill:
    def __init__(
        self, plan: DrillPlan, cluster: ChaosCluster, expected: dict[int, HeardAnswer], progress: Progress
    ) -> None:
        self._plan, self._cluster, self._expected, self._say = plan, cluster, expected, progress
        count = plan.cluster.prefill + plan.cluster.decode
        self._watch = Watch(cluster, worker_count=count)
        self._injector = Injector(cluster, self._watch, self._progress)
        self._asked: list[AskedRequest] = []
        self._sent: list[int] = []
        self._origin_s = 0.0

    def _progress(self, text: str) -> None:
        self._say(f"[{time.monotonic() - self._origin_s:7.1f} s] {text}")

    async def run(self) -> DrillResult:
        clients = Clients(list(self._cluster.routers.values()), attempts_max=ATTEMPTS_MAX)
        await self._watch.start()
        try:
            await self._until_whole(WHOLE_S)
            self._origin_s = time.monotonic()
            self._progress(f"{len(self._plan.asks)} requests and {len(self._plan.events)} faults begin")
            async with self._news(clients):
                sending = asyncio.create_task(self._send_all(clients))
                injecting = self._injector.run(self._plan.events, origin_s=self._origin_s)
                try:
                    await asyncio.gather(sending, injecting)
                finally:
                    await _cancel([sending])
            self._progress("the last answer is there; everything has to come back and to become idle")
            missing = await self._until_whole(WHOLE_S)
            held = await self._until_idle()
        finally:
            await self._injector.undo_all()
            await self._watch.close()
            await clients.close()
        self._progress("the cluster stops")
        left = await self._cluster.stop()
        return self._result(missing, held, left)

    async def _send_all(self, clients: Clients) -> None:
        ends_s = self._origin_s + self._plan.asks[-1].at_s + LAST_ANSWERS_S
        tasks: list[asyncio.Task[AskedRequest]] = []
        try:
            for ask in self._plan.asks:
                await asyncio.sleep(max(0.0, self._origin_s + ask.at_s - time.monotonic()))
                self._sent.append(ask.index)
                tasks.append(asyncio.create_task(clients.ask(ask, self._asked.append)))
            await asyncio.wait(tasks, timeout=ends_s - time.monotonic())
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    @contextlib.asynccontextmanager
    async def _news(self, clients: Clients) -> AsyncGenerator[None]:
        async def tell() -> None:
            while True:
                await asyncio.sleep(NEWS_S)
                missing = ", ".join(sorted(self._watch.seen[-1][1])) if self._watch.seen else ""
                text = f"{len(self._asked)} of {len(self._plan.asks)} answered, {clients.in_flight} in flight"
                self._progress(text + (f"; missing: {missing}" if missing else ""))

        task = asyncio.create_task(tell())
        try:
            yield
        finally:
            task.cancel()

    async def _until_whole(self, timeout_s: float) -> frozenset[str]:
        ends_s = time.monotonic() + timeout_s
        while (missing := await self._watch.missing()) and time.monotonic() < ends_s:  # noqa: ASYNC110
            await asyncio.sleep(LOOK_S)
        return missing

    async def _until_idle(self) -> dict[str, dict[str, float]]:
        ends_s = time.monotonic() + IDLE_S
        while (held := await self._watch.held()) and time.monotonic() < ends_s:  # noqa: ASYNC110
            await asyncio.sleep(LOOK_S)
        return held

    # --- what became of it --------------------------------------------------------------------------

    def _result(
        self, missing: frozenset[str], held: dict[str, dict[str, float]], left: Sequence[str]
    ) -> DrillResult:
        now_s = time.monotonic()
        applied = [self._with_recovery(one, now_s) for one in self._injector.applied]
        deaths = {self._cluster.routers[name]: self._cluster.supervised[name].deaths_s for name in ROUTERS}
        findings = (
            *checks.check_answers(self._expected, self._asked),
            *checks.check_terminal(self._sent, self._asked, deaths),
            *checks.check_whole(map(self._watch.explain, missing)),
            *checks.check_idle(held),
            *checks.check_left_behind(left),
            *checks.check_growth(self._watch.samples),
            *checks.check_logs(self._cluster.logs()),
        )
        ends = [attempt.end for asked in self._asked for attempt in asked.attempts]
        kinds = [asked.kind for asked in self._asked]
        return DrillResult(
            seed=self._plan.seed,
            requests=len(self._asked),
            attempts={end: ends.count(end) for end in End if end in ends},
            kinds={kind: kinds.count(kind) for kind in sorted(set(kinds))},
            placed_again=sum(r.attempts[-1].answer.placements > 1 for r in self._asked),
            faults=tuple(self._from_origin(one) for one in applied),
            errors=tuple(timeline.errors(self._asked, applied)),
            longest_pause=timeline.longest_pause(self._asked, applied, origin_s=self._origin_s),
            longest_wait=timeline.longest_pause(self._asked, applied, origin_s=self._origin_s, of_first=True),
            findings=findings,
            seconds=now_s - self._origin_s,
            folder=str(self._cluster.folder),
        )

    def _with_recovery(self, applied: Applied, now_s: float) -> Applied:
        recovered_s = timeline.recovered_s(applied, self._watch.seen, now_s=now_s)
        return msgspec.structs.replace(applied, recovered_s=recovered_s)

    def _from_origin(self, applied: Applied) -> Applied:
        recovered_s = None if applied.recovered_s is None else applied.recovered_s - self._origin_s
        return msgspec.structs.replace(
            applied,
            began_s=applied.began_s - self._origin_s,
            ended_s=applied.ended_s - self._origin_s,
            recovered_s=recovered_s,
        )
