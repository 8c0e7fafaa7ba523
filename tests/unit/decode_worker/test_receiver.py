import pytest

from baton.config import TransferConfig
from baton.core.hashing import block_hashes, root_hash
from baton.core.ids import ReadId, SeqKey, SequenceId, WorkerId
from baton.core.messages import FailureReason, KVGrant, KVRefused, KVReleased, KVRequest, PeerRef
from decode_worker.receiver import GaveUp, KVReceiver, NoFreeBlocks, Ready, Send
from engine.scheduling.block_pool import BlockPool
from engine.scheduling.prefix_cache import PrefixCache
from kv_transfer.read import BlockRead, ReadDone

ROOT = root_hash("f", b"")
KEY = SeqKey(SequenceId("s"), 0)
P = PeerRef(WorkerId("p.1"), "p:1")
PROMPT = tuple(range(10))  # two full blocks and a part-filled one; the next token fits the third


class Desk:
    def __init__(self, *, blocks=8, keep_free=0, waiting_max=4, **transfer):
        self.pool = BlockPool(blocks, [0] * blocks)
        self.cache = PrefixCache(self.pool)
        self.receiver = KVReceiver(
            self.cache,
            TransferConfig(**transfer),
            block_tokens=4,
            block_bytes=100,
            waiting_max=waiting_max,
            keep_free=lambda: keep_free,
        )
        self.actions = []

    def did(self, actions):
        self.receiver.check()
        self.pool.check()
        self.actions += actions
        return actions

    def start(self, key=KEY, tokens=PROMPT, now_s=0.0):
        actions = self.receiver.start(key, P, tokens, ROOT, now_s=now_s)
        return self.did([*actions, *self.receiver.admit(now_s=now_s)])

    def grant(self, first, count, *, key=KEY, answers=0, last=False, now_s=0.0, lease_s=5.0):
        blocks = tuple(range(100 + first, 100 + first + count))
        grant = KVGrant(
            key.seq_id, key.epoch, first, blocks, (1,) * count, lease_s, answers, last, 42 if last else None
        )
        return self.did(self.receiver.granted(P.worker_id, grant, now_s=now_s))

    def done(self, read_id, *, error="", is_settled=True, is_stale=False, corrupt=(), now_s=0.0):
        done = ReadDone(ReadId(read_id), error, is_settled, is_stale, corrupt)
        return self.did(self.receiver.read_done(done, now_s=now_s))

    def settled(self, read_id):
        return self.did(self.receiver.read_settled(ReadId(read_id)))

    def tick(self, now_s):
        return self.did(self.receiver.tick(now_s=now_s))

    def cancel(self, key=KEY):
        return self.did(self.receiver.cancel(key))

    @property
    def releases(self):
        return [a.message for a in self.actions if isinstance(a, Send) and isinstance(a.message, KVReleased)]


def of(actions, kind):
    return [a for a in actions if isinstance(a, kind)]


def test_reserves_asks_reads_and_is_ready():
    desk = Desk()
    [ask] = desk.start()
    assert ask == Send(P, KVRequest("s", 0, 0, 0))
    assert desk.pool.held_count == 3
    [first] = desk.grant(0, 2, now_s=1.0)
    assert (first.source_blocks, len(first.local_blocks)) == ((100, 101), 2)
    [second] = desk.grant(2, 1, last=True, now_s=2.0)
    assert desk.done(0, now_s=2.5) == []
    [ready, release] = desk.done(1, now_s=3.0)
    assert isinstance(ready, Ready)
    assert tuple(ready.block_ids) == first.local_blocks + second.local_blocks
    assert (ready.first_token, ready.transferred_bytes) == (42, 300)
    assert (ready.transfer_s, ready.handover_s) == (2.0, 1.0)
    assert release == Send(P, KVReleased("s", 0, True))
    assert desk.receiver.is_idle
    assert desk.cache.match(block_hashes(ROOT, PROMPT, 4)) == list(first.local_blocks)


def test_a_prompt_that_is_all_here_still_asks_for_its_first_token():
    desk = Desk()
    desk.start(tokens=tuple(range(8)))
    desk.grant(0, 2, last=True)
    [ready, _] = desk.done(0)
    desk.pool.release(ready.block_ids)
    again = SeqKey(SequenceId("t"), 0)
    [ask] = desk.start(again, tokens=tuple(range(8)))
    assert ask.message.first_block == 2
    [ready, _] = desk.grant(2, 0, key=again, last=True)
    assert (ready.first_token, ready.transferred_bytes, len(ready.block_ids)) == (42, 0, 3)


def test_chunks_of_one_sequence_are_read_at_once_up_to_the_limit():
    desk = Desk(reads_in_flight_max=2)
    desk.start()
    reads = [*desk.grant(0, 1), *desk.grant(1, 1), *desk.grant(2, 1)]
    assert len(reads) == 2
    [third] = desk.done(0)
    assert third.source_blocks == (102,)


def test_a_block_granted_twice_is_read_once():
    desk = Desk()
    desk.start()
    desk.grant(0, 1)
    [read] = desk.grant(0, 2)
    assert read.source_blocks == (101,)


def test_a_gap_in_the_grants_is_a_failed_transfer():
    desk = Desk()
    desk.start()
    [gave_up, _] = desk.grant(1, 1)
    assert gave_up.reason is FailureReason.TRANSFER
    assert desk.pool.held_count == 0


@pytest.mark.parametrize(("first", "count", "last"), [(0, 4, False), (0, 2, True)])
def test_a_grant_that_does_not_fit_the_prompt_is_a_failed_transfer(first, count, last):
    desk = Desk()
    desk.start()
    assert of(desk.grant(first, count, last=last), GaveUp)
    assert desk.receiver.is_idle


def test_a_read_is_given_no_more_time_than_the_lease_has_left():
    desk = Desk(read_timeout_s=3.0, lease_slack_s=0.5)
    desk.start(now_s=10.0)
    [read] = desk.grant(0, 1, now_s=12.0, lease_s=5.0)
    assert read.timeout_s == pytest.approx(10.0 + 5.0 - 0.5 - 12.0)


def test_the_lease_counts_from_when_the_answered_ask_was_sent():
    desk = Desk(lease_s=3.0, lease_slack_s=0.0)
    desk.start(now_s=0.0)
    desk.grant(0, 1, now_s=0.5, lease_s=3.0)
    [renewal] = desk.tick(1.0)
    assert renewal.message == KVRequest("s", 0, 0, 1)
    assert desk.grant(1, 0, answers=0, now_s=1.5, lease_s=3.0) == []  # sent before the renewal arrived
    assert desk.receiver.next_tick_s == 2.0
    desk.tick(2.0)
    [gave_up] = desk.tick(3.0)
    assert gave_up.reason is FailureReason.TRANSFER


def test_renewals_keep_the_lease_running():
    desk = Desk(lease_s=3.0, lease_slack_s=0.0)
    desk.start()
    desk.grant(0, 0)
    for number in range(1, 20):
        now_s = desk.receiver.next_tick_s
        [renewal] = desk.tick(now_s)
        assert renewal.message.request_number == number
        desk.grant(0, 0, answers=number, now_s=now_s + 0.1, lease_s=3.0)
    assert now_s > 10


def test_a_source_that_never_answers_is_given_up():
    desk = Desk(lease_s=3.0)
    desk.start()
    for _ in range(20):
        if of(desk.tick(desk.receiver.next_tick_s), GaveUp):
            break
    assert desk.receiver.is_idle
    assert desk.pool.held_count == 0
    assert len(desk.releases) == 1


def test_a_read_that_ends_after_the_lease_is_not_trusted():
    desk = Desk(lease_slack_s=0.0)
    desk.start()
    desk.grant(0, 3, last=True)
    [gave_up, release] = desk.done(0, now_s=5.0)
    assert gave_up.reason is FailureReason.TRANSFER
    assert release.message.taken is False
    assert desk.cache.snapshot() == ()
    assert desk.pool.held_count == 0


def test_a_failed_read_is_tried_again_while_the_lease_runs():
    desk = Desk(read_attempts_max=3)
    desk.start()
    desk.grant(0, 3, last=True)
    [second] = desk.done(0, error="broken")
    assert isinstance(second, BlockRead)
    [third] = desk.done(1, error="broken")
    [gave_up, _] = desk.done(2, error="broken")
    assert gave_up.reason is FailureReason.TRANSFER
    assert third.source_blocks == second.source_blocks


def test_stale_blocks_are_not_read_again():
    desk = Desk()
    desk.start()
    desk.grant(0, 3, last=True)
    [gave_up, _] = desk.done(0, error="stale", is_stale=True)
    assert isinstance(gave_up, GaveUp)


def test_a_second_attempt_does_not_share_blocks_with_a_read_that_may_still_land():
    desk = Desk()
    desk.start()
    [first] = desk.grant(0, 3, last=True)
    [second] = desk.done(0, error="timeout", is_settled=False)
    assert set(first.local_blocks).isdisjoint(second.local_blocks)
    assert desk.receiver.quarantined_count == 3
    [ready] = desk.done(1)
    assert tuple(ready.block_ids) == second.local_blocks
    assert desk.releases == []  # the abandoned read may still be reading there
    desk.settled(0)
    assert desk.releases == [KVReleased("s", 0, True)]
    assert desk.pool.held_count == 3


def test_without_spare_blocks_an_unsettled_read_fails_the_transfer():
    desk = Desk(blocks=3)
    desk.start()
    desk.grant(0, 3, last=True)
    [gave_up] = desk.done(0, error="timeout", is_settled=False)
    assert isinstance(gave_up, GaveUp)
    assert desk.pool.held_count == 3
    desk.settled(0)
    assert desk.pool.held_count == 0


def test_cancel_waits_for_reads_and_releases_exactly_once():
    desk = Desk()
    desk.start()
    desk.grant(0, 1)
    desk.grant(1, 1)
    assert desk.cancel() == []
    assert desk.pool.held_count == 2  # the third block came back at once
    assert desk.done(0) == []
    assert desk.done(1, error="timeout", is_settled=False) == []
    assert desk.pool.held_count == 1
    desk.settled(1)
    desk.cancel()
    assert desk.releases == [KVReleased("s", 0, False)]
    assert desk.pool.held_count == 0


def test_cancel_before_any_grant_releases_at_once():
    desk = Desk()
    desk.start()
    [release] = desk.cancel()
    assert release.message == KVReleased("s", 0, False)
    assert desk.pool.held_count == 0


def test_no_room_waits_in_order_and_is_refused_in_time():
    desk = Desk(blocks=4, receive_wait_s=2.0)
    desk.start()
    first, second = SeqKey(SequenceId("a"), 0), SeqKey(SequenceId("b"), 0)
    assert desk.start(first, now_s=1.0) == []
    assert desk.start(second, tokens=(1,), now_s=1.5) == []  # would fit, but is not first
    [refused] = of(desk.tick(3.0), NoFreeBlocks)
    assert refused.key == first
    [ask] = desk.did(desk.receiver.admit(now_s=3.0))
    assert ask.message.seq_id == "b"


def test_the_waiting_line_is_bounded():
    desk = Desk(blocks=1, waiting_max=1)
    desk.start(SeqKey(SequenceId("a"), 0))
    [refused] = desk.start(SeqKey(SequenceId("b"), 0))
    assert isinstance(refused, NoFreeBlocks)


def test_blocks_are_kept_free_for_others():
    assert Desk(blocks=4, keep_free=2).start() == []


def test_a_lost_source_is_told_nothing_and_good_blocks_stay_cached():
    desk = Desk()
    desk.start()
    desk.grant(0, 1)
    desk.done(0)
    [gave_up] = desk.did(desk.receiver.owner_lost(P.worker_id, "gone"))
    assert gave_up == GaveUp(KEY, FailureReason.SOURCE_LOST, "gone")
    assert desk.pool.held_count == 0
    [ask] = desk.start(SeqKey(SequenceId("s"), 1))
    assert ask.message.first_block == 1


@pytest.mark.parametrize("granted", [0, 1])
def test_a_refusal_is_answered_by_a_release_if_anything_was_granted(granted):
    desk = Desk()
    desk.start()
    desk.grant(0, granted)
    if granted:
        desk.done(0)
    actions = desk.did(desk.receiver.refused(P.worker_id, KVRefused("s", 0, "cancelled")))
    assert actions[0] == GaveUp(KEY, FailureReason.SOURCE_REFUSED, "cancelled")
    assert len(desk.releases) == granted


def test_messages_of_strangers_and_of_ended_attempts_change_nothing():
    desk = Desk()
    desk.start()
    assert desk.receiver.refused(WorkerId("x"), KVRefused("s", 0, "")) == []
    desk.cancel()
    assert desk.grant(0, 1) == []
    assert desk.receiver.is_idle


def test_a_short_prompt_does_not_wait_for_all_of_a_long_one():
    desk = Desk(blocks=64, bytes_in_flight_max=800)  # eight blocks, two in one read
    desk.start(tokens=tuple(range(160)))
    long = of(desk.grant(0, 40), BlockRead)
    assert [len(read.source_blocks) for read in long] == [2, 2]
    short = SeqKey(SequenceId("short"), 0)
    desk.start(short)
    reads = of(desk.grant(0, 2, key=short), BlockRead)
    assert [read.source_blocks for read in reads] == [(100, 101)]
    [last] = of(desk.grant(2, 1, key=short, last=True), BlockRead)
    desk.done(reads[0].read_id)
    assert [a.key for a in of(desk.done(last.read_id), Ready)] == [short]


def test_checksums_of_a_grant_reach_the_reads_of_its_blocks():
    desk = Desk(bytes_in_flight_max=400)
    desk.start()
    grant = KVGrant("s", 0, 0, (7, 8, 9), (1, 1, 1), 5.0, is_last=True, first_token=4, checksums=(17, 18, 19))
    [first, second] = of(desk.did(desk.receiver.granted(P.worker_id, grant, now_s=0.0)), BlockRead)
    assert (first.checksums, second.checksums) == ((17,), (18,))
    [again] = of(desk.done(first.read_id, corrupt=(0,)), BlockRead)
    assert (again.source_blocks, again.checksums) == ((7,), (17,))


def test_a_grant_with_some_checksums_is_a_failed_transfer():
    desk = Desk()
    desk.start()
    grant = KVGrant("s", 0, 0, (7, 8), (1, 1), 5.0, checksums=(17,))
    assert of(desk.did(desk.receiver.granted(P.worker_id, grant, now_s=0.0)), GaveUp)
