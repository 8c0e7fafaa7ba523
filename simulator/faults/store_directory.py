"""The directory of a simulated cluster: the production book over a network that delays and loses, in a
process that goes down and may forget everything."""

from typing import TYPE_CHECKING

from baton.core.ids import NodeId
from baton.core.store import StoreChanges, StoreMember
from kv_store.directory.book import DirectoryBook
from kv_store.node.events import DirectoryForgot, LookedUp, LookUp, PeersChanged
from simulator.faults.network import Network
from simulator.faults.world import World

if TYPE_CHECKING:
    from simulator.faults.store_node import SimStoreNode

ENTRIES_MAX = 400


class SimDirectory:
    """And the nodes' registrations with it: they renew, publish in order, and tell their node when the
    directory must be told everything again."""

    __slots__ = ("_book", "_down_until_s", "_last_s", "_lease_s", "_network", "_peers", "world")

    def __init__(self, world: World, network: Network, *, lease_s: float) -> None:
        self.world, self._network, self._lease_s = world, network, lease_s
        self._book = DirectoryBook(ENTRIES_MAX)
        self._down_until_s = 0.0
        self._last_s: dict[NodeId, float] = {}
        self._peers: dict[NodeId, tuple[NodeId, ...]] = {}
        self.world.after(0.1, self._tick)

    @property
    def is_down(self) -> bool:
        return self.world.now_s < self._down_until_s

    def go_down(self, seconds: float) -> None:
        self._down_until_s = max(self._down_until_s, self.world.now_s + seconds)

    def come_back(self) -> None:
        self._down_until_s = self.world.now_s

    def flush(self) -> None:
        """As FLUSHALL, or the restart of a control plane."""
        self._book = DirectoryBook(ENTRIES_MAX)

    def _tick(self) -> None:
        self._book.tick(now_s=self.world.now_s)
        self._book.check()
        self.world.after(0.1, self._tick)

    # --- the nodes' registrations -------------------------------------------------------------------

    def joins(self, node: "SimStoreNode") -> None:
        self.world.after(self._network.delay_s(), lambda: node.post(lambda: self._renew(node)))

    def _renew(self, node: "SimStoreNode") -> None:
        self.world.after(self._lease_s / 3, lambda: node.post(lambda: self._renew(node)))
        if self.is_down or self._network.is_cut_off(node.name):
            return
        member = StoreMember(node.ref, is_draining=False)
        is_known, _ = self._book.renew(member, lease_s=self._lease_s, now_s=self.world.now_s)
        if not is_known:
            self._forgot(node)
        peers = tuple(m.node for m in self._book.members if m.node.node_id != node.node_id)
        names = tuple(peer.node_id for peer in peers)
        if self._peers.get(node.node_id) != names:
            self._peers[node.node_id] = names
            node.feed(PeersChanged(peers))

    def _forgot(self, node: "SimStoreNode") -> None:
        self.world.counts["snapshots asked of nodes"] += 1
        node.feed(DirectoryForgot())

    def hears(self, node: "SimStoreNode", changes: StoreChanges) -> None:
        at_s = max(self.world.now_s + self._network.delay_s(), self._last_s.get(node.node_id, 0.0))
        self._last_s[node.node_id] = at_s
        self.world.at(at_s, lambda: self._publish(node, changes))

    def _publish(self, node: "SimStoreNode", changes: StoreChanges) -> None:
        if self.is_down or self._network.is_cut_off(node.name):
            return  # lost: the next one shows a gap, or the next renewal that nothing is known
        self.world.counts["changes published"] += 1
        if not self._book.publish(changes):
            self.world.after(
                self._network.delay_s() + self._lease_s / 3, lambda: node.post(lambda: self._forgot(node))
            )

    def looked_up_by(self, node: "SimStoreNode", action: LookUp) -> None:
        delay_s = 2 * self._network.delay_s()
        if self.is_down or self._network.is_cut_off(node.name) or delay_s > action.timeout_s:
            nothing = LookedUp(action.lookup_id, ((),) * len(action.hashes))
            self.world.after(action.timeout_s, lambda: node.post(lambda: node.feed(nothing)))
            return
        found = LookedUp(action.lookup_id, tuple(self._book.look_up(action.hashes)))
        self.world.counts["blocks found by look-ups"] += sum(map(bool, found.holdings))
        self.world.after(delay_s, lambda: node.post(lambda: node.feed(found)))
