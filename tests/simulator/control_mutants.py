"""Decisions of the control plane and of its autoscaler, broken on purpose."""

from collections.abc import Iterator, Mapping, Sequence

from baton.core.ids import WorkerId
from baton.core.membership import MembershipBook, Renewal, Silence
from baton.core.messages import Role
from baton.core.operate import DrainNode, DrainWorker, Pool, RollOut
from control_plane import orders as orders_module
from control_plane import reconcile as reconcile_module
from control_plane.autoscaler import decide
from control_plane.autoscaler.decide import Autoscaler
from control_plane.autoscaler.live import LiveAutoscaler, RouterLoads
from control_plane.autoscaler.patience import Patience
from control_plane.orders import ControlRecord, Orders
from control_plane.reconcile import Reconciler
from control_plane.reconcile_events import (
    KillReplica,
    ReplicaExited,
    RestartPolicy,
    SetDesired,
    StartReplica,
)
from control_plane.targets import ReplicaSummary
from tests.simulator.mutant import Mutant, Patch


def _lapsed_members_stay(patch: Patch) -> None:
    """A worker that fell silent is listed for ever."""
    tick = MembershipBook.tick

    def nobody(self: MembershipBook, now_s: float) -> Silence:
        kept = dict(self._leases)
        found = tick(self, now_s)
        self._leases = kept
        return Silence({}, found.suspects)

    patch.setattr(MembershipBook, "tick", nobody)


def _renewals_do_not_count(patch: Patch) -> None:
    """A worker that renews its lease lapses all the same."""
    renew = MembershipBook.renew

    def first_only(
        self: MembershipBook, member_id: str, info: object, *, now_s: float, **more: float
    ) -> Renewal:
        before = self._leases.get(member_id)
        found = renew(self, member_id, info, now_s=now_s, **more)
        if before is not None and found is Renewal.UNCHANGED:
            self._leases[member_id].ends_s = before.ends_s
        return found

    patch.setattr(MembershipBook, "renew", first_only)


def _the_gone_come_back(patch: Patch) -> None:
    """A renewal that was under way lists a worker again that is dead."""

    def forget(self: MembershipBook, member_id: str, *, now_s: float) -> bool:
        return self._leases.pop(member_id, None) is not None

    patch.setattr(MembershipBook, "leave", forget)


def _pauses_count_as_silence(patch: Patch) -> None:
    """A directory that was held up believes that everybody else was."""
    patch.setattr(MembershipBook, "paused", lambda self, for_s: None)


def _nobody_is_suspect(patch: Patch) -> None:
    """Workers that miss heartbeats get requests until their lease is over."""

    def later(self: MembershipBook, now_s: float) -> list[str]:
        for lease in self._leases.values():
            if lease.suspect_at_s <= now_s:
                lease.suspect_at_s = now_s + self.suspect_s
        return []

    patch.setattr(MembershipBook, "_suspect", later)


def _lives_overlap(patch: Patch) -> None:
    """A replica is started again when its process is killed, and not when its end is known."""
    kill = Reconciler._kill

    def and_start(self: Reconciler, replica: object, reason: str, now_s: float) -> KillReplica:
        action = kill(self, replica, reason, now_s)
        self._exited(replica, reason, now_s)
        return action

    patch.setattr(Reconciler, "_kill", and_start)


def _without_backoff(patch: Patch) -> None:
    """A replica that cannot start is started again at once."""
    patch.setattr(RestartPolicy, "delay_s", lambda self, deaths: 0.0)


def _starts_without_limit(patch: Patch) -> None:
    """A process that never reports is waited for."""
    start = Reconciler._start

    def for_ever(self: Reconciler, replica: object, now_s: float) -> StartReplica:
        action = start(self, replica, now_s)
        replica.due_s = None
        return action

    patch.setattr(Reconciler, "_start", for_ever)


def _drains_without_limit(patch: Patch) -> None:
    """A worker that does not end when asked to is waited for."""
    drain = Reconciler._drain

    def for_ever(self: Reconciler, replica: object, reason: str, now_s: float) -> object:
        action = drain(self, replica, reason, now_s)
        replica.due_s = None
        return action

    patch.setattr(Reconciler, "_drain", for_ever)


def _kills_are_not_repeated(patch: Patch) -> None:
    """A kill that was lost is believed."""
    kill = Reconciler._kill

    def once(self: Reconciler, replica: object, reason: str, now_s: float) -> KillReplica:
        action = kill(self, replica, reason, now_s)
        replica.due_s = None
        return action

    patch.setattr(Reconciler, "_kill", once)


def _silent_workers_are_kept(patch: Patch) -> None:
    """A lease that lapsed has no consequence for the process."""
    on = Reconciler._on

    def deaf(self: Reconciler, event: object, now_s: float) -> Iterator[object]:
        return iter(()) if type(event).__name__ == "LeaseLapsed" else on(self, event, now_s)

    patch.setattr(Reconciler, "_on", deaf)


def _updates_take_all_at_once(patch: Patch) -> None:
    """An update of versions drains every old replica in one go."""

    def all_of_them(pool: Pool, role: Role, have: Sequence[ReplicaSummary]) -> Iterator[tuple[str, str]]:
        wanted = [h for h in have if h.is_wanted and h.role is role]
        old = [h for h in wanted if h.version != pool.version.name]
        yield from ((h.name, f"version {pool.version.name} replaces it") for h in old)
        surplus = len(wanted) - pool.count(role)
        yield from ((h.name, "no longer wanted") for h in wanted[: max(0, surplus)] if h not in old)

    patch.setattr(reconcile_module, "retirements", all_of_them)


def _updates_surge_without_limit(patch: Patch) -> None:
    """An update of versions starts all new replicas beside all old ones."""

    def everybody(pool: Pool, role: Role, have: Sequence[ReplicaSummary]) -> int:
        mine = [h for h in have if h.role is role and h.is_wanted]
        return max(0, pool.count(role) - sum(h.version == pool.version.name for h in mine))

    patch.setattr(reconcile_module, "add_count", everybody)


def _drained_nodes_are_used(patch: Patch) -> None:
    """A node that is drained gets the next worker."""
    start = Reconciler._start

    def anywhere(self: Reconciler, replica: object, now_s: float) -> StartReplica:
        action = start(self, replica, now_s)
        return StartReplica(action.worker_id, action.role, action.reason, action.model, action.version, ())

    patch.setattr(Reconciler, "_start", anywhere)


def _found_workers_count_as_starting(patch: Patch) -> None:
    """A control plane that begins anew kills workers that it has not heard yet."""
    patch.setattr(reconcile_module._ReplicaEntry, "may_serve", False)


def _found_workers_are_ignored(patch: Patch) -> None:
    """A control plane that begins anew starts everything beside what runs."""
    patch.setattr(Reconciler, "_adopt", lambda self, event, now_s: iter(()))


def _roles_are_not_switched(patch: Patch) -> None:
    """A role switch is ordered, and the worker is not told."""
    patch.setattr(Reconciler, "_match_role", lambda self, replica, now_s: iter(()))


def _orders_do_not_end(patch: Patch) -> None:
    """Nobody looks whether a drain or an update is done."""
    end_of = orders_module._end_of

    def never(pending: object, *known: object) -> object:
        action = pending.decision.action
        return None if isinstance(action, DrainWorker | DrainNode | RollOut) else end_of(pending, *known)

    patch.setattr(orders_module, "_end_of", never)


def _orders_are_forgotten(patch: Patch) -> None:
    """A control plane that begins anew returns to its configuration."""
    begin = Orders.begin

    def anew(self: Orders, pools: Sequence[Pool], record: ControlRecord | None) -> SetDesired:
        return begin(self, pools, None)

    patch.setattr(Orders, "begin", anew)


def _ends_are_not_heard(patch: Patch) -> None:
    """Now and then the end of a process has no consequence."""
    on = Reconciler._on

    def deaf(self: Reconciler, event: object, now_s: float) -> Iterator[object]:
        is_lost = isinstance(event, ReplicaExited) and WorkerId(event.worker_id).endswith("3")
        return iter(()) if is_lost else on(self, event, now_s)

    patch.setattr(Reconciler, "_on", deaf)


# --- the autoscaler ---------------------------------------------------------------------------------


def _bounds_are_ignored(patch: Patch) -> None:
    """The autoscaler orders as many replicas as it computes."""
    patch.setattr(decide, "within", lambda wanted, needed, settings, **more: dict(wanted))


def _total_is_ignored(patch: Patch) -> None:
    """All roles together may have more than the limit for all."""
    within = decide.within
    patch.setattr(
        decide,
        "within",
        lambda wanted, needed, settings, *, ranks_max, reasons: within(
            wanted, needed, settings, ranks_max=0, reasons=reasons
        ),
    )


def _without_patience(patch: Patch) -> None:
    """A pool shrinks as soon as fewer replicas are enough."""
    patch.setattr(Patience, "floor", lambda self, needed, at_s, *, mistake_s: needed)


def _switches_without_patience(patch: Patch) -> None:
    """A role gives its replicas away as soon as it can."""
    patch.setattr(Patience, "most", lambda self, at_s, span_s: self._needs[-1][1] if self._needs else 0)


def _the_last_worker_goes(patch: Patch) -> None:
    """A role that needs no replica keeps none."""
    patch.setattr(Autoscaler, "_asleep", lambda self, seen, wanted, reasons: wanted)


def _asleep_while_busy(patch: Patch) -> None:
    """Idleness is counted from the start, and not from the last request."""

    def learn(self: Autoscaler, seen: object, traits: object) -> None:
        began_s = self._busy_s
        _learn(self, seen, traits)
        self._busy_s = seen.at_s if began_s is None else began_s

    _learn = Autoscaler._learn
    patch.setattr(Autoscaler, "_learn", learn)


def _stale_reports_are_used(patch: Patch) -> None:
    """A router that fell silent is taken for one without requests."""
    patch.setattr(RouterLoads, "silent", lambda self, routers, *, now_s: [])


def _never_grows(patch: Patch) -> None:
    """More demand has no consequence."""
    wanted = Autoscaler._wanted

    def no_more(self: Autoscaler, role: Role, have: int, sized: object, reasons: list[str]) -> int:
        return min(have, wanted(self, role, have, sized, reasons))

    patch.setattr(Autoscaler, "_wanted", no_more)


def _pools_go_at_once(patch: Patch) -> None:
    """A pool shrinks to what it needs in one step."""
    wanted = Autoscaler._wanted

    def all_at_once(self: Autoscaler, role: Role, have: int, sized: object, reasons: list[str]) -> int:
        found = wanted(self, role, have, sized, reasons)
        return sized.floor if found < have and sized.floor is not None else found

    patch.setattr(Autoscaler, "_wanted", all_at_once)


def _advice_is_followed(patch: Patch) -> None:
    """What was meant as advice is ordered."""
    order_of = LiveAutoscaler.decide

    def ordered(self: LiveAutoscaler, state: object, *, now_s: float) -> object:
        order = order_of(self, state, now_s=now_s)
        return None if order is None else type(order)(order.action, order.who, order.reason)

    patch.setattr(LiveAutoscaler, "decide", ordered)


def _demand_is_forgotten(patch: Patch) -> None:
    """Each report counts as if nothing had come since the one before."""
    take = RouterLoads.take

    def nothing(self: RouterLoads, routers: object, *, now_s: float) -> Mapping[str, object]:
        take(self, routers, now_s=now_s)
        return {}

    patch.setattr(RouterLoads, "take", nothing)


CONTROL = frozenset({13})
SCALING = frozenset({14})

CONTROL_MUTANTS = (
    Mutant("lapsed members stay", _lapsed_members_stay, CONTROL | {6}),
    Mutant("renewals do not count", _renewals_do_not_count, CONTROL),
    Mutant("the gone come back", _the_gone_come_back, CONTROL),
    Mutant("pauses count as silence", _pauses_count_as_silence, CONTROL),
    Mutant("nobody is suspect", _nobody_is_suspect, CONTROL),
    Mutant("lives overlap", _lives_overlap, CONTROL),
    Mutant("restarts without backoff", _without_backoff, CONTROL),
    Mutant("starts without limit", _starts_without_limit, CONTROL),
    Mutant("drains without limit", _drains_without_limit, CONTROL),
    Mutant("kills are not repeated", _kills_are_not_repeated, CONTROL),
    Mutant("silent workers are kept", _silent_workers_are_kept, CONTROL),
    Mutant("updates take all at once", _updates_take_all_at_once, CONTROL),
    Mutant("updates surge without limit", _updates_surge_without_limit, CONTROL),
    Mutant("drained nodes are used", _drained_nodes_are_used, CONTROL),
    Mutant("found workers count as starting", _found_workers_count_as_starting, CONTROL),
    Mutant("found workers are ignored", _found_workers_are_ignored, CONTROL),
    Mutant("roles are not switched", _roles_are_not_switched, CONTROL),
    Mutant("orders do not end", _orders_do_not_end, CONTROL),
    Mutant("orders are forgotten", _orders_are_forgotten, CONTROL),
    Mutant("ends are not heard", _ends_are_not_heard, CONTROL),
)

SCALING_MUTANTS = (
    Mutant("bounds are ignored", _bounds_are_ignored, SCALING),
    Mutant("the limit for all roles is ignored", _total_is_ignored, SCALING),
    Mutant("shrinks without patience", _without_patience, SCALING),
    Mutant("switches without patience", _switches_without_patience, SCALING),
    Mutant("the last worker goes", _the_last_worker_goes, SCALING),
    Mutant("asleep while busy", _asleep_while_busy, SCALING),
    Mutant("stale reports are used", _stale_reports_are_used, SCALING),
    Mutant("never grows", _never_grows, SCALING),
    Mutant("pools go at once", _pools_go_at_once, SCALING),
    Mutant("advice is followed", _advice_is_followed, SCALING),
    Mutant("demand is forgotten", _demand_is_forgotten, SCALING),
)
