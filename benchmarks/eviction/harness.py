"""A trace through one pool: how many blocks are hit under a policy, and how many could be at best. Pure.

A request's hits are its leading blocks that the pool holds when it arrives. Then all its blocks are used,
deepest first: touched if held, else inserted. Then blocks leave until the capacity holds; blocks of the
request itself may be among them, so that a policy can refuse. Prefix hits of all requests by all their
blocks are the hit ratio.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from baton.core.ids import BlockHash
from baton.core.store import BlockFacts
from kv_store.tiers.policy import EvictionPolicy

Chain = Sequence[int]
"""A number per block that stands for it and all before it."""
Requests = Sequence[tuple[float, Chain]]
"""Arrival in seconds, and blocks, first block first."""

PROGRESS_EVERY = 500


@dataclass(frozen=True, slots=True)
class Hits:
    hit_blocks: int
    asked_blocks: int

    @property
    def ratio(self) -> float:
        return self.hit_blocks / self.asked_blocks if self.asked_blocks else 0.0


def block_hash_of(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(16, "big", signed=True))


ROOT = block_hash_of(-1)


def chains_of(requests: Iterable[tuple[float, Sequence[int]]]) -> list[tuple[float, tuple[int, ...]]]:
    """Blocks by content become blocks by prefix: equal leading runs get equal numbers."""
    numbers: dict[tuple[int, int], int] = {}
    chained: list[tuple[float, tuple[int, ...]]] = []
    for at_s, contents in requests:
        chain: list[int] = []
        parent = -1
        for content in contents:
            parent = numbers.setdefault((parent, content), len(numbers))
            chain.append(parent)
        chained.append((at_s, tuple(chain)))
    return chained


def run_policy(
    requests: Requests,
    policy: EvictionPolicy,
    capacity_blocks: int,
    *,
    progress: Callable[[int], None] | None = None,
) -> Hits:
    """`requests` as `chains_of` gives them; `progress` hears how many are done."""
    held: set[BlockHash] = set()
    hashes: dict[int, BlockHash] = {}
    hit = asked = 0
    for index, (at_s, chain) in enumerate(requests):
        keys = [hashes.setdefault(n, block_hash_of(n)) for n in chain]
        hit += next((i for i, key in enumerate(keys) if key not in held), len(keys))
        asked += len(keys)
        policy.expect(keys, now_s=at_s)
        for depth in range(len(keys) - 1, -1, -1):
            key = keys[depth]
            if key in held:
                policy.touch(key, now_s=at_s)
            else:
                held.add(key)
                policy.insert(BlockFacts(key, keys[depth - 1] if depth else ROOT, depth), now_s=at_s)
        _make_room(policy, held, capacity_blocks, at_s)
        if progress is not None and index % PROGRESS_EVERY == 0:
            progress(index)
    return Hits(hit, asked)


def _make_room(policy: EvictionPolicy, held: set[BlockHash], capacity_blocks: int, now_s: float) -> None:
    while len(held) > capacity_blocks:
        victim = policy.victim(lambda _: True)
        if victim is None:
            raise AssertionError(f"{policy.name} names nobody of {len(held)} blocks")
        held.remove(victim)
        policy.remove(victim, now_s=now_s, was_evicted=True)


def best_possible(requests: Requests, capacity_blocks: int) -> Hits:
    """The exact optimum of the same game for one who knows the future (Belady's MIN, as MIN with bypass).

    After each request leave those whose next use is farthest, of equals the deepest. Every use of a block is
    a use of all before it, so no block is ever wanted before its parent: what is kept is closed under
    prefixes, block hits are prefix hits, and the optimum for the first, which MIN is, is that for the second.
    """
    next_uses = _next_uses(requests)
    held: dict[int, int] = {}
    farthest: list[tuple[int, int, int]] = []
    hit = asked = 0
    for (_, chain), uses in zip(requests, next_uses, strict=True):
        asked += len(chain)
        hit += next((i for i, n in enumerate(chain) if n not in held), len(chain))
        for depth, (number, use) in enumerate(zip(chain, uses, strict=True)):
            held[number] = use
            heappush(farthest, (-use, -depth, number))
        while len(held) > capacity_blocks:
            negative_use, _, number = heappop(farthest)
            if held.get(number) == -negative_use:
                del held[number]
    return Hits(hit, asked)


def _next_uses(requests: Requests) -> list[list[int]]:
    never = len(requests)
    upcoming: dict[int, int] = {}
    uses: list[list[int]] = []
    for index in range(len(requests) - 1, -1, -1):
        chain = requests[index][1]
        uses.append([upcoming.get(number, never) for number in chain])
        for number in chain:
            upcoming[number] = index
    uses.reverse()
    return uses
