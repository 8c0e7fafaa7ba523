"""A router's connections over the simulated network: to workers, and to the other routers that it follows."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Protocol, cast

from baton.core.errors import IncompatiblePeer
from baton.core.ids import RouterId, WorkerId
from baton.core.messages import LoadReport, RouterMessage, StepOutput, WorkerHello, WorkerMessage
from baton.core.sharing import RouterUpdate
from baton.wire.link import LinkBroken
from router.live.peers.publisher import PeerPublisher
from simulator.faults.network import Network, SimProcess, SimSession
from simulator.faults.node import SimWorker
from simulator.faults.virtual_loop import VirtualLoop

ADDRESS = "sim:"
"""Beginning of every address; the rest is the name of the process."""


class LoopProcess(Protocol):
    """A process with an event loop of its own."""

    loop: VirtualLoop
    reports_lost_until_s: dict[str, float]
    """Workers whose load reports do not arrive, and until when."""

    @property
    def process(self) -> SimProcess: ...

    def run_loop(self) -> None: ...


class Inbox:
    """The messages of one session that a coroutine has not read."""

    def __init__(self, owner: LoopProcess, peer: str) -> None:
        self._owner, self._peer = owner, peer
        self._messages: asyncio.Queue[object | None] = asyncio.Queue()
        self._broken = ""

    @property
    def process(self) -> SimProcess:
        return self._owner.process

    async def next(self) -> object:
        """Return the next message. Raises LinkBroken once the session is broken and all is read."""
        message = await self._messages.get()
        if message is None:
            raise LinkBroken(self._broken)
        return message

    def on_message(self, session: SimSession, message: object) -> None:
        if isinstance(message, LoadReport) and self.process.run.clock.now_s < self._unreported_until_s():
            message = StepOutput(())  # the worker is heard, and says nothing of its load
        self._put(message)

    def _unreported_until_s(self) -> float:
        return self._owner.reports_lost_until_s.get(self._peer, 0.0)

    def on_break(self, session: SimSession, reason: str) -> None:
        self._broken = reason
        self._put(None)

    def _put(self, message: object | None) -> None:
        with self._owner.loop.entered():
            self._messages.put_nowait(message)
        self._owner.run_loop()


class SimWorkerLink:
    """An open session to a worker, as `router.live.sessions` uses it."""

    def __init__(self, session: SimSession, inbox: Inbox) -> None:
        self._session, self._inbox = session, inbox

    def send(self, message: RouterMessage) -> None:
        if not self._session.is_open:
            raise LinkBroken("the session is broken")
        self._session.send(1, message)

    async def __aiter__(self) -> AsyncIterator[WorkerMessage]:
        while True:
            yield cast(WorkerMessage, await self._inbox.next())


class WorkerDialer:
    """Opens sessions from one router to workers."""

    def __init__(
        self, owner: LoopProcess, network: Network, workers: Mapping[WorkerId, object], *, timeout_s: float
    ) -> None:
        self._owner, self._network, self._workers = owner, network, workers
        self._timeout_s = timeout_s
        self._rng = owner.process.run.stream(f"dial/{owner.process.name}")

    @asynccontextmanager
    async def dial(
        self, address: str, router_id: RouterId
    ) -> AsyncGenerator[tuple[WorkerHello, SimWorkerLink]]:
        network, me = self._network, self._owner.process
        await asyncio.sleep(2 * network.delay_s())
        worker = self._workers.get(WorkerId(address.removeprefix(ADDRESS)))
        if not isinstance(worker, SimWorker) or not _can_connect(network, me, worker):
            raise LinkBroken("nobody answers")
        inbox = Inbox(self._owner, worker.name)
        session = network.open(inbox, worker)
        accept = lambda: worker.post(lambda: worker.accept_router(router_id, session))  # noqa: E731
        me.run.clock.after(network.delay_s(), accept)
        try:
            async with asyncio.timeout(self._timeout_s):
                hello = await inbox.next()
            if not isinstance(hello, WorkerHello):
                raise IncompatiblePeer(f"{worker.name} begins a session with {hello}, not with a hello")
            yield hello, SimWorkerLink(session, inbox)
        except TimeoutError:
            raise LinkBroken("no hello in time") from None
        finally:
            # The other end of a silent session may learn of its end much later.
            session.break_off(
                "closed by the router",
                noticed_after_s=(None, network.delay_s() + self._rng.choice((0.0, 1.0)) * self._rng.random()),
            )


class PublishedRouter(LoopProcess, Protocol):
    """A router that others follow."""

    publisher: PeerPublisher


class FollowerEnd:
    """The followed router's end of a session with a follower."""

    def __init__(self, router: PublishedRouter) -> None:
        self._router = router
        self._task: asyncio.Task[None] | None = None

    @property
    def process(self) -> SimProcess:
        return self._router.process

    def serve(self, session: SimSession, follower: RouterId) -> None:
        if session.is_open:
            self._task = self._router.loop.spawn(self._serve(session, follower), f"follower {follower}")
            self._router.run_loop()

    async def _serve(self, session: SimSession, follower: RouterId) -> None:
        async for update in self._router.publisher.follow(follower):
            session.send(0, update)
        session.break_off("dropped by the followed router", noticed_after_s=(0.001, None))

    def on_message(self, session: SimSession, message: object) -> None:
        raise AssertionError("followers say nothing")

    def on_break(self, session: SimSession, reason: str) -> None:
        if self._task is not None:
            with self._router.loop.entered():
                self._task.cancel()
            self._router.run_loop()


class RouterDirectory(Protocol):
    """Finds routers by their names."""

    def router_named(self, name: str) -> PublishedRouter | None: ...


class PeerDialer:
    """Opens sessions from one router to others."""

    def __init__(self, owner: LoopProcess, network: Network, directory: RouterDirectory) -> None:
        self._owner, self._network, self._directory = owner, network, directory

    async def follow(self, address: str, router_id: RouterId) -> AsyncGenerator[RouterUpdate]:
        network, me = self._network, self._owner.process
        await asyncio.sleep(2 * network.delay_s())
        other = self._directory.router_named(address.removeprefix(ADDRESS))
        if other is None or not _can_connect(network, me, other.process):
            raise LinkBroken("nobody answers")
        inbox, end = Inbox(self._owner, other.process.name), FollowerEnd(other)
        session = network.open(inbox, end)
        serve = lambda: other.process.post(lambda: end.serve(session, router_id))  # noqa: E731
        me.run.clock.after(network.delay_s(), serve)
        try:
            while True:
                yield cast(RouterUpdate, await inbox.next())
        finally:
            session.break_off("closed by the follower", noticed_after_s=(None, network.delay_s()))


def _can_connect(network: Network, me: SimProcess, other: SimProcess) -> bool:
    is_cut_off = network.is_cut_off(me.name) or network.is_cut_off(other.name)
    return other.is_alive and not other.is_frozen and not is_cut_off
