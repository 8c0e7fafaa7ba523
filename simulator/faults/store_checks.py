"""What a store node owes to its peers and to its host, seen from outside."""

from baton.core.ids import NodeId
from baton.core.store import BlocksGrant, BlocksRefused, BlocksReleased, BlocksRequest, NodeToNode
from kv_store.node.core import NodeCore
from simulator.faults.network import SimProcess
from simulator.faults.run_context import Violation

SLACK_S = 0.02


class StoreChecker:
    """A second account of the leases that one node gave to its peers."""

    __slots__ = ("_core", "_ends_s", "_lease_s", "_process")

    def __init__(self, process: SimProcess, core: NodeCore, *, lease_s: float) -> None:
        self._process, self._core, self._lease_s = process, core, lease_s
        self._ends_s: dict[tuple[NodeId, int], float] = {}
        """Leases by peer and fetch: when each ends on the node's clock, if it is not renewed or released."""

    def heard(self, peer: NodeId, message: NodeToNode) -> None:
        """Take note of a message of a peer, before the node handles it."""
        match message:
            case BlocksRequest():
                self._renew(peer, message.fetch_id)
            case BlocksReleased():
                if self._ends_s.pop((peer, message.fetch_id), None) is not None:
                    self._process.run.counts["leases of store nodes released"] += 1
            case _:
                pass

    def said(self, peer: NodeId, message: NodeToNode) -> None:
        """Take note of a message to a peer."""
        match message:
            case BlocksGrant():
                self._renew(peer, message.fetch_id)
            case BlocksRefused(fetch_id, 0, _):
                self._ends_s.pop((peer, fetch_id), None)
            case _:
                pass

    def tenants(self, quota_bytes: int) -> None:
        """Check invariant 3: no tenant has more of the host memory than its share."""
        for tenant, held_bytes, _ in self._core.status().tenants:
            if held_bytes > quota_bytes:
                raise Violation(
                    3, f"{self._process.name} holds {held_bytes} bytes of {tenant!r}, of {quota_bytes}"
                )

    def _renew(self, peer: NodeId, fetch_id: int) -> None:
        process = self._process
        self._ends_s[peer, fetch_id] = process.local_clock.now_s() + self._lease_s
        at_s = process.local_clock.virtual_s(self._ends_s[peer, fetch_id]) + 2 * SLACK_S
        process.run.clock.at(at_s, lambda: process.post(self.look))

    def look(self) -> None:
        """Check invariant 5: no more leases are open than peers may still read under."""
        now_s = self._process.local_clock.now_s()
        over = [key for key, end_s in self._ends_s.items() if end_s < now_s - SLACK_S]
        for key in over:
            del self._ends_s[key]
            self._process.run.counts["leases of store nodes lapsed"] += 1
        count = self._core.status().leases_open
        if count > len(self._ends_s):
            raise Violation(
                5, f"{self._process.name} keeps {count} leases, and {len(self._ends_s)} have not ended"
            )
