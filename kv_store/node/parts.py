"""The parts of a node, joined."""

from baton.core.store import Tier
from kv_store.node.bringing import Bringer
from kv_store.node.context import Context
from kv_store.node.finds import Finds
from kv_store.node.host import HostTier
from kv_store.node.index import Index
from kv_store.node.loads import Loads
from kv_store.node.peers import PeerFetches
from kv_store.node.publisher import Publisher
from kv_store.node.shares import Shares
from kv_store.node.ssd import SsdTier
from kv_store.node.workers import Worker
from kv_store.node.writes import Writes


class Parts:
    def __init__(self, context: Context) -> None:
        config = context.config
        self.context = context
        self.publisher = Publisher(context)
        self.index = Index(context, self.publisher)
        self.shares = Shares(int(config.host_bytes * config.pinned_share_max))
        self.bringer = Bringer(context, self.index, self.shares)
        self.ssd = SsdTier(context, self.index, self.bringer)
        self.host = HostTier(context, self.index, self.ssd)
        self.ssd.connect(self.host)
        self.peers = PeerFetches(context, self.bringer)
        self.bringer.connect(Tier.SSD, self.ssd)
        self.bringer.connect(Tier.PEER, self.peers)
        self.writes = Writes(context, self.index, self.host, self.shares)
        self.finds = Finds(context, self.index, self.bringer, self.ssd, self.peers)
        self.loads = Loads(context, self.index, self.bringer)
        self.workers: dict[str, Worker] = {}
