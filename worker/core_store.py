"""The store as a worker sees it. Blocks are offered as they are committed, and loaded where that is faster
than computing them. Without a store nothing is offered or asked for, and what was under way ends by
itself."""

from collections.abc import Iterator
from typing import assert_never

import msgspec

from baton.config import StoreConfig
from baton.core.ids import BlockId, tenant_of
from baton.core.store import (
    BlockFacts,
    BlocksReady,
    FoundBlocks,
    LoadFailed,
    StoreRefused,
    StoreToWorker,
    StoreWelcome,
    TakeBlocks,
)
from engine.scheduling.prefix_cache import PrefixCache
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import Sequence
from worker.core_copies import PoolCopies
from worker.core_load import LoadCopy
from worker.core_loads import StoreLoads
from worker.core_offers import Offer, Offers
from worker.events import CopyDone, WorkerAction


class StoreStatus(msgspec.Struct, frozen=True):
    """Counts of blocks since the worker started, unless said otherwise."""

    is_joined: bool
    load_count: int
    """Look-ups and loads that sequences have now."""
    copies_in_flight: int
    """Copies between pool and arena now."""
    offers_in_flight: int
    """Offers under way now."""
    offers_queued: int
    """Blocks that wait to be offered now."""
    offered_blocks: int
    written_blocks: int
    skipped_blocks: int
    """Blocks that were committed, and not offered or not written: too many at once, or reused before it was
    their turn."""
    loads_started: int
    """Loads that were asked for."""
    loaded_blocks: dict[str, int]
    """Loaded blocks by the tier that held them."""
    recomputed_blocks: dict[str, int]
    """Blocks that were not in the pool and were computed, by reason (`core_load.ComputeReason`)."""
    predicted_load_s: float
    """Predicted seconds, summed over the loads that came wholly."""
    actual_load_s: float
    """Actual seconds of the same loads."""

    def accounts(self) -> dict[str, float]:
        """The counts by name, as a worker lists its accounts."""
        facts: dict[str, int | float | dict[str, int]] = msgspec.structs.asdict(self)
        found: dict[str, float] = {}
        for name, value in facts.items():
            if isinstance(value, dict):
                found |= {f"store.{name}.{key}": float(count) for key, count in value.items()}
            else:
                found[f"store.{name}"] = float(value)
        return found


class StoreClient:
    """Offers and loads of one worker, over one session after another. Pure."""

    def __init__(
        self, cache: PrefixCache, scheduler: Scheduler, config: StoreConfig, *, block_tokens: int
    ) -> None:
        self._scheduler = scheduler
        self._block_tokens = block_tokens
        self._is_joined = False
        self._now_s = 0.0
        self._copies = PoolCopies(cache.pool)
        self._offers = Offers(cache, self._copies)
        self._loads = StoreLoads(cache, scheduler, self._copies, config, block_tokens=block_tokens)
        scheduler.on_commit(self._committed)

    @property
    def is_idle(self) -> bool:
        """No block is held for a copy."""
        return self._copies.count == 0

    @property
    def next_tick_s(self) -> float | None:
        due = (self._offers.next_tick_s, self._loads.next_tick_s)
        return min((at_s for at_s in due if at_s is not None), default=None)

    def held_blocks(self) -> Iterator[BlockId]:
        """The blocks that copies hold, one entry for each reference."""
        return self._copies.held_blocks()

    def status(self) -> StoreStatus:
        offers, loads = self._offers, self._loads
        return StoreStatus(
            is_joined=self._is_joined,
            load_count=loads.count,
            copies_in_flight=self._copies.count,
            offers_in_flight=offers.in_flight_count,
            offers_queued=offers.queued_count,
            offered_blocks=offers.offered_count,
            written_blocks=offers.written_count,
            skipped_blocks=offers.skipped_count,
            loads_started=loads.counts.started_count,
            loaded_blocks={str(tier): count for tier, count in loads.counts.loaded.items()},
            recomputed_blocks={str(reason): count for reason, count in loads.counts.recomputed.items()},
            predicted_load_s=loads.times.predicted_s,
            actual_load_s=loads.times.actual_s,
        )

    def check(self) -> None:
        self._offers.check()
        self._loads.check()

    # --- events ---------------------------------------------------------------------------------

    def at(self, now_s: float) -> None:
        """Set the time at which blocks are committed from here on."""
        self._now_s = now_s

    def joined(self, welcome: StoreWelcome) -> None:
        self.lost()
        self._is_joined = True
        self._offers.joined(now_s=self._now_s)
        self._loads.joined(slot_count=welcome.slot_count)

    def lost(self) -> None:
        self._is_joined = False
        self._offers.lost()
        self._loads.lost()

    def on_message(self, message: StoreToWorker) -> list[WorkerAction]:
        if not self._is_joined:
            return []  # a message of a session that ended
        match message:
            case TakeBlocks():
                return self._offers.taken(message)
            case FoundBlocks():
                self._loads.found(message, now_s=self._now_s)
            case BlocksReady():
                self._loads.ready(message, now_s=self._now_s)
            case LoadFailed():
                self._loads.failed(message)
            case StoreWelcome() | StoreRefused():
                pass  # for the adapter
            case _:
                assert_never(message)
        return []

    def copied(self, done: CopyDone) -> list[WorkerAction]:
        owner = self._copies.owner(done.copy_id)
        if isinstance(owner, LoadCopy):
            self._loads.copied(owner, done)
        self._copies.done(done.copy_id)
        return self._offers.copied(owner, done) if isinstance(owner, Offer) else []

    def find(self, seq: Sequence) -> list[WorkerAction]:
        """Look up a sequence that came to the scheduler, or lost its blocks there."""
        return self._loads.find(seq, now_s=self._now_s) if self._is_joined else []

    def advance(self) -> list[WorkerAction]:
        """Advance all loads as far as they can go, which may let sequences run."""
        return self._loads.advance(now_s=self._now_s)

    def take_arrived(self) -> list[Sequence]:
        """Return the sequences of which more counts as computed since the last call."""
        return self._loads.take_arrived()

    def flush(self) -> list[WorkerAction]:
        """Offer what was committed."""
        return self._offers.flush(now_s=self._now_s)

    # --- parts ----------------------------------------------------------------------------------

    def _committed(self, seq: Sequence, first: int, end: int) -> None:
        size = self._block_tokens
        for i in range(first, end):
            facts = BlockFacts(
                block_hash=seq.hashes[i],
                parent=seq.hashes[i - 1] if i else seq.cache_root,
                depth=i,
                recompute_s=self._scheduler.times.share_s(i * size, (i + 1) * size),
                tenant=tenant_of(seq.fairness_key),
                is_generated=(i + 1) * size > seq.prompt_token_count,
            )
            self._offers.committed(facts, now_s=self._now_s)
