import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.ids import BlockHash, NodeId
from baton.core.store import BlockLocation, NodeRef, StoreMember, Tier
from kv_store.directory.interface import DirectoryLost
from router.decisions.stored_prefix import NOTHING_STORED, StoredRun, stored_prefix
from router.live.store_lookup import BLOCKS_MIN, StoreLookup

HOSTS = {NodeId("n1"): "a", NodeId("n2"): "b"}


def held(node, tier=Tier.HOST):
    return BlockLocation(NodeRef(NodeId(node), f"{node}:1"), tier)


def test_each_host_sees_its_own_tiers_and_what_others_have():
    found = stored_prefix([(held("n1"),), (held("n1", Tier.SSD), held("n2")), (held("n2", Tier.SSD),)], HOSTS)
    assert found.run("a", 0) == StoredRun(host=1, ssd=1, peer=1)
    assert found.run("b", 0) == StoredRun(host=1, ssd=1, peer=1)
    assert found.run("a", 2) == StoredRun(0, 0, 1)
    assert found.run("c", 0) == NOTHING_STORED


def test_a_run_ends_where_nobody_has_a_block():
    found = stored_prefix([(held("n1"),), (), (held("n1"),)], HOSTS)
    assert found.run("a", 0).block_count == 1
    assert found.run("a", 1).block_count == 0
    assert found.run("a", 2).block_count == 1
    assert found.run("a", 3) == NOTHING_STORED


def test_nodes_that_are_no_members_do_not_count():
    assert stored_prefix([(held("gone"),)], HOSTS) is None


locations = st.lists(
    st.lists(st.tuples(st.sampled_from(["n1", "n2", "x"]), st.sampled_from(Tier)), max_size=3), max_size=20
)


@given(locations, st.integers(0, 21))
def test_the_run_is_what_counting_block_by_block_says(listed, first):
    found = stored_prefix([tuple(held(n, t) for n, t in each) for each in listed], HOSTS)
    known = [[h for h in each if h[0] != "x"] for each in listed]
    length = next((i for i, each in enumerate(known[first:]) if not each), max(0, len(listed) - first))
    run = found.run("a", first) if found else NOTHING_STORED
    assert run.block_count == length
    here = [each for each in known[first : first + length] if ("n1", Tier.HOST) in each]
    assert run.host == len(here)


class FakeDirectory:
    def __init__(self):
        self.asked, self.fails, self.hangs = 0, False, False

    async def members(self):
        return (StoreMember(NodeRef(NodeId("n1"), "n1:1"), host="a"),)

    async def look_up(self, hashes):
        self.asked += 1
        if self.fails:
            raise DirectoryLost("away")
        if self.hangs:
            await asyncio.Event().wait()
        return [(held("n1"),) for _ in hashes]


PROMPT = [BlockHash(bytes([i]) * 16) for i in range(BLOCKS_MIN)]


async def test_long_prompts_are_looked_up_and_short_ones_are_not():
    directory = FakeDirectory()
    lookup = StoreLookup(directory, timeout_s=0.5)
    assert (await lookup.of(PROMPT)).run("a", 0).host == len(PROMPT)
    assert await lookup.of(PROMPT[1:]) is None
    assert directory.asked == 1


@pytest.mark.parametrize("how", ["fails", "hangs"])
async def test_a_directory_that_is_away_delays_one_request_only(how):
    directory = FakeDirectory()
    lookup = StoreLookup(directory, timeout_s=0.5)
    assert await lookup.of(PROMPT) is not None
    setattr(directory, how, True)
    assert await lookup.of(PROMPT) is None
    assert await lookup.of(PROMPT) is None
    assert directory.asked == 2
