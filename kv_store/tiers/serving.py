"""What serving knows decides: a leaf goes before its parent, the one least worth its place first.

Worth is hits (in recomputed seconds, where these are known) per block and time, from return times learnt
online (`returns`). Blocks are told apart by what a request shows of its session: how often a block was used,
how much of the prompt was known and by how many it was used, how much is new, how long ago it was used, where
in the prompt it stands, whether anything followed it.

What LRU would hold is followed exactly (it is a boundary in the order of uses), and its hits are counted
beside our own. What we may still lose is estimated: blocks that LRU would hold and that left here, times the
share of such blocks that were asked for before LRU would have let them go. Only as long as our lead, less
that, stays above a small (negative) share of all uses does a block leave before LRU's choice. Otherwise LRU's
choice leaves, under which the difference to LRU's content shrinks with every use.
"""

import math
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush

import numpy as np

from baton.core.ids import BlockHash
from baton.core.store import BlockFacts
from kv_store.tiers.parking import ParkingPolicy
from kv_store.tiers.returns import ReturnChance, ReturnTimes

LEVELS = 12
"""Classes of the predicted chance of return."""
SCORE_MAX = 4.0
"""Logits beyond are in the outermost levels."""
KINDS = 2
"""Used once; used more often."""
LOSS_SHARE = 0.0015
"""Share of all uses: hits that may be lost against LRU."""
LRU_FIRST = 4
"""Times the capacity, in uses: so long LRU decides, and chances are learnt (see LABEL_AGE)."""
ASTRAY_ENDED = 30.0
ASTRAY_LOST = 9.0
"""Before anything is known, so many of so many blocks that left before LRU's choice are asked for again."""
LABEL_AGE = 3
"""Times the capacity, in uses: a block not used by then counts as not returned when chances are learnt."""
GHOSTS_PER_BLOCK = 15
GHOSTS_MORE = 65_536
"""A large tier remembers so many ghosts above its own number of blocks."""
GHOSTS_LEAST = 4096
LEARN_FIRST = 64
LEARN_EVERY = 2000
LEARN_SHARE = 50
"""Worth is computed anew after so many uses: from LEARN_FIRST on in ever longer steps."""
COSTS = 5
COST_MIDDLE = 2
EARN_SCORE = -2.2
"""Logit of about 0.1: a block that was used once earns a write below if its chance of return is above."""


class _Block:
    __slots__ = (
        "block_hash", "cls", "cost", "depth", "features", "in_lru", "is_held", "is_labelled", "parent",
        "queue", "slot", "used_at", "uses",
    )  # fmt: skip

    def __init__(self, block_hash: BlockHash, slot: int) -> None:
        self.block_hash = block_hash
        self.parent = block_hash
        self.depth = 0
        self.uses = 0
        self.used_at = 0
        self.cls = 0
        self.cost = COST_MIDDLE
        self.features: tuple[int, ...] = ()
        self.is_held = False
        self.is_labelled = True
        self.in_lru = False
        self.queue = -1
        self.slot = slot


Request = tuple[int, int, int]
"""What is known of a prompt: uses of its deepest known block, new blocks, age of the known ones; each in
steps."""
UNKNOWN: tuple[Request, bool] = ((0, 0, 0), False)


def _steps(count: int) -> int:
    """Powers of two."""
    return min(14, count.bit_length())


def _use_steps(uses: int) -> int:
    return uses if uses <= 3 else 4 if uses <= 5 else 5 if uses <= 9 else 6 if uses <= 20 else 7


FEATURES = 256


def _features(block: _Block, asked: tuple[Request, bool], age: int) -> tuple[int, ...]:
    (known_uses, new_blocks, known_age), is_last = asked
    again = 1 if block.uses > 1 else 0
    return (
        _use_steps(block.uses),
        8 + 2 * is_last + again,
        16 + 16 * again + new_blocks,
        48 + 8 * again + known_uses,
        64 + 32 * again + known_age,
        128 + 16 * again + _steps(block.depth),
        192 + (32 + min(19, age.bit_length()) if again else 0),
    )


class ServingPolicy(ParkingPolicy):
    """`EvictionPolicy`. Remembers as many ghosts as `GHOSTS_PER_BLOCK` and `GHOSTS_MORE` allow."""

    name = "serving"

    def __init__(self, capacity_blocks: int) -> None:
        super().__init__()
        self._capacity = capacity_blocks
        ghosts = min(GHOSTS_PER_BLOCK * capacity_blocks, capacity_blocks + GHOSTS_MORE)
        self._ghosts_max = max(GHOSTS_LEAST, ghosts)
        self._blocks: dict[BlockHash, _Block] = {}  # here or ghosts
        self._ghosts: OrderedDict[BlockHash, None] = OrderedDict()
        self._order: OrderedDict[BlockHash, None] = OrderedDict()  # here and not aside, by last use
        self._children: dict[BlockHash, int] = {}  # here, of blocks here or not
        self._asked: OrderedDict[BlockHash, tuple[Request, bool]] = OrderedDict()
        self._uses = 0
        self._lru: deque[tuple[_Block, int]] = deque()
        self._lru_count = 0
        self._lead = 0.0
        """Our hits less those of LRU, at most the capacity."""
        self._astray = 0
        """Blocks that LRU would hold and that are not here."""
        self._astray_lost, self._astray_ended = ASTRAY_LOST, ASTRAY_ENDED
        self._unlabelled: deque[tuple[_Block, int]] = deque()
        self._chance = ReturnChance(FEATURES)
        self._times = ReturnTimes(KINDS, LEVELS, 4 * (self._ghosts_max + capacity_blocks))
        self._alive_class = array("q")
        self._alive_since = array("q")
        self._free_slots: list[int] = []
        self._queues: dict[int, OrderedDict[BlockHash, _Block]] = {}  # of leaves
        self._by_worth: list[tuple[float, int]] = []  # heap; each key of _queues once
        self._worth: list[float] = []
        self._learn_at = 0
        self._sweep_at = 0
        self._cost_mean_s = 0.0
        self._learn()

    # --- what happens

    def expect(self, chain: Sequence[BlockHash], *, now_s: float) -> None:
        self._trim_lru()
        known = hits = lru_hits = 0
        for block_hash in chain:
            block = self._blocks.get(block_hash)
            if block is None:
                break
            hits += block.is_held and hits == known
            lru_hits += block.in_lru and lru_hits == known
            known += 1
        self._lead = min(self._lead + hits - lru_hits, self._capacity)
        last = self._blocks[chain[known - 1]] if known else None
        request = (
            _use_steps(last.uses) if last else 0,
            min(9, (len(chain) - known).bit_length()),
            min(19, max(1, self._uses - last.used_at).bit_length()) if last else 0,
        )
        within = (request, False)
        for block_hash in chain[:-1]:
            self._asked[block_hash] = within
        if chain:
            self._asked[chain[-1]] = (request, True)
        while len(self._asked) > 2 * self._capacity + GHOSTS_LEAST:
            self._asked.popitem(last=False)

    def insert(self, block: BlockFacts, *, now_s: float) -> None:
        block_hash = block.block_hash
        known = self._blocks.get(block_hash)
        if known is None:
            known = self._blocks[block_hash] = _Block(block_hash, self._new_slot())
        else:
            del self._ghosts[block_hash]
        known.parent, known.depth = block.parent, block.depth
        known.cost = self._cost(block.recompute_s)
        self._used(known)
        known.is_held = True
        children = self._children.get(block.parent, 0)
        self._children[block.parent] = children + 1
        if not children and (parent := self._blocks.get(block.parent)) is not None:
            self._leave_queue(parent)
        self._enter(known)

    def touch(self, block_hash: BlockHash, *, now_s: float) -> None:
        block = self._blocks[block_hash]
        self._leave_queue(block)
        self._take_aside(block_hash)
        self._used(block)
        self._enter(block)

    def remove(self, block_hash: BlockHash, *, now_s: float, was_evicted: bool) -> None:
        block = self._blocks[block_hash]
        if not self._take_aside(block_hash):
            self._unlink(block_hash)
        block.is_held = False
        self._astray += block.in_lru
        children = self._children[block.parent] - 1
        if children:
            self._children[block.parent] = children
        else:
            del self._children[block.parent]
            parent = self._blocks.get(block.parent)
            if parent is not None and parent.is_held and parent.block_hash not in self._aside:
                self._enter_queue(parent, first=True)
        if was_evicted:
            self._ghosts[block_hash] = None
            if len(self._ghosts) > self._ghosts_max:
                self._forget(self._blocks[self._ghosts.popitem(last=False)[0]])
        else:
            self._forget(block)

    def victim(self, may_go: Callable[[BlockHash], bool]) -> BlockHash | None:
        self._trim_lru()
        found = super().victim(may_go)
        if found is not None:
            return found
        # Every leaf is in use: what comes before them may be free all the same.
        return next((h for h in self._order if may_go(h)), None)

    def earns_next(self, block_hash: BlockHash) -> bool:
        block = self._blocks[block_hash]
        return block.uses > 1 or self._chance.score(block.features) > EARN_SCORE

    # --- who goes

    def _front(self) -> BlockHash | None:
        lru = self._oldest_leaf()
        if lru is None or not self._may_go_astray():
            return lru
        if self._uses >= self._sweep_at:
            self._sweep()
        while self._by_worth:
            queue = self._by_worth[0][1]
            if not self._queues[queue]:
                del self._queues[queue]
                heappop(self._by_worth)
                continue
            return next(iter(self._queues[queue]))
        return lru

    def _may_go_astray(self) -> bool:
        if self._uses < LRU_FIRST * self._capacity:
            return False
        expected_loss = self._astray_lost / self._astray_ended * (self._astray + 1)
        return self._lead + LOSS_SHARE * self._uses >= expected_loss

    def _oldest_leaf(self) -> BlockHash | None:
        for _ in range(len(self._order)):
            block_hash = next(iter(self._order))
            if block_hash not in self._children:
                return block_hash
            self._order.move_to_end(block_hash)  # what follows it was used later, so it was too
        return None

    def _unlink(self, block_hash: BlockHash) -> None:
        self._order.pop(block_hash, None)
        self._leave_queue(self._blocks[block_hash])

    def _enter(self, block: _Block) -> None:
        self._order[block.block_hash] = None
        self._order.move_to_end(block.block_hash)
        if block.block_hash not in self._children:
            self._enter_queue(block, first=False)

    def _queue(self, block: _Block) -> int:
        return (block.cls * COSTS + block.cost) * self._times.ages + self._times.bucket(
            self._uses - block.used_at
        )

    def _enter_queue(self, block: _Block, *, first: bool) -> None:
        number = block.queue = self._queue(block)
        queue = self._queues.get(number)
        if queue is None:
            queue = self._queues[number] = OrderedDict()
            heappush(self._by_worth, (self._worth[number], number))
        queue[block.block_hash] = block
        if first:
            queue.move_to_end(block.block_hash, last=False)

    def _leave_queue(self, block: _Block) -> None:
        if block.queue >= 0:
            del self._queues[block.queue][block.block_hash]
            block.queue = -1

    def _sweep(self) -> None:
        """Blocks that have aged go to the queue of their age. Each queue is nearly in order of age."""
        self._sweep_at = self._uses + max(1, self._capacity // 32)
        for number, queue in list(self._queues.items()):
            while queue:
                block = next(iter(queue.values()))
                if self._queue(block) == number:
                    break
                self._leave_queue(block)
                self._enter_queue(block, first=False)

    # --- what is learnt

    def _used(self, block: _Block) -> None:
        self._uses += 1
        age = self._uses - block.used_at
        if block.uses:
            self._times.ended(block.cls, age, returned=True)
            self._label(block, returned=True)
        block.uses += 1
        block.used_at = self._uses
        asked = self._asked.pop(block.block_hash, None)
        block.features = _features(block, UNKNOWN if asked is None else asked, age)
        block.cls = self._class(block)
        self._alive_class[block.slot], self._alive_since[block.slot] = block.cls, self._uses
        block.is_labelled = False
        self._unlabelled.append((block, self._uses))
        while self._unlabelled[0][1] < self._uses - LABEL_AGE * self._capacity:
            old, used_at = self._unlabelled.popleft()
            if old.used_at == used_at:
                self._label(old, returned=False)
        self._follow_lru(block, was_counted=asked is not None)
        if self._uses >= self._learn_at:
            self._learn()

    def _class(self, block: _Block) -> int:
        share = (self._chance.score(block.features) + SCORE_MAX) / (2 * SCORE_MAX)
        level = max(0, min(LEVELS - 1, math.floor(share * LEVELS)))
        return level * KINDS + (block.uses > 1)

    def _label(self, block: _Block, *, returned: bool) -> None:
        if not block.is_labelled:
            block.is_labelled = True
            self._chance.learn(block.features, returned=returned)

    def _follow_lru(self, block: _Block, *, was_counted: bool) -> None:
        """LRU of the same capacity holds the blocks used last: those from a boundary of `_lru` on.
        `was_counted`: by `expect`, which sees what is here before the request's own blocks come."""
        if not was_counted:
            self._lead = min(self._lead + block.is_held - block.in_lru, self._capacity)
        if block.in_lru and not block.is_held:
            self._astray -= 1
            self._astray_lost += 1
            self._astray_ended += 1
        if not block.in_lru:
            block.in_lru = True
            self._lru_count += 1
        self._lru.append((block, self._uses))
        if self._lru_count > 2 * self._capacity:
            self._trim_lru()
        if len(self._lru) > 4 * self._capacity + GHOSTS_LEAST:
            self._lru = deque((b, used_at) for b, used_at in self._lru if b.used_at == used_at and b.in_lru)

    def _trim_lru(self) -> None:
        """Done where blocks leave here: LRU, too, may hold too many until the end of a request."""
        while self._lru_count > self._capacity:
            old, used_at = self._lru.popleft()
            if old.used_at == used_at and old.in_lru:
                self._leave_lru(old)
                self._astray_ended += not old.is_held

    def _leave_lru(self, block: _Block) -> None:
        block.in_lru = False
        self._lru_count -= 1
        self._astray -= not block.is_held

    def _forget(self, block: _Block) -> None:
        self._times.ended(block.cls, self._uses - block.used_at, returned=False)
        self._label(block, returned=False)
        if block.in_lru:
            self._leave_lru(block)
        self._alive_class[block.slot] = -1
        self._free_slots.append(block.slot)
        del self._blocks[block.block_hash]

    def _new_slot(self) -> int:
        if self._free_slots:
            return self._free_slots.pop()
        self._alive_class.append(-1)
        self._alive_since.append(0)
        return len(self._alive_class) - 1

    def _cost(self, recompute_s: float) -> int:
        """Powers of two from the mean. 0 s, not known, counts as the mean."""
        if recompute_s <= 0:
            return COST_MIDDLE
        self._cost_mean_s += (recompute_s - self._cost_mean_s) * (0.01 if self._cost_mean_s else 1.0)
        steps = round(math.log2(recompute_s / self._cost_mean_s))
        return max(0, min(COSTS - 1, COST_MIDDLE + steps))

    def _learn(self) -> None:
        later = max(LEARN_EVERY, self._uses // LEARN_SHARE)
        self._learn_at = self._uses + min(later, max(LEARN_FIRST, self._capacity // 5, self._uses // 8))
        classes, since = np.array(self._alive_class), np.array(self._alive_since)
        alive = classes >= 0
        worth = self._times.worth(classes[alive], (self._uses - since[alive]).astype(np.float64))
        by_cost = worth[:, None, :] * 2.0 ** (np.arange(COSTS) - COST_MIDDLE)[:, None]
        self._worth = by_cost.reshape(-1).tolist()
        self._by_worth = [(self._worth[number], number) for number in self._queues]
        heapify(self._by_worth)
