"""Block tables of sequences: how they are reserved, shared, copied, swapped, committed and released."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from baton.core.geometry import blocks_for
from baton.core.hashing import tail_hash
from baton.core.ids import BlockHash, BlockId
from baton.core.messages import Phase, Task
from engine.scheduling.incoming import Incoming
from engine.scheduling.prefix_cache import PrefixCache
from engine.scheduling.sequence import Sequence


@dataclass(slots=True)
class Moves:
    """Moves of blocks that the next step makes before it computes, and blocks that must stay untouched until
    it is done."""

    copies: list[tuple[BlockId, BlockId]] = field(default_factory=list[tuple[BlockId, BlockId]])
    swap_out: list[tuple[BlockId, int]] = field(default_factory=list[tuple[BlockId, int]])
    swap_in: list[tuple[int, BlockId]] = field(default_factory=list[tuple[int, BlockId]])
    references: list[BlockId] = field(default_factory=list[BlockId])
    """Blocks that the step reads from, one reference each."""
    slots: list[int] = field(default_factory=list[int])
    """Swap slots that are free again when the step is done: a later step's `swap_out` comes after this one's
    `swap_in`."""

    @property
    def block_count(self) -> int:
        return len(self.copies) + len(self.swap_out) + len(self.swap_in)


class Tables:
    """Carries out what the scheduler decided, and keeps the accounts of blocks and swap slots."""

    def __init__(self, cache: PrefixCache, *, block_tokens: int, swap_slot_count: int) -> None:
        self._cache = cache
        self._pool = cache.pool
        self._block_tokens = block_tokens
        self._swap_slot_count = swap_slot_count
        self._free_slots = list(range(swap_slot_count - 1, -1, -1))
        self._promised: dict[BlockHash, Sequence] = {}
        self._on_commit: Callable[[Sequence, int, int], None] | None = None
        self.moves = Moves()

    @property
    def free_slot_count(self) -> int:
        return len(self._free_slots)

    def take_moves(self) -> Moves:
        moves, self.moves = self.moves, Moves()
        return moves

    def finish_moves(self, moves: Moves) -> None:
        """Release the blocks and slots of moves whose step is done."""
        self._pool.release(moves.references)
        self._free_slots += moves.slots

    def on_commit(self, tell: Callable[[Sequence, int, int], None]) -> None:
        """Call `tell(sequence, first, end)` for blocks that were computed here and became findable."""
        self._on_commit = tell

    # --- admission ------------------------------------------------------------------------------

    def waits_for_sibling(self, seq: Sequence) -> bool:
        """True if a sequence with the same prefix is computing the next block that this one lacks. Waiting
        pays, and the block will come, since the sequence that computes has all its blocks."""
        if seq.lacks_prompt_logprobs or seq.swap_slots or not self._promised:
            return False
        for block_hash in self._findable(seq):
            if not self._cache.has(block_hash):
                return block_hash in self._promised
        return False

    def admit(self, seq: Sequence, *, keep_free: int) -> None:
        """Blocks for all that is known of it and the position of its next token. Raises OutOfBlocks and
        then changes nothing. At least the last token stays to be computed: sampling needs its logits."""
        hashes = self._full_hashes(seq)
        tail = None if seq.swap_slots or seq.lacks_prompt_logprobs else self._tail_of(seq)
        grows = seq.phase is not Phase.PREFILL and seq.task is Task.GENERATE
        need_count = blocks_for(len(seq.tokens) + (1 if grows else 0), self._block_tokens)
        got = self._cache.reserve(hashes, need_count, keep_free=keep_free, tail=tail)
        seq.block_ids = got.blocks
        seq.committed_count = got.cached_count
        start = got.cached_count * self._block_tokens
        if got.copy_source is not None:
            self.moves.copies.append((got.copy_source, got.blocks[got.cached_count]))
            self.moves.references.append(got.copy_source)
            start = len(seq.tokens) - 1
        if seq.swap_slots:
            start = max(start, self._swap_in(seq, got.cached_count))
        seq.computed_count = seq.planned_count = start
        if seq.incoming is not None:
            _meet(seq.incoming, blocks_for(start, self._block_tokens))
        if seq.cached_token_count is None:
            seq.cached_token_count = min(start, seq.prompt_token_count)
        self._promise(seq, tail if got.copy_source is None else None)

    def grow(self, seq: Sequence, position_count: int) -> None:
        """Add blocks until `position_count` positions fit. Raises OutOfBlocks; blocks added before that
        stay."""
        while len(seq.block_ids) * self._block_tokens < position_count:
            seq.block_ids += self._pool.allocate(1)

    def room_of(self, seq: Sequence) -> int:
        """Positions that fit its blocks."""
        return len(seq.block_ids) * self._block_tokens

    # --- progress -------------------------------------------------------------------------------

    def computed(self, seq: Sequence) -> None:
        """Blocks that became full can be found from now on, and so can a tail. Positions whose token
        was never heard of (a step of a cancelled sequence) stay nameless."""
        first = seq.committed_count
        self._commit(seq)
        if self._on_commit is not None and first < seq.committed_count:
            self._on_commit(seq, first, seq.committed_count)
        self.arrived(seq)
        if seq.tail is not None and seq.computed_count >= seq.tail_end:
            self._cache.insert_tail(seq.tail, seq.block_ids[seq.tail_end // self._block_tokens])
            seq.tail = None
        if seq.promised and seq.computed_count >= seq.tail_end:
            self._break_promises(seq)

    def arrived(self, seq: Sequence) -> bool:
        """Counts blocks that came from elsewhere as computed, as soon as computing got to where they begin.
        Whether there were any."""
        incoming = seq.incoming
        if incoming is None or incoming.first >= incoming.ready:
            return False
        if seq.computed_count < incoming.first * self._block_tokens:
            return False
        assert seq.computed_count == seq.planned_count, "planned past what is awaited"
        if seq.cached_token_count is not None and not seq.was_preempted:
            token_count = (incoming.ready - incoming.first) * self._block_tokens
            seq.cached_token_count = min(seq.cached_token_count + token_count, seq.prompt_token_count)
        incoming.first = incoming.ready
        seq.computed_count = seq.planned_count = incoming.ready * self._block_tokens
        self._commit(seq)
        return True

    # --- ways out -------------------------------------------------------------------------------

    def release(self, seq: Sequence) -> None:
        """Everything it holds, in the pool and outside; nothing moves into its blocks any more."""
        self._break_promises(seq)
        self._drop_moves_into(seq)
        self._pool.release(seq.block_ids)
        self._free_slots += seq.swap_slots
        seq.block_ids, seq.swap_slots = [], []
        seq.computed_count = seq.planned_count = seq.committed_count = 0
        seq.tail = seq.incoming = None

    def has_moves_to_come(self, seq: Sequence) -> bool:
        """True if content that the sequence counts as computed is moved only by the next step."""
        targets = {block for _, block in (*self.moves.copies, *self.moves.swap_in)}
        return not targets.isdisjoint(seq.block_ids)

    def swap_out(self, seq: Sequence) -> None:
        """Its content goes to slots with the next step. The blocks are given back by `moved`, or one by
        one by `yield_block` to who needs them in that step: nobody else writes before it has begun."""
        count = blocks_for(seq.computed_count, self._block_tokens)
        slots = [self._free_slots.pop() for _ in range(count)]
        self.moves.swap_out += zip(seq.block_ids[:count], slots, strict=True)
        self.moves.references += seq.block_ids[:count]
        self._pool.release(seq.block_ids[count:])
        self._break_promises(seq)
        seq.block_ids, seq.swap_slots = [], slots
        seq.planned_count, seq.committed_count = seq.computed_count, 0
        seq.tail = seq.incoming = None

    def yield_block(self) -> bool:
        """One block of those just swapped out becomes free now. False: there is none."""
        leaving = {block for block, _ in self.moves.swap_out}
        for i in range(len(self.moves.references) - 1, -1, -1):
            if self.moves.references[i] in leaving:
                self._pool.release([self.moves.references.pop(i)])
                return True
        return False

    def cancel_swap_out(self, seq: Sequence) -> None:
        """Cancel a swap that no step will make. The KV that was computed is lost."""
        slots = set(seq.swap_slots)
        blocks = [block for block, slot in self.moves.swap_out if slot in slots]
        self.moves.swap_out = [move for move in self.moves.swap_out if move[1] not in slots]
        self._free_slots += seq.swap_slots
        seq.swap_slots = []
        seq.computed_count = seq.planned_count = 0
        for block in blocks:
            if block in self.moves.references:
                self.moves.references.remove(block)
                self._pool.release([block])

    # --- accounts -------------------------------------------------------------------------------

    def check(self, sequences: list[Sequence], open_moves: list[Moves]) -> None:
        slots = [slot for seq in sequences for slot in seq.swap_slots]
        slots += [slot for moves in (*open_moves, self.moves) for slot in moves.slots]
        slots += self._free_slots
        assert sorted(slots) == list(range(self._swap_slot_count)), "swap slots"
        for block_hash, seq in self._promised.items():
            assert seq.block_ids, "promised by nobody who computes"
            assert block_hash in seq.promised

    # --- parts ----------------------------------------------------------------------------------

    def _commit(self, seq: Sequence) -> None:
        full_count = min(seq.computed_count, len(seq.tokens)) // self._block_tokens
        if full_count <= seq.committed_count:
            return
        hashes = seq.hashes_of(full_count)
        for i in range(seq.committed_count, full_count):
            self._cache.insert(hashes[i], seq.block_ids[i])
        seq.committed_count = full_count

    def _full_hashes(self, seq: Sequence) -> list[BlockHash]:
        """Hashes of the full blocks that the sequence may find in the cache."""
        return seq.hashes_of(0 if seq.lacks_prompt_logprobs else (len(seq.tokens) - 1) // self._block_tokens)

    def _tail_of(self, seq: Sequence) -> BlockHash | None:
        """Hash of the tokens between the last full block and the last token."""
        full_count = (len(seq.tokens) - 1) // self._block_tokens
        seq.tail_end = len(seq.tokens) - 1
        tokens = seq.tokens[full_count * self._block_tokens : seq.tail_end]
        if not tokens:
            return None
        hashes = seq.hashes_of(full_count)
        return tail_hash(hashes[-1] if hashes else seq.cache_root, tokens)

    def _findable(self, seq: Sequence) -> Iterator[BlockHash]:
        yield from self._full_hashes(seq)
        tail = self._tail_of(seq)
        if tail is not None:
            yield tail

    def _promise(self, seq: Sequence, tail: BlockHash | None) -> None:
        seq.tail_end = len(seq.tokens) - 1
        seq.tail = tail
        full_count = len(seq.tokens) // self._block_tokens
        wanted = seq.hashes_of(full_count)[seq.committed_count :]
        for block_hash in wanted if tail is None else [*wanted, tail]:
            if block_hash not in self._promised and not self._cache.has(block_hash):
                self._promised[block_hash] = seq
                seq.promised.append(block_hash)

    def _break_promises(self, seq: Sequence) -> None:
        for block_hash in seq.promised:
            del self._promised[block_hash]
        seq.promised.clear()

    def _drop_moves_into(self, seq: Sequence) -> None:
        if not self.has_moves_to_come(seq):
            return
        mine = set(seq.block_ids)
        for source, block in self.moves.copies:
            if block in mine:
                self.moves.references.remove(source)
                self._pool.release([source])
        self.moves.copies = [move for move in self.moves.copies if move[1] not in mine]
        self.moves.swap_in = [move for move in self.moves.swap_in if move[1] not in mine]

    def _swap_in(self, seq: Sequence, cached_count: int) -> int:
        """Position up to which the content comes back."""
        count = blocks_for(seq.computed_count, self._block_tokens)
        pairs = zip(seq.swap_slots[cached_count:count], seq.block_ids[cached_count:count], strict=True)
        self.moves.swap_in += pairs
        self.moves.slots += seq.swap_slots
        seq.swap_slots = []
        return seq.computed_count


def _meet(incoming: Incoming, start_block: int) -> None:
    """Leave out of `incoming` the blocks before `start_block`, which are in place already."""
    incoming.first = min(max(incoming.first, start_block), incoming.end)
    incoming.ready = incoming.first
