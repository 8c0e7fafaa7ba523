"""How the KV of a decode phase gets here: reserve, ask, read under a lease, join.

One `_Pull` per attempt. It holds its blocks until it is ready (they pass to the scheduler) or ends
(they are freed, except those a read may still write into: they are the read's until it is settled).
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, assert_never

from baton.config import TransferConfig
from baton.core.geometry import blocks_for
from baton.core.hashing import block_hashes
from baton.core.ids import BlockHash, BlockId, ReadId, SeqKey, WorkerId
from baton.core.messages import (
    FailureReason,
    KVGrant,
    KVRefused,
    KVReleased,
    KVRequest,
    PeerRef,
    ReaderMessage,
    SourceMessage,
)
from baton.core.steps import TokenLogprobs
from decode_worker.read_queue import Chunk, ReadQueue
from engine.scheduling.block_pool import OutOfBlocks
from engine.scheduling.prefix_cache import PrefixCache


@dataclass(frozen=True, slots=True)
class Send:
    source: PeerRef
    message: ReaderMessage


class Read(NamedTuple):
    """Copy source_blocks[i] of `source` into local_blocks[i]; answered by `KVReceiver.read_done`."""

    read_id: ReadId
    source: WorkerId
    source_blocks: tuple[int, ...]
    local_blocks: tuple[int, ...]
    generations: tuple[int, ...]
    timeout_s: float
    checksums: tuple[int, ...] = ()
    """Of the source blocks; empty: not compared."""


@dataclass(frozen=True, slots=True)
class Ready:
    """All KV of the prompt is here. `block_ids`, one share each, are the receiver's from now on and
    have room for one more position."""

    key: SeqKey
    block_ids: list[BlockId]
    hashes: list[BlockHash]
    first_token: int
    transferred_bytes: int
    transfer_s: float
    handover_s: float
    first_logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None


@dataclass(frozen=True, slots=True)
class GaveUp:
    key: SeqKey
    reason: FailureReason
    message: str


@dataclass(frozen=True, slots=True)
class NoRoom:
    key: SeqKey
    message: str


ReceiverAction = Send | Read | Ready | GaveUp | NoRoom


@dataclass(slots=True, eq=False)
class _Pull:
    key: SeqKey
    source: PeerRef
    token_count: int
    hashes: list[BlockHash]
    """Of all full blocks."""
    room_by_s: float
    """Until then it may wait for blocks."""
    block_ids: list[BlockId] = field(default_factory=list[BlockId])
    held_count: int = 0
    """Blocks from the front that were here before."""
    next_block: int = 0
    """Position of the first block not granted yet."""
    asked_s: dict[int, float] = field(default_factory=dict[int, float])
    """When each ask that may still be answered was sent."""
    request_number: int = -1
    renew_every_s: float = 0.0
    renew_s: float = 0.0
    lease_end_s: float = 0.0
    is_granted: bool = False
    """An answer came, so `lease_end_s` is a lease and not our patience."""
    was_granted_any: bool = False
    first_token: int | None = None
    first_logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    last_grant_s: float = 0.0
    chunks_left: int = 0
    """Granted and not read yet."""
    reads_open: int = 0
    """Reads that may still move bytes, given up ones included."""
    busy_count: int = 0
    busy_since_s: float = 0.0
    transfer_s: float = 0.0
    is_over: bool = False
    release: KVReleased | None = None
    """To be sent when the last read is settled."""


@dataclass(slots=True, eq=False)
class _OpenRead:
    chunk: "Chunk[_Pull]"
    local_blocks: list[BlockId]
    owns_blocks: bool = False
    """In quarantine: the blocks belong to nobody else and are freed when the read is settled."""


class KVReceiver:
    """Decode phases whose KV is not all here yet. Pure: the caller has the clock and does the actions.

    `keep_free` says how many blocks must stay free after a reservation, at this moment.
    """

    def __init__(
        self,
        cache: PrefixCache,
        config: TransferConfig,
        *,
        block_tokens: int,
        block_bytes: int,
        waiting_max: int,
        keep_free: Callable[[], int],
    ) -> None:
        self._cache = cache
        self._pool = cache.pool
        self._config = config
        self._block_tokens = block_tokens
        self._block_bytes = block_bytes
        self._waiting_max = waiting_max
        self._keep_free = keep_free
        self._waiting: deque[_Pull] = deque()
        self._pulls: dict[SeqKey, _Pull] = {}
        self._queue: ReadQueue[_Pull] = ReadQueue(
            reads_max=config.reads_in_flight_max,
            bytes_max=config.bytes_in_flight_max,
            block_bytes=block_bytes,
        )
        self._reads: dict[ReadId, _OpenRead] = {}
        self._in_flight: set[ReadId] = set()
        """Started, and not answered by `read_done`."""
        self._next_read_id = 0

    # --- what others may know -------------------------------------------------------------------

    @property
    def count(self) -> int:
        return len(self._waiting) + len(self._pulls)

    @property
    def reads_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def quarantined_count(self) -> int:
        return sum(len(read.local_blocks) for read in self._reads.values() if read.owns_blocks)

    @property
    def is_idle(self) -> bool:
        return not (self._waiting or self._pulls or self._reads)

    @property
    def next_tick_s(self) -> float | None:
        room = [pull.room_by_s for pull in self._waiting]
        pulls = [min(pull.renew_s, pull.lease_end_s) for pull in self._pulls.values()]
        return min((*room, *pulls), default=None)

    def held_blocks(self) -> Iterator[BlockId]:
        """One entry for each share the receiver has, quarantine included."""
        for pull in self._pulls.values():
            yield from pull.block_ids
        for read in self._reads.values():
            if read.owns_blocks:
                yield from read.local_blocks

    # --- the sequence ---------------------------------------------------------------------------

    def start(
        self, key: SeqKey, source: PeerRef, tokens: Sequence[int], cache_root: BlockHash, *, now_s: float
    ) -> list[ReceiverAction]:
        """Queues it for blocks; `admit` goes on from there."""
        if len(self._waiting) >= self._waiting_max:
            return [NoRoom(key, f"{len(self._waiting)} sequences wait for blocks")]
        hashes = block_hashes(cache_root, tokens, self._block_tokens)
        self._waiting.append(
            _Pull(key, source, len(tokens), hashes, room_by_s=now_s + self._config.receive_wait_s)
        )
        return []

    def admit(self, *, now_s: float) -> list[ReceiverAction]:
        """Reserves blocks for those that wait, in order, and asks their sources."""
        actions: list[ReceiverAction] = []
        while self._waiting:
            pull = self._waiting[0]
            need_count = blocks_for(pull.token_count + 1, self._block_tokens)
            try:
                got = self._cache.reserve(pull.hashes, need_count, keep_free=self._keep_free())
            except OutOfBlocks:
                break
            self._waiting.popleft()
            self._pulls[pull.key] = pull
            pull.block_ids, pull.held_count, pull.next_block = got.blocks, got.cached_count, got.cached_count
            # The source may hold an ask for one lease before it answers; then it is our patience that ends.
            pull.lease_end_s = now_s + 2 * self._config.lease_s
            pull.renew_every_s = self._config.lease_s / 3
            actions.append(self._ask(pull, now_s=now_s))
        return actions

    def cancel(self, key: SeqKey) -> list[ReceiverAction]:
        """Unknown: nothing happens."""
        for pull in self._waiting:
            if pull.key == key:
                self._waiting.remove(pull)
                return []
        pull = self._pulls.get(key)
        return [] if pull is None else self._end(pull, tell_source=True)

    # --- the source -----------------------------------------------------------------------------

    def heard(self, source: WorkerId, message: SourceMessage, *, now_s: float) -> list[ReceiverAction]:
        match message:
            case KVGrant():
                return self.granted(source, message, now_s=now_s)
            case KVRefused():
                return self.refused(source, message)
            case _:
                assert_never(message)

    def granted(self, source: WorkerId, grant: KVGrant, *, now_s: float) -> list[ReceiverAction]:
        pull = self._pull_from(source, SeqKey(grant.seq_id, grant.epoch))
        if pull is None:
            return []
        self._extend_lease(pull, grant)
        skip = pull.next_block - grant.first_block
        end = grant.first_block + len(grant.source_blocks)
        prompt_blocks = blocks_for(pull.token_count, self._block_tokens)
        is_gap = skip < 0 or end > prompt_blocks or not _is_complete(grant)
        if is_gap or (
            grant.is_last and (grant.first_token is None or max(end, pull.next_block) < prompt_blocks)
        ):
            return self._give_up(pull, FailureReason.TRANSFER, f"grant of {source} does not fit: {grant}")
        if end > pull.next_block:  # what was granted before is not read twice
            new = (grant.source_blocks[skip:], grant.generations[skip:], grant.checksums[skip:])
            pull.chunks_left += self._queue.add(Chunk(pull, pull.next_block, *new))
            pull.next_block = end
            pull.was_granted_any = True
            pull.last_grant_s = now_s
        if grant.is_last and pull.first_token is None:
            pull.first_token = grant.first_token
            pull.first_logprobs, pull.prompt_logprobs = grant.first_logprobs, grant.prompt_logprobs
            pull.last_grant_s = now_s
        return self._finish_if_complete(pull, now_s=now_s) or self._start_reads(now_s=now_s)

    def refused(self, source: WorkerId, refusal: KVRefused) -> list[ReceiverAction]:
        """Whatever arrived wholly stays in the prefix cache."""
        pull = self._pull_from(source, SeqKey(refusal.seq_id, refusal.epoch))
        if pull is None:
            return []
        gave_up = GaveUp(pull.key, FailureReason.SOURCE_REFUSED, refusal.message)
        return [gave_up, *self._end(pull, tell_source=pull.was_granted_any)]

    def source_lost(self, source: WorkerId, message: str) -> list[ReceiverAction]:
        """Nothing is sent to a lost source: its lease ends by itself."""
        for read in self._reads.values():
            if read.chunk.pull.source.worker_id == source:
                read.chunk.pull.release = None
        actions: list[ReceiverAction] = []
        for pull in [p for p in self._pulls.values() if p.source.worker_id == source]:
            actions.append(GaveUp(pull.key, FailureReason.SOURCE_LOST, message))
            actions += self._end(pull, tell_source=False)
        return actions

    # --- reads ----------------------------------------------------------------------------------

    def read_done(
        self, read_id: ReadId, error: str, *, is_settled: bool, is_stale: bool, now_s: float
    ) -> list[ReceiverAction]:
        """A read counts as good only if it ended before the lease did and is settled."""
        self._in_flight.remove(read_id)  # KeyError: a read that we did not start
        read = self._reads[read_id]
        self._queue.ended(read.chunk)
        pull = read.chunk.pull
        pull.busy_count -= 1
        if pull.busy_count == 0:
            pull.transfer_s += now_s - pull.busy_since_s
        actions: list[ReceiverAction] = []
        is_good = is_settled and not error and not is_stale and now_s < pull.lease_end_s
        if is_good and not pull.is_over:
            del self._reads[read_id]
            pull.reads_open -= 1
            actions += self._accept(read, now_s=now_s)
        else:
            if not pull.is_over:
                reason = (
                    "the source's blocks changed hands" if is_stale else error or "it ended after the lease"
                )
                can_retry = not is_stale and now_s < pull.lease_end_s
                actions += self._retry_or_give_up(read, reason, can_retry=can_retry, is_settled=is_settled)
            if is_settled:
                actions += self.read_settled(read_id)
        return actions + self._start_reads(now_s=now_s)

    def read_settled(self, read_id: ReadId) -> list[ReceiverAction]:
        """Nothing can land any more: quarantined blocks come back."""
        read = self._reads.pop(read_id)
        if read.owns_blocks:
            self._pool.release(read.local_blocks)
        read.chunk.pull.reads_open -= 1
        return self._release_if_settled(read.chunk.pull)

    def tick(self, *, now_s: float) -> list[ReceiverAction]:
        actions: list[ReceiverAction] = []
        while self._waiting and self._waiting[0].room_by_s <= now_s:
            pull = self._waiting.popleft()
            actions.append(NoRoom(pull.key, f"no blocks within {self._config.receive_wait_s:g} s"))
        for pull in list(self._pulls.values()):
            if pull.lease_end_s <= now_s:
                what = "the lease is over" if pull.is_granted else "the source does not answer"
                actions += self._give_up(pull, FailureReason.TRANSFER, what)
            elif pull.renew_s <= now_s:
                actions.append(self._ask(pull, now_s=now_s))
        return actions + self._start_reads(now_s=now_s)

    def check(self) -> None:
        assert self._in_flight <= self._reads.keys()
        self._queue.check(reads_in_flight=len(self._in_flight))
        assert all(not pull.block_ids for pull in self._waiting)
        for pull in self._pulls.values():
            assert not pull.is_over
            assert len(pull.block_ids) == blocks_for(pull.token_count + 1, self._block_tokens)
        for read in self._reads.values():
            assert read.owns_blocks or set(read.local_blocks) <= set(read.chunk.pull.block_ids)
            assert read.owns_blocks or not read.chunk.pull.is_over

    # --- parts ----------------------------------------------------------------------------------

    def _pull_from(self, source: WorkerId, key: SeqKey) -> _Pull | None:
        pull = self._pulls.get(key)
        return pull if pull is not None and pull.source.worker_id == source else None

    def _ask(self, pull: _Pull, *, now_s: float) -> Send:
        pull.request_number += 1
        pull.asked_s[pull.request_number] = now_s
        pull.renew_s = now_s + pull.renew_every_s
        ask = KVRequest(pull.key.seq_id, pull.key.epoch, pull.held_count, pull.request_number)
        return Send(pull.source, ask)

    def _extend_lease(self, pull: _Pull, grant: KVGrant) -> None:
        asked_s = pull.asked_s.get(grant.answers_request)
        if asked_s is None:
            return  # an older answer overtaken by a newer one: that one's lease ends later
        for number in [n for n in pull.asked_s if n < grant.answers_request]:
            del pull.asked_s[number]
        end_s = asked_s + grant.lease_s - self._config.lease_slack_s
        pull.lease_end_s = max(pull.lease_end_s, end_s) if pull.is_granted else end_s
        pull.renew_every_s = min(self._config.lease_s, grant.lease_s) / 3
        pull.renew_s = min(pull.renew_s, pull.asked_s[pull.request_number] + pull.renew_every_s)
        pull.is_granted = True

    def _start_reads(self, *, now_s: float) -> list[ReceiverAction]:
        actions: list[ReceiverAction] = []
        while (chunk := self._queue.next()) is not None:
            left_s = chunk.pull.lease_end_s - now_s
            if left_s <= 0:
                self._queue.ended(chunk)
                actions += self._give_up(chunk.pull, FailureReason.TRANSFER, "the lease is over")
                continue
            actions.append(self._start_read(chunk, min(self._config.read_timeout_s, left_s), now_s=now_s))
        return actions

    def _start_read(self, chunk: Chunk[_Pull], timeout_s: float, *, now_s: float) -> Read:
        pull = chunk.pull
        local_blocks = pull.block_ids[chunk.first_block : chunk.first_block + len(chunk.source_blocks)]
        read_id = ReadId(self._next_read_id)
        self._next_read_id += 1
        self._reads[read_id] = _OpenRead(chunk, local_blocks)
        self._in_flight.add(read_id)
        chunk.attempts += 1
        pull.reads_open += 1
        if pull.busy_count == 0:
            pull.busy_since_s = now_s
        pull.busy_count += 1
        source = pull.source.worker_id
        blocks = (chunk.source_blocks, tuple(local_blocks), chunk.generations)
        return Read(read_id, source, *blocks, timeout_s, chunk.checksums)

    def _accept(self, read: _OpenRead, *, now_s: float) -> list[ReceiverAction]:
        """The blocks hold what was granted: the full ones can be found from now on, by others too."""
        hashes = read.chunk.pull.hashes
        for i, block in enumerate(read.local_blocks, start=read.chunk.first_block):
            if i < len(hashes):
                self._cache.insert(hashes[i], block)
        read.chunk.pull.chunks_left -= 1
        return self._finish_if_complete(read.chunk.pull, now_s=now_s)

    def _retry_or_give_up(
        self, read: _OpenRead, reason: str, *, can_retry: bool, is_settled: bool
    ) -> list[ReceiverAction]:
        chunk = read.chunk
        has_attempts = can_retry and chunk.attempts < self._config.read_attempts_max
        if has_attempts and (is_settled or self._quarantine(read)):
            self._queue.add_again(chunk)
            return []
        message = f"read attempt {chunk.attempts}: {reason}"
        return self._give_up(chunk.pull, FailureReason.TRANSFER, message)

    def _quarantine(self, read: _OpenRead) -> bool:
        """Bytes of a given-up read may yet land in its blocks, over a good second read: the pull goes
        on with other blocks. False: there are none."""
        pull, first = read.chunk.pull, read.chunk.first_block
        try:
            fresh = self._pool.allocate(len(read.local_blocks))
        except OutOfBlocks:
            return False
        pull.block_ids[first : first + len(fresh)] = fresh
        read.owns_blocks = True
        return True

    def _finish_if_complete(self, pull: _Pull, *, now_s: float) -> list[ReceiverAction]:
        if pull.first_token is None or pull.chunks_left > 0:
            return []
        ready = Ready(
            key=pull.key,
            block_ids=pull.block_ids,
            hashes=pull.hashes,
            first_token=pull.first_token,
            transferred_bytes=(pull.next_block - pull.held_count) * self._block_bytes,
            transfer_s=pull.transfer_s,
            handover_s=now_s - pull.last_grant_s,
            first_logprobs=pull.first_logprobs,
            prompt_logprobs=pull.prompt_logprobs,
        )
        pull.block_ids = []
        return [ready, *self._end(pull, tell_source=True, taken=True)]

    def _give_up(self, pull: _Pull, reason: FailureReason, message: str) -> list[ReceiverAction]:
        return [GaveUp(pull.key, reason, message), *self._end(pull, tell_source=True)]

    def _end(self, pull: _Pull, *, tell_source: bool, taken: bool = False) -> list[ReceiverAction]:
        """Blocks that a read may still write into stay with that read; the others are freed."""
        del self._pulls[pull.key]
        self._queue.forget(pull)
        pull.is_over = True
        quarantined: set[BlockId] = set()
        for read in self._reads.values():
            if read.chunk.pull is pull and not read.owns_blocks:
                read.owns_blocks = True
                quarantined.update(read.local_blocks)
        self._pool.release([block for block in pull.block_ids if block not in quarantined])
        pull.block_ids = []
        if tell_source:
            pull.release = KVReleased(pull.key.seq_id, pull.key.epoch, taken)
        return self._release_if_settled(pull)

    def _release_if_settled(self, pull: _Pull) -> list[ReceiverAction]:
        if pull.release is None or pull.reads_open > 0:
            return []
        release, pull.release = pull.release, None
        return [Send(pull.source, release)]


def _is_complete(grant: KVGrant) -> bool:
    """Whether it says of every block what is needed to trust it."""
    count = len(grant.source_blocks)
    return len(grant.generations) == count and len(grant.checksums) in (0, count)
