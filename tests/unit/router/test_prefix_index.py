"""The inverted index agrees with the dullest model: a set of hashes per worker."""

from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.ids import BlockHash, WorkerId
from baton.core.messages import BlockEvents
from router.decisions.prefix_index import EXPECTED_S, RESYNC_AGAIN_S, PrefixIndex

A, B = WorkerId("a"), WorkerId("b")
CHAIN = [BlockHash(bytes([i]) * 16) for i in range(6)]


def index_of(**blocks: list[BlockHash]) -> PrefixIndex:
    index = PrefixIndex()
    for name, held in blocks.items():
        index.add_worker(WorkerId(name))
        index.apply(WorkerId(name), BlockEvents(0, stored=tuple(held), is_snapshot=True), now_s=0.0)
    return index


def test_the_longest_prefix_of_each_worker_is_found():
    index = index_of(a=CHAIN[:4], b=CHAIN[:2], c=CHAIN[3:], d=[])
    assert index.match(CHAIN) == {"a": 4, "b": 2}
    assert index.match(CHAIN[:1]) == {"a": 1, "b": 1}
    assert index.match([]) == {}


def test_nothing_counts_before_the_first_snapshot():
    index = PrefixIndex()
    index.add_worker(A)
    assert index.apply(A, BlockEvents(3, stored=tuple(CHAIN)), now_s=0.0) is True
    assert not index.is_known(A)
    assert index.match(CHAIN) == {}


def test_a_gap_forgets_until_the_snapshot_and_asks_once():
    index = index_of(a=CHAIN[:3])
    assert index.apply(A, BlockEvents(2), now_s=1.0) is True
    assert index.match(CHAIN) == {}
    assert index.apply(A, BlockEvents(3, stored=tuple(CHAIN)), now_s=1.1) is False
    assert index.match(CHAIN) == {}
    assert index.apply(A, BlockEvents(4), now_s=1.1 + RESYNC_AGAIN_S) is True
    assert index.apply(A, BlockEvents(5, stored=tuple(CHAIN[:2]), is_snapshot=True), now_s=8.0) is False
    index.apply(A, BlockEvents(6, stored=(CHAIN[2],)), now_s=8.0)
    assert index.match(CHAIN) == {"a": 3}


def test_events_heard_twice_change_nothing():
    index = index_of(a=CHAIN[:1])
    index.apply(A, BlockEvents(1, stored=(CHAIN[1],)), now_s=0.0)
    index.apply(A, BlockEvents(2, removed=(CHAIN[1],)), now_s=0.0)
    assert index.apply(A, BlockEvents(1, stored=(CHAIN[1],)), now_s=0.0) is False
    assert index.match(CHAIN) == {"a": 1}


def test_expected_blocks_count_until_their_time_unless_confirmed():
    index = index_of(a=[], b=[])
    index.expect(A, CHAIN[:4], now_s=0.0)
    assert index.match(CHAIN) == {"a": 4}
    index.apply(A, BlockEvents(1, stored=tuple(CHAIN[:2])), now_s=1.0)
    assert index.next_tick_s == EXPECTED_S
    index.expire(EXPECTED_S)
    assert index.match(CHAIN) == {"a": 2}
    assert index.next_tick_s is None


def test_a_lost_worker_leaves_nothing_and_its_bit_is_used_again():
    index = index_of(a=CHAIN, b=CHAIN[:1])
    index.expect(A, CHAIN, now_s=0.0)
    index.remove_worker(A)
    assert index.match(CHAIN) == {"b": 1}
    index.add_worker(WorkerId("c"))
    assert index.match(CHAIN) == {"b": 1}
    index.expire(1000.0)
    index.check()


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["store", "remove", "expect", "snapshot", "gap", "lose", "wait"]),
        st.sampled_from([A, B]),
        st.sets(st.sampled_from(CHAIN)),
    ),
    max_size=40,
)


@settings(max_examples=200, deadline=None)
@given(OPERATIONS)
def test_the_index_agrees_with_sets(operations):
    index = index_of(a=[], b=[])
    numbers = {A: 1, B: 1}
    known = {A: True, B: True}
    stored: dict[WorkerId, set[BlockHash]] = {A: set(), B: set()}
    expected: dict[WorkerId, dict[BlockHash, float]] = {A: {}, B: {}}
    now_s = 0.0
    for what, worker, blocks in operations:
        now_s += 1.0
        index.expire(now_s)
        for waits in expected.values():
            for block in [b for b, until_s in waits.items() if until_s <= now_s]:
                del waits[block]
        if what == "expect":
            index.expect(worker, sorted(blocks), now_s=now_s)
            for block in blocks - stored[worker]:
                expected[worker].setdefault(block, now_s + EXPECTED_S)
        elif what == "lose":
            index.remove_worker(worker)
            index.add_worker(worker)
            numbers[worker], known[worker] = 0, False
            stored[worker], expected[worker] = set(), {}
        elif what == "wait":
            now_s += 4.0
            continue
        else:
            if what == "gap":
                numbers[worker] += 1
                known[worker], stored[worker] = False, set()
            removed = tuple(blocks) if what == "remove" else ()
            added = tuple(blocks) if what in ("store", "snapshot") else ()
            message = BlockEvents(numbers[worker], added, removed, what == "snapshot")
            index.apply(worker, message, now_s=now_s)
            numbers[worker] += 1
            if what == "snapshot":
                known[worker], stored[worker] = True, set()
            if known[worker] and what != "gap":
                stored[worker] = (stored[worker] | set(added)) - set(removed)
                for block in added:
                    expected[worker].pop(block, None)
        index.check()
        for worker_id in (A, B):
            held = stored[worker_id] | expected[worker_id].keys()
            depth = next((i for i, b in enumerate(CHAIN) if b not in held), len(CHAIN))
            assert index.match(CHAIN).get(worker_id, 0) == depth
