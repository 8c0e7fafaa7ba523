"""What peers read out of this node's arena, and until when."""

from dataclasses import dataclass

from baton.core.ids import NodeId
from baton.core.store import BlocksGrant, BlocksRefused, BlocksReleased, BlocksRequest, NodeRef
from kv_store.node.context import HASHES_MAX, LEASES_MAX, Context
from kv_store.node.events import ToPeer
from kv_store.node.promotion import Bringer, Demand
from kv_store.node.quotas import Holder, Shares
from kv_store.node.size_classes import HostCopy, Space
from kv_transfer.lease import LeaseBook, OwnerLease

_Key = tuple[int, NodeId, int]
"""(size of the space's blocks, reader, fetch)"""

NAME = "peers"
"""All readers together are one holder of host memory."""


@dataclass(slots=True, eq=False)
class _Leased:
    """Blocks of one fetch, pinned for its reader."""

    lease: OwnerLease[_Key, NodeId]
    peer: NodeRef
    fetch_id: int
    demand: Demand


class Leases:
    """Pins of blocks that peers read, each fetch under a lease of its own."""

    def __init__(self, context: Context, shares: Shares, bringer: Bringer) -> None:
        self._context = context
        self._shares = shares
        self._bringer = bringer
        self._book = LeaseBook[_Key, NodeId](lease_s=context.config.lease_s)
        self._leased: dict[_Key, _Leased] = {}
        """One for each lease of the book."""
        self._holder: Holder | None = None
        self.last_s = context.now_s
        """When the last lease ended."""

    @property
    def count(self) -> int:
        return len(self._book)

    def request(self, space: Space, peer: NodeRef, request: BlocksRequest) -> None:
        """A request heard again renews the lease."""
        key = (space.block_bytes, peer.node_id, request.fetch_id)
        leased = self._leased.get(key)
        if leased is not None:
            self._book.request(key, peer.node_id, request.request_number)
            self._grant(leased, leased.demand.told, [])
            return
        reason = self._refuse(peer, request)
        if reason:
            self._send(space, peer, BlocksRefused(request.fetch_id, 0, reason))
            return
        self._open(key, space, peer, request)

    def released(self, space: Space, peer: NodeRef, released: BlocksReleased) -> None:
        leased = self._leased.get((space.block_bytes, peer.node_id, released.fetch_id))
        if leased is None:
            return
        for block_hash in released.corrupt[:HASHES_MAX]:
            self._bringer.found_corrupt(leased.demand, block_hash)
        self._end(leased)

    # --- parts ----------------------------------------------------------------------------------

    def _refuse(self, peer: NodeRef, request: BlocksRequest) -> str:
        count = len(request.hashes)
        if count > HASHES_MAX or len(set(request.hashes)) != count:
            return f"{count} blocks; {HASHES_MAX} different ones at most"
        if not self._context.ends_later(request.time_left_s):
            return "no time is left"
        held = self._book.count_of(peer.node_id)
        return f"{LEASES_MAX} fetches are open" if held >= LEASES_MAX else ""

    def _open(self, key: _Key, space: Space, peer: NodeRef, request: BlocksRequest) -> None:
        def tell_ready(demand: Demand, first: int, copies: list[HostCopy], tiers: object) -> None:
            del demand, tiers
            self._grant(leased, first, copies)

        def tell_failed(first: int, message: str) -> None:
            self._send(space, peer, BlocksRefused(request.fetch_id, first, message))
            if first == 0:
                self._end(leased)

        limit_s = min(request.time_left_s, self._context.config.load_timeout_s)
        if self._holder is None:
            self._holder = self._shares.join(NAME)
        demand = Demand(
            space=space,
            hashes=request.hashes,
            holder=self._holder,
            deadline_s=self._context.now_s + limit_s,
            tell_ready=tell_ready,
            tell_failed=tell_failed,
            may_fetch=False,
        )
        leased = self._leased[key] = _Leased(self._book.open(key), peer, request.fetch_id, demand)
        self._book.request(key, peer.node_id, request.request_number)
        self._renew(key)
        self._bringer.open(demand)

    def _renew(self, key: _Key) -> None:
        now_s = self._context.now_s
        self._book.renew(key, now_s=now_s)
        self._context.at(now_s + self._book.lease_s, self._expire)

    def _expire(self) -> None:
        self._book.expire(now_s=self._context.now_s, lapse=self._lapse)

    def _lapse(self, key: _Key) -> None:
        self._context.counts.leases_lapsed += 1
        self._end(self._leased[key])

    def _end(self, leased: _Leased) -> None:
        self._book.close(leased.lease.key)
        del self._leased[leased.lease.key]
        self.last_s = self._context.now_s
        self._bringer.end(leased.demand)
        if not self._leased and self._holder is not None:
            self._shares.leave(self._holder)
            self._holder = None

    def _grant(self, leased: _Leased, first: int, copies: list[HostCopy]) -> None:
        space = leased.demand.space
        arena = space.arena
        self._renew(leased.lease.key)
        self._context.counts.served_bytes += len(copies) * space.block_bytes
        grant = BlocksGrant(
            fetch_id=leased.fetch_id,
            first_block=first,
            source_blocks=tuple(copy.slot for copy in copies),
            generations=tuple(arena.generation(copy.slot) for copy in copies),
            facts=tuple(copy.facts for copy in copies),
            checksums=tuple(copy.checksum for copy in copies),
            lease_s=self._book.lease_s,
            answers_request=leased.lease.number,
        )
        self._send(space, leased.peer, grant)

    def _send(self, space: Space, peer: NodeRef, message: BlocksGrant | BlocksRefused) -> None:
        self._context.emit(ToPeer(space.block_bytes, peer, message))
