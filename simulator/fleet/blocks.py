"""Block tables of modelled sequences, in the production pool and prefix cache."""

from baton.core.geometry import blocks_for
from baton.core.ids import BlockHash
from baton.core.messages import Phase
from engine.scheduling.prefix_cache import PrefixCache
from simulator.fleet.sequence import MacroSequence


class Blocks:
    """The rules of `engine.scheduling.tables`, without tails and swapping."""

    def __init__(self, cache: PrefixCache, block_tokens: int) -> None:
        self._cache, self._block_tokens = cache, block_tokens
        self._promised: dict[BlockHash, MacroSequence] = {}

    def waits_for_sibling(self, seq: MacroSequence) -> bool:
        """Return whether the next block that the sequence lacks is being computed right now."""
        if not self._promised:
            return False
        for block_hash in self._findable(seq):
            if not self._cache.has(block_hash):
                return block_hash in self._promised
        return False

    def admit(self, seq: MacroSequence, *, keep_free: int) -> None:
        """Reserve blocks for all that is known of a sequence. Raises OutOfBlocks and then changes nothing."""
        grows = seq.phase is not Phase.PREFILL
        need = blocks_for(seq.known_count + (1 if grows else 0), self._block_tokens)
        got = self._cache.reserve(self._findable(seq), need, keep_free=keep_free)
        seq.block_ids, seq.committed_count = got.blocks, got.cached_count
        seq.computed_count = got.cached_count * self._block_tokens
        if seq.cached_count is None:
            seq.cached_count = min(seq.computed_count, seq.prompt_count)
        incoming = seq.incoming
        if incoming is not None:
            incoming.first = min(max(incoming.first, got.cached_count), incoming.end)
            incoming.ready = max(incoming.first, incoming.ready)
            self.arrived(seq)
        for block_hash in seq.hashes[seq.committed_count :]:
            if block_hash not in self._promised and not self._cache.has(block_hash):
                self._promised[block_hash] = seq
                seq.promised.append(block_hash)

    def commit(self, seq: MacroSequence) -> None:
        """Make full blocks of the prompt findable from now on."""
        full = min(seq.computed_count // self._block_tokens, len(seq.hashes))
        for i in range(seq.committed_count, full):
            self._cache.insert(seq.hashes[i], seq.block_ids[i])
        seq.committed_count = max(seq.committed_count, full)

    def arrived(self, seq: MacroSequence) -> bool:
        """Count blocks that came from elsewhere as computed, once computing got to where they begin."""
        incoming = seq.incoming
        if incoming is None or not seq.block_ids or incoming.first >= incoming.ready:
            return False
        if seq.computed_count < incoming.first * self._block_tokens:
            return False
        if seq.cached_count is not None:
            seq.cached_count += (incoming.ready - incoming.first) * self._block_tokens
        incoming.first = incoming.ready
        seq.computed_count = incoming.ready * self._block_tokens
        self.commit(seq)
        return True

    def give_back(self, seq: MacroSequence) -> None:
        self.break_promises(seq)
        self._cache.pool.release(seq.block_ids)
        seq.block_ids, seq.incoming = [], None

    def break_promises(self, seq: MacroSequence) -> None:
        for block_hash in seq.promised:
            del self._promised[block_hash]
        seq.promised.clear()

    def _findable(self, seq: MacroSequence) -> list[BlockHash]:
        return seq.hashes[: (seq.known_count - 1) // self._block_tokens]
