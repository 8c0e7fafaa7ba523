"""The directory of a simulated cluster: the production book over a network that delays and loses, in a
process that goes down and may forget everything."""

from collections.abc import Callable
from typing import Protocol

from baton.core.ids import NodeId
from baton.core.store import NodeRef, StoreChanges, StoreMember
from kv_store.directory.book import DirectoryBook
from kv_store.node.events import DirectoryForgot, LookedUp, LookUp, NodeEvent, PeersChanged
from simulator.faults.network import Network
from simulator.faults.run_context import RunContext

ENTRIES_MAX = 400


class RegisteredNode(Protocol):
    """A store node, as the directory sees it."""

    name: str
    node_id: NodeId

    @property
    def ref(self) -> NodeRef: ...

    def post(self, happening: Callable[[], None]) -> None: ...

    def feed(self, event: NodeEvent) -> None: ...


class SimDirectory:
    """The directory, and the nodes' registrations with it. Nodes renew, publish in order, and hear when the
    directory must be told everything again."""

    __slots__ = ("_book", "_down_until_s", "_last_s", "_lease_s", "_network", "_peers", "run")

    def __init__(self, run: RunContext, network: Network, *, lease_s: float) -> None:
        self.run, self._network, self._lease_s = run, network, lease_s
        self._book = DirectoryBook(ENTRIES_MAX)
        self._down_until_s = 0.0
        self._last_s: dict[NodeId, float] = {}
        self._peers: dict[NodeId, tuple[NodeId, ...]] = {}
        self.run.clock.after(0.1, self._tick)

    @property
    def is_down(self) -> bool:
        return self.run.clock.now_s < self._down_until_s

    def go_down(self, seconds: float) -> None:
        self._down_until_s = max(self._down_until_s, self.run.clock.now_s + seconds)

    def come_back(self) -> None:
        self._down_until_s = self.run.clock.now_s

    def flush(self) -> None:
        """Forget everything, as FLUSHALL or the restart of a control plane does."""
        self._book = DirectoryBook(ENTRIES_MAX)

    def _tick(self) -> None:
        self._book.tick(now_s=self.run.clock.now_s)
        self._book.check()
        self.run.clock.after(0.1, self._tick)

    # --- the nodes' registrations -------------------------------------------------------------------

    def joins(self, node: RegisteredNode) -> None:
        self.run.clock.after(self._network.delay_s(), lambda: node.post(lambda: self._renew(node)))

    def _renew(self, node: RegisteredNode) -> None:
        self.run.clock.after(self._lease_s / 3, lambda: node.post(lambda: self._renew(node)))
        if self.is_down or self._network.is_cut_off(node.name):
            return
        member = StoreMember(node.ref, is_draining=False)
        is_known, _ = self._book.renew(member, lease_s=self._lease_s, now_s=self.run.clock.now_s)
        if not is_known:
            self._forgot(node)
        peers = tuple(m.node for m in self._book.members if m.node.node_id != node.node_id)
        names = tuple(peer.node_id for peer in peers)
        if self._peers.get(node.node_id) != names:
            self._peers[node.node_id] = names
            node.feed(PeersChanged(peers))

    def _forgot(self, node: RegisteredNode) -> None:
        self.run.counts["snapshots asked of nodes"] += 1
        node.feed(DirectoryForgot())

    def on_changes(self, node: RegisteredNode, changes: StoreChanges) -> None:
        at_s = max(self.run.clock.now_s + self._network.delay_s(), self._last_s.get(node.node_id, 0.0))
        self._last_s[node.node_id] = at_s
        self.run.clock.at(at_s, lambda: self._publish(node, changes))

    def _publish(self, node: RegisteredNode, changes: StoreChanges) -> None:
        if self.is_down or self._network.is_cut_off(node.name):
            return  # Lost: the next change shows a gap, or the next renewal that nothing is known.
        self.run.counts["changes published"] += 1
        if not self._book.publish(changes):
            self.run.clock.after(
                self._network.delay_s() + self._lease_s / 3, lambda: node.post(lambda: self._forgot(node))
            )

    def look_up(self, node: RegisteredNode, action: LookUp) -> None:
        delay_s = 2 * self._network.delay_s()
        if self.is_down or self._network.is_cut_off(node.name) or delay_s > action.timeout_s:
            nothing = LookedUp(action.lookup_id, ((),) * len(action.hashes))
            self.run.clock.after(action.timeout_s, lambda: node.post(lambda: node.feed(nothing)))
            return
        found = LookedUp(action.lookup_id, tuple(self._book.look_up(action.hashes)))
        self.run.counts["blocks found by look-ups"] += sum(map(bool, found.locations))
        self.run.clock.after(delay_s, lambda: node.post(lambda: node.feed(found)))
