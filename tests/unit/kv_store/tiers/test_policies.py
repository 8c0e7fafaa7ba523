"""Every policy against what the interface promises, and LRU against a dull list."""

import random
from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from baton.core.ids import BlockHash
from baton.core.store import BlockFacts
from benchmarks.eviction.harness import ROOT, best_possible, block_hash_of, chains_of, run_policy
from benchmarks.eviction.table import NAMES
from benchmarks.eviction.table import make_compared_policy as make_policy
from kv_store.tiers.serving import GHOSTS_LEAST, ServingPolicy

Trace = list[tuple[float, tuple[int, ...]]]


class AnyPolicy(RuleBasedStateMachine):
    """A tree of blocks comes, is used and goes in any order, pinned or not."""

    @initialize(name=st.sampled_from(NAMES), capacity=st.integers(1, 20))
    def start(self, name: str, capacity: int) -> None:
        self.policy = make_policy(name, capacity)
        self.held: list[BlockHash] = []
        self.in_use: set[BlockHash] = set()

    @rule(number=st.integers(0, 30))
    def use(self, number: int) -> None:
        block_hash, parent = block_hash_of(number), block_hash_of(number // 2) if number else ROOT
        self.policy.expect([parent, block_hash], now_s=0)
        if block_hash in self.held:
            self.held.remove(block_hash)
            self.policy.touch(block_hash, now_s=0)
        else:
            self.policy.insert(BlockFacts(block_hash, parent, number.bit_length()), now_s=0)
        self.held.append(block_hash)

    @rule(numbers=st.sets(st.integers(0, 30)))
    def pin(self, numbers: set[int]) -> None:
        self.in_use = {block_hash_of(n) for n in numbers}

    @rule(leaves=st.booleans())
    def make_room(self, leaves: bool) -> None:
        victim = self.policy.victim(lambda h: h not in self.in_use)
        free = [h for h in self.held if h not in self.in_use]
        assert (victim is None) == (not free)
        if victim is not None:
            assert victim in free
            self.policy.earns_next(victim)
            if leaves:
                self.held.remove(victim)
                self.policy.remove(victim, now_s=0, was_evicted=True)

    @rule(index=st.integers(0, 30))
    def clear_one(self, index: int) -> None:
        if self.held:
            block_hash = self.held.pop(index % len(self.held))
            self.policy.remove(block_hash, now_s=0, was_evicted=False)

    @invariant()
    def goes_empty_once_each(self) -> None:
        if isinstance(getattr(self, "policy", None), ServingPolicy):
            here = {h for h, b in self.policy._blocks.items() if b.is_held}  # pyright: ignore
            assert here == set(self.held)

    def teardown(self) -> None:
        gone: list[BlockHash] = []
        while hasattr(self, "policy") and (victim := self.policy.victim(lambda _: True)) is not None:
            self.policy.remove(victim, now_s=0, was_evicted=True)
            gone.append(victim)
        assert sorted(gone) == sorted(getattr(self, "held", []))


AnyPolicy.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestAnyPolicy = AnyPolicy.TestCase


def dull_lru(requests: Trace, capacity: int) -> int:
    order: list[int] = []
    hits = 0
    for _, chain in requests:
        hits += next((i for i, n in enumerate(chain) if n not in order), len(chain))
        order = [n for n in order if n not in chain] + list(reversed(chain))
        order = order[max(0, len(order) - capacity) :]
    return hits


def sessions(seed: int, count: int = 250) -> Trace:
    """Turns that come back after a while, each longer, among prompts that nobody asks again."""
    draw = random.Random(seed)
    turns: list[tuple[float, list[int]]] = []
    for session in range(count):
        at_s, length = session * 2.0, draw.randint(3, 12)
        for _ in range(draw.choice([1, 1, 1, 5])):
            turns.append((at_s, [0, *(session * 1000 + i + 1 for i in range(length))]))
            at_s += draw.uniform(20, 90)
            length += draw.randint(1, 3)
    return chains_of(sorted(turns))


def once(seed: int) -> Trace:
    return chains_of((float(i), [seed * 10_000 + i * 10 + j for j in range(8)]) for i in range(300))


def loop(seed: int) -> Trace:
    return chains_of((float(i), [i % (20 + seed), 1000 + i % (20 + seed)]) for i in range(800))


def zipf(seed: int) -> Trace:
    draw = random.Random(seed)
    return chains_of((float(i), [int(draw.paretovariate(0.8)) % 500, 1, 2]) for i in range(1200))


@pytest.mark.parametrize("capacity", [1, 7, 60, 500])
def test_lru_is_lru(capacity: int) -> None:
    requests = sessions(1)
    assert run_policy(requests, make_policy("lru", capacity), capacity).hit_blocks == dull_lru(
        requests, capacity
    )


@pytest.mark.parametrize("make", [sessions, once, loop, zipf])
@pytest.mark.parametrize("capacity", [5, 40, 200])
def test_serving_is_never_much_below_lru_and_nobody_beats_the_optimum(make: object, capacity: int) -> None:
    assert callable(make)
    for seed in range(2):
        requests: Trace = make(seed)  # pyright: ignore
        lru = run_policy(requests, make_policy("lru", capacity), capacity).ratio
        best = best_possible(requests, capacity).ratio
        for name in NAMES:
            assert run_policy(requests, make_policy(name, capacity), capacity).ratio <= best + 1e-12
        assert run_policy(requests, make_policy("serving", capacity), capacity).ratio >= lru - 0.002


def test_serving_keeps_part_of_a_loop_of_which_lru_keeps_nothing() -> None:
    requests = loop(40)
    assert run_policy(requests, make_policy("lru", 60), 60).hit_blocks == 0
    assert run_policy(requests, make_policy("serving", 60), 60).ratio > 0.1


def brute_force(chains: Sequence[Sequence[int]], capacity: int) -> int:
    """Every choice of what to keep."""
    from itertools import combinations

    states: dict[frozenset[int], int] = {frozenset(): 0}
    for chain in chains:
        reached: dict[frozenset[int], int] = {}
        for held, hits in states.items():
            total = hits + next((i for i, n in enumerate(chain) if n not in held), len(chain))
            union = sorted(held | set(chain))
            for kept in combinations(union, min(capacity, len(union))):
                key = frozenset(kept)
                reached[key] = max(reached.get(key, 0), total)
        states = reached
    return max(states.values())


@pytest.mark.parametrize("seed", range(6))
def test_the_optimum_is_what_trying_everything_finds(seed: int) -> None:
    draw = random.Random(seed)
    requests = chains_of(
        (float(i), [draw.randint(0, 2) for _ in range(draw.randint(1, 3))]) for i in range(9)
    )
    found = best_possible(requests, 3).hit_blocks
    assert found == brute_force([chain for _, chain in requests], 3)


def test_ghosts_are_bounded() -> None:
    policy = ServingPolicy(4)
    requests = chains_of((float(i), [i]) for i in range(GHOSTS_LEAST + 500))
    run_policy(requests, policy, 4)
    assert len(policy._blocks) <= GHOSTS_LEAST + 4  # pyright: ignore[reportPrivateUsage]
