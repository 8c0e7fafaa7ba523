"""What other routers have sent to each worker, and what this one tells them. Pure.

Each router tells what it has at a worker *now* that the worker's reports need not show yet: as it is, not
as a change. So the sum over routers is the sum of what was heard last, and a router that is lost, or
silent for `PEER_SILENCE_S`, takes away exactly what it added. Its blocks that are expected somewhere stay
until they are confirmed or their time is over: its sequences' KV is where it was sent, whoever asked.
"""

from collections.abc import Sequence

from baton.core.ids import BlockHash, RouterId, WorkerId
from baton.core.membership import MembershipBook
from baton.core.sharing import ExpectedBlocks, RouterUpdate, WorkerShare
from router.decisions.cluster.view import ClusterView
from router.decisions.prefix_index import PrefixIndex

PEER_SILENCE_S = 2.0
"""What a router said counts for this long after it was last heard."""

TOLD_HASHES_MAX = 16_384
"""Expected blocks in one update; the others learn of the rest from the worker itself, when it has them."""


class PeerBook:
    def __init__(self, cluster: ClusterView, index: PrefixIndex) -> None:
        self._cluster, self._index = cluster, index
        self._peers = MembershipBook[RouterId, None](PEER_SILENCE_S)
        self._shares: dict[RouterId, dict[WorkerId, WorkerShare]] = {}
        """What each peer has where; none of them empty."""
        self._told: dict[WorkerId, WorkerShare] = {}
        """Our own shares, as the followers know them; none of them empty."""
        self._expected: dict[WorkerId, list[BlockHash]] = {}
        self._expected_count = 0

    @property
    def count(self) -> int:
        """Routers whose shares count."""
        return len(self._peers)

    def __contains__(self, router_id: RouterId) -> bool:
        return router_id in self._peers

    # --- what others have -------------------------------------------------------------------------

    def heard(self, update: RouterUpdate, *, now_s: float) -> None:
        """Changes of a router whose snapshot was not heard, or was given up, are nothing."""
        if update.is_snapshot:
            self.lost(update.router_id)
            self._shares[update.router_id] = {}
        shares = self._shares.get(update.router_id)
        if shares is None:
            return
        self._peers.renew(update.router_id, None, now_s=now_s)
        for share in update.shares:
            if share == WorkerShare(share.worker_id):
                shares.pop(share.worker_id, None)
            else:
                shares[share.worker_id] = share
            self._tell(share.worker_id)
        for expected in update.expected:
            if expected.worker_id in self._cluster:
                self._index.expect(expected.worker_id, expected.hashes, now_s=now_s)

    def lost(self, router_id: RouterId) -> None:
        """Its stream has ended. Unknown, or lost before: nothing happens."""
        self._peers.leave(router_id, now_s=0.0)
        for worker_id in self._shares.pop(router_id, {}):
            self._tell(worker_id)

    def expire(self, now_s: float) -> None:
        if len(self._peers):
            for router_id in self._peers.tick(now_s).lapsed:
                self.lost(router_id)

    @property
    def next_tick_s(self) -> float | None:
        return self._peers.next_tick_s

    def worker_joined(self, worker_id: WorkerId) -> None:
        self._tell(worker_id)

    def total(self, worker_id: WorkerId) -> WorkerShare:
        """What all others have there together."""
        shares = [theirs[worker_id] for theirs in self._shares.values() if worker_id in theirs]
        return WorkerShare(
            worker_id,
            sum(s.sequences for s in shares),
            sum(s.tokens for s in shares),
            sum(s.blocks for s in shares),
        )

    def _tell(self, worker_id: WorkerId) -> None:
        if (worker := self._cluster.get(worker_id)) is not None:
            worker.set_elsewhere(self.total(worker_id))

    def check(self) -> None:
        """Raises AssertionError if a worker's sum is not the peers'."""
        for worker in self._cluster:
            assert worker.load.elsewhere == self.total(worker.worker_id)

    # --- what we tell -----------------------------------------------------------------------------

    def snapshot(self, router_id: RouterId) -> RouterUpdate:
        """The first update for one that follows from now on, together with those who do already: `changes` is
        told to all."""
        return RouterUpdate(router_id, is_snapshot=True, shares=tuple(self._told.values()))

    def changes(self, router_id: RouterId) -> RouterUpdate | None:
        """Since it was asked last; None: nothing."""
        self._index.note_placed()
        ours = {w.worker_id: w.load.own_share for w in self._cluster}
        shares = [s for w, s in ours.items() if s != self._told.get(w, WorkerShare(w))]
        shares += [WorkerShare(w) for w in self._told.keys() - ours.keys()]
        for share in shares:
            if share == WorkerShare(share.worker_id):
                del self._told[share.worker_id]
            else:
                self._told[share.worker_id] = share
        expected = tuple(ExpectedBlocks(w, tuple(hashes)) for w, hashes in self._expected.items())
        self._expected, self._expected_count = {}, 0
        if not shares and not expected:
            return None
        return RouterUpdate(router_id, shares=tuple(shares), expected=expected)

    def listen(self, *, is_followed: bool) -> None:
        """Note which blocks are expected where, as long as somebody wants to know."""
        self._expected, self._expected_count = {}, 0
        self._index.on_placed = self._note if is_followed else None

    def _note(self, worker_id: WorkerId, hashes: Sequence[BlockHash]) -> None:
        room = TOLD_HASHES_MAX - self._expected_count
        if room > 0 and hashes:
            self._expected.setdefault(worker_id, []).extend(hashes[:room])
            self._expected_count += min(room, len(hashes))
