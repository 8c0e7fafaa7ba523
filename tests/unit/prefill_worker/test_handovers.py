import pytest

from baton.core.ids import SeqKey, SequenceId, WorkerId
from baton.core.messages import KVGrant, KVRefused, KVRequest
from engine.scheduling.block_pool import BlockPool
from prefill_worker.handovers import Handovers

LEASE_S = 5.0
KEY = SeqKey(SequenceId("s"), 0)
D = WorkerId("d.1")
OTHER = WorkerId("d.2")


class Desk:
    """A pool, its hand-overs, and a sequence that computed some blocks."""

    def __init__(self, *, early_requests_max=2):
        self.generations = [0] * 8
        self.pool = BlockPool(8, self.generations)
        self.handovers = Handovers(self.pool, lease_s=LEASE_S, early_requests_max=early_requests_max)
        self.blocks = self.pool.allocate(4)

    def open(self, now_s=0.0):
        return [tell.message for tell in self.handovers.open(KEY, now_s=now_s)]

    def request(self, number=0, first_block=0, now_s=0.0, reader=D):
        request = KVRequest(KEY.seq_id, KEY.epoch, first_block, number)
        known = self.handovers.knows(KEY)
        told = (self.handovers.request if known else self.handovers.request_early)(
            reader, request, now_s=now_s
        )
        self.handovers.check()
        return [tell.message for tell in told]

    def committed(self, count, now_s=0.0):
        told = self.handovers.committed(KEY, self.blocks[:count], now_s=now_s)
        self.handovers.check()
        return [tell.message for tell in told]

    def complete(self, now_s=0.0):
        """The core does it in this order: the hand-over takes its references, then the sequence gives its own
        up."""
        told = self.handovers.complete(KEY, self.blocks, first_token=42, cached_token_count=4, now_s=now_s)
        self.pool.release(self.blocks)
        self.handovers.check()
        return [tell.message for tell in told]

    def close(self, now_s=0.0):
        told = [tell.message for tell in self.handovers.close(KEY, "cancelled", now_s=now_s)]
        self.handovers.check()
        return told

    def tick(self, now_s):
        told = [tell.message for tell in self.handovers.tick(now_s=now_s)]
        self.handovers.check()
        return told

    @property
    def held(self):
        return self.pool.held_count


@pytest.fixture
def desk():
    return Desk()


def test_each_chunk_is_granted_once_and_the_last_grant_carries_the_first_token(desk):
    desk.open()
    [nothing] = desk.request()
    assert (nothing.source_blocks, nothing.is_last) == ((), False)
    [first] = desk.committed(2)
    assert (first.first_block, first.source_blocks) == (0, tuple(desk.blocks[:2]))
    assert desk.committed(2) == []
    [last] = desk.complete()
    assert (last.first_block, last.source_blocks) == (2, tuple(desk.blocks[2:]))
    assert (last.is_last, last.first_token, last.cached_token_count) == (True, 42, 4)


def test_grants_start_where_the_reader_has_no_blocks(desk):
    desk.open()
    desk.request(first_block=3)
    assert desk.committed(2) == []
    [last] = desk.complete()
    assert (last.first_block, last.source_blocks) == (3, (desk.blocks[3],))


def test_an_reader_that_holds_all_blocks_gets_the_first_token_alone(desk):
    desk.open()
    desk.request(first_block=4)
    [last] = desk.complete()
    assert (last.first_block, last.source_blocks, last.first_token) == (4, (), 42)


def test_grants_name_the_generations_of_their_blocks(desk):
    desk.open()
    desk.complete()
    [grant] = desk.request()
    assert grant.generations == (1, 1, 1, 1)


def test_an_early_request_is_answered_when_the_sequence_arrives(desk):
    assert desk.request(number=0) == []
    assert desk.request(number=1) == []
    [grant] = desk.open()
    assert isinstance(grant, KVGrant)
    assert grant.answers_request == 1


def test_an_early_request_is_refused_after_one_lease(desk):
    desk.request(now_s=1.0)
    desk.request(number=1, now_s=3.0)
    assert desk.tick(5.9) == []
    [refused] = desk.tick(6.0)
    assert isinstance(refused, KVRefused)
    assert desk.handovers.next_tick_s is None


def test_a_reader_waits_as_long_as_the_sequence_is_made_ready(desk):
    assert desk.request(now_s=0.0) == []
    [nothing] = [tell.message for tell in desk.handovers.prepare(KEY, now_s=1.0)]
    assert (nothing.source_blocks, nothing.is_last, nothing.answers_request) == ((), False, 0)
    for number, now_s in enumerate(range(3, 30, 2), start=1):
        assert desk.tick(now_s) == []
        [nothing] = desk.request(number=number, first_block=2, now_s=now_s)
        assert (nothing.source_blocks, nothing.answers_request, nothing.lease_s) == ((), number, LEASE_S)
    [grant] = desk.open(30.0)
    assert isinstance(grant, KVGrant)
    [last] = desk.complete(31.0)
    assert last.is_last


def test_a_request_that_comes_while_the_sequence_is_made_ready_is_answered_at_once(desk):
    desk.handovers.prepare(KEY, now_s=0.0)
    [nothing] = desk.request(now_s=20.0)
    assert isinstance(nothing, KVGrant)


def test_a_reader_hears_that_the_sequence_will_not_start(desk):
    desk.handovers.prepare(KEY, now_s=0.0)
    desk.request(now_s=1.0)
    [refused] = desk.close(now_s=2.0)
    assert isinstance(refused, KVRefused)
    assert desk.request(number=1, now_s=3.0) == []  # unknown once more
    assert isinstance(desk.tick(8.0)[0], KVRefused)


def test_a_reader_that_is_silent_while_the_sequence_is_made_ready_is_forgotten(desk):
    desk.handovers.prepare(KEY, now_s=0.0)
    desk.request(now_s=1.0)
    desk.tick(6.0)
    assert desk.handovers.next_tick_s is None
    assert desk.open(7.0) == []


def test_what_no_reader_has_asked_for_is_held_while_the_reader_may_be_made_ready(desk):
    desk.handovers.open(KEY, unread_s=30.0, now_s=0.0)
    desk.complete(now_s=1.0)
    assert desk.tick(35.9) == []
    assert desk.held == 4
    [grant] = desk.request(now_s=35.9)
    assert grant.is_last
    assert desk.handovers.next_tick_s == 40.9  # an ordinary lease from now on
    desk.tick(41.0)
    assert desk.held == 0


def test_early_requests_are_bounded():
    handovers = Desk(early_requests_max=2).handovers
    told = [handovers.request_early(D, KVRequest(SequenceId(f"s{i}"), 0, 0), now_s=0.0) for i in range(3)]
    assert [len(t) for t in told] == [0, 0, 1]
    assert isinstance(told[2][0].message, KVRefused)


def test_block_is_not_reused_while_a_reader_may_read(desk):
    desk.open()
    desk.request()
    desk.committed(2)
    desk.close(now_s=1.0)
    desk.pool.release(desk.blocks)
    assert desk.held == 2
    assert set(desk.pool.allocate(desk.pool.free_count)).isdisjoint(desk.blocks[:2])


def test_a_cancelled_hand_over_waits_for_the_release(desk):
    desk.open()
    desk.request()
    desk.committed(2)
    [refused] = desk.close()
    assert isinstance(refused, KVRefused)
    desk.pool.release(desk.blocks)
    assert desk.held == 2
    desk.handovers.released(D, KEY, now_s=1.0)
    assert desk.held == 0


def test_a_cancelled_hand_over_does_not_wait_longer_than_the_lease(desk):
    desk.open()
    desk.request()
    desk.committed(2, now_s=1.0)
    desk.close(now_s=2.0)
    desk.pool.release(desk.blocks)
    [refused] = desk.request(number=1, now_s=3.0)  # a renewal does not prolong it
    assert isinstance(refused, KVRefused)
    assert desk.handovers.next_tick_s == 1.0 + LEASE_S
    desk.tick(1.0 + LEASE_S)
    assert desk.held == 0


def test_without_grants_cancel_frees_at_once(desk):
    desk.open()
    desk.request()
    desk.close()
    desk.pool.release(desk.blocks)
    assert desk.held == 0
    assert desk.handovers.count == 0


def test_second_release_changes_nothing(desk):
    desk.open()
    desk.request()
    desk.complete()
    desk.handovers.released(D, KEY, now_s=1.0)
    assert desk.held == 0
    others = desk.pool.allocate(8)
    desk.handovers.released(D, KEY, now_s=2.0)
    assert desk.held == len(others)


def test_a_stranger_cannot_release(desk):
    desk.open()
    desk.request()
    desk.complete()
    desk.handovers.released(OTHER, KEY, now_s=1.0)
    assert desk.held == 4


def test_a_second_reader_is_refused(desk):
    desk.open()
    desk.request()
    [refused] = desk.request(reader=OTHER)
    assert isinstance(refused, KVRefused)


def test_a_release_while_computing_ends_the_hand_over(desk):
    desk.open()
    desk.request()
    desk.committed(2)
    desk.handovers.released(D, KEY, now_s=1.0)
    assert desk.committed(3) == []
    assert desk.complete() == []
    assert desk.held == 0


def test_never_requested_blocks_are_held_for_one_lease_from_completion(desk):
    desk.open(now_s=0.0)
    desk.complete(now_s=10.0)
    assert desk.held == 4
    desk.tick(10.0 + LEASE_S - 0.01)
    assert desk.held == 4
    desk.tick(10.0 + LEASE_S)
    assert desk.held == 0


def test_every_request_is_answered_and_renews_the_lease(desk):
    desk.open()
    desk.request()
    desk.complete()
    [grant] = desk.request(number=1, now_s=4.0)
    assert (grant.source_blocks, grant.answers_request, grant.is_last, grant.first_token) == ((), 1, True, 42)
    desk.tick(LEASE_S + 1)
    assert desk.held == 4
    desk.tick(4.0 + LEASE_S)
    assert desk.held == 0


def test_a_repeated_request_changes_nothing_but_is_answered(desk):
    desk.open()
    desk.request()
    desk.committed(2)
    [grant] = desk.request()
    assert (grant.first_block, grant.source_blocks) == (2, ())
    [last] = desk.complete()
    assert last.first_block == 2


def test_a_reader_that_lapsed_while_we_compute_may_start_over(desk):
    desk.open()
    desk.request()
    desk.committed(2)
    desk.tick(LEASE_S)
    assert desk.held == 4  # the sequence's own
    [grant] = desk.request(reader=OTHER, now_s=6.0)
    assert grant.source_blocks == tuple(desk.blocks[:2])
