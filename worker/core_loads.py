"""Loads: blocks of a waiting sequence's prefix that the store holds are moved into the arena, copied into the
sequence's blocks, and counted as computed. Whatever goes wrong, the sequence computes on from where its
contiguous prefix ends.

    FINDING ──found, worth it──▶ PARKED ──asked for──▶ LOADING ──▶ over
       │                           ▲  too long without admission │
       └──nothing, too late──▶ over └──────────────────────────────┘

A load belongs to an `Incoming`. A sequence that was cancelled or preempted has lost its own, and the load
ends.
"""

import math

from baton.config import StoreConfig
from baton.core.geometry import blocks_for
from baton.core.ids import SeqKey, tenant_of
from baton.core.store import (
    BlocksReady,
    EndLoad,
    FindBlocks,
    FoundBlocks,
    FoundSpan,
    LoadBlocks,
    LoadFailed,
    Tier,
)
from engine.scheduling.incoming import Incoming
from engine.scheduling.prefix_cache import PrefixCache
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import Sequence
from kv_store.planner import (
    SMOOTHING,
    LoadPlan,
    Paths,
    PathTimes,
    PromptWork,
    Recompute,
    first_blocks,
    from_block,
    plan_load,
)
from worker.core_copies import PoolCopies
from worker.core_load import ComputeReason, LoadCopy, LoadCounts, LoadState, StoreLoad
from worker.events import CopyDone, ToStore, WorkerAction

FIND_BLOCKS_MAX = 4096
"""The blocks of one prompt that are looked up; the end of a longer prompt is computed."""
COPY_BLOCKS = 16
"""Blocks of one copy. Copied blocks can be handed on while the next ones are copied."""
COPIES_MAX = 2
"""Copies under way for one load, at most. A load that ends early waits for no more than these."""
ANSWER_S_MAX = 0.05
"""The time that the store has for its answer, beside what its directory may take."""
ANSWER_S_MIN = 0.01
WAIT_SHARE = 0.5
"""A sequence waits for the answer no longer than this share of what computing its prompt would take."""
HIT_SHARE_MIN = 0.02
"""An answer is waited for if this share of the prompt, or the share that was found lately, takes longer to
compute than the store takes to answer. Without reuse in the traffic only long prompts wait."""
PREFETCH_SHARE = 8
"""Sequences that wait for admission may have 1/8 of the arena filled for them."""
PREFETCH_HOLD_S = 5.0
"""Blocks that were loaded for a sequence are let go after this long without admission, and asked for again at
admission."""
OVERDUE = 2.0
"""An admitted sequence computes its prefix itself when a load takes this many times what was predicted, …"""
PATIENCE_SHARE = 0.5
"""… and this share of what computing would take. So a load that never comes costs half as much again at
most."""
OVERDUE_S_MIN = 0.05
GRACE_S = 1.0
"""The time beyond `load_timeout_s` that the node has to report that a load failed."""


class StoreLoads:
    """The loads of all sequences that wait or run. Pure: the caller has the clock and performs the actions.

    Messages and copies that ended change what is known; `advance` does what follows.
    """

    def __init__(
        self,
        cache: PrefixCache,
        scheduler: Scheduler,
        copies: PoolCopies,
        config: StoreConfig,
        *,
        block_tokens: int,
    ) -> None:
        self._cache = cache
        self._scheduler = scheduler
        self._copies = copies
        self._config = config
        self._block_tokens = block_tokens
        self._loads: dict[int, StoreLoad] = {}
        """Loads by their id, oldest first."""
        self._next_id = 0
        self._prefetch_max = self._prefetched_count = 0
        self._arrived: dict[SeqKey, Sequence] = {}
        self._hit_share = 0.5
        """The share of looked-up blocks that was found lately."""
        self._answer_s = 0.001
        """The time between a look-up and its answer lately."""
        self.times = PathTimes()
        self.counts = LoadCounts()

    @property
    def count(self) -> int:
        return len(self._loads)

    @property
    def next_tick_s(self) -> float | None:
        return min(
            (at_s for load in self._loads.values() if (at_s := _due_s(load)) is not None), default=None
        )

    # --- the session ----------------------------------------------------------------------------

    def joined(self, *, slot_count: int) -> None:
        self._prefetch_max = slot_count // PREFETCH_SHARE

    def lost(self) -> None:
        """End the session. What is being copied still arrives; nothing else does."""
        for load in list(self._loads.values()):
            load.is_cut = True
            self._shrink(load, load.copy_next or load.first, ComputeReason.FAILED)
            if load.state is LoadState.FINDING and load.is_wanted:
                self._over(load)

    # --- what is found --------------------------------------------------------------------------

    def find(self, seq: Sequence, *, now_s: float) -> list[WorkerAction]:
        """Look up the blocks of a sequence that waits for blocks and a seat.

        The sequence is not admitted before the answer is here, or could have been. A preempted sequence gave
        its blocks to another one: what the pool still has of them will go.
        """
        if seq.lacks_prompt_logprobs or self._config.load == "never":
            return []
        usable_count = min((len(seq.tokens) - 1) // self._block_tokens, FIND_BLOCKS_MAX)
        hashes = seq.hashes_of(usable_count)
        if not hashes:
            return []
        held_count = 0 if seq.was_preempted else len(self._cache.match(hashes))
        self._next_id += 1
        if held_count < usable_count:  # the store is only told that they are used
            missing_s = self._scheduler.times.prompt_s(held_count * self._block_tokens, len(seq.tokens))
            seq.incoming = Incoming(wait_until_s=now_s + self._patience_s(missing_s))
            load = StoreLoad(seq, seq.incoming, hashes, held_count, self._next_id, asked_s=now_s)
            self._loads[self._next_id] = load
        return [ToStore(FindBlocks(self._next_id, tuple(hashes), held_count, tenant_of(seq.fairness_key)))]

    def _patience_s(self, missing_s: float) -> float:
        """How long an answer is worth waiting for, where computing the missing blocks takes `missing_s`."""
        expected_s = max(HIT_SHARE_MIN, self._hit_share) * missing_s
        if expected_s <= self._answer_s and self._config.load != "always":
            return 0.0
        limit_s = self._config.lookup_timeout_s + ANSWER_S_MAX
        return min(max(ANSWER_S_MIN, WAIT_SHARE * missing_s), limit_s)

    def found(self, message: FoundBlocks, *, now_s: float) -> None:
        """Take the store's answer. It may come after the sequence was admitted: then blocks that it has not
        reached yet may be loaded."""
        load = self._loads.get(message.find_id)
        if load is None or load.state is not LoadState.FINDING or not load.is_wanted:
            return
        load.incoming.wait_until_s = 0.0
        asked_count = len(load.hashes) - load.held_count
        spans = first_blocks(message.spans, asked_count)
        found_count = sum(span.block_count for span in spans)
        self.counts.recomputed[ComputeReason.ABSENT] += asked_count - found_count
        self._hit_share += SMOOTHING * (found_count / asked_count - self._hit_share)
        self._answer_s += SMOOTHING * (now_s - load.asked_s - self._answer_s)
        plan = self._plan(load, spans)
        if plan is None:
            self.counts.recomputed[ComputeReason.FASTER] += found_count
            self._over(load)
            return
        load.state = LoadState.PARKED
        load.first, load.end, load.predicted_s = plan.first, plan.end, plan.load_s
        load.incoming.first = load.incoming.ready = plan.first
        load.incoming.end = plan.end

    def _plan(self, load: StoreLoad, spans: tuple[FoundSpan, ...]) -> LoadPlan | None:
        """Plan the load from where computing is, and remember the spans."""
        seq = load.seq
        start = max(load.held_count, blocks_for(seq.planned_count, self._block_tokens))
        load.spans = from_block(spans, start - load.held_count)
        load.held_count = start
        if not load.spans:
            return None
        prompt = PromptWork(
            held_count=start,
            block_tokens=self._block_tokens,
            token_count=len(seq.tokens),
            compute_s=self._scheduler.times.prompt_s,
            queue_s=0.0 if load.is_admitted else self._scheduler.queue_s(seq),
        )
        plan = plan_load(load.spans, prompt, self.times, always=self._config.load == "always")
        if isinstance(plan, Recompute):
            self.times.not_tried()
            return None
        return plan

    # --- what is loaded -------------------------------------------------------------------------

    def ready(self, message: BlocksReady, *, now_s: float) -> None:
        load = self._loads.get(message.load_id)
        if load is None or load.state is not LoadState.LOADING:
            return
        counts = {len(message.slots), len(message.checksums), len(message.tiers or message.slots)}
        if message.first != len(load.slots) or len(counts) > 1:
            self._shrink(
                load, load.ready_end, ComputeReason.FAILED
            )  # a gap: the blocks after it cannot be used
            return
        load.slots += message.slots
        load.checksums += message.checksums
        load.tiers += message.tiers or (Tier.HOST,) * len(message.slots)
        if load.ready_end >= load.end:
            held = load.held_count
            self.times.loaded(Paths(load.spans), load.first - held, load.end - held, now_s - load.loading_s)

    def failed(self, message: LoadFailed) -> None:
        load = self._loads.get(message.load_id)
        if load is not None and load.state is LoadState.LOADING:
            self._shrink(load, load.first + message.first, ComputeReason.FAILED)

    def copied(self, copy: LoadCopy, done: CopyDone) -> None:
        """Count the blocks of a copy in the sequence's order, whatever the order in which copies end."""
        load = copy.load
        load.copying_count -= 1
        if not load.is_wanted:
            return
        self.times.copied(copy.end - copy.first, done.seconds)
        if done.error:
            self._shrink(load, copy.first, ComputeReason.FAILED)
            return
        for position in sorted(done.corrupt, reverse=True):
            load.corrupt.append(load.hashes[copy.first + position])
            self._shrink(load, copy.first + position, ComputeReason.CORRUPT)
        load.copied.update(range(copy.first, min(copy.end, load.end)))
        while load.incoming.ready in load.copied:
            self.counts.loaded[load.tiers[load.incoming.ready - load.first]] += 1
            load.copied.remove(load.incoming.ready)
            load.incoming.ready += 1
        if self._scheduler.arrived(load.seq):
            self._arrived[load.seq.key] = load.seq

    def take_arrived(self) -> list[Sequence]:
        """Return the sequences of which more counts as computed since the last call."""
        arrived, self._arrived = list(self._arrived.values()), {}
        return [seq for seq in arrived if seq.block_ids]

    # --- what follows ---------------------------------------------------------------------------

    def advance(self, *, now_s: float) -> list[WorkerAction]:
        """Do everything that is possible or due."""
        actions: list[WorkerAction] = []
        loading = [load for load in self._loads.values() if load.state is LoadState.LOADING]
        self._prefetched_count = sum(load.end - load.first for load in loading if not load.is_admitted)
        for load in list(self._loads.values()):
            if not load.is_wanted:
                actions += self._end(load)
            elif load.state is LoadState.FINDING:
                if load.incoming.wait_until_s <= now_s:
                    load.incoming.wait_until_s = 0.0
            elif load.state is LoadState.PARKED:
                actions += self._ask(load, loading, now_s=now_s)
            elif load.state is LoadState.LOADING:
                actions += (
                    self._admitted(load, now_s=now_s) if load.is_admitted else self._hold(load, now_s=now_s)
                )
        return actions

    def check(self) -> None:
        for load in self._loads.values():
            assert 0 <= load.first <= load.end <= len(load.hashes)
            incoming = load.incoming
            if load.is_wanted and load.state is not LoadState.FINDING:
                assert incoming.first <= max(incoming.ready, incoming.end)
                assert load.end <= incoming.end or not load.is_admitted
            assert load.is_wanted or load.copying_count, "nobody's load"

    # --- parts ----------------------------------------------------------------------------------

    def _ask(self, load: StoreLoad, loading: list[StoreLoad], *, now_s: float) -> list[WorkerAction]:
        if load.is_admitted:  # blocks that the pool has by now are left out
            load.first = max(load.first, load.incoming.first)
        if load.first >= load.end:
            return self._over(load)
        if not load.is_admitted:
            if not self._may_prefetch(load, loading):
                return []
            self._prefetched_count += load.end - load.first
        loading.append(load)
        del self._loads[load.load_id]
        self._next_id += 1
        load.load_id, load.state, load.loading_s = self._next_id, LoadState.LOADING, now_s
        self._loads[load.load_id] = load
        self.counts.started_count += 1
        wanted = tuple(load.hashes[load.first : load.end])
        return [
            ToStore(
                LoadBlocks(
                    load.load_id, wanted, self._config.load_timeout_s, tenant_of(load.seq.fairness_key)
                )
            )
        ]

    def _may_prefetch(self, load: StoreLoad, loading: list[StoreLoad]) -> bool:
        """Whether the load may start before its sequence is admitted: within bounds, and without blocks that
        another load brings, whose sequence is waited for.

        Every waiting sequence is asked at every event, so the bound comes first.
        """
        would_have = self._prefetched_count + load.end - load.first
        if load.was_prefetched or (self._prefetched_count and would_have > self._prefetch_max):
            return False
        wanted = load.hashes[load.first]
        return not self._cache.has(wanted) and not any(
            other.first <= load.first < other.end and other.hashes[load.first] == wanted for other in loading
        )

    def _hold(self, load: StoreLoad, *, now_s: float) -> list[WorkerAction]:
        """Let go of what was loaded for a sequence that still waits: pins must not wait with it."""
        if load.first >= load.end:
            return self._over(load)
        if now_s < load.loading_s + PREFETCH_HOLD_S:
            return []
        ended = self._end_load(load)
        load.state, load.was_prefetched = LoadState.PARKED, True
        load.slots, load.checksums, load.tiers = [], [], []
        return ended

    def _admitted(self, load: StoreLoad, *, now_s: float) -> list[WorkerAction]:
        incoming = load.incoming
        if load.copy_next is None:
            load.copy_next = incoming.first
            load.give_up_s = self._give_up_s(load, now_s=now_s)
        if load.give_up_s <= now_s:
            load.give_up_s = math.inf
            self._shrink(load, load.copy_next, ComputeReason.LATE)
        actions = self._start_copies(load)
        if load.copying_count or incoming.ready < load.end:
            return actions
        incoming.end = max(load.end, incoming.first)
        return actions + self._over(load)

    def _give_up_s(self, load: StoreLoad, *, now_s: float) -> float:
        left_s = max(0.0, load.loading_s + load.predicted_s - now_s)
        left_s += self.times.copy_block_s * (load.end - load.first)
        computing_s = self._scheduler.times.prompt_s(
            load.first * self._block_tokens, load.end * self._block_tokens
        )
        patience_s = max(OVERDUE_S_MIN, OVERDUE * left_s, PATIENCE_SHARE * computing_s)
        return now_s + min(patience_s, self._config.load_timeout_s + GRACE_S)

    def _start_copies(self, load: StoreLoad) -> list[WorkerAction]:
        actions: list[WorkerAction] = []
        assert load.copy_next is not None
        while load.copying_count < COPIES_MAX and not load.is_cut:
            first, end = load.copy_next, min(load.copy_next + COPY_BLOCKS, load.ready_end, load.end)
            if first >= end:
                break
            places = slice(first - load.first, end - load.first)
            copy = self._copies.from_store(
                LoadCopy(load, first, end),
                load.slots[places],
                load.seq.block_ids[first:end],
                load.checksums[places],
            )
            actions.append(copy)
            load.copy_next = end
            load.copying_count += 1
        return actions

    def _shrink(self, load: StoreLoad, end: int, reason: ComputeReason) -> None:
        """Give up the blocks from `end` on."""
        end = max(end, load.first)
        if end >= load.end:
            return
        self.counts.recomputed[reason] += load.end - end
        load.end = end
        if not load.is_admitted:
            load.incoming.end = end

    def _end(self, load: StoreLoad) -> list[WorkerAction]:
        """End a load that its sequence does not want any more. The slots must stay while they are read."""
        if load.copying_count:
            return []
        del self._loads[load.load_id]
        return self._end_load(load)

    def _over(self, load: StoreLoad) -> list[WorkerAction]:
        """End a load; the sequence computes what is left."""
        del self._loads[load.load_id]
        if not load.incoming.is_awaited:
            load.seq.incoming = None
        return self._end_load(load)

    def _end_load(self, load: StoreLoad) -> list[WorkerAction]:
        if load.state is not LoadState.LOADING or load.is_cut:
            return []
        return [ToStore(EndLoad(load.load_id, tuple(load.corrupt)))]


def _due_s(load: StoreLoad) -> float | None:
    match load.state:
        case LoadState.FINDING:
            return load.incoming.wait_until_s or None
        case LoadState.PARKED:
            return None
        case LoadState.LOADING:
            due_s = load.give_up_s if load.is_admitted else load.loading_s + PREFETCH_HOLD_S
            return due_s if due_s < math.inf else None
