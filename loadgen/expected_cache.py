"""The hits that an ideal prefix cache would have in a plan, to compare a server's own figure with. Pure.

The model is one LRU pool of blocks and requests in order of arrival. A prompt is cached whole when it
arrives; outputs are not cached. A real cluster has fewer hits where placement scatters prefixes, and where
siblings arrive before the first of them is computed.
"""

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from loadgen.lengths import ReplayPlan


@dataclass(frozen=True, slots=True)
class ExpectedCache:
    prompt_tokens: int
    cached_tokens: int

    @property
    def hit_ratio(self) -> float:
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


class LruPrefixCache:
    """Blocks by key; a key stands for a block and everything before it."""

    def __init__(self, capacity_blocks: int | None = None) -> None:
        """`capacity_blocks` None means no bound."""
        self._capacity = capacity_blocks
        self._blocks: OrderedDict[Hashable, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def hit_then_insert(self, keys: Sequence[Hashable]) -> int:
        """The number of leading keys that are cached. Afterwards all keys are, as far as they fit, and the
        prefix stays longest."""
        hits = 0
        for key in keys:
            if key not in self._blocks:
                break
            hits += 1
        # Insert the tail first, so that the start of a prompt is the most recently used: more requests share
        # it.
        for key in reversed(keys):
            self._blocks[key] = None
            self._blocks.move_to_end(key)
        if self._capacity is not None:
            while len(self._blocks) > self._capacity:
                self._blocks.popitem(last=False)
        return hits


def block_hit_ratio(requests: Iterable[Sequence[Hashable]], *, capacity_blocks: int | None) -> float:
    """The share of requested blocks that are leading hits, which is the figure that papers give for a
    trace."""
    cache = LruPrefixCache(capacity_blocks)
    hits = asked = 0
    for keys in requests:
        hits += cache.hit_then_insert(keys)
        asked += len(keys)
    return hits / asked if asked else 0.0


def expected_cache(
    plan: ReplayPlan, *, server_block_tokens: int, cache_blocks: int | None = None
) -> ExpectedCache:
    """Prompt tokens that an LRU prefix cache of `cache_blocks` blocks would save.

    Only full blocks are cached. A fully cached prompt still computes its last token, so at most (length - 1)
    // block blocks are a hit.
    """
    cache = LruPrefixCache(cache_blocks)
    chains: dict[tuple[int, int], int] = {}
    size, parts = plan.block_tokens.numerator, plan.block_tokens.denominator
    prompt_tokens = cached_tokens = 0
    for request in plan.requests:
        length = request.input_tokens
        prompt_tokens += length
        if not plan.has_prefixes:
            continue  # blocks that are never requested again need not be stored
        chain = _chain(request.hash_ids, chains)
        covered = plan.edge(len(chain))
        keys: list[Hashable] = []
        for k in range(length // server_block_tokens):
            last = (k + 1) * server_block_tokens - 1
            keys.append((chain[last * parts // size], k) if last < covered else ("own", request.index, k))
        hits = min(cache.hit_then_insert(keys), (length - 1) // server_block_tokens)
        cached_tokens += hits * server_block_tokens
    return ExpectedCache(prompt_tokens, cached_tokens)


def _chain(hash_ids: Sequence[int], chains: dict[tuple[int, int], int]) -> list[int]:
    """A number for every leading run of hash_ids; equal runs get equal numbers."""
    numbers: list[int] = []
    parent = -1
    for hash_id in hash_ids:
        parent = chains.setdefault((parent, hash_id), len(chains))
        numbers.append(parent)
    return numbers
