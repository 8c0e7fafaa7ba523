from dataclasses import dataclass

import pytest

from baton.core.ids import ReadId, WorkerId
from kv_transfer.layout import RangeCopy
from kv_transfer.lease import ReaderLease
from kv_transfer.read import BlockRead, ReadDone
from kv_transfer.session import BadGrant, OpenReads, ReadSession

LEASE_S = 6.0


@dataclass(frozen=True)
class Grant:
    first_block: int = 0
    source_blocks: tuple = ()
    generations: tuple = ()
    checksums: tuple = ()
    lease_s: float = LEASE_S
    answers_request: int = 0


def grant(first, blocks, **changes):
    return Grant(first, tuple(blocks), (1,) * len(blocks), **changes)


@pytest.fixture
def session():
    lease = ReaderLease(lease_s=LEASE_S, patience_end_s=20.0)
    lease.request(now_s=0.0)
    return ReadSession(lease, block_count=4)


def read(number, blocks=(7,)):
    count = len(blocks)
    return BlockRead(
        ReadId(number), WorkerId("o"), tuple(range(count)), tuple(blocks), (1,) * count, 1.0, 100
    )


def test_blocks_granted_again_are_not_read_again(session):
    assert session.accept(grant(0, [10, 11]), slack_s=0.0).source_blocks == (10, 11)
    added = session.accept(grant(1, [11, 12]), slack_s=0.0)
    assert (added.first_block, added.source_blocks, added.generations) == (2, (12,), (1,))
    assert session.accept(grant(0, [10]), slack_s=0.0).source_blocks == ()
    assert session.granted_end == 3


def test_what_the_reader_has_already_need_not_be_granted():
    lease = ReaderLease(lease_s=LEASE_S, patience_end_s=20.0)
    lease.request(now_s=0.0)
    session = ReadSession(lease, block_count=4, granted_end=3)
    assert session.accept(grant(3, [13]), slack_s=0.0).first_block == 3


@pytest.mark.parametrize(
    "bad",
    [
        grant(1, [11]),
        grant(0, [10, 11, 12, 13, 14]),
        grant(-1, [9, 10]),
        grant(0, [-1]),
        grant(0, [10, 11], checksums=(5,)),
        grant(0, [10], checksums=(2**64,)),
        grant(0, [10], lease_s=0.0),
        grant(0, [10], lease_s=float("nan")),
        grant(0, [10], answers_request=1),
        Grant(0, (10, 11), (1,)),
    ],
    ids=[
        "a gap",
        "more than requested",
        "before the first",
        "a block below 0",
        "some checksums",
        "a checksum that is none",
        "no lease",
        "a lease of nothing",
        "an answer to what was not sent",
        "a generation missing",
    ],
)
def test_a_grant_that_makes_no_sense_changes_nothing(session, bad):
    with pytest.raises(BadGrant):
        session.accept(bad, slack_s=0.0)
    assert (session.granted_end, session.lease.is_granted) == (0, False)


def test_a_read_is_good_only_before_the_lease_ends(session):
    session.accept(grant(0, [10, 11]), slack_s=0.5)
    reads = OpenReads()
    reads.start(read(0), session, "a", now_s=1.0)
    reads.start(read(1), session, "b", now_s=1.0)
    _, good = reads.done(ReadDone(ReadId(0)), now_s=5.4)
    _, late = reads.done(ReadDone(ReadId(1)), now_s=5.5)
    assert (good.fault, good.may_repeat) == ("", True)
    assert (bool(late.fault), late.may_repeat) == (True, False)


@pytest.mark.parametrize(
    ("done", "may_repeat"),
    [
        ({"error": "broken"}, True),
        ({"error": "moved", "is_stale": True}, False),
        ({"is_settled": False}, True),
    ],
)
def test_a_read_that_failed_is_of_no_use(session, done, may_repeat):
    reads = OpenReads()
    reads.start(read(0), session, None, now_s=1.0)
    _, verdict = reads.done(ReadDone(ReadId(0), **done), now_s=1.0)
    assert verdict.fault
    assert verdict.may_repeat is may_repeat


def test_a_read_is_open_until_it_has_settled_and_is_answered_once(session):
    reads = OpenReads()
    opened = reads.start(read(3), session, "part", now_s=0.0)
    opened.quarantined.append(7)
    assert reads.settled(ReadId(3)) is None  # it is still in flight
    assert (reads.in_flight_count, reads.quarantined_count, session.reads_open) == (1, 1, 1)
    assert reads.done(ReadDone(ReadId(3), "late", is_settled=False), now_s=0.0) is not None
    assert reads.done(ReadDone(ReadId(3)), now_s=0.0) is None
    assert (reads.in_flight_count, len(reads.of(session)), session.reads_open) == (0, 1, 1)
    assert reads.settled(ReadId(3)) is opened
    assert reads.settled(ReadId(3)) is None
    assert (len(reads), session.reads_open) == (0, 0)
    reads.check()


def test_the_release_waits_for_the_last_read_and_is_sent_once(session):
    reads = OpenReads()
    reads.start(read(0), session, None, now_s=0.0)
    session.end(tell_owner=True)
    assert not session.take_release()
    reads.done(ReadDone(ReadId(0)), now_s=0.0)
    assert not session.take_release()
    reads.settled(ReadId(0))
    assert session.take_release()
    assert not session.take_release()


def test_nobody_is_told_of_the_end_when_the_owner_is_lost(session):
    session.end(tell_owner=True)
    session.owner_lost()
    assert not session.take_release()


def test_a_read_of_parts_counts_their_bytes():
    whole = read(0, blocks=(1, 2, 3))
    assert whole.byte_count == 300
    ranges = (RangeCopy(0, 8, 16), RangeCopy(32, 0, 4))
    parts = BlockRead(ReadId(0), WorkerId("o"), (0, 1), (0, 1), (1, 1), 1.0, 100, ranges=ranges)
    assert parts.byte_count == 40
