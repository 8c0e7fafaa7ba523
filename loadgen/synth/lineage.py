"""Finds where the beginning of each prompt comes from: a head that many share, an earlier request, or
nowhere. Pure.

Only prompts matter, in order of arrival. A request that shares more than its head with an earlier one
descends from the last request that touched the deepest block they share. It is a *turn* if it has all whole
blocks of that prompt, else a *branch*. If a trace names its conversations but no prefixes, the turns of its
conversations are the turns.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise

from loadgen.formats.base import Trace

HEAD_SHARE_MIN = 0.01
HEADS_MAX = 32
_SPLIT_SHARE_MIN = 0.1
"""A head ends where at least this share of the requests that have it continue differently."""


class Kind(IntEnum):
    FRESH = 0
    TURN = 1
    BRANCH = 2


@dataclass(frozen=True, slots=True)
class Descent:
    kind: Kind
    blocks: int
    shared: int
    """Leading blocks that an earlier request had."""
    parent: int | None
    """Index of the request that it descends from; None if fresh."""
    head: int
    """Number of its head; -1 if it has none."""


class Tree:
    """Prefixes by number; a prefix is a block and all blocks before it."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, int], int] = {}

    def chain(self, hash_ids: Sequence[int]) -> list[int]:
        numbers = self._numbers
        found: list[int] = []
        parent = -1
        for hash_id in hash_ids:
            parent = numbers.setdefault((parent, hash_id), len(numbers))
            found.append(parent)
        return found

    def __len__(self) -> int:
        return len(self._numbers)


def descents(trace: Trace) -> tuple[list[Descent], tuple[int, ...]]:
    """The descent of every request, and the lengths of the heads in blocks."""
    tree = Tree()
    chains = [tree.chain(r.hash_ids) for r in trace.requests]
    heads = _heads(chains)
    last: dict[int, int] = {}
    index_of = {r.row: i for i, r in enumerate(trace.requests)}
    found: list[Descent] = []
    for i, (request, chain) in enumerate(zip(trace.requests, chains, strict=True)):
        shared = 0
        while shared < len(chain) and chain[shared] in last:
            shared += 1
        head = next((heads[node] for node in reversed(chain[:shared]) if node in heads), -1)
        head_blocks = chain.index(_node_of(heads, head)) + 1 if head >= 0 else 0
        if not trace.has_prefixes:
            parent = None if request.parent_row is None else index_of.get(request.parent_row)
            kind = Kind.FRESH if parent is None else Kind.TURN
            found.append(Descent(kind, 0, 0, parent, -1))
        elif shared <= head_blocks:
            found.append(Descent(Kind.FRESH, len(chain), shared, None, head))
        else:
            parent = last[chain[shared - 1]]
            before = trace.requests[parent]
            whole = min(before.input_tokens // trace.hash_block_tokens, len(chains[parent]))
            is_turn = shared >= whole and request.input_tokens >= before.input_tokens
            found.append(Descent(Kind.TURN if is_turn else Kind.BRANCH, len(chain), shared, parent, head))
        for node in chain:
            last[node] = i
    depths = tuple(next(len(c[: c.index(node) + 1]) for c in chains if node in c) for node in heads)
    return found, depths


def _node_of(heads: dict[int, int], number: int) -> int:
    return next(node for node, n in heads.items() if n == number)


def _heads(chains: Sequence[Sequence[int]]) -> dict[int, int]:
    """The number of each head by its last prefix, the most popular first.

    A head ends at a prefix that enough requests have, and after which enough of them diverge.
    """
    counts = Counter(node for chain in chains for node in chain)
    goes_on: dict[int, int] = {}
    """The number of requests of each prefix's most popular continuation."""
    for chain in chains:
        for node, following in pairwise(chain):
            goes_on[node] = max(goes_on.get(node, 0), counts[following])
    least = max(10.0, HEAD_SHARE_MIN * len(chains))
    ends = [
        node
        for node, count in counts.items()
        if count >= least and count - goes_on.get(node, 0) >= max(_SPLIT_SHARE_MIN * count, least / 2)
    ]
    ends.sort(key=lambda node: (-counts[node], node))
    return {node: number for number, node in enumerate(ends[:HEADS_MAX])}
