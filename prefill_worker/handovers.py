"""The KV owner's side of every hand-over: which blocks of this worker a decode worker may read, and until
when.

The hand-overs have references of their own in the blocks they granted, so they and the scheduler end
independently: a block is freed when the sequence is done with it *and* its reader is, or its lease is over.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum, auto

from baton.core.ids import BlockId, SeqKey, WorkerId
from baton.core.lifecycle import Lifecycle
from baton.core.messages import KVGrant, KVRefused, KVRequest, OwnerMessage
from baton.core.steps import TokenLogprobs
from engine.scheduling.block_pool import BlockPool
from kv_transfer.lease import LeaseBook, OwnerLease


@dataclass(frozen=True, slots=True)
class Tell:
    """Send `message` to `reader`."""

    reader: WorkerId
    message: OwnerMessage


class HandoverState(StrEnum):
    COMPUTING = auto()
    """The sequence holds its blocks; what is granted has a reference more."""
    COMPLETE = auto()
    """All is computed; the hand-over holds the blocks until it is released or the lease ends."""
    WITHDRAWN = auto()
    """The sequence was cancelled, but a reader may be reading what was granted."""
    OVER = auto()


LEGAL: dict[HandoverState, frozenset[HandoverState]] = {
    HandoverState.COMPUTING: frozenset({HandoverState.COMPLETE, HandoverState.WITHDRAWN, HandoverState.OVER}),
    HandoverState.COMPLETE: frozenset({HandoverState.WITHDRAWN, HandoverState.OVER}),
    HandoverState.WITHDRAWN: frozenset({HandoverState.OVER}),
    HandoverState.OVER: frozenset(),
}


@dataclass(slots=True, eq=False)
class _Handover:
    lease: OwnerLease[SeqKey, WorkerId]
    life: Lifecycle[HandoverState]
    blocks: list[BlockId] = field(default_factory=list[BlockId])
    """Full blocks so far, in table order; with the part-filled last one once COMPLETE."""
    held: dict[BlockId, None] = field(default_factory=dict[BlockId, None])
    """Blocks in which the hand-over has a reference, in table order."""
    next_block: int = 0
    """Position of the first block not granted yet."""
    was_granted_any: bool = False
    unread_s: float = 0.0
    """How long all of it is held for a reader that has not come yet."""
    first_token: int | None = None
    cached_token_count: int = 0
    first_logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None

    @property
    def key(self) -> SeqKey:
        return self.lease.key


@dataclass(slots=True)
class _EarlyRequest:
    """A request for a sequence that this worker has not heard of yet."""

    reader: WorkerId
    request: KVRequest
    ends_s: float


class Handovers:
    """Hand-overs of this worker's PREFILL phases. Pure: the caller has the clock and sends the answers.

    While a sequence computes it holds its own blocks; `close`d early or `complete`d, what was granted
    stays held until it is `released` or no grant was made for `lease_s`.
    """

    def __init__(self, pool: BlockPool, *, lease_s: float, early_requests_max: int) -> None:
        self._pool = pool
        self._early_requests_max = early_requests_max
        self._leases = LeaseBook[SeqKey, WorkerId](lease_s=lease_s)
        self._handovers: dict[SeqKey, _Handover] = {}
        """One for each lease of the book."""
        self._early: dict[SeqKey, _EarlyRequest] = {}
        self._preparing: set[SeqKey] = set()
        """Sequences that are made ready, which may take longer than a lease."""

    @property
    def count(self) -> int:
        """Hand-overs that hold blocks, or whose sequence is still computing."""
        return len(self._handovers)

    @property
    def expired_count(self) -> int:
        """Leases that ended without a release, since the start."""
        return self._leases.expired_count

    @property
    def next_tick_s(self) -> float | None:
        ends = [early.ends_s for early in self._early.values()]
        if (lease_end_s := self._leases.next_end_s) is not None:
            ends.append(lease_end_s)
        return min(ends, default=None)

    def held_blocks(self) -> Iterator[BlockId]:
        """One entry for each reference that the hand-overs have."""
        for handover in self._handovers.values():
            yield from handover.held

    # --- the sequence ---------------------------------------------------------------------------

    def prepare(self, key: SeqKey, *, now_s: float) -> list[Tell]:
        """A PREFILL phase came, and its grammar or adapter is made ready. Its reader is granted nothing again
        and again meanwhile, so that it goes on waiting. `open` or `close` follows."""
        if key in self._handovers:
            return []
        self._preparing.add(key)
        early = self._early.get(key)
        return [] if early is None else [self._keep_waiting(key, early, now_s=now_s)]

    def is_preparing(self, key: SeqKey) -> bool:
        """Whether `prepare` was told of it, and neither `open` nor `close`."""
        return key in self._preparing

    def open(self, key: SeqKey, *, unread_s: float = 0.0, now_s: float) -> list[Tell]:
        """A PREFILL phase was accepted. A request that came before it is answered now.

        `unread_s` is how much longer than a lease the reader may take until its first request, because it is
        made ready as well.
        """
        self._preparing.discard(key)
        life = Lifecycle(HandoverState.COMPUTING, LEGAL, now_s=now_s)
        self._handovers[key] = _Handover(self._leases.open(key), life, unread_s=unread_s)
        early = self._early.pop(key, None)
        return [] if early is None else self.request(early.reader, early.request, now_s=now_s)

    def committed(self, key: SeqKey, blocks: Sequence[BlockId], *, now_s: float) -> list[Tell]:
        """`blocks` are all full blocks of the sequence so far. New ones are granted, if there is a reader."""
        handover = self._handovers.get(key)
        if handover is None:
            return []  # released already: nobody reads
        handover.blocks = list(blocks)
        if handover.lease.reader is None or len(blocks) <= handover.next_block:
            return []
        return [self._grant(handover, now_s=now_s)]

    def complete(
        self,
        key: SeqKey,
        blocks: Sequence[BlockId],
        *,
        first_token: int,
        cached_token_count: int,
        first_logprobs: TokenLogprobs | None = None,
        prompt_logprobs: tuple[TokenLogprobs, ...] | None = None,
        now_s: float,
    ) -> list[Tell]:
        """All prompt positions are in `blocks`, the part-filled last one included. The hand-over takes its
        own references, so the caller may give up its own; the lease runs from now."""
        handover = self._handovers.get(key)
        if handover is None:
            return []
        handover.life.to(HandoverState.COMPLETE, now_s=now_s, cause="computed")
        handover.blocks = list(blocks)
        handover.first_token, handover.cached_token_count = first_token, cached_token_count
        handover.first_logprobs, handover.prompt_logprobs = first_logprobs, prompt_logprobs
        if handover.lease.reader is not None:
            return [self._grant(handover, now_s=now_s)]
        self._hold(handover, handover.blocks)
        self._leases.renew(key, now_s=now_s, longer_s=handover.unread_s)
        return []

    def close(self, key: SeqKey, reason: str, *, now_s: float) -> list[Tell]:
        """The sequence was cancelled, failed, was refused or finished without a hand-over. The reader hears a
        refusal; what it was granted stays until it releases it or the lease is over. An unknown key changes
        nothing."""
        self._preparing.discard(key)
        early = self._early.pop(key, None)
        if early is not None:
            return [Tell(early.reader, _refusal(key, reason))]
        handover = self._handovers.get(key)
        if handover is None or handover.life.state is HandoverState.WITHDRAWN:
            return []
        if handover.was_granted_any:
            handover.life.to(HandoverState.WITHDRAWN, now_s=now_s, cause=reason)
        else:
            self._end(handover, reason, now_s=now_s)
        reader = handover.lease.reader
        return [] if reader is None else [Tell(reader, _refusal(key, reason))]

    # --- the reader -----------------------------------------------------------------------------

    def knows(self, key: SeqKey) -> bool:
        return key in self._handovers

    def request(self, reader: WorkerId, request: KVRequest, *, now_s: float) -> list[Tell]:
        """Every request is answered by a grant, of nothing if there is nothing new. A second one changes
        nothing but the lease."""
        key = SeqKey(request.seq_id, request.epoch)
        handover = self._handovers[key]
        if handover.life.state is HandoverState.WITHDRAWN:
            return [Tell(reader, _refusal(key, "no longer offered"))]
        is_first = handover.lease.reader is None
        if not self._leases.request(key, reader, request.request_number):
            return [Tell(reader, _refusal(key, f"granted to {handover.lease.reader}"))]
        if is_first:
            handover.next_block = request.first_block
        return [self._grant(handover, now_s=now_s)]

    def request_early(self, reader: WorkerId, request: KVRequest, *, now_s: float) -> list[Tell]:
        """A request for a sequence not heard of yet is held for one lease, then refused. That of a sequence
        which is made ready is answered by a grant of nothing."""
        key = SeqKey(request.seq_id, request.epoch)
        known = self._early.get(key)
        if known is None:
            if len(self._early) >= self._early_requests_max:
                return [Tell(reader, _refusal(key, "too many requests for unknown sequences"))]
            self._early[key] = _EarlyRequest(reader, request, now_s + self._leases.lease_s)
        elif known.reader != reader:
            return [Tell(reader, _refusal(key, f"requested by {known.reader}"))]
        elif request.request_number > known.request.request_number:
            known.request = request
        if key in self._preparing:
            return [self._keep_waiting(key, self._early[key], now_s=now_s)]
        return []

    def released(self, reader: WorkerId, key: SeqKey, *, now_s: float) -> None:
        """The reader reads no more. An unknown key, a repetition or another reader changes nothing."""
        early = self._early.get(key)
        if early is not None and early.reader == reader:
            del self._early[key]
        if self._leases.is_of(key, reader):
            self._end(self._handovers[key], "released", now_s=now_s)

    def tick(self, *, now_s: float) -> list[Tell]:
        answers: list[Tell] = []
        for key in [k for k, early in self._early.items() if early.ends_s <= now_s]:
            answers.append(Tell(self._early.pop(key).reader, _refusal(key, "never heard of the sequence")))
        self._leases.expire(now_s=now_s, lapse=lambda key: self._lapse(self._handovers[key], now_s=now_s))
        return answers

    def check(self) -> None:
        self._leases.check()
        assert {lease.key for lease in self._leases} == self._handovers.keys()
        for handover in self._handovers.values():
            assert not handover.life.is_terminal
            assert handover.held.keys() <= set(handover.blocks)
            if handover.life.state is not HandoverState.COMPUTING or handover.held:
                assert handover.lease.end_s is not None, "held by nobody's deadline"

    # --- parts ----------------------------------------------------------------------------------

    def _keep_waiting(self, key: SeqKey, early: _EarlyRequest, *, now_s: float) -> Tell:
        early.ends_s = now_s + self._leases.lease_s
        nothing = KVGrant(
            seq_id=key.seq_id,
            epoch=key.epoch,
            first_block=early.request.first_block,
            source_blocks=(),
            generations=(),
            lease_s=self._leases.lease_s,
            answers_request=early.request.request_number,
        )
        return Tell(early.reader, nothing)

    def _grant(self, handover: _Handover, *, now_s: float) -> Tell:
        lease = handover.lease
        assert lease.reader is not None
        first_block = handover.next_block
        blocks = handover.blocks[first_block:]
        self._hold(handover, blocks)
        handover.next_block = first_block + len(blocks)
        handover.was_granted_any |= bool(blocks)
        self._leases.renew(lease.key, now_s=now_s)
        grant = KVGrant(
            seq_id=lease.key.seq_id,
            epoch=lease.key.epoch,
            first_block=first_block,
            source_blocks=tuple(blocks),
            generations=tuple(self._pool.generation(block) for block in blocks),
            lease_s=self._leases.lease_s,
            answers_request=lease.number,
            is_last=handover.life.state is HandoverState.COMPLETE,
            first_token=handover.first_token,
            cached_token_count=handover.cached_token_count,
            first_logprobs=handover.first_logprobs,
            prompt_logprobs=handover.prompt_logprobs,
        )
        return Tell(lease.reader, grant)

    def _hold(self, handover: _Handover, blocks: Sequence[BlockId]) -> None:
        fresh = [block for block in blocks if block not in handover.held]
        self._pool.acquire(fresh)
        handover.held.update(dict.fromkeys(fresh))

    def _lapse(self, handover: _Handover, *, now_s: float) -> None:
        if handover.life.state is not HandoverState.COMPUTING:
            self._end(handover, "lease over", now_s=now_s)
            return
        # The reader has stopped by its own, earlier, end. The sequence computes on, and the next reader
        # starts from the beginning.
        self._give_back(handover)
        self._leases.vacate(handover.key)
        handover.next_block, handover.was_granted_any = 0, False

    def _end(self, handover: _Handover, reason: str, *, now_s: float) -> None:
        handover.life.to(HandoverState.OVER, now_s=now_s, cause=reason)
        self._give_back(handover)
        self._leases.close(handover.key)
        del self._handovers[handover.key]

    def _give_back(self, handover: _Handover) -> None:
        self._pool.release(list(handover.held))
        handover.held = {}


def _refusal(key: SeqKey, message: str) -> KVRefused:
    return KVRefused(key.seq_id, key.epoch, message)
