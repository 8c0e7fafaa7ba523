import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.scheduling.block_pool import BlockPool, OutOfBlocks

BLOCKS = 8


class BlockPoolAgainstModel(RuleBasedStateMachine):
    """The dullest model: what each holder has, and free blocks in two plain lists, reused from the front."""

    def __init__(self):
        super().__init__()
        self.generations = [0] * BLOCKS
        self.pool = BlockPool(BLOCKS, self.generations)
        self.forgotten = []
        self.pool.on_reuse(self.forgotten.append)
        self.held = []
        self.blank = list(range(BLOCKS))
        self.kept = []
        self.remembered = set()
        self.taken_times = [0] * BLOCKS

    @rule(count=st.integers(0, BLOCKS + 2))
    def take(self, count):
        free = self.blank + self.kept
        if count > len(free):
            with pytest.raises(OutOfBlocks):
                self.pool.allocate(count)
            return
        expected = free[:count]
        self.forgotten.clear()
        assert self.pool.allocate(count) == expected
        assert self.forgotten == [b for b in expected if b in self.remembered]
        self.remembered -= set(expected)
        self.blank = [b for b in self.blank if b not in expected]
        self.kept = [b for b in self.kept if b not in expected]
        for block in expected:
            self.taken_times[block] += 1
        self.held.append(expected)

    @precondition(lambda self: any(self.held))
    @rule(data=st.data())
    def remember(self, data):
        block = data.draw(st.sampled_from([b for ids in self.held for b in ids]))
        self.pool.remember(block)
        self.remembered.add(block)

    @precondition(lambda self: bool(self.held))
    @rule(data=st.data())
    def share(self, data):
        ids = list(data.draw(st.sampled_from(self.held)))
        self.pool.acquire(ids)
        self.held.append(ids)

    @precondition(lambda self: bool(self.kept))
    @rule(data=st.data())
    def revive(self, data):
        block = data.draw(st.sampled_from(self.kept))
        self.pool.acquire([block])
        self.kept.remove(block)
        self.held.append([block])

    @precondition(lambda self: bool(self.held))
    @rule(data=st.data())
    def give_back(self, data):
        ids = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.pool.release(ids)
        still = {b for other in self.held for b in other}
        for block in reversed(ids):
            if block not in still:
                (self.kept if block in self.remembered else self.blank).append(block)

    @invariant()
    def accounts_balance(self):
        self.pool.check()
        held = [b for ids in self.held for b in ids]
        assert self.pool.free_count == BLOCKS - len(set(held))
        assert self.pool.held_count == len(set(held))
        assert all(self.pool.ref_count(b) == held.count(b) for b in range(BLOCKS))
        assert self.generations == self.taken_times


TestBlockPool = BlockPoolAgainstModel.TestCase
TestBlockPool.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def pool_of(count=4):
    return BlockPool(count, [0] * count)


def test_a_failed_take_changes_nothing():
    generations = [0] * 4
    pool = BlockPool(4, generations)
    pool.allocate(3)
    with pytest.raises(OutOfBlocks):
        pool.allocate(2)
    assert pool.free_count == 1
    assert generations == [1, 1, 1, 0]


def test_the_generation_rises_when_a_block_is_given_out_and_not_when_it_is_revived():
    generations = [0]
    pool = BlockPool(1, generations)
    [block] = pool.allocate(1)
    pool.remember(block)
    pool.release([block])
    pool.acquire([block])
    assert generations == [1]
    pool.release([block])
    pool.allocate(1)
    assert generations == [2]


def test_the_tail_of_a_sequence_is_reused_before_its_head():
    pool = pool_of()
    blocks = pool.allocate(4)
    for block in blocks:
        pool.remember(block)
    pool.release(blocks)
    assert pool.allocate(4) == list(reversed(blocks))


def test_blank_blocks_are_used_before_remembered_ones():
    pool = pool_of()
    kept, blank = pool.allocate(2), pool.allocate(2)
    pool.remember(kept[0])
    pool.release(kept[:1])
    pool.release(blank)
    assert set(pool.allocate(2)) == set(blank)


def test_giving_back_what_is_free_is_our_bug():
    pool = pool_of()
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(KeyError):
        pool.release(blocks)


def test_sharing_a_blank_free_block_is_our_bug():
    with pytest.raises(KeyError):
        pool_of().acquire([0])


def test_generations_may_be_memory_that_peers_read():
    generations = np.zeros(2, np.uint64)
    pool = BlockPool(2, generations)
    pool.allocate(1)
    assert generations.tolist() == [1, 0]
    assert type(pool.generation(0)) is int
