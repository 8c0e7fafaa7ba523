"""Routes decide which expert ranks one caller sends rows to. Pure: maps, losses and the time go in, tables
and reports come out.

A caller is a process of a worker. It takes a map when the control plane announces one, connects to the ranks
that the map names, and takes a rank out for itself when the rank does not answer. A rank that was taken out
gets rows again when it is connected anew, which is tried after a while: if it is lost, the next map does not
name it. A connection that ends is made anew at once, and only if that fails is the rank suspected: its
process may well be alive.

What always holds: a table names only ranks that the map of its epoch names, that are connected, and that have
not refused the expert in this epoch.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

import numpy as np
import numpy.typing as npt

from baton.core.experts import (
    ExpertEpochUsed,
    ExpertMapUpdate,
    ExpertRankRef,
    ExpertRankSuspected,
)
from baton.core.ids import ExpertRankId

REPEAT_S = 0.5
"""A suspicion is repeated this often while the map goes on to name the rank."""
RECONNECT_S = 1.0
"""A rank that was taken out is connected anew after this time."""
STEADY_S = 5.0
"""A connection that ends so soon after the one before ended is not made anew before the rank is suspected."""

Links = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class RouteTable:
    """The ranks that may get rows for each expert."""

    epoch: int
    starts: Links
    """[L * E + 1]: the links of expert n are links[starts[n] : starts[n + 1]]."""
    links: Links
    """Numbers of links."""

    def has(self, expert: int) -> bool:
        return bool(self.starts[expert] < self.starts[expert + 1])


@dataclass(frozen=True, slots=True)
class ConnectExpertRank:
    """Connect to a rank. `on_connected` or `on_failed` answers it."""

    link: int
    ref: ExpertRankRef


@dataclass(frozen=True, slots=True)
class CloseExpertRank:
    """Close the connection, or end the attempt to connect. What comes from this rank counts no more."""

    link: int
    rank_id: ExpertRankId


RouteAction = ConnectExpertRank | CloseExpertRank | ExpertEpochUsed | ExpertRankSuspected


@dataclass(slots=True)
class _Route:
    """A rank of the map."""

    link: int
    ref: ExpertRankRef
    is_connected: bool = False
    is_connecting: bool = False
    connect_from_s: float = 0.0
    suspected: ExpertRankSuspected | None = None
    """What the control plane was told, since the rank failed last."""
    repeat_from_s: float = 0.0
    retry_until_s: float | None = None
    """A connection that ended is being made anew, until then. The rank is not suspected meanwhile."""
    retried_s: float = -inf
    """When that was tried last."""


class ExpertRoutes:
    """The routes of one caller. The one who calls it has the clock and does the actions."""

    def __init__(self, layer_count: int, expert_count: int, *, retry_s: float = 0.4) -> None:
        """A connection that ended may take `retry_s` to be made anew."""
        self._retry_s = retry_s
        self._size = layer_count * expert_count
        self._routes: dict[ExpertRankId, _Route] = {}
        self._held: dict[ExpertRankId, npt.NDArray[np.int64]] = {}
        self._refused: dict[ExpertRankId, set[int]] = {}
        """Experts that ranks refused in this epoch."""
        self._link_count = 0
        self._dispatches: dict[int, int] = {}
        """Dispatches under way, by epoch."""
        self._reported = 0
        self.epoch = 0
        self.table = self._empty()

    @property
    def suspected(self) -> tuple[ExpertRankId, ...]:
        """Ranks of the map that get no rows, since they failed."""
        return tuple(rank for rank, route in self._routes.items() if route.suspected is not None)

    @property
    def is_complete(self) -> bool:
        """Whether every expert has a rank that may get rows."""
        return bool((np.diff(self.table.starts) > 0).all())

    @property
    def next_tick_s(self) -> float | None:
        """When to call `tick` at the latest."""
        due = [route.repeat_from_s for route in self._routes.values() if route.suspected is not None]
        due += [route.retry_until_s for route in self._routes.values() if route.retry_until_s is not None]
        due += [
            route.connect_from_s
            for route in self._routes.values()
            if not (route.is_connected or route.is_connecting)
        ]
        return min(due, default=None)

    # --- events ------------------------------------------------------------------------------------------

    def on_map(self, update: ExpertMapUpdate, *, now_s: float) -> list[RouteAction]:
        """Use a map. One that is not newer than the present one changes nothing."""
        if update.epoch <= self.epoch or update.layer_count * update.expert_count != self._size:
            return []
        actions: list[RouteAction] = []
        named = {rank.ref.rank_id for rank in update.ranks}
        for rank_id in [rank for rank in self._routes if rank not in named]:
            actions.append(self._close(rank_id))
        self.epoch, self._refused = update.epoch, {}
        self._held = {rank.ref.rank_id: np.array(rank.experts, dtype=np.int64) for rank in update.ranks}
        for rank in update.ranks:
            if rank.ref.rank_id not in self._routes:
                self._routes[rank.ref.rank_id] = _Route(self._new_link(), rank.ref, connect_from_s=now_s)
        self._make_table()
        return [*actions, *self._connect(now_s), *self._report_epoch()]

    def on_connected(self, rank_id: ExpertRankId, link: int) -> None:
        route = self._route(rank_id, link)
        if route is not None:
            route.is_connected, route.is_connecting, route.suspected = True, False, None
            route.retry_until_s = None
            self._make_table()

    def on_failed(
        self, rank_id: ExpertRankId, link: int, reason: str, *, is_gone: bool, now_s: float
    ) -> list[RouteAction]:
        """The rank did not answer, or cannot be reached: it gets no rows from now on. is_gone: it closed the
        connection, or nobody listens there."""
        route = self._route(rank_id, link)
        if route is None:
            return []
        actions: list[RouteAction] = []
        may_retry = is_gone and route.is_connected and now_s >= route.retried_s + STEADY_S
        is_gone = is_gone and route.retry_until_s is not None
        if route.is_connected or route.is_connecting:
            actions.append(CloseExpertRank(route.link, rank_id))
        # What the rank still writes, it writes to the old link's memory, which nobody reads any more.
        route.link = self._new_link()
        route.is_connected = route.is_connecting = False
        self._make_table()
        if may_retry:
            route.retried_s, route.retry_until_s, route.connect_from_s = now_s, now_s + self._retry_s, now_s
            return [*actions, *self._connect(now_s)]
        return [*actions, self._suspect(route, is_gone=is_gone, reason=reason, now_s=now_s)]

    def _suspect(self, route: _Route, *, is_gone: bool, reason: str, now_s: float) -> ExpertRankSuspected:
        route.retry_until_s = None
        route.connect_from_s, route.repeat_from_s = now_s + RECONNECT_S, now_s + REPEAT_S
        route.suspected = ExpertRankSuspected(route.ref.rank_id, is_gone, reason)
        return route.suspected

    def on_refused(self, rank_id: ExpertRankId, expert: int) -> None:
        """The rank does not hold an expert that the map says it holds."""
        if rank_id in self._routes:
            self._refused.setdefault(rank_id, set()).add(expert)
            self._make_table()

    def on_dispatch(self) -> int:
        """A dispatch begins by the present table. Returns its epoch, for `on_dispatched`."""
        self._dispatches[self.epoch] = self._dispatches.get(self.epoch, 0) + 1
        return self.epoch

    def on_waiting(self, epoch: int) -> tuple[int, list[RouteAction]]:
        """Rows of a dispatch wait for a rank. Returns the epoch that the dispatch counts for from now on.

        It is the present one: the control plane may need the memory of what only older maps name to load the
        experts that the dispatch waits for. Rows that are under way by an older map are refused at worst.
        """
        if epoch == self.epoch:
            return epoch, []
        self._dispatches[self.epoch] = self._dispatches.get(self.epoch, 0) + 1
        return self.epoch, self.on_dispatched(epoch)

    def on_dispatched(self, epoch: int) -> list[RouteAction]:
        """A dispatch has ended, however it did."""
        self._dispatches[epoch] -= 1
        if not self._dispatches[epoch]:
            del self._dispatches[epoch]
        return self._report_epoch()

    def tick(self, *, now_s: float) -> list[RouteAction]:
        actions = self._connect(now_s)
        for rank_id, route in self._routes.items():
            if route.retry_until_s is not None and route.retry_until_s <= now_s:
                reason = "its connection ended, and cannot be made anew"
                if route.is_connecting:
                    actions.append(CloseExpertRank(route.link, rank_id))
                route.link, route.is_connecting = self._new_link(), False
                actions.append(self._suspect(route, is_gone=False, reason=reason, now_s=now_s))
            elif route.suspected is not None and route.repeat_from_s <= now_s:
                route.repeat_from_s = now_s + REPEAT_S
                actions.append(route.suspected)
        return actions

    def is_current(self, rank_id: ExpertRankId, link: int) -> bool:
        """Whether the link is the one that the rank has now."""
        return self._route(rank_id, link) is not None

    # --- inside ------------------------------------------------------------------------------------------

    def _route(self, rank_id: ExpertRankId, link: int) -> _Route | None:
        """The rank's route, if the event is about its present link."""
        route = self._routes.get(rank_id)
        return route if route is not None and route.link == link else None

    def _new_link(self) -> int:
        """A number that no route ever had, so that late events of old links are recognised."""
        self._link_count += 1
        return self._link_count - 1

    def _close(self, rank_id: ExpertRankId) -> CloseExpertRank:
        return CloseExpertRank(self._routes.pop(rank_id).link, rank_id)

    def _connect(self, now_s: float) -> list[RouteAction]:
        actions: list[RouteAction] = []
        for route in self._routes.values():
            if not (route.is_connected or route.is_connecting) and route.connect_from_s <= now_s:
                route.is_connecting = True
                actions.append(ConnectExpertRank(route.link, route.ref))
        return actions

    def _report_epoch(self) -> list[RouteAction]:
        used = min(self._dispatches, default=self.epoch)
        if used <= self._reported:
            return []
        self._reported = used
        return [ExpertEpochUsed(used)]

    def _empty(self) -> RouteTable:
        return RouteTable(0, np.zeros(self._size + 1, dtype=np.int32), np.zeros(0, dtype=np.int32))

    def _make_table(self) -> None:
        experts: list[npt.NDArray[np.int64]] = []
        links: list[npt.NDArray[np.int32]] = []
        for rank_id, route in self._routes.items():
            if not route.is_connected:
                continue
            held = _without(self._held[rank_id], self._refused.get(rank_id, ()))
            experts.append(held)
            links.append(np.full(len(held), route.link, dtype=np.int32))
        starts = np.zeros(self._size + 1, dtype=np.int32)
        if not experts:
            self.table = RouteTable(self.epoch, starts, np.zeros(0, dtype=np.int32))
            return
        of_expert, of_link = np.concatenate(experts), np.concatenate(links)
        np.cumsum(np.bincount(of_expert, minlength=self._size), out=starts[1:])
        self.table = RouteTable(self.epoch, starts, of_link[np.lexsort((of_link, of_expert))])


def _without(held: npt.NDArray[np.int64], refused: Iterable[int]) -> npt.NDArray[np.int64]:
    return held[~np.isin(held, list(refused))] if refused else held
