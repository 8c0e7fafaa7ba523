"""The components of a node, joined."""

from baton.core.store import Tier
from kv_store.node.context import Context
from kv_store.node.drain import Drainer, Takeovers
from kv_store.node.finds import Finds
from kv_store.node.host_tier import HostTier
from kv_store.node.index import Index
from kv_store.node.leases import Leases
from kv_store.node.loads import Loads
from kv_store.node.lookups import Lookups
from kv_store.node.peers import PeerFetches
from kv_store.node.promotion import Promoter
from kv_store.node.publisher import Publisher
from kv_store.node.quotas import Quotas
from kv_store.node.ssd import SsdTier
from kv_store.node.workers import StoreClientState
from kv_store.node.writes import Writes


class Components:
    def __init__(self, context: Context) -> None:
        config = context.config
        self.context = context
        self.publisher = Publisher(context)
        self.index = Index(context, self.publisher)
        self.quotas = Quotas(int(config.host_bytes * config.pinned_share_max))
        self.promoter = Promoter(context, self.index, self.quotas)
        self.ssd = SsdTier(context, self.index, self.promoter)
        self.host = HostTier(context, self.index, self.ssd)
        self.ssd.connect(self.host)
        self.lookups = Lookups(context)
        self.peers = PeerFetches(context, self.index, self.promoter, self.lookups, self.host)
        self.promoter.connect(Tier.SSD, self.ssd)
        self.promoter.connect(Tier.PEER, self.peers)
        self.writes = Writes(
            context, self.index, self.host, self.quotas, self.promoter, on_stored=self.ssd.came
        )
        self.finds = Finds(context, self.index, self.promoter, self.lookups, self.ssd, self.peers)
        self.loads = Loads(context, self.promoter)
        self.leases = Leases(context, self.quotas, self.promoter)
        self.drainer = Drainer(context, self.index, self.lookups, self.leases)
        self.takeovers = Takeovers(context, self.index, self.quotas, self.promoter, self.lookups, self.peers)
        self.workers: dict[str, StoreClientState] = {}

    def settle(self) -> None:
        """Do what has become possible, then report it to everybody."""
        self._pump()
        while self.index.was_freed:
            self.index.was_freed = False
            self.promoter.admit_waiting()
            self._pump()
        self.publisher.flush()

    def _pump(self) -> None:
        if self.ssd.is_on:
            self.host.clean_ahead()
            self.ssd.pump()
        self.takeovers.pump()
        self.peers.pump()
        self.promoter.report()
