"""The load of other routers counts once while they live, and not at all afterwards."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from baton.core.ids import BlockHash, RouterId, SequenceId, WorkerId
from baton.core.messages import BlockEvents, LoadReport, Phase, Role, WorkerHello
from baton.core.sharing import ExpectedBlocks, RouterUpdate, UnreportedLoad
from router.decisions.cluster.view import ClusterView
from router.decisions.peer_loads import PEER_SILENCE_S, REPORTED_HASHES_MAX, PeerBook
from router.decisions.prefix_index import PrefixIndex

WORKERS = [WorkerId(f"w{i}") for i in range(3)]
ROUTERS = [RouterId(f"r{i}") for i in range(3)]
HASHES = [BlockHash(bytes([i]) * 16) for i in range(1, 9)]


def hello(worker_id):
    return WorkerHello(worker_id, Role.AGGREGATED, "f", "model", 16, 1000, 4096)


def report(free_blocks=1000):
    return LoadReport(Role.AGGREGATED, False, free_blocks, 0, 0, 0, 0.01)


class Router:
    """The parts of a router that the book sees."""

    def __init__(self, workers=WORKERS):
        self.cluster, self.index = ClusterView(silence_s=60.0), PrefixIndex()
        self.book = PeerBook(self.cluster, self.index)
        for worker_id in workers:
            self.join(worker_id)

    def join(self, worker_id):
        self.cluster.join(hello(worker_id), "a:1")
        self.index.add_worker(worker_id)
        self.index.apply(worker_id, BlockEvents(0, is_snapshot=True), now_s=0.0)
        self.book.worker_joined(worker_id)

    def lose(self, worker_id):
        for seq_id in list(self.cluster[worker_id].load.reservations):
            self.cluster.release_except(seq_id, ())
        self.cluster.lose(worker_id)
        self.index.remove_worker(worker_id)

    def issue(self, worker_id, name, tokens=100, blocks=10):
        self.cluster.reserve(
            worker_id, SequenceId(name), phase=Phase.AGGREGATED, tokens=tokens, blocks=blocks
        )


class Fleet(RuleBasedStateMachine):
    """Three routers over the same workers; streams between them break, stall and begin anew."""

    @initialize()
    def start(self):
        self.now_s = 0.0
        self.names = 0
        self.routers = {r: Router() for r in ROUTERS}
        self.streams = {}
        """Updates under way by (follower, followed)."""
        self.fresh_s = {}
        """Time of the last update by (follower, followed), while that counts."""

    def _end(self, pair):
        if self.streams.pop(pair, None) is not None:
            self.routers[pair[0]].book.lost(pair[1])
            self.fresh_s.pop(pair, None)

    @rule(follower=st.sampled_from(ROUTERS), followed=st.sampled_from(ROUTERS))
    def follow(self, follower, followed):
        if follower == followed:
            return
        self._end((follower, followed))
        self.told(followed)
        self.streams[follower, followed] = [self.routers[followed].book.snapshot(followed)]

    @rule(router=st.sampled_from(ROUTERS))
    def told(self, router):
        update = self.routers[router].book.changes(router)
        for pair, queue in self.streams.items():
            if pair[1] == router:
                queue.append(update or RouterUpdate(router))

    @rule(data=st.data())
    def hear(self, data):
        ready = sorted(pair for pair, queue in self.streams.items() if queue)
        if not ready:
            return
        pair = data.draw(st.sampled_from(ready))
        update = self.streams[pair].pop(0)
        if update.is_snapshot or pair in self.fresh_s:
            self.fresh_s[pair] = self.now_s
        self.routers[pair[0]].book.on_update(update, now_s=self.now_s)

    @rule(router=st.sampled_from(ROUTERS), worker=st.sampled_from(WORKERS))
    def place(self, router, worker):
        if worker in self.routers[router].cluster:
            self.names += 1
            self.routers[router].issue(worker, f"s{self.names}", tokens=self.names, blocks=1)

    @rule(router=st.sampled_from(ROUTERS), worker=st.sampled_from(WORKERS))
    def finish(self, router, worker):
        cluster = self.routers[router].cluster
        if worker in cluster and cluster[worker].load.reservations:
            cluster.release_except(next(iter(cluster[worker].load.reservations)), ())

    @rule(worker=st.sampled_from(WORKERS))
    def reports(self, worker):
        for router in self.routers.values():
            if worker in router.cluster:
                router.cluster[worker].on_report(report(), now_s=self.now_s)

    @rule(router=st.sampled_from(ROUTERS), worker=st.sampled_from(WORKERS))
    def worker_comes_or_goes(self, router, worker):
        router = self.routers[router]
        (router.lose if worker in router.cluster else router.join)(worker)

    @rule(router=st.sampled_from(ROUTERS))
    def router_dies(self, router):
        for pair in [p for p in self.streams if router in p]:
            self._end(pair)
        self.routers[router] = Router()

    @rule(seconds=st.floats(0.1, 1.5))
    def wait(self, seconds):
        self.now_s += seconds
        for router in self.routers.values():
            router.book.expire(self.now_s)
        self.fresh_s = {p: s for p, s in self.fresh_s.items() if s + PEER_SILENCE_S > self.now_s}

    @invariant()
    def accounts_agree(self):
        for router_id, router in getattr(self, "routers", {}).items():
            router.book.check()
            assert router.book.count == sum(pair[0] == router_id for pair in self.fresh_s)

    def teardown(self):
        """Check that each router counts exactly the others' load that reports do not show, once all updates
        have arrived."""
        if not hasattr(self, "routers"):
            return
        for follower in ROUTERS:
            for followed in ROUTERS:
                self.follow(follower, followed)
        for (follower, _), queue in self.streams.items():
            for update in queue:
                self.routers[follower].book.on_update(update, now_s=self.now_s)
        for router_id, router in self.routers.items():
            for worker in router.cluster:
                theirs = [
                    other.cluster[worker.worker_id].load.own_unreported
                    for other_id, other in self.routers.items()
                    if other_id != router_id and worker.worker_id in other.cluster
                ]
                assert worker.load.elsewhere.tokens == sum(s.tokens for s in theirs)
                assert worker.load.elsewhere.sequences == sum(s.sequences for s in theirs)
                assert worker.load.elsewhere.blocks == sum(s.blocks for s in theirs)
        for router_id in ROUTERS:
            for router in self.routers.values():
                router.book.lost(router_id)
        for router in self.routers.values():
            assert all(worker.load.elsewhere == UnreportedLoad(worker.worker_id) for worker in router.cluster)


class TestFleet(Fleet.TestCase):
    settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_others_work_counts_until_the_second_report_has_seen_it():
    mine, theirs = Router(), Router()
    before = mine.cluster[WORKERS[0]].load.load_tokens
    for router in (mine, theirs):
        router.cluster[WORKERS[0]].on_report(report(), now_s=0.0)
    theirs.issue(WORKERS[0], "s", tokens=500, blocks=40)
    theirs.book.changes(ROUTERS[1])
    mine.book.on_update(theirs.book.snapshot(ROUTERS[1]), now_s=0.0)
    worker = mine.cluster[WORKERS[0]]
    assert (worker.load.free_blocks, worker.load.load_tokens > before + 500) == (960, True)
    for _ in range(2):  # The reports have it now.
        theirs.cluster[WORKERS[0]].on_report(report(960), now_s=1.0)
        worker.on_report(report(960), now_s=1.0)
    mine.book.on_update(theirs.book.changes(ROUTERS[1]), now_s=1.0)
    assert (worker.load.free_blocks, worker.load.elsewhere) == (960, UnreportedLoad(WORKERS[0]))


def test_what_a_silent_router_said_ends_by_itself_and_its_stream_begins_with_a_snapshot():
    router = Router()
    load = UnreportedLoad(WORKERS[0], 1, 100, 7)
    router.book.on_update(RouterUpdate(ROUTERS[1], loads=(load,)), now_s=0.0)
    assert router.book.count == 0  # No snapshot came yet.
    router.book.on_update(RouterUpdate(ROUTERS[1], is_snapshot=True, loads=(load,)), now_s=0.0)
    router.book.on_update(RouterUpdate(ROUTERS[1]), now_s=1.0)
    assert router.book.next_tick_s == 1.0 + PEER_SILENCE_S
    router.book.expire(1.0 + PEER_SILENCE_S)
    assert router.cluster[WORKERS[0]].load.elsewhere == UnreportedLoad(WORKERS[0])
    router.book.on_update(RouterUpdate(ROUTERS[1], loads=(load,)), now_s=4.0)
    assert router.cluster[WORKERS[0]].load.elsewhere == UnreportedLoad(WORKERS[0])
    assert router.book.next_tick_s is None


def test_expected_blocks_are_told_once_and_not_passed_on():
    first, second = Router(), Router()
    first.index.placed(WORKERS[0], HASHES[:2], now_s=0.0)
    assert first.book.changes(ROUTERS[0]) is None  # Nobody listened.
    for router in (first, second):
        router.book.listen(is_followed=True)
    first.index.placed(WORKERS[0], HASHES, now_s=0.0)
    update = first.book.changes(ROUTERS[0])
    assert update.expected == (ExpectedBlocks(WORKERS[0], tuple(HASHES)),)
    second.book.on_update(RouterUpdate(ROUTERS[0], is_snapshot=True), now_s=0.0)
    second.book.on_update(update, now_s=0.0)
    assert second.index.match(HASHES) == {WORKERS[0]: len(HASHES)}
    assert second.book.changes(ROUTERS[1]) is None
    assert first.book.changes(ROUTERS[0]) is None


def test_what_is_told_at_once_is_bounded():
    router = Router()
    router.book.listen(is_followed=True)
    for _ in range(4):
        router.index.placed(WORKERS[1], HASHES * (REPORTED_HASHES_MAX // 16), now_s=0.0)
    update = router.book.changes(ROUTERS[0])
    assert sum(len(e.hashes) for e in update.expected) == REPORTED_HASHES_MAX
