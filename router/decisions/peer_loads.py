"""The load that other routers report at each worker, and the load that this router reports to them. Pure.

A router reports the load that it has at a worker *now* and that the worker's own reports need not show yet.
It reports the total and not a change. The sum over routers is therefore the sum of their latest reports, and
a router that is lost, or silent for `PEER_SILENCE_S`, takes away exactly what it added. The blocks that it
expects at workers stay until they are confirmed or expire, because its sequences still run there.
"""

from collections.abc import Sequence

from baton.core.ids import BlockHash, RouterId, WorkerId
from baton.core.membership import MembershipBook
from baton.core.sharing import ExpectedBlocks, RouterUpdate, UnreportedLoad
from router.decisions.cluster.view import ClusterView
from router.decisions.prefix_index import PrefixIndex

PEER_SILENCE_S = 2.0
"""The reports of a router count for this long after its last message."""

REPORTED_HASHES_MAX = 16_384
"""Largest number of expected blocks in one update. Other routers learn of the rest from the worker's own
block events."""


class PeerBook:
    def __init__(self, cluster: ClusterView, index: PrefixIndex) -> None:
        self._cluster, self._index = cluster, index
        self._peers = MembershipBook[RouterId, None](PEER_SILENCE_S)
        self._loads: dict[RouterId, dict[WorkerId, UnreportedLoad]] = {}
        """Load of each peer at each worker. Empty loads are left out."""
        self._reported: dict[WorkerId, UnreportedLoad] = {}
        """This router's load at each worker as its followers know it. Empty loads are left out."""
        self._expected: dict[WorkerId, list[BlockHash]] = {}
        self._expected_count = 0

    @property
    def count(self) -> int:
        """Number of routers whose loads count."""
        return len(self._peers)

    def __contains__(self, router_id: RouterId) -> bool:
        return router_id in self._peers

    # --- reports of others -------------------------------------------------------------------------

    def on_update(self, update: RouterUpdate, *, now_s: float) -> None:
        """Apply a report. Changes are ignored if the router's snapshot is missing or was dropped."""
        if update.is_snapshot:
            self.lost(update.router_id)
            self._loads[update.router_id] = {}
        loads = self._loads.get(update.router_id)
        if loads is None:
            return
        self._peers.renew(update.router_id, None, now_s=now_s)
        for load in update.loads:
            if load == UnreportedLoad(load.worker_id):
                loads.pop(load.worker_id, None)
            else:
                loads[load.worker_id] = load
            self._apply_total(load.worker_id)
        for expected in update.expected:
            if expected.worker_id in self._cluster:
                self._index.expect(expected.worker_id, expected.hashes, now_s=now_s)

    def lost(self, router_id: RouterId) -> None:
        """Drop the loads of a router whose stream has ended. Nothing happens if it is unknown."""
        self._peers.leave(router_id, now_s=0.0)
        for worker_id in self._loads.pop(router_id, {}):
            self._apply_total(worker_id)

    def expire(self, now_s: float) -> None:
        if len(self._peers):
            for router_id in self._peers.tick(now_s).lapsed:
                self.lost(router_id)

    @property
    def next_tick_s(self) -> float | None:
        return self._peers.next_tick_s

    def worker_joined(self, worker_id: WorkerId) -> None:
        self._apply_total(worker_id)

    def total(self, worker_id: WorkerId) -> UnreportedLoad:
        """Return the load that all other routers together have at the worker."""
        loads = [peer_loads[worker_id] for peer_loads in self._loads.values() if worker_id in peer_loads]
        return UnreportedLoad(
            worker_id,
            sum(s.sequences for s in loads),
            sum(s.tokens for s in loads),
            sum(s.blocks for s in loads),
        )

    def _apply_total(self, worker_id: WorkerId) -> None:
        if (worker := self._cluster.get(worker_id)) is not None:
            worker.set_elsewhere(self.total(worker_id))

    def check(self) -> None:
        """Raises AssertionError if a worker's sum is not the peers'."""
        for worker in self._cluster:
            assert worker.load.elsewhere == self.total(worker.worker_id)

    # --- own reports -----------------------------------------------------------------------------

    def snapshot(self, router_id: RouterId) -> RouterUpdate:
        """Return the first update for a new follower. Later `changes` go to all followers alike."""
        return RouterUpdate(router_id, is_snapshot=True, loads=tuple(self._reported.values()))

    def changes(self, router_id: RouterId) -> RouterUpdate | None:
        """Return the changes since the last call; None if there are none."""
        self._index.note_placed()
        ours = {w.worker_id: w.load.own_unreported for w in self._cluster}
        loads = [s for w, s in ours.items() if s != self._reported.get(w, UnreportedLoad(w))]
        loads += [UnreportedLoad(w) for w in self._reported.keys() - ours.keys()]
        for load in loads:
            if load == UnreportedLoad(load.worker_id):
                del self._reported[load.worker_id]
            else:
                self._reported[load.worker_id] = load
        expected = tuple(ExpectedBlocks(w, tuple(hashes)) for w, hashes in self._expected.items())
        self._expected, self._expected_count = {}, 0
        if not loads and not expected:
            return None
        return RouterUpdate(router_id, loads=tuple(loads), expected=expected)

    def listen(self, *, is_followed: bool) -> None:
        """Collect expected blocks as long as another router follows this one."""
        self._expected, self._expected_count = {}, 0
        self._index.on_placed = self._note if is_followed else None

    def _note(self, worker_id: WorkerId, hashes: Sequence[BlockHash]) -> None:
        room = REPORTED_HASHES_MAX - self._expected_count
        if room > 0 and hashes:
            self._expected.setdefault(worker_id, []).extend(hashes[:room])
            self._expected_count += min(room, len(hashes))
