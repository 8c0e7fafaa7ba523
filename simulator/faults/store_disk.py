"""One host's disk under its store node: slow, full, failing, and never quite written when the node dies."""

import random
from dataclasses import dataclass

from baton.core.store import BlockFacts
from kv_store.node.events import IoDone, ReadSsd, Recovered, WriteSsd
from simulator.faults.model import Memory
from simulator.faults.store_link import checksum_of
from simulator.faults.world import World

BLOCK_S = 0.0015


@dataclass(slots=True)
class Written:
    """A slot of the file: header and payload as they are on the device."""

    facts: BlockFacts
    checksum: int
    """Of the payload when it was written."""
    payload: Memory


class SimDisk:
    """Outlives the store nodes of its host."""

    __slots__ = ("_rng", "_under_way", "error_chance", "is_full", "slots", "slowness", "world")

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self._rng: random.Random = world.stream(f"disk/{name}")
        self.slots: dict[int, Written] = {}
        self._under_way: dict[int, tuple[WriteSsd, Memory]] = {}
        self.slowness, self.error_chance, self.is_full = 1.0, 0.0, False

    def seconds(self) -> float:
        return BLOCK_S * self.slowness * (0.5 + self._rng.random())

    # --- writing --------------------------------------------------------------------------------------

    def begin_write(self, write: WriteSsd, arena: Memory) -> None:
        """What the slot held is gone, whatever becomes of the write."""
        self.slots.pop(write.ssd_slot, None)
        self._under_way[write.op_id] = (write, arena)

    def end_write(self, op_id: int, seconds: float) -> IoDone:
        write, arena = self._under_way.pop(op_id)
        if self.is_full:
            self.world.counts["writes to a full disk"] += 1
            return IoDone(op_id, error="no space left on device", is_full=True, seconds=seconds)
        if self._rng.random() < self.error_chance:
            self.world.counts["disk errors"] += 1
            return IoDone(op_id, error="input/output error", seconds=seconds)
        payload = Memory(1, arena.block_tokens)
        payload.copy_block(arena, write.slot, 0)
        self.slots[write.ssd_slot] = Written(write.facts, write.checksum or checksum_of(payload, 0), payload)
        self.world.counts["blocks written to SSD"] += 1
        return IoDone(op_id, seconds=seconds)

    def node_died(self) -> None:
        """Writes under way are on the device wholly, half, or not at all."""
        for write, arena in self._under_way.values():
            draw = self._rng.random()
            payload = Memory(1, arena.block_tokens)
            payload.copy_block(arena, write.slot, 0)
            found = Written(write.facts, checksum_of(payload, 0), payload)
            if draw < 0.5:
                payload.cells[0][-1] = -2
                self.world.counts["torn writes"] += 1
            if draw < 0.8:
                self.slots[write.ssd_slot] = found
        self._under_way.clear()

    # --- reading --------------------------------------------------------------------------------------

    def read(self, read: ReadSsd, arena: Memory, seconds: float) -> IoDone:
        if self._rng.random() < self.error_chance:
            self.world.counts["disk errors"] += 1
            return IoDone(read.op_id, error="input/output error", seconds=seconds)
        found = self.slots.get(read.ssd_slot)
        if found is not None:
            arena.copy_block(found.payload, 0, read.slot)
        is_right = found is not None and found.facts.block_hash == read.block_hash
        if found is None or not is_right or checksum_of(arena, read.slot) != found.checksum:
            self.world.counts["corrupt blocks noticed at the disk"] += 1
            return IoDone(read.op_id, error="the checksum does not hold", is_corrupt=True, seconds=seconds)
        self.world.counts["blocks read from SSD"] += 1
        return IoDone(read.op_id, seconds=seconds, checksum=found.checksum)

    def forget(self, ssd_slot: int) -> None:
        self.slots.pop(ssd_slot, None)

    def switch_role(self) -> bool:
        """One bit of one block. False: there is none."""
        if not self.slots:
            return False
        found = self.slots[self._rng.choice(sorted(self.slots))]
        found.payload.cells[0][0] ^= 1
        return True

    def recovered(self) -> list[Recovered]:
        """What a scan of the headers tells; payloads are looked at when they are read. Of two with one
        hash the scan keeps one."""
        by_hash = {written.facts.block_hash: slot for slot, written in sorted(self.slots.items())}
        self.slots = {slot: self.slots[slot] for slot in by_hash.values()}
        return [Recovered(slot, w.facts, w.checksum) for slot, w in sorted(self.slots.items())]
