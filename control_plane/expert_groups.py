"""The IO of expert ranks in the control plane: their streams and processes around the pure groups."""

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any, Protocol

from baton.config import Config
from baton.core.errors import SetupError
from baton.core.experts import (
    ExpertCallerHello,
    ExpertGroupState,
    ExpertRankHello,
    ExpertRankRetired,
    group_name,
)
from baton.core.ids import ExpertRankId
from baton.core.messages import Role
from baton.core.operate import Pool, RebalanceExperts, ScaleExperts, replica_prefix
from baton.wire.core_driver import CoreDriver, performer, performers
from baton.wire.crash import Crash
from baton.wire.experts import CallerEnd, RankEnd
from baton.wire.link import Link, LinkBroken
from baton.wire.serving import serve_until
from control_plane.expert_orders import ExpertAction, OrderRefused
from control_plane.experts import group_values as v
from control_plane.experts.group import ExpertRankGroup
from control_plane.experts.group_state import group_state
from control_plane.reconcile_events import RestartPolicy

log = logging.getLogger(__name__)

STATE_S = 0.5
"""A group's state is worked out anew after this time, and whenever ranks change."""
BEGIN_S = 30.0
"""The time that ranks and callers wait until the ranks of an earlier control plane are known."""


def ranks_beside(
    wanted: Mapping[Role, int], started: Mapping[Role, int], role: Role, *, calling: int, there: int
) -> int:
    """Return the number of ranks of a group where one stands beside every worker. `wanted` are the workers
    that each role shall have, and `started` those that live, by the role that they were started in, whose
    group they use. `calling` workers use the group, and it has `there` ranks that stay. While workers come
    and go, no rank leaves that a live worker was given, and none is started for a worker that is there for
    the time of an exchange only."""
    is_settled = sum(started.values()) == sum(wanted.values())
    least = started.get(role, 0) if is_settled else wanted.get(role, 0)
    return max(least, min(max(started.get(role, 0), calling), there))


class ExpertRankProcesses(Protocol):
    """The processes of expert ranks, see `expert_ranks.StartedExpertRanks`."""

    def start(self, start: v.StartExpertRank, model: str, role: Role) -> None: ...

    async def kill(self, rank_id: ExpertRankId) -> None: ...

    def worker_count(self, model: str, role: Role) -> int:
        """Workers of a pool that have a process."""
        ...


Spawn = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]


class _ExpertPeer:
    """The stream of a rank or of a caller. A peer that reads too slowly is dropped."""

    def __init__(self, stream: int, link: Link[Any, Any]) -> None:
        self.stream, self._link = stream, link
        self.dropped = asyncio.Event()

    def send(self, message: Any) -> None:
        try:
            self._link.send(message)
        except LinkBroken:
            self.dropped.set()


class _DrivenGroup:
    """One group, its driver, and the streams of its ranks and callers."""

    def __init__(
        self,
        core: ExpertRankGroup,
        model: str,
        role: Role,
        *,
        processes: ExpertRankProcesses,
        spawn: Spawn,
        crash: Crash,
        on_changed: Callable[[], None],
    ) -> None:
        self.core, self.model, self.role = core, model, role
        self.ranks: dict[ExpertRankId, _ExpertPeer] = {}
        self.callers: dict[str, _ExpertPeer] = {}
        self._processes, self._spawn, self._on_changed = processes, spawn, on_changed
        self._state: ExpertGroupState | None = None
        self._state_s, self._seen = 0.0, object()
        self.driver: CoreDriver[v.ExpertGroupEvent, v.ExpertGroupAction] = CoreDriver(
            core,
            tick=v.ExpertGroupTick(),
            performers=performers(
                v.ExpertGroupAction,
                performer(v.StartExpertRank, self._start),
                performer(v.KillExpertRank, self._kill),
                performer(v.TellExpertRank, self._tell_rank),
                performer(v.TellExpertCallers, self._tell_callers),
            ),
            crash=crash,
            on_handled=self._handled,
            paused=v.ExpertGroupPaused,
        )

    @property
    def calling_workers(self) -> int:
        """Workers of which a process follows the map."""
        return len({caller.rpartition("/")[0] for caller in self.callers})

    def state(self) -> ExpertGroupState:
        now_s = time.monotonic()
        if self._state is None or now_s >= self._state_s + STATE_S:
            self._state = group_state(self.core, model=self.model, role=self.role, now_s=now_s)
            self._state_s = now_s
        return self._state

    def _start(self, action: v.StartExpertRank) -> None:
        if action.reason != "wanted":
            log.info("expert rank %s starts: %s", action.rank_id, action.reason)
        self._processes.start(action, self.model, self.role)

    def _kill(self, action: v.KillExpertRank) -> None:
        log.warning("expert rank %s is being killed: %s", action.rank_id, action.reason)
        self._spawn(self._processes.kill(action.rank_id))

    def _tell_rank(self, action: v.TellExpertRank) -> None:
        if (peer := self.ranks.get(action.rank_id)) is not None:
            peer.send(action.order)

    def _tell_callers(self, action: v.TellExpertCallers) -> None:
        for caller, peer in list(self.callers.items()):
            if action.caller in (None, caller):
                peer.send(action.update)

    def _handled(self) -> None:
        ranks, rollout = self.core.ranks, self.core.rollout
        seen = (
            ranks.wanted,
            tuple((entry.rank_id, entry.state) for entry in ranks.entries.values()),
            rollout is not None and rollout.is_idle,
            self.core.placer.rebalances if self.core.placer is not None else 0,
            len(self.core.callers),
        )
        if seen != self._seen:
            self._seen, self._state = seen, None
            self._on_changed()


class ExpertGroups:
    """The groups of all models whose experts are on expert ranks. It implements
    `baton.wire.experts.ExpertsHandler`. Call `begin` once, when the ranks of an earlier control plane have
    been adopted."""

    def __init__(
        self,
        configs: Mapping[str, Config],
        *,
        life: str,
        processes: ExpertRankProcesses,
        spawn: Spawn,
        crash: Crash,
        restart: RestartPolicy,
        on_changed: Callable[[], None] = lambda: None,
    ) -> None:
        """`configs` are by model. `on_changed` is called when ranks, or what is ordered of them, change."""
        self._configs = {name: one for name, one in configs.items() if one.experts.parallel != "off"}
        self._models = tuple(configs)
        self._life, self._processes, self._spawn, self._crash = life, processes, spawn, crash
        self._restart, self.on_changed = restart, on_changed
        self._groups: dict[str, _DrivenGroup] = {}
        self._streams = itertools.count(1)
        self._has_begun = asyncio.Event()
        self._pools: tuple[Pool, ...] = ()
        self._avoid: frozenset[str] = frozenset()
        self._scaled: dict[str, int] = {}

    # --- groups --------------------------------------------------------------------------------------

    def _group(self, model: str, role: Role) -> _DrivenGroup:
        name = group_name(model, role)
        if name not in self._groups:
            config = self._configs[model].experts
            policy = v.ExpertGroupPolicy(
                restart=self._restart,
                replicas=config.replicas,
                rebalance_s=config.rebalance_s,
                gain_min=config.gain_min,
                half_life_s=config.half_life_s,
                bytes_per_s=config.migration_bytes_per_s,
            )
            prefix = replica_prefix(model, self._models) if len(self._models) > 1 else ""
            core = ExpertRankGroup(name, f"{prefix}experts-{role}", policy, life=self._life)
            self._groups[name] = _DrivenGroup(
                core,
                model,
                role,
                processes=self._processes,
                spawn=self._spawn,
                crash=self._crash,
                on_changed=lambda: self.on_changed(),
            )
        return self._groups[name]

    def adopt(self, rank_id: ExpertRankId, model: str, role: Role) -> None:
        """Take over a live rank that an earlier control plane started."""
        if model not in self._configs:
            self._spawn(self._processes.kill(rank_id))
            return
        log.info("expert rank %s of an earlier control plane was adopted", rank_id)
        self._group(model, role).driver.post(v.ExpertRankAdopted(rank_id))

    def begin(self) -> None:
        """Listen to ranks and callers."""
        self._has_begun.set()

    def follow(self, pools: Iterable[Pool], avoid: frozenset[str], scaled: Mapping[str, int]) -> None:
        """Have as many ranks as the pools ask for, none of them on nodes of `avoid`. `scaled` are ordered
        numbers by group."""
        if not self._configs:
            return
        self._pools, self._avoid, self._scaled = tuple(pools), avoid, dict(scaled)
        for pool in self._pools:
            if pool.model not in self._configs:
                continue
            for role in Role:
                self._want(pool, role)

    def _want(self, pool: Pool, role: Role) -> None:
        count = self._wanted(pool, role)
        name = group_name(pool.model, role)
        if name not in self._groups and not count:
            return
        group = self._group(pool.model, role)
        ranks = group.core.ranks
        if ranks.avoided != self._avoid:
            group.driver.post(v.ExpertNodesAvoided(self._avoid))
        if ranks.wanted != count or not ranks.is_known:
            group.driver.post(v.ExpertRanksWanted(count))

    def _wanted(self, pool: Pool, role: Role) -> int:
        """Workers go on using the ranks of the role that they were started in, whatever their role is now."""
        started = {one: self._processes.worker_count(pool.model, one) for one in Role}
        experts = self._configs[pool.model].experts
        group = self._groups.get(group_name(pool.model, role))
        calling = group.calling_workers if group is not None else 0
        if experts.parallel == "workers":
            there = group.core.ranks.staying if group is not None else 0
            return ranks_beside(pool.counts, started, role, calling=calling, there=there)
        if not (pool.count(role) or started[role] or calling):
            return 0
        return self._scaled.get(group_name(pool.model, role), experts.ranks)

    # --- operators -----------------------------------------------------------------------------------

    def states(self) -> tuple[ExpertGroupState, ...]:
        """The groups that have ranks or shall have some."""
        found = (self._groups[name].state() for name in sorted(self._groups))
        return tuple(state for state in found if state.wanted_ranks or state.ranks)

    def check(self, action: ExpertAction, group: ExpertGroupState) -> None:
        """Raises OrderRefused for an order that the configuration of the group forbids."""
        experts = self._configs[group.model].experts
        if experts.parallel == "ranks" or isinstance(action, RebalanceExperts):
            return
        if isinstance(action, ScaleExperts):
            raise OrderRefused(
                f"an expert rank stands beside every {group.role} worker of {group.model} "
                "(experts.parallel=workers): scale the workers instead"
            )
        if not action.is_replaced:
            raise OrderRefused(
                f"an expert rank stands beside every {group.role} worker of {group.model} "
                "(experts.parallel=workers): scale the workers, or drain it with a replacement"
            )

    def carry_out(self, action: ExpertAction, group: str, wanted: int | None) -> None:
        """Follow an accepted order. `wanted`: so many ranks are wanted from now on; None: as many as
        before."""
        driver = self._groups[group].driver
        if isinstance(action, RebalanceExperts):
            driver.post(v.ExpertsRebalanced())
            return
        if isinstance(action, ScaleExperts):
            return  # `follow` does it
        for status in self._groups[group].state().ranks:
            if action.rank in (status.rank_id, status.name):
                driver.post(v.ExpertRankDrained(status.name, wanted))

    # --- processes -----------------------------------------------------------------------------------

    def on_exit(self, rank_id: ExpertRankId, reason: BaseException | str) -> None:
        """Note that the process of a rank is dead."""
        text = reason if isinstance(reason, str) else f"{type(reason).__name__}: {reason}"
        if not isinstance(reason, SetupError):
            log.info("expert rank %s ended: %s", rank_id, text)
        for group in self._groups.values():
            group.driver.post(v.ExpertRankExited(rank_id, text))

    def close(self) -> None:
        """Start and kill no ranks any more."""
        for group in self._groups.values():
            group.driver.close()

    # --- streams -------------------------------------------------------------------------------------

    async def serve_rank(self, hello: ExpertRankHello, link: RankEnd) -> None:
        group = await self._named(hello.group)
        rank_id = hello.ref.rank_id
        if group is None:
            link.send(ExpertRankRetired(f"the control plane has no group {hello.group!r}"))
            return
        peer = group.ranks[rank_id] = _ExpertPeer(next(self._streams), link)

        async def read() -> None:
            async for report in link:
                group.driver.post(v.ExpertRankSaid(rank_id, peer.stream, report))

        try:
            group.driver.post(v.ExpertRankSaid(rank_id, peer.stream, hello))
            await serve_until(peer.dropped, read())
        finally:
            if group.ranks.get(rank_id) is peer:
                del group.ranks[rank_id]
            group.driver.post(v.ExpertRankHungUp(rank_id, peer.stream))

    async def serve_caller(self, hello: ExpertCallerHello, link: CallerEnd) -> None:
        group = await self._named(hello.group)
        if group is None:
            return
        caller = hello.caller
        peer = group.callers[caller] = _ExpertPeer(next(self._streams), link)

        async def read() -> None:
            async for report in link:
                group.driver.post(v.ExpertCallerSaid(caller, peer.stream, report))

        try:
            group.driver.post(v.ExpertCallerSaid(caller, peer.stream, hello))
            await serve_until(peer.dropped, read())
        finally:
            if group.callers.get(caller) is peer:
                del group.callers[caller]
            group.driver.post(v.ExpertCallerHungUp(caller, peer.stream))

    async def _named(self, name: str) -> _DrivenGroup | None:
        try:
            async with asyncio.timeout(BEGIN_S):
                await self._has_begun.wait()
        except TimeoutError:
            return None
        if name not in self._groups:
            for model in self._configs:
                for role in Role:
                    if name == group_name(model, role):
                        return self._group(model, role)
        return self._groups.get(name)
