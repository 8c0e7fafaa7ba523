"""An expert rank's process: it follows the control plane's orders beside the engine that computes.

The rank goes on computing while the control plane is away, and says hello again when it is back. It ends when
it is told to, when its engine fails, or when the control plane stays away and nobody sends rows any more.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from typing import Any, Protocol, TypeVar

from baton.config import Config
from baton.core.errors import PeerFailure, SetupError
from baton.core.experts import (
    ExpertDropOrder,
    ExpertLoaded,
    ExpertLoadFailed,
    ExpertLoadOrder,
    ExpertRankBeat,
    ExpertRankHello,
    ExpertRankRef,
    ExpertRankRetired,
)
from baton.core.ids import ExpertRankId
from baton.wire.address import reachable_host
from baton.wire.experts import RankStream, rank_stream
from baton.wire.link import LinkBroken
from baton.wire.serving import serve_until
from control_plane.ray_experts import ExpertRankSpec
from engine.experts.memory import RankFull
from engine.experts.rank import ExpertRankEngine
from engine.model_files.read_spec import load_spec
from engine.model_files.resolve import FILES_WITHOUT_WEIGHTS, resolve_model

log = logging.getLogger(__name__)

LOAD_THREADS = 4
"""Experts that are loaded at once."""
BEAT_S = 0.1
RETRY_S = 0.2
"""Time between two attempts to reach the control plane."""
AWAY_S = 60.0
"""The rank ends when the control plane was away, and no rows came, for so long."""


_T = TypeVar("_T")


class RankEngine(Protocol):
    """See `engine.experts.rank.ExpertRankEngine`."""

    @property
    def layer_count(self) -> int: ...
    @property
    def expert_count(self) -> int: ...
    @property
    def expert_bytes(self) -> int: ...
    @property
    def group_count(self) -> int: ...
    @property
    def held(self) -> tuple[int, ...]: ...
    @property
    def rows(self) -> int: ...
    @property
    def busy_s(self) -> float: ...
    @property
    def slots(self) -> int: ...
    @property
    def slots_max(self) -> int: ...
    @property
    def failure(self) -> BaseException | None: ...

    def load_expert(self, expert: int, source: ExpertRankRef | None = None) -> bool: ...

    def drop_expert(self, expert: int) -> None: ...


class ExpertRankFailed(Exception):
    """The engine computes no more; its error is chained."""


class RankOrders:
    """Does what the control plane orders. Orders for one expert are done in order, and those for others
    beside one another.

    Answers go to the stream that the order came by, since another control plane gives loads other numbers.
    """

    def __init__(self, engine: RankEngine, threads: ThreadPoolExecutor) -> None:
        self._engine, self._threads = engine, threads
        self._last: dict[int, asyncio.Task[None]] = {}
        """The last order for each expert that is not done."""
        self._dropped: set[asyncio.Task[None]] = set()
        """Loads that have not begun and need not."""

    @property
    def held(self) -> tuple[int, ...]:
        """Experts that are held and will be, as far as has been ordered."""
        return tuple(expert for expert in self._engine.held if expert not in self._last)

    def load(self, order: ExpertLoadOrder, link: RankStream) -> None:
        self._then(order.expert, lambda: self._load(order, link))

    def drop(self, expert: int) -> None:
        if (before := self._last.get(expert)) is not None:
            self._dropped.add(before)
        self._then(expert, lambda: self._run(self._engine.drop_expert, expert))

    def abandon(self) -> None:
        """The stream is over: whoever comes next does not know of what is being loaded."""
        for expert in list(self._last):
            self.drop(expert)

    def _then(self, expert: int, make: Callable[[], Coroutine[Any, Any, None]]) -> None:
        before = self._last.get(expert)

        async def run() -> None:
            if before is not None:
                await asyncio.wait({before})
            task = asyncio.current_task()
            try:
                if task not in self._dropped:
                    await make()
            finally:
                self._dropped.discard(task)  # pyright: ignore[reportArgumentType] - this runs in a task
                if self._last.get(expert) is task:
                    del self._last[expert]

        self._last[expert] = asyncio.create_task(run(), name=f"expert {expert}")

    async def _load(self, order: ExpertLoadOrder, link: RankStream) -> None:
        answer: ExpertLoaded | ExpertLoadFailed
        try:
            is_copied = await self._run(self._engine.load_expert, order.expert, order.source)
            answer = ExpertLoaded(order.load_id, order.expert, is_copied=is_copied)
        except RankFull as error:
            log.warning("expert %d is not loaded: %s", order.expert, error)
            answer = ExpertLoadFailed(order.load_id, order.expert, str(error), is_full=True)
        except (SetupError, PeerFailure, MemoryError, OSError) as error:
            log.warning("expert %d cannot be loaded: %s", order.expert, error)
            reason = str(error) or type(error).__name__
            answer = ExpertLoadFailed(order.load_id, order.expert, reason)
        try:
            link.send(answer)
        except LinkBroken:
            return  # the next control plane asks anew

    async def _run(self, call: Callable[..., _T], *arguments: Any) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call, *arguments)

    async def close(self) -> None:
        tasks = list(self._last.values())
        self._dropped.update(tasks)
        if tasks:
            await asyncio.wait(tasks)


class ExpertRankService:
    """Keeps a stream to the control plane. Call `run` once."""

    def __init__(
        self, engine: RankEngine, hello: ExpertRankHello, address: str, threads: ThreadPoolExecutor
    ) -> None:
        self._engine, self._hello, self._address = engine, hello, address
        self.orders = RankOrders(engine, threads)

    async def run(self, *, away_s: float = AWAY_S, retry_s: float = RETRY_S) -> str:
        """Follow orders until the rank shall end, and return why. Raises ExpertRankFailed."""
        loop, rows, quiet_since_s = asyncio.get_running_loop(), -1, 0.0
        has_told = False
        while True:
            try:
                async with rank_stream(self._address, self._now()) as link:
                    if (reason := await self._follow(link)) is not None:
                        return reason
            except LinkBroken as error:
                if not has_told:
                    log.warning("the control plane is away, going on without: %s", error)
                has_told = True
            finally:
                self.orders.abandon()
            self._check()
            if rows != self._engine.rows:
                rows, quiet_since_s = self._engine.rows, loop.time()
            if loop.time() - quiet_since_s >= away_s:
                return f"no control plane and no rows for {away_s:g} s"
            await asyncio.sleep(retry_s)

    def _now(self) -> ExpertRankHello:
        hello = self._hello
        return ExpertRankHello(
            *(hello.ref, hello.group, hello.node, hello.pid, hello.layer_count, hello.expert_count),
            *(hello.expert_bytes, hello.slots, self.orders.held, hello.group_count, hello.slots_max),
        )

    async def _follow(self, link: RankStream) -> str | None:
        """Follow the orders of one stream until it ends. Return why the rank shall end, if it shall."""
        has_failed, retired = asyncio.Event(), list[str]()

        async def read() -> None:
            async for order in link:
                match order:
                    case ExpertLoadOrder():
                        self.orders.load(order, link)
                    case ExpertDropOrder(expert):
                        self.orders.drop(expert)
                    case ExpertRankRetired(reason):
                        retired.append(reason)
                        return

        beats = asyncio.create_task(self._beat(link, has_failed))
        try:
            await serve_until(has_failed, read())
        finally:
            beats.cancel()
            await asyncio.wait({beats})
        return retired[0] if retired else None

    async def _beat(self, link: RankStream, has_failed: asyncio.Event) -> None:
        """Show signs of life as long as the engine computes."""
        while self._engine.failure is None:
            try:
                link.send(ExpertRankBeat(self._engine.rows, self._engine.busy_s))
            except LinkBroken:
                return
            await asyncio.sleep(BEAT_S)
        has_failed.set()

    def _check(self) -> None:
        if self._engine.failure is not None:
            raise ExpertRankFailed(str(self._engine.failure)) from self._engine.failure


async def run_expert_rank(spec: ExpertRankSpec, config: Config, *, node: str) -> str:
    """Run one rank until it shall end, and return why. Raises SetupError and ExpertRankFailed."""
    import os

    async with AsyncExitStack() as stack:
        threads = ThreadPoolExecutor(LOAD_THREADS, thread_name_prefix="load-expert")
        stack.callback(threads.shutdown, wait=False, cancel_futures=True)
        engine = await asyncio.to_thread(_open, spec, config)
        stack.push_async_callback(asyncio.to_thread, engine.close)
        listen = config.cluster.worker_host
        reached_at = reachable_host(listen, towards=spec.control_address)
        rank_id = ExpertRankId(spec.rank_id)
        ref = await asyncio.to_thread(engine.start, host=listen, rank_id=rank_id, reached_at=reached_at)
        hello = ExpertRankHello(
            *(ref, spec.group, node, os.getpid(), engine.layer_count, engine.expert_count),
            *(engine.expert_bytes, engine.slots, (), engine.group_count, engine.slots_max),
        )
        service = ExpertRankService(engine, hello, spec.control_address, threads)
        stack.push_async_callback(service.orders.close)
        return await service.run()


def _open(spec: ExpertRankSpec, config: Config) -> ExpertRankEngine:
    """Open the model with memory for this rank's share of the experts. Raises SetupError."""
    folder = resolve_model(config.model.path, config.model.revision, files=FILES_WITHOUT_WEIGHTS)
    moe = load_spec(folder).moe
    count = moe.expert_count if moe is not None else 1  # a model without experts is refused below
    experts = config.experts.model_copy(update={"threads": spec.threads})
    slots = min(count, -int(-count * experts.replicas // spec.ranks))
    return ExpertRankEngine.load(config.model, config.engine, experts, slots=max(1, slots))
