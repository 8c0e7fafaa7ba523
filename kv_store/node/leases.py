"""What peers read of ours, and until when."""

from dataclasses import dataclass

from baton.core.ids import NodeId
from baton.core.store import NodeRef, PinBlocks, PinFailed, PinnedBlocks, UnpinBlocks
from kv_store.node.context import HASHES_MAX, LEASES_MAX, Context
from kv_store.node.events import ToPeer
from kv_store.node.promotion import Bringer, Demand
from kv_store.node.quotas import Holder, Shares
from kv_store.node.size_classes import HostCopy, Space

_Key = tuple[int, NodeId, int]

NAME = "peers"
"""All of them together are one holder of host memory."""


@dataclass(slots=True, eq=False)
class _Lease:
    key: _Key
    peer: NodeRef
    fetch_id: int
    end_s: float
    pin_number: int
    demand: Demand


class Leases:
    """Pins for one-sided reads: we cannot see a reader's end, so they last until it says so or the lease is
    over. The reader counts the same lease from before it asked."""

    def __init__(self, context: Context, shares: Shares, bringer: Bringer) -> None:
        self._context = context
        self._shares = shares
        self._bringer = bringer
        self._leases: dict[_Key, _Lease] = {}
        self._holder: Holder | None = None
        self.last_s = context.now_s
        """When the last lease ended."""

    @property
    def count(self) -> int:
        return len(self._leases)

    def pin(self, space: Space, peer: NodeRef, pin: PinBlocks) -> None:
        """Heard again: the lease is renewed."""
        key = (space.block_bytes, peer.node_id, pin.fetch_id)
        lease = self._leases.get(key)
        if lease is not None:
            lease.pin_number = max(lease.pin_number, pin.pin_number)
            self._extend(lease)
            self._tell(lease, lease.demand.told, [])
            return
        reason = self._refuse(peer, pin)
        if reason:
            self._send(space, peer, PinFailed(pin.fetch_id, 0, reason))
            return
        self._open(key, space, peer, pin)

    def unpin(self, space: Space, peer: NodeRef, unpin: UnpinBlocks) -> None:
        lease = self._leases.get((space.block_bytes, peer.node_id, unpin.fetch_id))
        if lease is None:
            return
        for block_hash in unpin.corrupt[:HASHES_MAX]:
            self._bringer.found_corrupt(lease.demand, block_hash)
        self._end(lease)

    # --- parts ----------------------------------------------------------------------------------

    def _refuse(self, peer: NodeRef, pin: PinBlocks) -> str:
        if len(pin.hashes) > HASHES_MAX or len(set(pin.hashes)) != len(pin.hashes):
            return f"{len(pin.hashes)} blocks; {HASHES_MAX} different ones at most"
        if not self._context.ends_later(pin.time_left_s):
            return "no time is left"
        held = sum(1 for lease in self._leases.values() if lease.peer.node_id == peer.node_id)
        return f"{LEASES_MAX} fetches are open" if held >= LEASES_MAX else ""

    def _open(self, key: _Key, space: Space, peer: NodeRef, pin: PinBlocks) -> None:
        def tell_ready(demand: Demand, first: int, copies: list[HostCopy], tiers: object) -> None:
            del demand, tiers
            self._extend(lease)
            self._tell(lease, first, copies)

        def tell_failed(first: int, message: str) -> None:
            self._send(space, peer, PinFailed(pin.fetch_id, first, message))
            if first == 0:
                self._end(lease)

        limit_s = min(pin.time_left_s, self._context.config.load_timeout_s)
        if self._holder is None:
            self._holder = self._shares.join(NAME)
        demand = Demand(
            space=space,
            hashes=pin.hashes,
            holder=self._holder,
            deadline_s=self._context.now_s + limit_s,
            tell_ready=tell_ready,
            tell_failed=tell_failed,
            may_fetch=False,
        )
        lease = _Lease(key, peer, pin.fetch_id, 0.0, pin.pin_number, demand)
        self._leases[key] = lease
        self._extend(lease)
        self._bringer.open(demand)

    def _extend(self, lease: _Lease) -> None:
        lease.end_s = self._context.now_s + self._context.config.lease_s
        self._context.at(lease.end_s, lambda: self._lapse(lease))

    def _lapse(self, lease: _Lease) -> None:
        if self._leases.get(lease.key) is lease and self._context.now_s >= lease.end_s:
            self._context.counts.leases_lapsed += 1
            self._end(lease)

    def _end(self, lease: _Lease) -> None:
        del self._leases[lease.key]
        self.last_s = self._context.now_s
        self._bringer.end(lease.demand)
        if not self._leases and self._holder is not None:
            self._shares.leave(self._holder)
            self._holder = None

    def _tell(self, lease: _Lease, first: int, copies: list[HostCopy]) -> None:
        space = lease.demand.space
        arena = space.arena
        self._context.counts.served_bytes += len(copies) * space.block_bytes
        answer = PinnedBlocks(
            fetch_id=lease.fetch_id,
            first=first,
            slots=tuple(copy.slot for copy in copies),
            generations=tuple(arena.generation(copy.slot) for copy in copies),
            facts=tuple(copy.facts for copy in copies),
            checksums=tuple(copy.checksum for copy in copies),
            lease_s=self._context.config.lease_s,
            answers_pin=lease.pin_number,
        )
        self._send(space, lease.peer, answer)

    def _send(self, space: Space, peer: NodeRef, message: PinnedBlocks | PinFailed) -> None:
        self._context.emit(ToPeer(space.block_bytes, peer, message))
