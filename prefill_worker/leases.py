"""Who may read which blocks of ours, and until when: the source's side of every hand-over.

The book has shares of its own in the blocks it granted, so it and the scheduler end independently:
a block is freed when the sequence is done with it *and* its reader is (or the lease is over).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum, auto

from baton.core.ids import BlockId, SeqKey, WorkerId
from baton.core.lifecycle import Lifecycle
from baton.core.messages import KVGrant, KVRefused, KVRequest, SourceMessage
from baton.core.steps import TokenLogprobs
from engine.scheduling.block_pool import BlockPool


@dataclass(frozen=True, slots=True)
class Tell:
    """Send `message` to `reader`."""

    reader: WorkerId
    message: SourceMessage


class HandoverState(StrEnum):
    COMPUTING = auto()
    """The sequence holds its blocks; grants are shared on top."""
    COMPLETE = auto()
    """All computed; the book holds the blocks until release or lease end."""
    WITHDRAWN = auto()
    """Cancelled, but a reader may be reading what was granted."""
    OVER = auto()


LEGAL: dict[HandoverState, frozenset[HandoverState]] = {
    HandoverState.COMPUTING: frozenset({HandoverState.COMPLETE, HandoverState.WITHDRAWN, HandoverState.OVER}),
    HandoverState.COMPLETE: frozenset({HandoverState.WITHDRAWN, HandoverState.OVER}),
    HandoverState.WITHDRAWN: frozenset({HandoverState.OVER}),
    HandoverState.OVER: frozenset(),
}


@dataclass(slots=True, eq=False)
class _Handover:
    key: SeqKey
    life: Lifecycle[HandoverState]
    blocks: list[BlockId] = field(default_factory=list[BlockId])
    """Committed so far, in table order; with the part-filled last one once COMPLETE."""
    held: dict[BlockId, None] = field(default_factory=dict[BlockId, None])
    """Blocks in which the book has a share, in table order."""
    reader: WorkerId | None = None
    request_number: int = 0
    next_block: int = 0
    """Position of the first block not granted yet."""
    was_granted_any: bool = False
    lease_end_s: float | None = None
    first_token: int | None = None
    cached_token_count: int = 0
    first_logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None


@dataclass(slots=True)
class _EarlyAsk:
    """An ask for a sequence that we have not heard of yet."""

    reader: WorkerId
    ask: KVRequest
    ends_s: float


class LeaseBook:
    """Hand-overs of this worker's PREFILL phases. Pure: the caller has the clock and sends what is told.

    While a sequence computes it holds its own blocks; `close`d early or `complete`d, what was granted
    stays held until `released` or until no grant was made for `lease_s`.
    """

    def __init__(self, pool: BlockPool, *, lease_s: float, early_requests_max: int) -> None:
        self._pool = pool
        self._lease_s = lease_s
        self._early_requests_max = early_requests_max
        self._handovers: dict[SeqKey, _Handover] = {}
        self._early: dict[SeqKey, _EarlyAsk] = {}
        self.expired_count = 0
        """Leases that ended without a release, since the start."""

    @property
    def count(self) -> int:
        """Hand-overs that hold blocks, or whose sequence is still computing."""
        return len(self._handovers)

    @property
    def next_tick_s(self) -> float | None:
        leases = (h.lease_end_s for h in self._handovers.values() if h.lease_end_s is not None)
        return min((*leases, *(early.ends_s for early in self._early.values())), default=None)

    def held_blocks(self) -> Iterator[BlockId]:
        """One entry for each share the book has."""
        for handover in self._handovers.values():
            yield from handover.held

    # --- the sequence ---------------------------------------------------------------------------

    def open(self, key: SeqKey, *, now_s: float) -> list[Tell]:
        """A PREFILL phase was accepted. An ask that came before it is answered now."""
        assert key not in self._handovers
        life = Lifecycle(HandoverState.COMPUTING, LEGAL, now_s=now_s)
        self._handovers[key] = _Handover(key, life)
        early = self._early.pop(key, None)
        return [] if early is None else self.ask(early.reader, early.ask, now_s=now_s)

    def committed(self, key: SeqKey, blocks: Sequence[BlockId], *, now_s: float) -> list[Tell]:
        """All full blocks of the sequence so far. What is new goes to the reader, if there is one."""
        handover = self._handovers.get(key)
        if handover is None:
            return []  # released already: nobody reads
        handover.blocks = list(blocks)
        if handover.reader is None or len(blocks) <= handover.next_block:
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
        """All prompt positions are in `blocks`, the part-filled last one included. The book takes its
        own shares, so the caller may give its ones back; the lease runs from now."""
        handover = self._handovers.get(key)
        if handover is None:
            return []
        handover.life.to(HandoverState.COMPLETE, now_s=now_s, cause="computed")
        handover.blocks = list(blocks)
        handover.first_token, handover.cached_token_count = first_token, cached_token_count
        handover.first_logprobs, handover.prompt_logprobs = first_logprobs, prompt_logprobs
        if handover.reader is not None:
            return [self._grant(handover, now_s=now_s)]
        self._hold(handover, handover.blocks)
        handover.lease_end_s = now_s + self._lease_s
        return []

    def close(self, key: SeqKey, reason: str, *, now_s: float) -> list[Tell]:
        """Cancelled, failed, refused or finished without a hand-over. The reader hears a refusal; what
        it was granted stays until it releases it or the lease is over. Unknown: nothing happens."""
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
        return [] if handover.reader is None else [Tell(handover.reader, _refusal(key, reason))]

    # --- the reader ------------------------------------------------------------------------------

    def knows(self, key: SeqKey) -> bool:
        return key in self._handovers

    def ask(self, reader: WorkerId, ask: KVRequest, *, now_s: float) -> list[Tell]:
        """Answered by a grant, of nothing if there is nothing new. Asking twice changes nothing."""
        key = SeqKey(ask.seq_id, ask.epoch)
        handover = self._handovers[key]
        if handover.life.state is HandoverState.WITHDRAWN:
            return [Tell(reader, _refusal(key, "no longer offered"))]
        if handover.reader is None:
            handover.reader, handover.next_block = reader, ask.first_block
        elif handover.reader != reader:
            return [Tell(reader, _refusal(key, f"granted to {handover.reader}"))]
        handover.request_number = max(handover.request_number, ask.request_number)
        return [self._grant(handover, now_s=now_s)]

    def ask_early(self, reader: WorkerId, ask: KVRequest, *, now_s: float) -> list[Tell]:
        """For a sequence not heard of yet: held for one lease, then refused."""
        key = SeqKey(ask.seq_id, ask.epoch)
        known = self._early.get(key)
        if known is None:
            if len(self._early) >= self._early_requests_max:
                return [Tell(reader, _refusal(key, "too many asks for unknown sequences"))]
            self._early[key] = _EarlyAsk(reader, ask, now_s + self._lease_s)
        elif known.reader != reader:
            return [Tell(reader, _refusal(key, f"asked for by {known.reader}"))]
        elif ask.request_number > known.ask.request_number:
            known.ask = ask
        return []

    def released(self, reader: WorkerId, key: SeqKey, *, now_s: float) -> None:
        """The reader reads no more. Unknown, repeated or not the reader: nothing happens."""
        early = self._early.get(key)
        if early is not None and early.reader == reader:
            del self._early[key]
        handover = self._handovers.get(key)
        if handover is not None and handover.reader == reader:
            self._end(handover, "released", now_s=now_s)

    def tick(self, *, now_s: float) -> list[Tell]:
        told: list[Tell] = []
        for key in [k for k, early in self._early.items() if early.ends_s <= now_s]:
            told.append(Tell(self._early.pop(key).reader, _refusal(key, "never heard of the sequence")))
        for handover in list(self._handovers.values()):
            if handover.lease_end_s is not None and handover.lease_end_s <= now_s:
                self._lapse(handover, now_s=now_s)
        return told

    def check(self) -> None:
        for handover in self._handovers.values():
            assert not handover.life.is_terminal
            assert handover.held.keys() <= set(handover.blocks)
            if handover.life.state is not HandoverState.COMPUTING or handover.held:
                assert handover.lease_end_s is not None, "held by nobody's deadline"

    # --- parts ----------------------------------------------------------------------------------

    def _grant(self, handover: _Handover, *, now_s: float) -> Tell:
        assert handover.reader is not None
        first_block = handover.next_block
        blocks = handover.blocks[first_block:]
        self._hold(handover, blocks)
        handover.next_block = first_block + len(blocks)
        handover.was_granted_any |= bool(blocks)
        handover.lease_end_s = now_s + self._lease_s
        grant = KVGrant(
            seq_id=handover.key.seq_id,
            epoch=handover.key.epoch,
            first_block=first_block,
            source_blocks=tuple(blocks),
            generations=tuple(self._pool.generation(block) for block in blocks),
            lease_s=self._lease_s,
            answers_request=handover.request_number,
            is_last=handover.life.state is HandoverState.COMPLETE,
            first_token=handover.first_token,
            cached_token_count=handover.cached_token_count,
            first_logprobs=handover.first_logprobs,
            prompt_logprobs=handover.prompt_logprobs,
        )
        return Tell(handover.reader, grant)

    def _hold(self, handover: _Handover, blocks: Sequence[BlockId]) -> None:
        fresh = [block for block in blocks if block not in handover.held]
        self._pool.acquire(fresh)
        handover.held.update(dict.fromkeys(fresh))

    def _lapse(self, handover: _Handover, *, now_s: float) -> None:
        self.expired_count += 1
        if handover.life.state is not HandoverState.COMPUTING:
            self._end(handover, "lease over", now_s=now_s)
            return
        # The reader has stopped by its own, earlier, end. The sequence computes on, and whoever asks
        # for it next starts from the beginning.
        self._give_back(handover)
        handover.reader, handover.lease_end_s = None, None
        handover.next_block, handover.was_granted_any = 0, False

    def _end(self, handover: _Handover, reason: str, *, now_s: float) -> None:
        handover.life.to(HandoverState.OVER, now_s=now_s, cause=reason)
        self._give_back(handover)
        del self._handovers[handover.key]

    def _give_back(self, handover: _Handover) -> None:
        self._pool.release(list(handover.held))
        handover.held = {}


def _refusal(key: SeqKey, message: str) -> KVRefused:
    return KVRefused(key.seq_id, key.epoch, message)
