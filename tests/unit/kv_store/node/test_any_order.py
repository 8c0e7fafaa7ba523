"""Whatever happens in whatever order: accounts balance, and no reader's slot has another block than his."""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from baton.config import StoreConfig
from baton.core.ids import BlockHash, NodeId, WorkerId
from baton.core.policies import EVICTION_POLICIES
from baton.core.store import (
    BlockFacts,
    BlockLocation,
    BlocksGrant,
    BlocksRefused,
    BlocksWritten,
    NodeRef,
    OfferBlocks,
    StoreHello,
    TakeOver,
    Tier,
)
from kv_store.node.events import (
    Clear,
    DirectoryForgot,
    DrainStore,
    FromPeer,
    FromStoreClient,
    IoDone,
    LookedUp,
    PeersChanged,
    StorePeerLost,
)
from kv_transfer.read import ReadDone, ReadSettled
from tests.unit.kv_store.node.world import World

SMALL, LARGE = 4096, 8000
WORKERS = [WorkerId("w0.a"), WorkerId("w1.a"), WorkerId("w2.a")]
PEERS = [NodeRef(NodeId(f"node-{i}"), f"host{i}:1") for i in (1, 2)]
CHAIN_BLOCKS = 6

size_classes = st.sampled_from([SMALL, SMALL, LARGE])
workers = st.sampled_from(WORKERS)
peers = st.sampled_from(PEERS)
chains = st.sampled_from("ab")
lengths = st.integers(1, CHAIN_BLOCKS)
seconds = st.sampled_from([0.001, 0.01, 0.05, 0.3, 1.0, 4.0])
rarely = st.sampled_from([False] * 7 + [True])


def chain(size_class: int, name: str) -> tuple[BlockFacts, ...]:
    hashes = [BlockHash(f"{size_class}/{name}/{i}".encode()) for i in range(-1, CHAIN_BLOCKS)]
    return tuple(
        BlockFacts(hashes[i + 1], hashes[i], depth=i, recompute_s=0.1, tenant=name)
        for i in range(CHAIN_BLOCKS)
    )


def hashes_of(size_class: int, name: str) -> tuple[BlockHash, ...]:
    return tuple(facts.block_hash for facts in chain(size_class, name))


class NodeMachine(RuleBasedStateMachine):
    @initialize(
        policy=st.sampled_from(sorted(EVICTION_POLICIES)),
        has_ssd=st.booleans(),
        tenant_share=st.sampled_from([1.0, 0.6]),
        ttl_s=st.sampled_from([0.0, 0.0, 10.0]),
        rate=st.sampled_from([0, 20_000, 10**9]),
    )
    def begin(self, policy, has_ssd, tenant_share, ttl_s, rate):
        config = StoreConfig(
            host_bytes=12 * 4096,
            ssd_dir="/ssd" if has_ssd else "",
            ssd_bytes=9 * 8192,
            ssd_threads=2,
            policy=policy,
            ttl_s=ttl_s,
            tenant_share_max=tenant_share,
            pinned_share_max=0.7,
            load_timeout_s=2.0,
            lease_s=3.0,
            replicate_bytes_s=rate,
        )
        self.world = World(config)
        self.opened = set()
        self.has_drained = False

    def open(self, size_class):
        if size_class not in self.opened and size_class in self.world.ssd_slots and self.world.config.ssd_dir:
            self.opened.add(size_class)
            self.world.open(size_class)

    def worker(self, worker_id):
        found = self.world.workers.get(worker_id)
        return None if found is None or found.is_dropped else found

    # --- workers --------------------------------------------------------------------------------

    @rule(worker_id=workers, size_class=size_classes, is_again=rarely)
    def join(self, worker_id, size_class, is_again):
        if self.worker(worker_id) is None or is_again:
            self.world.join(worker_id, size_class)
            if not is_again:
                self.open(size_class)

    @rule(worker_id=workers, is_due=rarely)
    def lose(self, worker_id, is_due):
        if worker_id in self.world.workers and is_due:
            self.world.lose(worker_id)

    @rule(worker_id=workers, name=chains, first=lengths, count=lengths)
    def offer(self, worker_id, name, first, count):
        worker = self.worker(worker_id)
        if worker is not None:
            self.world.offer(worker, chain(worker.size_class, name)[first - 1 : first - 1 + count])

    @rule(data=st.data(), worker_id=workers, is_written=st.lists(st.booleans(), min_size=1, max_size=3))
    def write(self, data, worker_id, is_written):
        worker = self.worker(worker_id)
        open_ = [] if worker is None else [i for i, (_, taken) in worker.offers.items() if taken.places]
        if open_:
            self.world.write(worker, data.draw(st.sampled_from(open_)), is_written)

    @rule(worker_id=workers, name=chains, count=lengths, is_lost=st.booleans())
    def store(self, worker_id, name, count, is_lost):
        """A worker that writes all it is asked for at once."""
        worker = self.worker(worker_id)
        if worker is not None:
            self.world.offer(worker, chain(worker.size_class, name)[:count])
            offer_id, (_, taken) = list(worker.offers.items())[-1]
            if taken.places and not is_lost:
                self.world.write(worker, offer_id, [True])

    @rule(worker_id=workers, name=chains, count=lengths, held=st.integers(0, 2))
    def find(self, worker_id, name, count, held):
        worker = self.worker(worker_id)
        if worker is not None:
            self.world.find(worker, hashes_of(worker.size_class, name)[:count], held)

    @rule(worker_id=workers, name=chains, count=lengths, time_left_s=seconds)
    def load(self, worker_id, name, count, time_left_s):
        worker = self.worker(worker_id)
        if worker is not None:
            self.world.load(worker, hashes_of(worker.size_class, name)[:count], time_left_s)

    @rule(data=st.data(), worker_id=workers, is_corrupt=st.booleans())
    def end_load(self, data, worker_id, is_corrupt):
        worker = self.worker(worker_id)
        if worker is not None and worker.loads:
            load_id = data.draw(st.sampled_from(list(worker.loads)))
            corrupt = worker.loads[load_id].hashes[:1] if is_corrupt else ()
            self.world.end_load(worker, load_id, corrupt)

    @rule(worker_id=workers, what=st.sampled_from(["hello", "written", "facts"]), is_due=rarely)
    def nonsense(self, worker_id, what, is_due):
        """It is dropped, and writes on until it hears of it."""
        worker = self.worker(worker_id)
        if worker is None or not is_due:
            return
        said = {
            "hello": StoreHello(worker_id, "x", SMALL),
            "written": BlocksWritten(9999, (1, 2)),
            "facts": OfferBlocks(10_001, (BlockFacts(BlockHash(b"x"), BlockHash(b"y"), -1, float("nan")),)),
        }[what]
        self.world.handle(FromStoreClient(worker_id, said))
        assert worker.is_dropped

    @rule(worker_id=workers)
    def worker_catches_up(self, worker_id):
        worker = self.worker(worker_id)
        if worker is not None:
            for offer_id in [i for i, (_, taken) in worker.offers.items() if taken.places]:
                self.world.write(worker, offer_id, [True])
            for load_id in list(worker.loads):
                self.world.end_load(worker, load_id)

    # --- the device -----------------------------------------------------------------------------

    @rule(data=st.data(), how=st.sampled_from(["", "", "", "error", "corrupt", "full"]))
    def io_ends(self, data, how):
        if self.world.io:
            self.world.io_ends(data.draw(st.sampled_from(list(self.world.io))), how)

    @rule()
    def device_catches_up(self):
        while self.world.io:
            self.world.io_ends(next(iter(self.world.io)), "")

    # --- peers ----------------------------------------------------------------------------------

    @rule(count=st.sampled_from([0, 1, 2, 2, 2]))
    def peers_change(self, count):
        self.world.handle(PeersChanged(tuple(PEERS[:count])))

    @rule(data=st.data())
    def look_up_ends(self, data):
        lookup_ids = list(self.world.lookups)
        if lookup_ids:
            lookup = self.world.lookups.pop(data.draw(st.sampled_from(lookup_ids)))
            some = st.sampled_from([(), (PEERS[0],), (PEERS[0],), (PEERS[1],), tuple(PEERS)])
            locations = tuple(
                tuple(BlockLocation(peer, Tier.HOST) for peer in data.draw(some)) for _ in lookup.hashes
            )
            self.world.handle(LookedUp(lookup.lookup_id, locations))

    @precondition(lambda self: self.world.asked)
    @rule(
        data=st.data(),
        count=lengths,
        skip=st.integers(0, 2),
        how=st.sampled_from(["", "", "", "fail", "lie"]),
    )
    def peer_answers(self, data, count, skip, how):
        """`skip`: blocks that it has told of already are told again."""
        key = data.draw(st.sampled_from(list(self.world.asked)))
        if how == "fail":
            node = next(peer for peer in PEERS if peer.node_id == key[0])
            size_class, pin = self.world.asked[key]
            first = min(skip, len(pin.hashes))
            self.world.handle(FromPeer(size_class, node, BlocksRefused(key[1], first, "gone")))
        else:
            self.answer(key, skip, count, is_lying=how == "lie")

    def answer(self, key, first, count, *, is_lying):
        node = next(peer for peer in PEERS if peer.node_id == key[0])
        size_class, pin = self.world.asked[key]
        hashes = pin.hashes[first : first + count]
        known = {f.block_hash: f for name in "ab" for f in chain(size_class, name)}
        facts = tuple(known[h] for h in hashes)[is_lying:]
        numbers = tuple(key[1] * 100 + first + i for i in range(len(hashes)))
        self.world.at_peers.update(zip(numbers, hashes, strict=True))
        answer = BlocksGrant(key[1], first, numbers, numbers, facts, numbers, 3.0, pin.request_number)
        self.world.handle(FromPeer(size_class, node, answer))

    @precondition(lambda self: self.world.reads)
    @rule(data=st.data(), how=st.sampled_from(["", "", "", "stale", "error", "unsettled", "corrupt"]))
    def peer_read_ends(self, data, how):
        self.read_ends(data.draw(st.sampled_from(list(self.world.reads))), how)

    def read_ends(self, read_id, how):
        read = self.world.reads.pop(read_id)
        corrupt = (0,) if how == "corrupt" else ()
        if how in ("", "corrupt"):
            for i, slot in enumerate(read.local_blocks):
                if i not in corrupt:
                    self.world.arena[read.block_bytes, slot] = self.world.at_peers[read.source_blocks[i]]
        if how == "unsettled":
            self.world.unsettled[read_id] = read
        done = ReadDone(
            read_id,
            error="gone" if how in ("error", "unsettled") else "",
            is_settled=how != "unsettled",
            is_stale=how == "stale",
            corrupt=corrupt,
        )
        self.world.handle(done)

    @precondition(lambda self: self.world.asked or self.world.lookups)
    @rule(peer=peers)
    def peer_serves(self, peer):
        """It has everything, and is fast."""
        for lookup_id in list(self.world.lookups):
            lookup = self.world.lookups.pop(lookup_id)
            location = (BlockLocation(peer, Tier.HOST),)
            self.world.handle(LookedUp(lookup_id, (location,) * len(lookup.hashes)))
        for key in list(self.world.asked):
            if key in self.world.asked:
                self.answer(key, first=0, count=CHAIN_BLOCKS, is_lying=False)
        while self.world.reads:
            self.read_ends(next(iter(self.world.reads)), "")

    @precondition(lambda self: self.world.unsettled)
    @rule(data=st.data())
    def peer_read_settles(self, data):
        read_id = data.draw(st.sampled_from(list(self.world.unsettled)))
        read = self.world.unsettled.pop(read_id)
        self.world.handle(ReadSettled(read.read_id))

    @rule(peer=peers, size_class=size_classes, is_due=rarely)
    def peer_lost(self, peer, size_class, is_due):
        if not is_due:
            return
        lost = [k for k, (of, _) in self.world.asked.items() if k[0] == peer.node_id and of == size_class]
        for key in lost:
            del self.world.asked[key]
        self.world.handle(StorePeerLost(size_class, peer.node_id, "vanished"))

    @rule(peer=peers, size_class=size_classes, name=chains, count=lengths, time_left_s=seconds)
    def peer_pins(self, peer, size_class, name, count, time_left_s):
        self.world.peer_pins(peer, size_class, hashes_of(size_class, name)[:count], time_left_s)

    @precondition(lambda self: self.world.leases)
    @rule(data=st.data(), how=st.sampled_from(["renew", "unpin", "unpin", "corrupt"]))
    def peer_goes_on(self, data, how):
        key = data.draw(st.sampled_from(list(self.world.leases)))
        if how == "renew":
            self.world.peer_renews(key)
        else:
            self.world.peer_unpins(key, self.world.leases[key].hashes[:1] if how == "corrupt" else ())

    @rule(peer=peers, size_class=size_classes, name=chains)
    def peer_leaves(self, peer, size_class, name):
        self.world.handle(FromPeer(size_class, peer, TakeOver(hashes_of(size_class, name))))

    # --- the rest -------------------------------------------------------------------------------

    @rule(passed_s=seconds)
    def time_passes(self, passed_s):
        self.world.wait(passed_s)

    @rule(passed_s=st.sampled_from([10.0, 70.0]), is_due=rarely)
    def nothing_happens_for_long(self, passed_s, is_due):
        if is_due:
            self.world.wait(passed_s)

    @rule(
        tier=st.sampled_from([None, Tier.HOST, Tier.HOST]), tenant=st.sampled_from([None, "a"]), is_due=rarely
    )
    def clear(self, tier, tenant, is_due):
        if is_due:
            self.world.handle(Clear(tier, tenant))

    @rule()
    def directory_forgot(self):
        self.world.handle(DirectoryForgot())

    @rule()
    def ids_that_nobody_knows(self):
        self.world.handle(IoDone(99_999))
        self.world.handle(ReadDone(99_999))
        self.world.handle(ReadSettled(99_999))
        self.world.handle(LookedUp(99_999, ()))

    @rule(is_due=rarely, is_really_due=rarely)
    def drain(self, is_due, is_really_due):
        if is_due and is_really_due:
            self.has_drained = True
            self.world.handle(DrainStore(40_000))

    def teardown(self):
        """When all that was begun has ended, nothing is held."""
        if not hasattr(self, "world"):
            return
        world = self.world
        for worker_id in list(world.workers):
            world.lose(worker_id)
        for _ in range(60):
            for op_id in list(world.io):
                world.io_ends(op_id, "")
            for read_id in list(world.reads):
                del world.reads[read_id]
                world.handle(ReadDone(read_id, error="over"))
            for read_id in list(world.unsettled):
                del world.unsettled[read_id]
                world.handle(ReadSettled(read_id))
            world.wait(3.0)
        assert world.core.is_idle
        status = world.core.status()
        assert status.tiers[Tier.HOST].pinned_count == status.tiers[Tier.SSD].pinned_count == 0
        assert (status.loads_open, status.writes_open, status.leases_open) == (0, 0, 0)
        assert world.core.is_drained == self.has_drained
        assert not world.asked


NodeMachine.TestCase.settings = settings(
    max_examples=150,
    stateful_step_count=60,
    deadline=None,
    report_multiple_bugs=False,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestAnyOrder = NodeMachine.TestCase
