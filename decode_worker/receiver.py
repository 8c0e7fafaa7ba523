"""How the KV of a decode phase gets here: reserve blocks, request, read under a lease, join.

An `_Incoming` is one attempt. It holds its blocks until it is ready (they pass to the scheduler) or ends
(they are freed, except those that a read may still write into: they are the read's until it has settled)."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import assert_never

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
    OwnerMessage,
    PeerRef,
    ReaderMessage,
)
from baton.core.steps import TokenLogprobs
from decode_worker.read_queue import Chunk, ReadQueue
from engine.scheduling.block_pool import OutOfBlocks
from engine.scheduling.prefix_cache import PrefixCache
from kv_transfer.lease import ReaderLease
from kv_transfer.read import BlockRead, ReadDone
from kv_transfer.session import BadGrant, OpenRead, OpenReads, ReadSession


@dataclass(frozen=True, slots=True)
class Send:
    owner: PeerRef
    message: ReaderMessage


@dataclass(frozen=True, slots=True)
class Ready:
    """All KV of the prompt is here. `block_ids`, with one reference each, are the caller's from now on and
    have room for one more position."""

    key: SeqKey
    block_ids: list[BlockId]
    hashes: list[BlockHash]
    first_token: int
    cached_token_count: int
    """Prompt tokens that the prefill worker found in its cache."""
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
class NoFreeBlocks:
    key: SeqKey
    message: str


ReceiverAction = Send | BlockRead | Ready | GaveUp | NoFreeBlocks
"""A BlockRead is answered by `KVReceiver.read_done`."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A decode phase that has no blocks yet."""

    key: SeqKey
    owner: PeerRef
    token_count: int
    hashes: list[BlockHash]
    """Hashes of all full blocks."""
    room_by_s: float
    """The time until which it may wait for blocks."""


@dataclass(slots=True, eq=False, kw_only=True)
class _Incoming(ReadSession):
    """A decode phase whose blocks are reserved. Positions are those of the sequence's block table."""

    key: SeqKey
    owner: PeerRef
    token_count: int
    hashes: list[BlockHash]
    block_ids: list[BlockId]
    held_count: int
    """Blocks from the front that were here before."""
    was_granted_any: bool = False
    was_taken: bool = False
    """All that was granted was read well."""
    first_token: int | None = None
    cached_token_count: int = 0
    first_logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    last_grant_s: float = 0.0
    chunks_left: int = 0
    """Chunks that were granted and are not read yet."""
    busy_count: int = 0
    """Reads in flight."""
    busy_since_s: float = 0.0
    transfer_s: float = 0.0


_Read = OpenRead[_Incoming, Chunk[_Incoming]]


class KVReceiver:
    """Decode phases whose KV is not all here yet. Pure: the caller has the clock and performs the actions.

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
        self._waiting: deque[_Waiting] = deque()
        self._incoming: dict[SeqKey, _Incoming] = {}
        self._queue: ReadQueue[_Incoming] = ReadQueue(
            reads_max=config.reads_in_flight_max,
            bytes_max=config.bytes_in_flight_max,
            block_bytes=block_bytes,
        )
        self._reads: OpenReads[_Incoming, Chunk[_Incoming]] = OpenReads()
        self._next_read_id = 0

    # --- what others may know -------------------------------------------------------------------

    @property
    def count(self) -> int:
        return len(self._waiting) + len(self._incoming)

    @property
    def reads_in_flight(self) -> int:
        return self._reads.in_flight_count

    @property
    def quarantined_count(self) -> int:
        return self._reads.quarantined_count

    @property
    def is_idle(self) -> bool:
        return not (self._waiting or self._incoming or len(self._reads))

    @property
    def next_tick_s(self) -> float | None:
        room = [waiting.room_by_s for waiting in self._waiting]
        leases = [min(one.lease.renew_s, one.lease.end_s) for one in self._incoming.values()]
        return min((*room, *leases), default=None)

    def held_blocks(self) -> Iterator[BlockId]:
        """One entry for each reference that the receiver has, quarantine included."""
        for incoming in self._incoming.values():
            yield from incoming.block_ids
        for read in self._reads:
            yield from (BlockId(block) for block in read.quarantined)

    # --- the sequence ---------------------------------------------------------------------------

    def start(
        self, key: SeqKey, owner: PeerRef, tokens: Sequence[int], cache_root: BlockHash, *, now_s: float
    ) -> list[ReceiverAction]:
        """The sequence waits for blocks; `admit` goes on from there."""
        if len(self._waiting) >= self._waiting_max:
            return [NoFreeBlocks(key, f"{len(self._waiting)} sequences wait for blocks")]
        hashes = block_hashes(cache_root, tokens, self._block_tokens)
        room_by_s = now_s + self._config.receive_wait_s
        self._waiting.append(_Waiting(key, owner, len(tokens), hashes, room_by_s))
        return []

    def admit(self, *, now_s: float) -> list[ReceiverAction]:
        """Reserve blocks for those that wait, in order, and request KV of their owners."""
        actions: list[ReceiverAction] = []
        while self._waiting:
            first = self._waiting[0]
            need_count = blocks_for(first.token_count + 1, self._block_tokens)
            try:
                got = self._cache.reserve(first.hashes, need_count, keep_free=self._keep_free())
            except OutOfBlocks:
                break
            self._waiting.popleft()
            lease_s = self._config.lease_s
            incoming = self._incoming[first.key] = _Incoming(
                # The owner may hold a request for one lease before it answers; then our patience ends.
                lease=ReaderLease(lease_s=lease_s, patience_end_s=now_s + 2 * lease_s),
                block_count=blocks_for(first.token_count, self._block_tokens),
                granted_end=got.cached_count,
                key=first.key,
                owner=first.owner,
                token_count=first.token_count,
                hashes=first.hashes,
                block_ids=got.blocks,
                held_count=got.cached_count,
            )
            actions.append(self._request(incoming, now_s=now_s))
        return actions

    def cancel(self, key: SeqKey) -> list[ReceiverAction]:
        """An unknown key changes nothing."""
        for waiting in self._waiting:
            if waiting.key == key:
                self._waiting.remove(waiting)
                return []
        incoming = self._incoming.get(key)
        return [] if incoming is None else self._end(incoming, tell_owner=True)

    # --- the owner ------------------------------------------------------------------------------

    def on_message(self, owner: WorkerId, message: OwnerMessage, *, now_s: float) -> list[ReceiverAction]:
        match message:
            case KVGrant():
                return self.granted(owner, message, now_s=now_s)
            case KVRefused():
                return self.refused(owner, message)
            case _:
                assert_never(message)

    def granted(self, owner: WorkerId, grant: KVGrant, *, now_s: float) -> list[ReceiverAction]:
        incoming = self._incoming_from(owner, SeqKey(grant.seq_id, grant.epoch))
        if incoming is None:
            return []
        try:
            added = incoming.accept(grant, slack_s=self._config.lease_slack_s)
            if grant.is_last and (grant.first_token is None or incoming.granted_end < incoming.block_count):
                raise BadGrant("a last grant without all blocks and the first token")
        except BadGrant as error:
            return self._give_up(incoming, FailureReason.TRANSFER, f"{owner} grants {error}: {grant}")
        if added.source_blocks:
            incoming.chunks_left += self._queue.add(Chunk(incoming, *added))
            incoming.was_granted_any = True
            incoming.last_grant_s = now_s
        if grant.is_last and incoming.first_token is None:
            incoming.first_token = grant.first_token
            incoming.cached_token_count = grant.cached_token_count
            incoming.first_logprobs, incoming.prompt_logprobs = grant.first_logprobs, grant.prompt_logprobs
            incoming.last_grant_s = now_s
        return self._finish_if_complete(incoming, now_s=now_s) or self._start_reads(now_s=now_s)

    def refused(self, owner: WorkerId, refusal: KVRefused) -> list[ReceiverAction]:
        """Whatever arrived wholly stays in the prefix cache."""
        incoming = self._incoming_from(owner, SeqKey(refusal.seq_id, refusal.epoch))
        if incoming is None:
            return []
        gave_up = GaveUp(incoming.key, FailureReason.SOURCE_REFUSED, refusal.message)
        return [gave_up, *self._end(incoming, tell_owner=incoming.was_granted_any)]

    def owner_lost(self, owner: WorkerId, message: str) -> list[ReceiverAction]:
        """Nothing is sent to a lost owner: its leases end by themselves."""
        for read in self._reads:
            if read.session.owner.worker_id == owner:
                read.session.owner_lost()
        actions: list[ReceiverAction] = []
        for incoming in [one for one in self._incoming.values() if one.owner.worker_id == owner]:
            actions.append(GaveUp(incoming.key, FailureReason.SOURCE_LOST, message))
            actions += self._end(incoming, tell_owner=False)
        return actions

    # --- reads ----------------------------------------------------------------------------------

    def read_done(self, done: ReadDone, *, now_s: float) -> list[ReceiverAction]:
        ended = self._reads.done(done, now_s=now_s)
        assert ended is not None, f"read {done.read_id} was not started"
        read, verdict = ended
        incoming = read.session
        self._queue.ended(read.part)
        incoming.busy_count -= 1
        if incoming.busy_count == 0:
            incoming.transfer_s += now_s - incoming.busy_since_s
        actions = self.read_settled(done.read_id) if done.is_settled else []
        if not incoming.is_over:
            # A corrupt block may arrive well next time, and the owner has no other copy to look at.
            fault = verdict.fault or ("corrupt bytes arrived" if done.corrupt else "")
            if fault:
                actions += self._retry_or_give_up(
                    read, fault, may_repeat=verdict.may_repeat, is_settled=done.is_settled
                )
            else:
                actions += self._accept(read, now_s=now_s)
        return actions + self._start_reads(now_s=now_s)

    def read_settled(self, read_id: ReadId) -> list[ReceiverAction]:
        """Nothing can land any more: quarantined blocks come back."""
        read = self._reads.settled(read_id)
        if read is None:
            return []
        self._pool.release([BlockId(block) for block in read.quarantined])
        return self._release_if_due(read.session)

    def tick(self, *, now_s: float) -> list[ReceiverAction]:
        actions: list[ReceiverAction] = []
        while self._waiting and self._waiting[0].room_by_s <= now_s:
            waiting = self._waiting.popleft()
            actions.append(NoFreeBlocks(waiting.key, f"no blocks within {self._config.receive_wait_s:g} s"))
        for incoming in list(self._incoming.values()):
            lease = incoming.lease
            if lease.end_s <= now_s:
                what = "the lease is over" if lease.is_granted else "the KV owner does not answer"
                actions += self._give_up(incoming, FailureReason.TRANSFER, what)
            elif lease.renew_s <= now_s:
                actions.append(self._request(incoming, now_s=now_s))
        return actions + self._start_reads(now_s=now_s)

    def check(self) -> None:
        self._reads.check()
        self._queue.check(reads_in_flight=self._reads.in_flight_count)
        for incoming in self._incoming.values():
            assert not incoming.is_over
            assert len(incoming.block_ids) == blocks_for(incoming.token_count + 1, self._block_tokens)
        for read in self._reads:
            assert read.quarantined or set(read.read.local_blocks) <= set(read.session.block_ids)
            assert read.quarantined or not read.session.is_over

    # --- parts ----------------------------------------------------------------------------------

    def _incoming_from(self, owner: WorkerId, key: SeqKey) -> _Incoming | None:
        incoming = self._incoming.get(key)
        return incoming if incoming is not None and incoming.owner.worker_id == owner else None

    def _request(self, incoming: _Incoming, *, now_s: float) -> Send:
        number = incoming.lease.request(now_s=now_s)
        request = KVRequest(incoming.key.seq_id, incoming.key.epoch, incoming.held_count, number)
        return Send(incoming.owner, request)

    def _start_reads(self, *, now_s: float) -> list[ReceiverAction]:
        actions: list[ReceiverAction] = []
        while (chunk := self._queue.next()) is not None:
            left_s = chunk.session.lease.end_s - now_s
            if left_s <= 0:
                self._queue.ended(chunk)
                actions += self._give_up(chunk.session, FailureReason.TRANSFER, "the lease is over")
                continue
            actions.append(self._start_read(chunk, min(self._config.read_timeout_s, left_s), now_s=now_s))
        return actions

    def _start_read(self, chunk: Chunk[_Incoming], timeout_s: float, *, now_s: float) -> BlockRead:
        incoming = chunk.session
        end = chunk.first_block + len(chunk.source_blocks)
        read = BlockRead(
            read_id=ReadId(self._next_read_id),
            owner=incoming.owner.worker_id,
            block_bytes=self._block_bytes,
            source_blocks=chunk.source_blocks,
            local_blocks=tuple(incoming.block_ids[chunk.first_block : end]),
            generations=chunk.generations,
            timeout_s=timeout_s,
            checksums=chunk.checksums,
        )
        self._next_read_id += 1
        self._reads.start(read, incoming, chunk, now_s=now_s)
        chunk.attempts += 1
        if incoming.busy_count == 0:
            incoming.busy_since_s = now_s
        incoming.busy_count += 1
        return read

    def _accept(self, read: _Read, *, now_s: float) -> list[ReceiverAction]:
        """The blocks hold what was granted: full ones can be found from now on, by others too."""
        incoming = read.session
        for i, block in enumerate(read.read.local_blocks, start=read.part.first_block):
            if i < len(incoming.hashes):
                self._cache.insert(incoming.hashes[i], BlockId(block))
        incoming.chunks_left -= 1
        return self._finish_if_complete(incoming, now_s=now_s)

    def _retry_or_give_up(
        self, read: _Read, fault: str, *, may_repeat: bool, is_settled: bool
    ) -> list[ReceiverAction]:
        chunk = read.part
        has_attempts = may_repeat and chunk.attempts < self._config.read_attempts_max
        if has_attempts and (is_settled or self._quarantine(read)):
            self._queue.add_again(chunk)
            return []
        message = f"read attempt {chunk.attempts}: {fault}"
        return self._give_up(read.session, FailureReason.TRANSFER, message)

    def _quarantine(self, read: _Read) -> bool:
        """Bytes of a read that was given up may yet land in its blocks, over a good second read: the phase
        goes on with other blocks. False: there are none."""
        incoming, first = read.session, read.part.first_block
        try:
            fresh = self._pool.allocate(len(read.read.local_blocks))
        except OutOfBlocks:
            return False
        incoming.block_ids[first : first + len(fresh)] = fresh
        read.quarantined = list(read.read.local_blocks)
        return True

    def _finish_if_complete(self, incoming: _Incoming, *, now_s: float) -> list[ReceiverAction]:
        if incoming.first_token is None or incoming.chunks_left > 0:
            return []
        ready = Ready(
            key=incoming.key,
            block_ids=incoming.block_ids,
            hashes=incoming.hashes,
            first_token=incoming.first_token,
            cached_token_count=incoming.cached_token_count,
            transferred_bytes=(incoming.granted_end - incoming.held_count) * self._block_bytes,
            transfer_s=incoming.transfer_s,
            handover_s=now_s - incoming.last_grant_s,
            first_logprobs=incoming.first_logprobs,
            prompt_logprobs=incoming.prompt_logprobs,
        )
        incoming.block_ids = []
        incoming.was_taken = True
        return [ready, *self._end(incoming, tell_owner=True)]

    def _give_up(self, incoming: _Incoming, reason: FailureReason, message: str) -> list[ReceiverAction]:
        return [GaveUp(incoming.key, reason, message), *self._end(incoming, tell_owner=True)]

    def _end(self, incoming: _Incoming, *, tell_owner: bool) -> list[ReceiverAction]:
        """Blocks that a read may still write into stay with that read; the others are freed."""
        del self._incoming[incoming.key]
        self._queue.forget(incoming)
        incoming.end(tell_owner=tell_owner)
        quarantined: set[int] = set()
        for read in self._reads.of(incoming):
            if not read.quarantined:
                read.quarantined = list(read.read.local_blocks)
                quarantined.update(read.quarantined)
        self._pool.release([block for block in incoming.block_ids if block not in quarantined])
        incoming.block_ids = []
        return self._release_if_due(incoming)

    def _release_if_due(self, incoming: _Incoming) -> list[ReceiverAction]:
        if not incoming.take_release():
            return []
        return [Send(incoming.owner, KVReleased(*incoming.key, incoming.was_taken))]
