import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton.core.hashing import block_hashes, root_hash
from engine.scheduling.block_pool import BlockPool, OutOfBlocks
from engine.scheduling.prefix_cache import PrefixCache

BLOCKS = 6
ROOT = root_hash("f", b"")
# A few prompts over a tiny alphabet, so that prefixes are shared often.
PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=4).map(tuple)


class PrefixCacheAgainstModel(RuleBasedStateMachine):
    """One token is one block. The model knows what each block really contains, and what a router that
    hears the changes believes."""

    def __init__(self):
        super().__init__()
        self.pool = BlockPool(BLOCKS, [0] * BLOCKS)
        self.cache = PrefixCache(self.pool)
        self.content = {}  # block -> hash of what was last written
        self.held = []
        self.believed = set()

    @rule(prompt=PROMPTS, keep_free=st.integers(0, 2))
    def run_a_prompt(self, prompt, keep_free):
        hashes = block_hashes(ROOT, prompt, 1)
        free_before, matched = self.pool.free_count, self.cache.match(hashes)
        revived = [b for b in matched if self.pool.ref_count(b) == 0]
        need = len(hashes) - len(matched) + len(revived)
        try:
            got = self.cache.reserve(hashes, len(hashes), keep_free=keep_free)
        except OutOfBlocks:
            assert free_before - need < keep_free
            assert self.pool.free_count == free_before
            return
        assert self.pool.free_count == free_before - need >= keep_free
        assert got.blocks[: got.cached_count] == matched
        for block, block_hash in list(zip(got.blocks, hashes, strict=True))[got.cached_count :]:
            self.content[block] = block_hash
            self.cache.insert(block_hash, block)
        self.held.append(got.blocks)

    @precondition(lambda self: bool(self.held))
    @rule(data=st.data())
    def give_back(self, data):
        self.pool.release(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @precondition(lambda self: self.pool.free_count > 0)
    @rule()
    def take_for_something_without_a_hash(self):
        [block] = self.pool.allocate(1)
        self.content[block] = None
        self.held.append([block])

    @rule()
    def collect(self):
        changes = self.cache.collect_changes()
        if changes is None:
            assert self.believed == set(self.cache.snapshot())
            return
        assert changes.stored or changes.removed
        assert self.believed.isdisjoint(changes.stored)
        assert self.believed.issuperset(changes.removed)
        self.believed = (self.believed | set(changes.stored)) - set(changes.removed)
        assert self.believed == set(self.cache.snapshot())

    @invariant()
    def what_is_found_is_really_there(self):
        self.pool.check()
        self.cache.check()
        for block_hash in self.cache.snapshot():
            [block] = self.cache.match([block_hash])
            assert self.content[block] == block_hash


TestPrefixCache = PrefixCacheAgainstModel.TestCase
TestPrefixCache.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def cached(prompt, blocks=BLOCKS):
    """A cache in which the prompt was run and freed."""
    pool = BlockPool(blocks, [0] * blocks)
    cache = PrefixCache(pool)
    hashes = block_hashes(ROOT, prompt, 1)
    got = cache.reserve(hashes, len(hashes), keep_free=0)
    for block_hash, block in zip(hashes, got.blocks, strict=True):
        cache.insert(block_hash, block)
    pool.release(got.blocks)
    return pool, cache, hashes, got.blocks


def test_free_blocks_stay_findable_until_they_are_reused():
    pool, cache, hashes, blocks = cached((1, 2, 3))
    assert cache.match(hashes) == blocks
    pool.allocate(BLOCKS - 2)  # three blank ones, then the tail of the cached prompt
    assert cache.match(hashes) == blocks[:2]


def test_a_match_ends_at_the_first_gap():
    pool, cache, hashes, blocks = cached((1, 2, 3))
    pool.acquire([blocks[0], blocks[2]])
    pool.allocate(BLOCKS - 2)
    assert cache.match(hashes) == blocks[:1]
    assert cache.match(hashes[2:]) == blocks[2:]


def test_what_came_and_went_between_two_collections_is_not_told():
    pool, cache, _, _ = cached((1, 2))
    pool.allocate(BLOCKS)
    assert cache.collect_changes() is None


def test_what_went_and_came_back_is_not_told():
    pool, cache, hashes, _ = cached((1,), blocks=1)
    assert cache.collect_changes() is not None
    [block] = pool.allocate(1)
    cache.insert(hashes[0], block)
    assert cache.collect_changes() is None


def test_the_second_block_with_the_same_content_stays_without_a_hash():
    pool, cache, hashes, [first] = cached((1,))
    [second] = pool.allocate(1)
    cache.insert(hashes[0], second)
    assert cache.match(hashes) == [first]
    cache.check()


def test_reserving_does_not_reuse_what_it_matched():
    pool, cache, hashes, blocks = cached((1, 2, 3), blocks=4)
    got = cache.reserve(hashes[:2], 4, keep_free=0)
    assert got.blocks[:2] == blocks[:2]
    assert len(set(got.blocks)) == 4
    with pytest.raises(OutOfBlocks):
        cache.reserve([], 1, keep_free=0)
    assert pool.free_count == 0
