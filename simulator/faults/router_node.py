"""The router process around the production `RouterCore`: its sessions to all members, its detection of
silence, and its clients."""

import random
from typing import cast

from baton.core.ids import RouterId, WorkerId
from baton.core.messages import Member, WorkerHello, WorkerMessage
from router.decisions.core import RouterCore
from router.decisions.events import (
    ClientGone,
    Deliver,
    Failed,
    Finished,
    FromWorker,
    Note,
    RouterAction,
    RouterEvent,
    Submit,
    Tick,
    ToWorker,
    WorkerJoined,
    WorkerLost,
    WorkerUpdated,
)
from simulator.faults.checkers import Checkers
from simulator.faults.client import Ending, SimClient
from simulator.faults.network import Network, SimProcess, SimSession
from simulator.faults.node import CoreTimer, SimWorker
from simulator.faults.reads import SimReads
from simulator.faults.run_context import RunContext, Violation
from simulator.faults.scenario import Scenario

BACKOFF_FIRST_S, BACKOFF_MAX_S = 0.05, 0.5


class MemberLink:
    """The state of the router's session to one member."""

    __slots__ = ("backoff_s", "has_hello", "last_message_s", "member", "session")

    def __init__(self, member: Member) -> None:
        self.member = member
        self.session: SimSession | None = None
        self.has_hello = False
        self.last_message_s = 0.0
        self.backoff_s = BACKOFF_FIRST_S


class SimRouter(SimProcess):
    """One life of a router process."""

    __slots__ = (
        "_checkers",
        "_links",
        "_network",
        "_reads",
        "_rng",
        "_scenario",
        "_timer",
        "core",
        "live",
        "router_id",
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
    ) -> None:
        super().__init__(run, router_id)
        self.router_id = router_id
        self._scenario, self._network, self._reads, self._checkers = scenario, network, reads, checkers
        self._rng: random.Random = run.stream(f"router/{router_id}")
        self._timer = CoreTimer(self)
        self._links: dict[WorkerId, MemberLink] = {}
        self.live: dict[str, SimClient] = {}
        self.core = RouterCore(
            config=scenario.router, rng=run.stream(f"placement/{router_id}"), now_s=self.local_clock.now_s()
        )
        self._arm()

    @property
    def process(self) -> SimProcess:
        return self

    # --- events in, actions out ---------------------------------------------------------------------

    def feed(self, event: RouterEvent) -> None:
        if not isinstance(event, Tick):
            self.run.note(self.name, event)
        for action in self.core.handle(event, now_s=self.local_clock.now_s()):
            self._perform(action)
        self._arm()
        self._checkers.after_router_event(self)

    def _arm(self) -> None:
        self._timer.arm(self.core.next_tick_s, self._tick)

    def _tick(self) -> None:
        self.feed(Tick())

    def _perform(self, action: RouterAction) -> None:
        self.run.note(self.name, action)
        match action:
            case ToWorker(worker_id, message):
                link = self._links.get(worker_id)
                if link is not None and link.session is not None:
                    link.session.send(1, message)
            case Deliver():
                self._checkers.delivered(action)
            case Finished():
                self._checkers.finished(self.name, action)
                del self.live[action.seq_id]
            case Failed():
                self._checkers.failed(self.name, action)
                del self.live[action.seq_id]
            case Note():
                self._checkers.noted(self.name, action)

    # --- clients ------------------------------------------------------------------------------------

    def accept_client(self, client: SimClient) -> None:
        """Accept a connection. The router handles the request as soon as it can; the client may leave
        before."""
        self.live[client.seq_id] = client
        self.post(lambda: self._submit(client))
        if client.leaves_after_s is not None:
            self.run.clock.after(client.leaves_after_s, lambda: self.post(lambda: self._leave(client)))

    def _submit(self, client: SimClient) -> None:
        self.feed(
            Submit(
                seq_id=client.seq_id,
                request_id=client.request_id,
                prompt=client.prompt,
                sampling=client.sampling,
                salt=client.salt_bytes,
                deadline_s=self.local_clock.now_s() + client.time_limit_s,
                task=client.task,
                priority=client.priority,
                fairness_key=f"tenant-{client.salt}",
                group=client.group,
            )
        )

    def _leave(self, client: SimClient) -> None:
        if client.ending is None:
            self.run.counts[f"left while {client.state}"] += 1
            self._checkers.ended(client, Ending.GONE)
            del self.live[client.seq_id]
            self.feed(ClientGone(client.seq_id))

    # --- membership ---------------------------------------------------------------------------------

    def set_members(self, members: dict[WorkerId, Member]) -> None:
        """Take the directory's newest view."""
        for worker_id in [w for w in self._links if w not in members]:
            link = self._links.pop(worker_id)
            self._close(link, "no longer a member")
        for worker_id, member in members.items():
            link = self._links.get(worker_id)
            if link is None:
                self._links[worker_id] = MemberLink(member)
                self._connect_later(worker_id, self._network.delay_s())
                continue
            before, link.member = link.member, member
            state, old_state = ((m.role, m.is_draining, m.is_suspect) for m in (member, before))
            if state != old_state and link.has_hello:
                self.feed(WorkerUpdated(worker_id, *state))

    # --- sessions -----------------------------------------------------------------------------------

    def _connect_later(self, worker_id: WorkerId, delay_s: float) -> None:
        self.run.clock.after(delay_s, lambda: self.post(lambda: self._connect(worker_id)))

    def _connect(self, worker_id: WorkerId) -> None:
        link = self._links.get(worker_id)
        if link is None or link.session is not None:
            return
        worker = self._reads.workers.get(worker_id)
        is_cut_off = self._network.is_cut_off(worker_id) or self._network.is_cut_off(self.name)
        if not isinstance(worker, SimWorker) or not worker.is_alive or worker.is_frozen or is_cut_off:
            link.backoff_s = min(2 * link.backoff_s, BACKOFF_MAX_S)
            self._connect_later(worker_id, link.backoff_s * self._rng.uniform(0.5, 1.5))
            return
        session = self._network.open(self, worker)
        link.session, link.has_hello = session, False
        link.last_message_s = self.run.clock.now_s
        self.run.clock.after(
            self._network.delay_s(),
            lambda: worker.post(lambda: worker.accept_router(self.router_id, session)),
        )
        self._watch(link, session)

    def _watch(self, link: MemberLink, session: SimSession) -> None:
        """Watch for silence: `worker_silence_s` without a message is a loss, whatever the session says."""
        silence_s = self._scenario.router.worker_silence_s
        due_s = link.last_message_s + silence_s + 1e-6
        self.run.clock.at(due_s, lambda: self.post(lambda: self._on_watch(link, session)))

    def _on_watch(self, link: MemberLink, session: SimSession) -> None:
        if link.session is not session:
            return
        if self.run.clock.now_s - link.last_message_s < self._scenario.router.worker_silence_s:
            self._watch(link, session)
            return
        self.run.counts["workers lost by silence"] += 1
        self._close(link, "silent")
        self._connect_later(link.member.worker_id, link.backoff_s)

    def _close(self, link: MemberLink, reason: str) -> None:
        session, link.session = link.session, None
        if session is None:
            return
        noticed_after_s = self._network.delay_s() + (self._rng.uniform(0, 1.0) if reason == "silent" else 0.0)
        session.break_off(reason, noticed_after_s=(None, noticed_after_s))
        self._lost(link, reason)

    def _lost(self, link: MemberLink, reason: str) -> None:
        if link.has_hello:
            link.has_hello = False
            self.feed(WorkerLost(link.member.worker_id, reason))

    def on_message(self, session: SimSession, message: object) -> None:
        worker_id = WorkerId(session.ends[1].process.name)
        link = self._links.get(worker_id)
        if link is None or link.session is not session:
            return
        link.last_message_s = self.run.clock.now_s
        if not link.has_hello:
            self._on_hello(link, message)
        else:
            self.feed(FromWorker(worker_id, cast(WorkerMessage, message)))

    def _on_hello(self, link: MemberLink, message: object) -> None:
        if not isinstance(message, WorkerHello):
            raise Violation(0, f"{link.member.worker_id} begins a session with {message}, not with a hello")
        link.has_hello, link.backoff_s = True, BACKOFF_FIRST_S
        self.feed(WorkerJoined(message, link.member.address))

    def on_break(self, session: SimSession, reason: str) -> None:
        worker_id = WorkerId(session.ends[1].process.name)
        link = self._links.get(worker_id)
        if link is None or link.session is not session:
            return
        link.session = None
        self._lost(link, reason)
        self._connect_later(worker_id, link.backoff_s)

    def kill(self) -> None:
        """End the process. Its clients see a broken stream, its workers a broken session."""
        self.die()
        for client in self.live.values():
            self._checkers.ended(client, Ending.BROKEN)
        self.live.clear()
        self._network.process_died(self, noticed_s=0.0)
