"""The faults of the store: nodes die and freeze, disks fail, bits flip, the directory forgets."""

import random
from collections.abc import Callable
from functools import partial

from baton.core.store import Tier
from kv_store.node.events import Clear
from simulator.faults.control import Cluster
from simulator.faults.store_node import SimHost, SimStoreNode


class StoreFaults:
    __slots__ = ("_cluster", "_is_over", "_rng", "_span_s")

    def __init__(self, cluster: Cluster, rng: random.Random, span_s: Callable[[], float]) -> None:
        self._cluster, self._rng, self._span_s = cluster, rng, span_s
        self._is_over = False

    def strikes(self) -> dict[str, Callable[[], None]]:
        return {
            "store_crash": self._crash,
            "store_freeze": self._freeze,
            "store_hang_up": self._hang_up,
            "store_clear": self._clear,
            "disk_full": self._disk_full,
            "disk_slow": self._disk_slow,
            "disk_error": self._disk_error,
            "disk_flip": self._disk_flip,
            "memory_flip": self._memory_flip,
            "directory_outage": self._directory_outage,
            "directory_flush": self._cluster.directory.flush,
        }

    def stop(self) -> None:
        self._is_over = True
        for host in self._cluster.hosts:
            host.disk.slowness, host.disk.error_chance, host.disk.is_full = 1.0, 0.0, False
            if host.node is not None:
                host.node.thaw()
                host.node.on_grant = None
        self._cluster.directory.come_back()

    def _host(self) -> SimHost:
        return self._rng.choice(self._cluster.hosts)

    def _node(self) -> SimStoreNode | None:
        nodes = self._cluster.store_nodes
        return self._rng.choice(nodes) if nodes else None

    def _crash(self) -> None:
        """Kill a node now, or the next one whose fetch was just granted: the lease is never released."""
        node = self._node()
        if node is None:
            return
        noticed_s = self._rng.choice((0.0, 0.3, 2.0))
        if self._rng.random() < 0.6:
            node.kill(noticed_s=noticed_s)
        else:
            self._at_next_grant(lambda one: one.kill(noticed_s=noticed_s))

    def _at_next_grant(self, strike: Callable[[SimStoreNode], None]) -> None:
        """Strike the node that is granted blocks next, before it reads them."""
        nodes = self._cluster.store_nodes

        def struck(node: SimStoreNode) -> None:
            for other in nodes:
                other.on_grant = None
            strike(node)

        for node in nodes:
            node.on_grant = partial(struck, node)

    def _freeze(self) -> None:
        node = self._node()
        if node is None or node.is_frozen:
            return
        span_s = self._span_s()
        if self._rng.random() < 0.6:
            self._freeze_for(node, span_s)
        else:
            self._at_next_grant(lambda one: self._freeze_for(one, span_s))

    def _freeze_for(self, node: SimStoreNode, span_s: float) -> None:
        if node.is_alive and not node.is_frozen and not self._is_over:
            node.freeze()
            self._cluster.run.clock.after(span_s, lambda: self._thaw(node))

    def _thaw(self, node: SimStoreNode) -> None:
        node.thaw(mistrust_s=3 * self._cluster.scenario.store.lease_s)

    def _hang_up(self) -> None:
        workers = self._cluster.workers
        if workers:
            worker = self._rng.choice(workers)
            worker.post(worker.store.break_off)

    def _clear(self) -> None:
        """An operator empties a node, or one of its tiers, whoever reads from it."""
        node = self._node()
        if node is not None:
            tier = self._rng.choice((None, Tier.HOST, Tier.HOST, Tier.SSD))
            node.post(lambda: node.feed(Clear(tier)))

    def _disk_full(self) -> None:
        disk = self._host().disk
        disk.is_full = True

        def room() -> None:
            disk.is_full = False

        self._cluster.run.clock.after(self._span_s(), room)

    def _disk_slow(self) -> None:
        disk = self._host().disk
        disk.slowness = self._rng.choice((10.0, 200.0, 2000.0))

        def normal() -> None:
            disk.slowness = 1.0

        self._cluster.run.clock.after(self._span_s(), normal)

    def _disk_error(self) -> None:
        disk = self._host().disk
        disk.error_chance = self._rng.choice((0.1, 1.0))

        def normal() -> None:
            disk.error_chance = 0.0

        self._cluster.run.clock.after(self._span_s(), normal)

    def _disk_flip(self) -> None:
        self._cluster.run.counts["bits flipped on disks"] += self._host().disk.flip_bit()

    def _memory_flip(self) -> None:
        node = self._node()
        if node is not None and self._cluster.scenario.store.checksums:  # else nobody could know
            self._cluster.run.counts["bits flipped in arenas"] += node.flip_bit(self._rng)

    def _directory_outage(self) -> None:
        self._cluster.directory.go_down(self._span_s())
