"""One host's disk under its store node: slow, full, failing, and never quite written when the node dies."""

import random
from dataclasses import dataclass

from baton.core.store import BlockFacts
from kv_store.node.events import IoDone, ReadSsd, Recovered, WriteSsd
from simulator.faults.memory import DeviceMemory
from simulator.faults.run_context import RunContext

BLOCK_S = 0.0015


@dataclass(slots=True)
class Written:
    """A slot of the file: header and payload as they are on the device."""

    facts: BlockFacts
    checksum: int
    """Checksum of the payload when it was written."""
    payload: DeviceMemory


class SimDisk:
    """The disk of a host, which outlives the host's store nodes."""

    __slots__ = ("_rng", "_under_way", "error_chance", "is_full", "run", "slots", "slowness")

    def __init__(self, run: RunContext, name: str) -> None:
        self.run = run
        self._rng: random.Random = run.stream(f"disk/{name}")
        self.slots: dict[int, Written] = {}
        self._under_way: dict[int, tuple[WriteSsd, DeviceMemory]] = {}
        self.slowness, self.error_chance, self.is_full = 1.0, 0.0, False

    def seconds(self) -> float:
        return BLOCK_S * self.slowness * (0.5 + self._rng.random())

    # --- writing --------------------------------------------------------------------------------------

    def begin_write(self, write: WriteSsd, arena: DeviceMemory) -> None:
        """Begin a write. What the slot held is gone, whatever becomes of the write."""
        self.slots.pop(write.ssd_slot, None)
        self._under_way[write.op_id] = (write, arena)

    def end_write(self, op_id: int, seconds: float) -> IoDone:
        write, arena = self._under_way.pop(op_id)
        if self.is_full:
            self.run.counts["writes to a full disk"] += 1
            return IoDone(op_id, error="no space left on device", is_full=True, seconds=seconds)
        if self._rng.random() < self.error_chance:
            self.run.counts["disk errors"] += 1
            return IoDone(op_id, error="input/output error", seconds=seconds)
        payload = DeviceMemory(1)
        payload.copy_block(arena, write.slot, 0)
        self.slots[write.ssd_slot] = Written(write.facts, write.checksum or payload.checksum_of(0), payload)
        self.run.counts["blocks written to SSD"] += 1
        return IoDone(op_id, seconds=seconds)

    def node_died(self) -> None:
        """Leave writes under way on the device wholly, half, or not at all."""
        for write, arena in self._under_way.values():
            draw = self._rng.random()
            payload = DeviceMemory(1)
            payload.copy_block(arena, write.slot, 0)
            found = Written(write.facts, payload.checksum_of(0), payload)
            if draw < 0.5:
                payload.tear(0)
                self.run.counts["torn writes"] += 1
            if draw < 0.8:
                self.slots[write.ssd_slot] = found
        self._under_way.clear()

    # --- reading --------------------------------------------------------------------------------------

    def read(self, read: ReadSsd, arena: DeviceMemory, seconds: float) -> IoDone:
        if self._rng.random() < self.error_chance:
            self.run.counts["disk errors"] += 1
            return IoDone(read.op_id, error="input/output error", seconds=seconds)
        found = self.slots.get(read.ssd_slot)
        if found is not None:
            arena.copy_block(found.payload, 0, read.slot)
        is_right = found is not None and found.facts.block_hash == read.block_hash
        if found is None or not is_right or arena.checksum_of(read.slot) != found.checksum:
            self.run.counts["corrupt blocks noticed at the disk"] += 1
            return IoDone(read.op_id, error="the checksum does not hold", is_corrupt=True, seconds=seconds)
        self.run.counts["blocks read from SSD"] += 1
        return IoDone(read.op_id, seconds=seconds, checksum=found.checksum)

    def forget(self, ssd_slot: int) -> None:
        self.slots.pop(ssd_slot, None)

    def flip_bit(self) -> bool:
        """Flip one bit of one block; return False when there is no block."""
        if not self.slots:
            return False
        found = self.slots[self._rng.choice(sorted(self.slots))]
        found.payload.flip(0)
        return True

    def recovered(self) -> list[Recovered]:
        """Return what a scan of the headers finds; payloads are looked at when they are read. The scan keeps
        one of two slots with the same hash."""
        by_hash = {written.facts.block_hash: slot for slot, written in sorted(self.slots.items())}
        self.slots = {slot: self.slots[slot] for slot in by_hash.values()}
        return [Recovered(slot, w.facts, w.checksum) for slot, w in sorted(self.slots.items())]
