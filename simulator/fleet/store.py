"""The KV store under the pools: host memory and SSD of each host, the production's policy and planner, and
paths with a rate and a queue each.

Prompts are written through when they are computed; writing costs nothing here. A worker that starts a prompt
asks what its own host has, and what others have, of the blocks that its pool lacks, and loads what is
predicted to come sooner than it is computed (`kv_store.planner`).
"""

from collections.abc import Sequence

from baton.core.ids import BlockHash
from baton.core.store import BlockFacts, FoundSpan, Tier
from engine.scheduling.incoming import Incoming
from engine.scheduling.prefix_cache import PrefixCache
from kv_store.planner import LoadPlan, PathTimes, PromptWork, plan_load
from kv_store.tiers.policy import EvictionPolicy
from kv_store.tiers.table import make_eviction_policy
from simulator.clock import VirtualClock
from simulator.fleet.engine import MacroEngine
from simulator.fleet.sequence import MacroSequence
from simulator.fleet.spec import StoreSpec

ROOT = BlockHash(bytes(16))


class TierBlocks:
    """One tier of one host."""

    def __init__(self, policy: EvictionPolicy, capacity_blocks: int) -> None:
        self.policy = policy
        self.capacity_blocks = capacity_blocks
        self.held: set[BlockHash] = set()

    def use(self, block: BlockFacts, now_s: float) -> None:
        if block.block_hash in self.held:
            self.policy.touch(block.block_hash, now_s=now_s)
        else:
            self.held.add(block.block_hash)
            self.policy.insert(block, now_s=now_s)

    def leaving(self, now_s: float) -> list[BlockHash]:
        """Evict what is too much, and return it."""
        gone: list[BlockHash] = []
        while len(self.held) > self.capacity_blocks:
            victim = self.policy.victim(lambda _: True)
            assert victim is not None, "nothing is pinned"
            self.held.remove(victim)
            self.policy.remove(victim, now_s=now_s, was_evicted=True)
            gone.append(victim)
        return gone


class LoadPath:
    """One way that blocks come: they queue, and take their time."""

    def __init__(self, bytes_s: float, latency_s: float = 0.0) -> None:
        self.bytes_s, self.latency_s = bytes_s, latency_s
        self.free_s = 0.0
        self.moved_bytes = 0.0

    def wait_s(self, now_s: float) -> float:
        return max(0.0, self.free_s - now_s) + self.latency_s

    def move(self, size_bytes: float, now_s: float) -> float:
        """Move bytes; return when the last one is here."""
        self.free_s = max(now_s, self.free_s) + size_bytes / self.bytes_s
        self.moved_bytes += size_bytes
        return self.free_s + self.latency_s


class HostStore:
    """The store node of one host."""

    def __init__(self, spec: StoreSpec, block_bytes: float, directory: "HolderCounts") -> None:
        host_blocks = max(1, int(spec.host_bytes / block_bytes))
        self.host = TierBlocks(make_eviction_policy(spec.policy, host_blocks), host_blocks)
        ssd_blocks = int(spec.ssd_bytes / block_bytes)
        self.ssd = (
            TierBlocks(make_eviction_policy(spec.policy, ssd_blocks), ssd_blocks) if ssd_blocks else None
        )
        self.paths = {
            Tier.HOST: LoadPath(spec.host_bytes_s),
            Tier.SSD: LoadPath(spec.ssd_read_bytes_s, spec.ssd_latency_s),
            Tier.PEER: LoadPath(spec.peer_bytes_s),
        }
        self._facts: dict[BlockHash, BlockFacts] = {}
        self._directory = directory

    def tier_of(self, block_hash: BlockHash) -> Tier | None:
        if block_hash in self.host.held:
            return Tier.HOST
        if self.ssd is not None and block_hash in self.ssd.held:
            return Tier.SSD
        return Tier.PEER if self._directory.has(block_hash) else None

    def used(self, hashes: Sequence[BlockHash], now_s: float) -> None:
        """Take note that a prompt was computed from these blocks, or loaded: all of them are in host memory
        now."""
        self.host.policy.expect(hashes, now_s=now_s)
        for depth in range(len(hashes) - 1, -1, -1):
            block_hash = hashes[depth]
            if block_hash not in self._facts:
                parent = hashes[depth - 1] if depth else ROOT
                self._facts[block_hash] = BlockFacts(block_hash, parent, depth)
                self._directory.add(block_hash)
            self.host.use(self._facts[block_hash], now_s)
        for gone in self.host.leaving(now_s):
            self._left_memory(gone, now_s)

    def _left_memory(self, block_hash: BlockHash, now_s: float) -> None:
        if self.ssd is None:
            self._forget(block_hash)
            return
        if block_hash in self.ssd.held or self.host.policy.earns_next(block_hash):
            self.ssd.use(self._facts[block_hash], now_s)
        else:
            self._forget(block_hash)
        for gone in self.ssd.leaving(now_s):
            if gone not in self.host.held:
                self._forget(gone)

    def _forget(self, block_hash: BlockHash) -> None:
        del self._facts[block_hash]
        self._directory.remove(block_hash)


class HolderCounts:
    """The count of hosts that have each block."""

    def __init__(self) -> None:
        self._holders: dict[BlockHash, int] = {}

    def has(self, block_hash: BlockHash) -> bool:
        return block_hash in self._holders

    def add(self, block_hash: BlockHash) -> None:
        self._holders[block_hash] = self._holders.get(block_hash, 0) + 1

    def remove(self, block_hash: BlockHash) -> None:
        left = self._holders[block_hash] - 1
        if left:
            self._holders[block_hash] = left
        else:
            del self._holders[block_hash]


class FleetWorkerStore:
    """The use that one worker makes of its host's store, as a `LoadingStore`."""

    def __init__(
        self,
        node: HostStore,
        clock: VirtualClock,
        engine: MacroEngine,
        cache: PrefixCache,
        *,
        block_tokens: int,
        block_bytes: float,
    ) -> None:
        self._node, self._clock, self._engine, self._cache = node, clock, engine, cache
        self._block_tokens, self._block_bytes = block_tokens, block_bytes
        self._times = PathTimes(answer_s=1e-3, copy_block_s=0.0)
        self.loaded_blocks = 0

    def find(self, seq: MacroSequence) -> None:
        """Look for a prompt's blocks before it waits for a seat: what is worth loading is on its way from now
        on."""
        findable = seq.hashes[: (seq.known_count - 1) // self._block_tokens]
        held = len(self._cache.match(findable))
        spans = self._spans(findable[held:])
        if not spans:
            return
        prompt = PromptWork(
            held, self._block_tokens, seq.known_count, self._engine.prompt_s, self._engine.queue_s
        )
        plan = plan_load(spans, prompt, self._times)
        if not isinstance(plan, LoadPlan) or plan.end <= plan.first:
            return
        incoming = seq.incoming = Incoming(first=plan.first, ready=plan.first, end=plan.end)
        now_s = self._clock.now_s
        ready_s = now_s
        position = held
        for span in spans:
            count = min(plan.end, position + span.block_count) - max(plan.first, position)
            position += span.block_count
            if count > 0:
                ready_s = max(ready_s, self._node.paths[span.tier].move(count * self._block_bytes, now_s))
                self.loaded_blocks += count
        self._clock.at(ready_s, self._arrived, (seq, incoming))

    def _spans(self, hashes: Sequence[BlockHash]) -> list[FoundSpan]:
        """Return the spans of the leading run of blocks that somebody has."""
        runs: list[tuple[Tier, int]] = []
        for block_hash in hashes:
            tier = self._node.tier_of(block_hash)
            if tier is None:
                break
            if runs and runs[-1][0] is tier:
                runs[-1] = (tier, runs[-1][1] + 1)
            else:
                runs.append((tier, 1))
        now_s = self._clock.now_s
        paths = self._node.paths
        return [
            FoundSpan(tier, count, paths[tier].wait_s(now_s), self._block_bytes / paths[tier].bytes_s)
            for tier, count in runs
        ]

    def _arrived(self, what: tuple[MacroSequence, Incoming]) -> None:
        seq, incoming = what
        if seq.incoming is not incoming:
            return  # The sequence was cancelled, or lost its blocks.
        incoming.ready = incoming.end
        self._engine.arrived(seq)

    def committed(self, hashes: Sequence[BlockHash], end: int) -> None:
        """Take note that the first `end` blocks of a prompt are computed."""
        if end:
            self._node.used(hashes[:end], self._clock.now_s)
