"""The router process: everything of the production router but its sockets, on an event loop in virtual time.

The HTTP application, the driver, the sessions with workers, the exchange of loads with other routers and the
counting of budgets are the production objects. Simulated are the network below them, the tokenizer, and what
a thread would do.
"""

import random
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import cast

from baton.config.router import RouterConfig
from baton.core.ids import RouterId, WorkerId
from baton.core.messages import Member, MembershipView
from baton.core.sharing import RouterMember
from baton.telemetry.metrics import Meter
from baton.telemetry.tracing import Spans
from router.decisions.core import RouterCore
from router.decisions.events import RouterAction, RouterEvent
from router.decisions.membership import FollowedMembership
from router.http.authentication import AccessControl, AuthenticationMiddleware
from router.http.embeddings import EmbeddingRequest
from router.http.generation import CompletionRequest
from router.http.observe import RequestRecorder
from router.http.request import EndpointApp
from router.http.service import Service
from router.live.driver import Driver
from router.live.drivers import Drivers
from router.live.peers.follower import PeerFollower
from router.live.peers.publisher import PeerPublisher
from router.live.recent_requests import RecentRequests
from router.live.sessions import WorkerSessions
from router.openai.adapters import Adapters, ServedAdapter
from router.tenants.budgets import Budgets, LocalBudgets, SharedBudgets
from router.tenants.keyring import LiveKeys
from router.tenants.keys import KeyBook
from router.text.model_card import ModelCard
from router.text.parsers.select import Parsers
from router.text.tokenizer import Tokenizer
from simulator.faults.checkers import Checkers
from simulator.faults.client import Ending, RequestKind, SimClient
from simulator.faults.exchange import Exchange
from simulator.faults.model import EOS, VOCABULARY, text_of
from simulator.faults.network import Network, SimProcess
from simulator.faults.node import CoreTimer
from simulator.faults.reads import SimReads
from simulator.faults.router_links import ADDRESS, PeerDialer, RouterDirectory, WorkerDialer
from simulator.faults.run_context import RunContext
from simulator.faults.scenario import MODEL_NAME, Scenario
from simulator.faults.tenancy import ADAPTERS, key_book, key_of
from simulator.faults.virtual_loop import VirtualLoop

SLICES_S = (0.0, 0.0, 0.0, 0.00005, 0.0005)
"""Times that a piece of work of the flusher seems to take."""


class SimTokenizer:
    """Every token is one character."""

    special_ids = frozenset({EOS})

    def __init__(self, context_tokens: int) -> None:
        self.card = ModelCard(context_tokens, VOCABULARY, (EOS,), hidden_size=3)

    def decode(self, ids: list[int]) -> str:
        return text_of(ids)

    def token_bytes(self, token: int) -> bytes:
        return text_of((token,)).encode()

    def ids_of_special(self, contents: Sequence[str]) -> frozenset[int]:
        return frozenset()


class SimAdapters(Adapters):
    """The first `count` adapters are loaded."""

    def __init__(self, card: ModelCard, count: int) -> None:
        super().__init__(MODEL_NAME, card, rank_max=16)
        self._adapters = {ref.name: ServedAdapter(ref, 0) for ref in ADAPTERS[:count]}


class BookSource:
    """A file of keys that never changes."""

    look_s = 5.0

    def __init__(self, book: KeyBook) -> None:
        self._book = book

    async def read(self, *, first: bool) -> KeyBook | None:
        return self._book if first else None

    async def close(self) -> None:
        pass


class WatchedCore(RouterCore):
    """The production core. The checkers see every event and action of it."""

    watch: Callable[[RouterEvent, list[RouterAction]], None]
    before: Callable[[RouterEvent], None]
    is_muted = False
    """The process is dead, and what still runs of it has no effect."""

    def handle(self, event: RouterEvent, *, now_s: float) -> list[RouterAction]:
        if self.is_muted:
            return []
        self.before(event)
        actions = super().handle(event, now_s=now_s)
        self.watch(event, actions)
        return actions


class SimRouter(SimProcess):
    """One life of a router process."""

    __slots__ = (
        "_access",
        "_background",
        "_checkers",
        "_done",
        "_network",
        "_parts",
        "_rng",
        "_scenario",
        "_services",
        "_timer",
        "_views",
        "core",
        "driver",
        "follower",
        "live",
        "loop",
        "meter",
        "publisher",
        "reports_lost_until_s",
        "router_id",
        "sessions",
        "thawed_s",
    )

    def __init__(
        self,
        run: RunContext,
        router_id: RouterId,
        *,
        scenario: Scenario,
        network: Network,
        reads: SimReads,
        checkers: Checkers,
        directory: RouterDirectory,
        budgets: Budgets | None,
    ) -> None:
        """`budgets` are shared with other routers; None: the router counts alone."""
        super().__init__(run, router_id)
        self.router_id = router_id
        self._scenario, self._network, self._checkers = scenario, network, checkers
        self._rng: random.Random = run.stream(f"router/{router_id}")
        self._timer = CoreTimer(self)
        self._views = 0
        self.reports_lost_until_s: dict[str, float] = {}
        self.thawed_s = 0.0
        self._done: list[SimClient] = []
        self.live: dict[str, SimClient] = {}
        self.loop = VirtualLoop(self.local_clock.now_s)
        self._parts = AsyncExitStack()
        with self.loop.entered():
            self._build(network, reads, directory, budgets)
        checkers.quotas.router_started(is_shared=budgets is not None)
        self._background = self.loop.spawn(self._start(), "start")
        self.run_loop()

    def _build(
        self, network: Network, reads: SimReads, directory: RouterDirectory, budgets: Budgets | None
    ) -> None:
        scenario, run = self._scenario, self.run
        self.meter = Meter()
        recent = RecentRequests(now_s=self.loop.time, unix_s=self.loop.time)
        observer = RequestRecorder(self.meter, Spans(None), recent, model=MODEL_NAME)
        self.core = WatchedCore(
            config=scenario.router,
            rng=run.stream(f"placement/{self.router_id}"),
            now_s=self.local_clock.now_s(),
            slo=scenario.slo,
        )
        self.core.before, self.core.watch = self._before, self._watch
        self.driver = Driver(self.core, on_note=observer.on_note, slice_clock=self._slice_clock)
        drivers = Drivers({MODEL_NAME: self.driver})
        keys = LiveKeys(BookSource(key_book(scenario.tenants)))
        shared = LocalBudgets() if budgets is None else SharedBudgets(budgets)
        self._access = AccessControl(keys, shared, router_id=self.router_id)
        hasty = scenario.router.model_copy(update={"request_timeout_s": scenario.hasty_s})
        self._services = [self._service(config, observer) for config in (scenario.router, hasty)]
        dialer = WorkerDialer(self, network, reads.workers, timeout_s=scenario.connect_timeout_s)
        self.sessions = WorkerSessions(
            drivers,
            FollowedMembership(),
            router_id=self.router_id,
            silence_s=scenario.router.worker_silence_s,
            dial=dialer.dial,
        )
        self.publisher = PeerPublisher(drivers, self.router_id, recent)
        peers = PeerDialer(self, network, directory)
        self.follower = PeerFollower(drivers, self.router_id, follow=peers.follow)

    def _service(self, config: RouterConfig, observer: RequestRecorder) -> Service:
        tokenizer = SimTokenizer(self._scenario.max_model_tokens)
        return Service(
            config=config,
            slo=self._scenario.slo,
            model=MODEL_NAME,
            model_path="",
            driver=self.driver,
            tokenizer=cast(Tokenizer, tokenizer),
            observer=observer,
            parsers=Parsers(),
            adapters=SimAdapters(tokenizer.card, self._scenario.adapter_count),
            access=self._access,
        )

    async def _start(self) -> None:
        assert self._access.keys is not None
        await self._access.keys.open()
        await self._parts.enter_async_context(self.sessions)
        await self._parts.enter_async_context(self.follower)
        self.loop.spawn(self.publisher.run(), "publisher")

    @property
    def process(self) -> SimProcess:
        return self

    def _slice_clock(self) -> float:
        return self.loop.time() + self._rng.choice(SLICES_S)

    # --- the loop -----------------------------------------------------------------------------------

    def run_loop(self) -> None:
        """Let the loop do what is due now, and look at what came of it."""
        if not self.is_alive:
            return
        self.loop.run_due()
        if (error := self.driver.defect) is not None:
            raise error
        for error in self.loop.errors:
            raise error
        done, self._done = self._done, []
        for client in done:
            self._answered(client)
        self._checkers.router_rested(self)
        self._timer.arm(self.loop.next_timer_s, self.run_loop)

    def _before(self, event: RouterEvent) -> None:
        self.run.note(self.name, event)
        self._checkers.before_router_event(self, event)

    def _watch(self, event: RouterEvent, actions: list[RouterAction]) -> None:
        for action in actions:
            self.run.note(self.name, action)
        self._checkers.after_router_event(self, event, actions)

    # --- clients ------------------------------------------------------------------------------------

    def accept_client(self, client: SimClient) -> None:
        """Accept a connection. The router handles the request as soon as it can; the client may leave
        before."""
        self.live[client.name] = client
        client.router_name = self.name
        client.exchange = Exchange(client.body, now_s=lambda: self.run.clock.now_s)
        self.post(lambda: self._begin(client))
        if client.leaves_after_s is not None:
            self.run.clock.after(client.leaves_after_s, lambda: self.post(lambda: self._leave(client)))

    def _begin(self, client: SimClient) -> None:
        exchange = client.exchange
        assert exchange is not None
        client.arrived_s = self.run.clock.now_s
        self._checkers.arrived(self, client)
        if client.is_slow:
            with self.loop.entered():
                exchange.stop_reading()
            self.run.clock.after(
                self._rng.uniform(0.2, 6.0), lambda: self.post(lambda: self._read_on(client))
            )
        kind = EmbeddingRequest if client.kind is RequestKind.EMBEDDING else CompletionRequest
        app = EndpointApp(self._services[client.is_hasty], kind, "", new_id=lambda: client.name)
        guarded = AuthenticationMiddleware(app, self._access)
        scope = exchange.scope(client.path, key_of(client.tenant))
        task = self.loop.spawn(guarded(scope, exchange.receive, exchange.send), client.name)

        def done(_: object) -> None:
            if not task.cancelled() and (error := task.exception()) is not None:
                self.loop.errors.append(error)
            exchange.is_done = True
            self._done.append(client)

        task.add_done_callback(done)
        self.run_loop()

    def _read_on(self, client: SimClient) -> None:
        assert client.exchange is not None
        with self.loop.entered():
            client.exchange.read_on()
        self.run_loop()

    def _leave(self, client: SimClient) -> None:
        exchange = client.exchange
        if client.ending is not None or exchange is None or exchange.is_complete:
            return
        self._checkers.left(client)
        with self.loop.entered():
            exchange.leave()
        self.run_loop()

    def _answered(self, client: SimClient) -> None:
        del self.live[client.name]
        self._checkers.answered(self, client)

    def thaw(self, *, mistrust_s: float = 0.0) -> None:
        self.thawed_s = self.run.clock.now_s
        super().thaw(mistrust_s=mistrust_s)

    # --- membership ---------------------------------------------------------------------------------

    def set_members(self, members: dict[WorkerId, Member], routers: Sequence[str]) -> None:
        """Take the directory's newest view."""
        self._views += 1
        listed = tuple(RouterMember(RouterId(name), ADDRESS + name) for name in routers)
        view = MembershipView("sim", self._views, tuple(members.values()), listed)
        with self.loop.entered():
            self.sessions.on_view(view)
            self.follower.on_view(view)
        self.run_loop()

    # --- the end ------------------------------------------------------------------------------------

    def kill(self) -> None:
        """End the process. Its clients see a broken stream, its workers a broken session."""
        self.die()
        self.core.is_muted = True
        for client in self.live.values():
            if client.exchange is not None and client.exchange.is_complete:
                self._checkers.answered(self, client)
            elif client.ending is None:
                self._checkers.ended(client, Ending.BROKEN)
        self._checkers.router_died(self)
        self.live.clear()
        self._network.process_died(self, noticed_s=0.0)
        self.close()

    def close(self) -> None:
        """Let every task end, without any effect."""
        self.core.is_muted = True
        self.loop.end_tasks()
