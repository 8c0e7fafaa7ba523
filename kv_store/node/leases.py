"""What peers read out of this node's arena, and until when."""

from dataclasses import dataclass

from baton.core.ids import NodeId
from baton.core.store import BlocksGrant, BlocksRefused, BlocksReleased, BlocksRequest, NodeRef
from kv_store.node.context import HASHES_MAX, LEASES_MAX, Context
from kv_store.node.events import ToPeer
from kv_store.node.promotion import Promoter, PromotionRequest
from kv_store.node.quotas import Holder, Quotas
from kv_store.node.size_classes import HostCopy, SizeClass
from kv_transfer.lease import LeaseBook, OwnerLease

_Key = tuple[int, NodeId, int]
"""(block size, reader, fetch)."""

NAME = "peers"
"""All readers together are one holder of host memory."""


@dataclass(slots=True, eq=False)
class _Leased:
    """Blocks of one fetch, pinned for its reader."""

    lease: OwnerLease[_Key, NodeId]
    peer: NodeRef
    fetch_id: int
    wanted: PromotionRequest


class Leases:
    """Pins of blocks that peers read, each fetch under a lease of its own."""

    def __init__(self, context: Context, quotas: Quotas, promoter: Promoter) -> None:
        self._context = context
        self._quotas = quotas
        self._promoter = promoter
        self._book = LeaseBook[_Key, NodeId](lease_s=context.config.lease_s)
        self._leased: dict[_Key, _Leased] = {}
        """One for each lease of the book."""
        self._holder: Holder | None = None
        self.last_s = context.now_s
        """When the last lease ended."""

    @property
    def count(self) -> int:
        return len(self._book)

    def request(self, size_class: SizeClass, peer: NodeRef, request: BlocksRequest) -> None:
        """Serve a reader. A repeated request renews the lease."""
        key = (size_class.block_bytes, peer.node_id, request.fetch_id)
        leased = self._leased.get(key)
        if leased is not None:
            self._book.request(key, peer.node_id, request.request_number)
            if self._context.ends_later(request.time_left_s):
                self._promoter.extend(leased.wanted, self._deadline_s(request))
            self._grant(leased, leased.wanted.reported, [])
            return
        reason = self._refuse(peer, request)
        if reason:
            self._send(size_class, peer, BlocksRefused(request.fetch_id, 0, reason))
            return
        self._open(key, size_class, peer, request)

    def released(self, size_class: SizeClass, peer: NodeRef, released: BlocksReleased) -> None:
        leased = self._leased.get((size_class.block_bytes, peer.node_id, released.fetch_id))
        if leased is None:
            return
        for block_hash in released.corrupt[:HASHES_MAX]:
            self._promoter.found_corrupt(leased.wanted, block_hash)
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

    def _open(self, key: _Key, size_class: SizeClass, peer: NodeRef, request: BlocksRequest) -> None:
        def report_ready(wanted: PromotionRequest, first: int, copies: list[HostCopy], tiers: object) -> None:
            del wanted, tiers
            self._grant(leased, first, copies)

        def report_failed(first: int, message: str) -> None:
            self._send(size_class, peer, BlocksRefused(request.fetch_id, first, message))
            if first == 0:
                self._end(leased)

        if self._holder is None:
            self._holder = self._quotas.join(NAME)
        wanted = PromotionRequest(
            size_class=size_class,
            hashes=request.hashes,
            holder=self._holder,
            deadline_s=self._deadline_s(request),
            report_ready=report_ready,
            report_failed=report_failed,
            may_fetch=False,
        )
        leased = self._leased[key] = _Leased(self._book.open(key), peer, request.fetch_id, wanted)
        self._book.request(key, peer.node_id, request.request_number)
        self._renew(key)
        self._promoter.open(wanted)

    def _deadline_s(self, request: BlocksRequest) -> float:
        return self._context.now_s + min(request.time_left_s, self._context.config.load_timeout_s)

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
        self._promoter.end(leased.wanted)
        if not self._leased and self._holder is not None:
            self._quotas.leave(self._holder)
            self._holder = None

    def _grant(self, leased: _Leased, first: int, copies: list[HostCopy]) -> None:
        size_class = leased.wanted.size_class
        arena = size_class.arena
        self._renew(leased.lease.key)
        self._context.counts.served_bytes += len(copies) * size_class.block_bytes
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
        self._send(size_class, leased.peer, grant)

    def _send(self, size_class: SizeClass, peer: NodeRef, message: BlocksGrant | BlocksRefused) -> None:
        self._context.emit(ToPeer(size_class.block_bytes, peer, message))
