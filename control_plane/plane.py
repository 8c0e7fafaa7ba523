"""The IO of the control plane: directory service and replicas around their two pure cores."""

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping
from itertools import product
from typing import Any, Protocol, cast

import msgspec

from baton.config import ClusterConfig
from baton.core.errors import SetupError
from baton.core.ids import ExpertRankId, WorkerId, replica_name
from baton.core.messages import INFO_NOTE, Member, MembershipView, Role
from baton.core.operate import (
    AutoscaleState,
    ClusterState,
    Decision,
    NodeState,
    Order,
    Outcome,
    Pool,
    RollOut,
    RouterState,
    pool_of,
)
from baton.core.sharing import RouterMember
from baton.telemetry import catalogue
from baton.telemetry.metrics import Meter
from baton.wire.core_driver import CoreDriver, performer, performers
from baton.wire.crash import Crash
from control_plane import membership as mb
from control_plane import reconcile_events as ev
from control_plane.autoscaler.values import AutoscalerMemory
from control_plane.desired import describe
from control_plane.expert_groups import ExpertGroups
from control_plane.expert_orders import ExpertAction, OrderRefused, group_for, is_of_experts, wanted_after
from control_plane.orders import ControlRecord, Orders
from control_plane.reconcile import Reconciler, ReplicaState, RestartPolicy

log = logging.getLogger(__name__)

WATCH_KEEPALIVE_S = 1.0
"""A watcher gets a message at least this often, so silence means that the directory is gone."""


DRAINED = "drained"
"""Exit reason of a worker that was asked to end, as `WorkerActor.serve` returns it."""

DECISIONS_SHOWN = 50
"""Number of latest decisions in each state that is sent."""

PROGRESS_S, PROGRESS_SHOWN = 15.0, 8
"""Seconds between two lines about workers that are not ready at the start, and workers named in one."""

NOTES_MAX = 1000
"""Number of distinct worker notes that are logged and remembered."""


class Replicas(Protocol):
    """Worker processes, see `ray_ops.RayReplicas`."""

    def start(self, start: ev.StartReplica) -> None: ...

    async def switch_role(self, worker_id: WorkerId, role: Role, address: str) -> None:
        """Let a worker finish what it holds, then take the role."""
        ...

    async def drain(self, worker_id: WorkerId) -> None: ...

    async def kill(self, worker_id: WorkerId) -> None: ...


def restart_policy(config: ClusterConfig) -> RestartPolicy:
    return RestartPolicy(
        backoff_s=config.restart_backoff_s,
        backoff_max_s=config.restart_backoff_max_s,
        start_timeout_s=config.start_timeout_s,
        drain_timeout_s=config.drain_timeout_s,
        stable_s=config.restart_stable_s,
    )


class ControlPlane:
    """The control plane of one cluster. It implements `baton.wire.server.DirectoryHandler` and
    `desired.Operations`; `on_exit` is called for each dead process.

    `spawn` runs a coroutine whose unexpected exception ends the process.
    """

    def __init__(
        self,
        config: ClusterConfig,
        *,
        life: str,
        replicas: Replicas,
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        meter: Meter | None = None,
        remember: Callable[[ControlRecord], None] = lambda record: None,
        check: Callable[[Pool], str] = lambda pool: "",
        crash: Crash | None = None,
    ) -> None:
        """`remember` gets the state that must outlive this process, each time it changes. `check` raises
        SetupError for a pool whose version cannot be started, and returns what should be known about it. An
        error in the decisions goes to `crash`."""
        self.book = mb.ClusterMembership(life, config.member_lease_s, config.member_suspect_s)
        self.reconciler = Reconciler(policy=restart_policy(config), life=life)
        self.orders = Orders()
        self.nodes: tuple[NodeState, ...] = ()
        self.autoscale: tuple[AutoscaleState, ...] = ()
        """State of each model's autoscaler, set by the one that runs them; empty if none does."""
        self.experts: ExpertGroups | None = None
        """The groups of expert ranks; None if no model has any."""
        self._remember, self._check = remember, check
        self.setup_error: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """First setup error that the operator must resolve before any worker can start."""
        self._replicas, self._spawn = replicas, spawn
        self.meter = meter or Meter()
        self._changed = asyncio.Event()
        self._watches = 0
        """Number of watches ever begun."""
        self._logged_notes: set[str] = set()
        """Notes of workers that were logged."""
        self._drive(crash or Crash())

    def _drive(self, crash: Crash) -> None:
        """Connect the two cores, membership and replicas: an action of one is an event of the other."""
        self._membership: CoreDriver[mb.MembershipEvent, mb.MembershipChange] = CoreDriver(
            self.book,
            tick=mb.MembershipTick(),
            performers=performers(
                mb.MembershipChange,
                performer(mb.Appeared, self._on_appeared),
                performer(mb.Updated, lambda change: self._replica_event(ev.MemberSeen(change.member))),
                performer(mb.Suspected, self._on_suspected),
                performer(mb.Lapsed, self._on_lapsed),
                performer(mb.ViewChanged, lambda _: self._notify()),
            ),
            crash=crash,
            paused=mb.DirectoryPaused,
        )
        self._replication: CoreDriver[ev.ReconcileEvent, ev.ReconcileAction] = CoreDriver(
            self.reconciler,
            tick=ev.ReconcileTick(),
            performers=performers(
                ev.ReconcileAction,
                performer(ev.StartReplica, self._start),
                performer(ev.SwitchReplicaRole, self._switch_role),
                performer(ev.DrainReplica, self._drain),
                performer(ev.KillReplica, self._kill),
            ),
            crash=crash,
            on_handled=self._on_reconciled,
        )
        self._member_event, self._replica_event = self._membership.post, self._replication.post

    # --- directory --------------------------------------------------------------------------------

    def renew(self, member: Member) -> None:
        self._member_event(mb.LeaseRenewed(member))

    def leave(self, worker_id: WorkerId) -> None:
        self._member_event(mb.WorkerLeft(worker_id))

    async def watch(self, member: RouterMember) -> AsyncIterator[MembershipView]:
        self._watches += 1
        watch = self._watches
        if member.address:
            where = (member.router_id, member.metrics_address)
            log.info("router %s joined, metrics at http://%s/metrics", *where)
            self._member_event(mb.RouterWatchStarted(member, watch))
        try:
            while True:
                changed, view = self._changed, self.book.view
                yield view
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(WATCH_KEEPALIVE_S):
                        await changed.wait()
        finally:
            self._member_event(mb.RouterWatchEnded(member.router_id, watch))

    # --- replicas ---------------------------------------------------------------------------------

    def want(self, pools: Iterable[Pool], *, record: ControlRecord | None = None) -> None:
        """Set the configured pools, once at the start and after `adopt`. `record` is what an earlier control
        plane kept."""
        self._replica_event(self.orders.begin(pools, record))
        self._remember(self.orders.record())

    def adopt(self, worker: ev.Adopted) -> None:
        """Take over a live worker that an earlier control plane started."""
        log.info("worker %s of an earlier control plane was adopted", worker.worker_id)
        self._replica_event(worker)
        # It may have renewed its lease before it was adopted, and then its next renewals change nothing.
        for member in self.book.view.members:
            if member.worker_id == worker.worker_id:
                self._replica_event(ev.MemberSeen(member))

    def on_nodes(self, nodes: Iterable[NodeState]) -> None:
        before, self.nodes = self.nodes, tuple(nodes)
        if before != self.nodes:
            self._notify()

    # --- operations -------------------------------------------------------------------------------

    def order(self, order: Order) -> Decision:
        decision, events = self._decide(order)
        level = logging.WARNING if decision.outcome is Outcome.REFUSED else logging.INFO
        reason = f" ({order.reason})" if order.reason else ""
        words = describe(order.action)
        log.log(
            level, "%s, ordered by %s%s - %s: %s", words, order.who, reason, decision.outcome, decision.text
        )
        for event in events:
            self._replica_event(event)
        self._remember(self.orders.record())
        self._notify()
        entries = self.orders.log.entries
        return next((d for d in reversed(entries) if d.number == decision.number), decision)

    def _decide(self, order: Order) -> tuple[Decision, list[ev.ReconcileEvent]]:
        pool = self._pool_of(order.action.model) if isinstance(order.action, RollOut) else None
        note = ""
        if isinstance(order.action, RollOut) and pool is not None:
            try:
                note = self._check(msgspec.structs.replace(pool, version=order.action.version))
            except SetupError as error:
                return self.orders.refuse(order, str(error), at_s=time.time()), []
        state = self.state()
        if not is_of_experts(order.action) or self.experts is None:
            return self.orders.take(order, state, at_s=time.time(), note=note)
        return self._decide_on_experts(order, state, self.experts), []

    def _decide_on_experts(self, order: Order, state: ClusterState, experts: ExpertGroups) -> Decision:
        action = cast(ExpertAction, order.action)
        try:
            group = group_for(action, state)
            experts.check(action, group)
        except OrderRefused as error:
            return self.orders.refuse(order, str(error), at_s=time.time())
        decision, _ = self.orders.take(order, state, at_s=time.time())
        if decision.outcome is Outcome.ACCEPTED:
            experts.carry_out(action, group.group, wanted_after(action, group))
            self._follow_pools()
        return decision

    def _pool_of(self, model: str) -> Pool | None:
        return pool_of(self.orders.pools, model)

    def state(self) -> ClusterState:
        avoid = self.orders.avoid
        return ClusterState(
            life=self.book.directory_life,
            pools=self.orders.pools,
            replicas=tuple(self.reconciler.status(now_s=time.monotonic())),
            nodes=tuple(msgspec.structs.replace(n, is_drained=n.node in avoid) for n in self.nodes),
            decisions=self.orders.log.entries[-DECISIONS_SHOWN:],
            is_settled=self.reconciler.is_settled,
            autoscale=self.autoscale,
            routers=tuple(
                RouterState(r.router_id, r.address, r.metrics_address, r.host) for r in self.book.view.routers
            ),
            experts=self.experts.states() if self.experts is not None else (),
        )

    async def changes(self) -> AsyncIterator[ClusterState]:
        while True:
            changed = self._changed
            yield self.state()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(WATCH_KEEPALIVE_S):
                    await changed.wait()

    # --- for the autoscaler ---------------------------------------------------------------------------

    @property
    def memories(self) -> Mapping[str, AutoscalerMemory]:
        """The autoscaler's memory by model."""
        return self.orders.memories

    def remember(self, memories: Mapping[str, AutoscalerMemory]) -> None:
        self.orders.memories = {**self.orders.memories, **memories}
        self._remember(self.orders.record())

    # --- processes --------------------------------------------------------------------------------

    def on_exit(self, worker_id: WorkerId, reason: BaseException | str) -> None:
        """Note that a process is dead. Routers are notified at once, not after a lease."""
        self._note_setup_error(reason)
        text = reason if isinstance(reason, str) else f"{type(reason).__name__}: {reason}"
        if not isinstance(reason, SetupError):  # a setup error is printed once, as the command's last line
            level = logging.INFO if reason == DRAINED else logging.WARNING
            log.log(level, "worker %s ended: %s", worker_id, text)
        self._member_event(mb.WorkerLeft(worker_id))
        self._replica_event(ev.ReplicaExited(worker_id, text))

    def on_expert_rank_exit(self, rank_id: ExpertRankId, reason: BaseException | str) -> None:
        """Note that the process of an expert rank is dead."""
        self._note_setup_error(reason)
        if self.experts is not None:
            self.experts.on_exit(rank_id, reason)

    def _note_setup_error(self, reason: BaseException | str) -> None:
        if isinstance(reason, SetupError) and not self.setup_error.done():
            self.setup_error.set_result(str(reason))

    async def until_settled(self) -> None:
        """Wait until every wanted replica serves, and log every PROGRESS_S for which ones."""
        while not self.reconciler.is_settled:
            try:
                async with asyncio.timeout(PROGRESS_S):
                    while not self.reconciler.is_settled:
                        await self._changed.wait()
            except TimeoutError:
                self._log_progress()

    def _log_progress(self) -> None:
        replicas = list(self.reconciler.status(now_s=time.monotonic()))
        missing = [r for r in replicas if r.state is not ReplicaState.RUNNING]
        shown = ", ".join(f"{r.name} ({r.state} for {r.for_s:.0f} s)" for r in missing[:PROGRESS_SHOWN])
        more = f" and {len(missing) - PROGRESS_SHOWN} more" if len(missing) > PROGRESS_SHOWN else ""
        log.info("%d of %d workers are not ready: %s%s", len(missing), len(replicas), shown, more)

    def close(self) -> None:
        """Stop starting and killing replicas; the directory goes on."""
        if self.experts is not None:
            self.experts.close()
        self._replication.close()
        self._membership.stop_ticks()

    # --- events in, actions out -------------------------------------------------------------------

    def _on_appeared(self, change: mb.Appeared) -> None:
        member = change.member
        where = (member.worker_id, member.address, member.metrics_address)
        log.info("worker %s joined at %s, metrics at http://%s/metrics", *where)
        self._log_notes(member)
        self._replica_event(ev.MemberSeen(member))

    def _on_suspected(self, change: mb.Suspected) -> None:
        log.warning("worker %s missed heartbeats; it gets no new requests", change.member.worker_id)
        self._replica_event(ev.MemberSilent(change.member.worker_id))

    def _on_lapsed(self, change: mb.Lapsed) -> None:
        log.warning("worker %s did not renew its lease", change.member.worker_id)
        self._replica_event(ev.LeaseLapsed(change.member.worker_id))

    def _log_notes(self, member: Member) -> None:
        """Log each note once, since replicas mostly report the same, and again after every restart."""
        for note in member.notes:
            if note in self._logged_notes or len(self._logged_notes) >= NOTES_MAX:
                continue
            self._logged_notes.add(note)
            level = logging.INFO if note.startswith(INFO_NOTE) else logging.WARNING
            log.log(level, "worker %s: %s", member.worker_id, note.removeprefix(INFO_NOTE))

    def _on_reconciled(self) -> None:
        self._follow_pools()
        self._follow_orders()
        self._count()
        self._notify()

    def on_experts(self) -> None:
        """Note that expert ranks changed."""
        self._follow_orders()
        self._notify()

    def _follow_pools(self) -> None:
        """Have the expert ranks that the pools' workers need."""
        if self.experts is not None:
            self.experts.follow(self.orders.pools, self.orders.avoid, self.orders.expert_ranks)

    def _follow_orders(self) -> None:
        if not self.orders.is_any_pending:
            return
        ended = self.orders.progress(self.state(), at_s=time.time())
        for decision in ended:
            words = (describe(decision.action), decision.outcome, decision.done_after_s, decision.text)
            log.info("%s - %s after %.2f s: %s", *words)
        if ended:
            self._remember(self.orders.record())

    def _start(self, action: ev.StartReplica) -> None:
        worker_id, reason = action.worker_id, action.reason
        if reason == "wanted":
            log.info("worker %s starts and loads %s", worker_id, action.model)
        else:
            log.info("worker %s starts: %s", worker_id, reason)
            replica = replica_name(worker_id)
            self.meter.inc(catalogue.RESTARTS, replica=replica, cause=reason.split(":")[0])
        self._replicas.start(action)

    def _switch_role(self, action: ev.SwitchReplicaRole) -> None:
        log.info("worker %s switches to %s: %s", action.worker_id, action.role, action.reason)
        address = self._address_of(action.worker_id)
        self._spawn(self._replicas.switch_role(action.worker_id, action.role, address))

    def _drain(self, action: ev.DrainReplica) -> None:
        log.info("worker %s drains: %s", action.worker_id, action.reason)
        self._spawn(self._replicas.drain(action.worker_id))

    def _kill(self, action: ev.KillReplica) -> None:
        log.warning("worker %s is being killed: %s", action.worker_id, action.reason)
        # Routers stop using it at once, and its later renewals do not bring it back.
        self._member_event(mb.WorkerLeft(action.worker_id))
        self._spawn(self._replicas.kill(action.worker_id))

    def _address_of(self, worker_id: WorkerId) -> str:
        found = [m.address for m in self.book.view.members if m.worker_id == worker_id]
        return found[0] if found else ""

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _count(self) -> None:
        counts = Counter((s.model, s.role, s.state) for s in self.reconciler.status())
        models = {pool.model for pool in self.orders.pools} | {model for model, _, _ in counts}
        for model, role, state in product(sorted(models), Role, ReplicaState):
            count = counts[model, role, state]
            self.meter.set(catalogue.REPLICAS, count, model=model, role=role, state=state)
