"""The order of reads, against a script and against a simple count of bytes in flight."""

from collections import Counter

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from decode_worker.read_queue import Chunk, ReadQueue

BLOCK_BYTES = 100


def queue(*, reads=8, blocks=8):
    return ReadQueue(reads_max=reads, bytes_max=blocks * BLOCK_BYTES, block_bytes=BLOCK_BYTES)


def chunk(session, count, first=0):
    blocks = tuple(range(first, first + count))
    return Chunk(session, first, blocks, tuple(b + 1 for b in blocks), tuple(b + 2 for b in blocks))


def started(q):
    found = []
    while (next_chunk := q.next()) is not None:
        found.append(next_chunk)
    return found


def test_a_long_grant_is_read_in_parts_that_say_what_it_said():
    q = queue(blocks=8)
    assert q.add(chunk("long", 5, first=10)) == 3
    parts = [q.next()]
    parts += [q.next()]
    assert q.next() is None  # half of what may be in flight is one request's at most
    q.ended(parts[0])
    parts.append(q.next())
    assert [c.first_block for c in parts] == [10, 12, 14]
    assert [c.source_blocks for c in parts] == [(10, 11), (12, 13), (14,)]
    assert [c.generations for c in parts] == [(11, 12), (13, 14), (15,)]
    assert [c.checksums for c in parts] == [(12, 13), (14, 15), (16,)]


def test_a_short_request_behind_a_long_one_is_read_at_once():
    q = queue(blocks=8)
    q.add(chunk("long", 1000))
    assert {c.session for c in started(q)} == {"long"}
    q.add(chunk("short", 2))
    assert [c.session for c in started(q)] == ["short"]


def test_requests_share_the_bytes_whatever_they_were_granted_first():
    q = queue(blocks=8)
    for session in ("a", "b", "c"):
        q.add(chunk(session, 100))
    served = Counter()
    running = started(q)
    for _ in range(60):
        ended = running.pop(0)
        served[ended.session] += len(ended.source_blocks)
        q.ended(ended)
        running += started(q)
    assert max(served.values()) - min(served.values()) <= 4


def test_the_largest_waits_for_its_turn_and_is_not_overtaken_for_ever():
    q = queue(blocks=1)
    q.add(chunk("a", 1))
    q.add(chunk("b", 1))
    (first,) = started(q)
    q.add(chunk("a", 1, first=1))
    q.ended(first)
    (second,) = started(q)
    assert (first.session, second.session) == ("a", "b")


def test_a_block_larger_than_the_limit_is_read_alone():
    q = ReadQueue(reads_max=8, bytes_max=10, block_bytes=BLOCK_BYTES)
    assert q.add(chunk("a", 2)) == 2
    assert len(started(q)) == 1


def test_a_chunk_to_be_read_again_comes_before_the_others():
    q = queue(reads=1)
    q.add(chunk("a", 1))
    q.add(chunk("a", 1, first=1))
    first = q.next()
    q.ended(first)
    q.add_again(first)
    assert q.next() is first


class ReadQueueMachine(RuleBasedStateMachine):
    SESSIONS = "abcd"

    def __init__(self):
        super().__init__()
        self.q = queue(reads=4, blocks=8)
        self.running = []
        self.left = Counter()

    @rule(session=st.sampled_from(SESSIONS), count=st.integers(1, 12))
    def add(self, session, count):
        self.q.add(chunk(session, count))
        self.left[session] += count

    @rule()
    def start(self):
        for c in started(self.q):
            self.left[c.session] -= len(c.source_blocks)
            self.running.append(c)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), again=st.booleans())
    def end(self, data, again):
        c = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        self.q.ended(c)
        if again:
            self.q.add_again(c)
            self.left[c.session] += len(c.source_blocks)

    @rule(session=st.sampled_from(SESSIONS))
    def forget(self, session):
        self.q.forget(session)
        self.left[session] = 0

    @invariant()
    def bounded(self):
        self.q.check(reads_in_flight=len(self.running))
        assert sum(len(c.source_blocks) for c in self.running) <= 8

    def teardown(self):
        """Whatever waits is read in the end."""
        while self.running or sum(self.left.values()):
            self.start()
            assert self.running
            self.q.ended(self.running.pop())
        assert self.q.next() is None


TestReadQueue = ReadQueueMachine.TestCase
