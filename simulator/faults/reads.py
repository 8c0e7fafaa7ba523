"""One-sided reads of KV between pools, as a NIC does them.

A read needs the owner's *memory*, not its process: it works while the owner is frozen or its session is gone,
and fails once the owner is dead. It copies contents at the moments it copies them (half of the blocks midway,
the rest at the end), may be posted late, may fail halfway, and may outlive its timeout and land in blocks
that the reader believes to be its own. After the copy the owner's generations are compared with the granted
ones, as the production adapter does.

Between workers of several ranks a read becomes reads of parts, by production's own arithmetic, and each has
a time and a fate of its own.
"""

import random
from collections.abc import Callable, Iterable, MutableSequence
from typing import Protocol, SupportsIndex, overload

from baton.core.ids import WorkerId
from baton.core.messages import KVPart
from kv_transfer import part_plan
from kv_transfer.layout import check_ranges
from kv_transfer.part_plan import PartLink
from kv_transfer.read import BlockRead, ReadDone, ReadEvent, ReadSettled
from simulator.faults.memory import DeviceMemory, part_bytes
from simulator.faults.network import Network
from simulator.faults.run_context import Violation
from simulator.faults.scenario import GEOMETRY


class PoolOwner(Protocol):
    """A worker as its reads see it."""

    @property
    def worker_id(self) -> WorkerId: ...
    @property
    def is_alive(self) -> bool: ...
    @property
    def clock_trusted_from_s(self) -> float: ...
    @property
    def memory(self) -> DeviceMemory: ...
    @property
    def generations(self) -> "Generations": ...

    def post_event(self, event: ReadEvent) -> None: ...


class Generations(MutableSequence[int]):
    """The generation table of one pool. It tells the reads when an entry rises."""

    __slots__ = ("_values", "on_rise")

    def __init__(self, block_count: int) -> None:
        self._values = [0] * block_count
        self.on_rise: Callable[[int], None] | None = None

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> MutableSequence[int]: ...
    def __getitem__(self, index: int | slice) -> int | MutableSequence[int]:
        return self._values[index]

    @overload
    def __setitem__(self, index: int, value: int) -> None: ...
    @overload
    def __setitem__(self, index: slice, value: Iterable[int]) -> None: ...
    def __setitem__(self, index: int | slice, value: int | Iterable[int]) -> None:
        if not isinstance(index, int) or not isinstance(value, int):
            raise TypeError("generations are written one by one")
        if value <= self._values[index]:
            raise Violation(4, f"generation of block {index} goes from {self._values[index]} to {value}")
        self._values[index] = value
        if self.on_rise is not None:
            self.on_rise(index)

    def __delitem__(self, index: SupportsIndex | slice) -> None:
        raise TypeError("the table has one entry per block, always")

    def insert(self, index: int, value: int) -> None:
        raise TypeError("the table has one entry per block, always")

    def __len__(self) -> int:
        return len(self._values)


class PendingRead:
    """One BlockRead under way, in as many parts as it takes."""

    __slots__ = ("_done", "_is_over", "_part_count", "_unsettled", "action", "reader")

    def __init__(self, action: BlockRead, reader: PoolOwner, part_count: int) -> None:
        self.action, self.reader = action, reader
        self._part_count, self._done = part_count, list[ReadDone]()
        self._unsettled = 0
        """Parts that were given up and may still land."""
        self._is_over = False

    def answer(self, done: ReadDone) -> None:
        """One part has ended. The last one ends the read."""
        self._done.append(done)
        self._unsettled += not done.is_settled
        if len(self._done) < self._part_count:
            return
        self._is_over = True
        whole = done if self._part_count == 1 else part_plan.merged(self.action.read_id, self._done)
        if not whole.error and any(part.error for part in self._done):
            raise Violation(
                4,
                f"{self.reader.worker_id} accepts read {self.action.read_id} of {self.action.owner}, of "
                f"which a part failed: {[part.error for part in self._done]}",
            )
        self.reader.post_event(whole)
        if not whole.is_settled and not self._unsettled:
            self.reader.post_event(ReadSettled(self.action.read_id))

    def settle(self) -> None:
        """A part that was given up has landed."""
        self._unsettled -= 1
        if self._is_over and not self._unsettled:
            self.reader.post_event(ReadSettled(self.action.read_id))


class SimRead:
    """One part of a BlockRead under way."""

    __slots__ = (
        "_link",
        "_whole",
        "action",
        "copied",
        "in_time_until_s",
        "is_answered",
        "mismatch",
        "reader",
        "source",
    )

    def __init__(self, whole: PendingRead, link: PartLink, source: PoolOwner, now_s: float) -> None:
        name = part_plan.part_name(source.worker_id, link.source_part, len(source.memory.places))
        self.action = part_plan.part_of_read(whole.action, link, name)
        self._whole, self._link = whole, link
        self.reader, self.source = whole.reader, source
        self.in_time_until_s = now_s + self.action.timeout_s
        self.is_answered = False
        self.copied = 0
        self.mismatch = False
        """A block's generation was not the granted one when it was copied."""

    def copy(self, count: int) -> None:
        """Copy the next `count` blocks, as they are at this moment."""
        if not self.reader.is_alive or not self.source.is_alive:
            return
        action, source, link = self.action, self.source, self._link
        parts = link.source_part, link.local_part
        for i in range(self.copied, min(self.copied + count, len(action.source_blocks))):
            block = action.source_blocks[i]
            self.mismatch |= source.generations[block] != action.generations[i]
            self.reader.memory.copy_part(source.memory, parts, action.ranges, (block, action.local_blocks[i]))
        self.copied = min(self.copied + count, len(action.source_blocks))

    def answer(self, done: ReadDone) -> None:
        self.is_answered = True
        self._whole.answer(done)

    def settle(self) -> None:
        self._whole.settle()


def offered_parts(memory: DeviceMemory) -> tuple[KVPart, ...]:
    """Return what a hello says of a pool."""
    return tuple(
        KVPart(part.layers.start, len(part.layers), part.heads.start, len(part.heads), {})
        for part in memory.places
    )


def links_between(reader: PoolOwner, source: PoolOwner) -> list[PartLink]:
    """Return the reads of parts that bring blocks of one pool to another. Raises Violation where one of them
    is no read of what these pools hold."""
    offer = offered_parts(source.memory)
    places = part_plan.places_of(GEOMETRY, offer)
    try:
        links = part_plan.part_links(GEOMETRY, reader.memory.places, places)
        for link in links:
            source_bytes = part_bytes(source.memory.places[link.source_part])
            check_ranges(link.ranges, source_bytes=source_bytes, local_bytes=link.block_bytes)
    except ValueError as error:
        raise Violation(4, f"{reader.worker_id} cannot read from {source.worker_id}: {error}") from None
    return links


class ReadFaults:
    """Chances that a read goes wrong, per read, while faults are on."""

    __slots__ = ("fail", "hang", "late")

    def __init__(self) -> None:
        self.fail = 0.0
        """Chance that a read ends with an error halfway; nothing lands afterwards."""
        self.hang = 0.0
        """Chance that a read outlives its timeout; the bytes land later."""
        self.late = 0.0
        """Chance that a read reaches the NIC long after the core asked, as by a transfer thread that was
        stopped."""


class SimReads:
    """The NICs of all workers."""

    __slots__ = (
        "_by_owner",
        "_landing",
        "_network",
        "_rng",
        "block_s",
        "faults",
        "late_s",
        "latency_s",
        "run",
        "slowness",
        "workers",
    )

    def __init__(self, network: Network, *, latency_s: float, block_s: float, late_s: float) -> None:
        self._network = network
        run = self.run = network.run
        self.latency_s, self.block_s, self.late_s = latency_s, block_s, late_s
        self.slowness = 1.0
        self.faults = ReadFaults()
        self.workers: dict[WorkerId, PoolOwner] = {}
        self._by_owner: dict[WorkerId, list[SimRead]] = {}
        self._landing: dict[WorkerId, list[SimRead]] = {}
        """Reads of each reader of which bytes may still land."""
        self._rng: random.Random = run.stream("reads")

    def register(self, worker: PoolOwner) -> None:
        self.workers[worker.worker_id] = worker
        self._by_owner[worker.worker_id] = []
        self._landing[worker.worker_id] = []
        worker.generations.on_rise = lambda block: self._on_rise(worker.worker_id, block)

    def _on_rise(self, source: WorkerId, block: int) -> None:
        """Check invariant 5: nobody reuses a block under a read that is in time by its reader's clock. When
        that clock has stood still, only the generations protect the reader."""
        self._is_out_of_quarantine(source, block)
        now_s = self.run.clock.now_s
        for read in self._by_owner[source]:
            if now_s < read.reader.clock_trusted_from_s:
                continue
            if now_s <= read.in_time_until_s and block in read.action.source_blocks:
                raise Violation(
                    5,
                    f"{source} reuses block {block} while {read.reader.worker_id} reads it in time "
                    f"(read {read.action.read_id}, until {read.in_time_until_s:.3f} s)",
                )

    def _is_out_of_quarantine(self, reader: WorkerId, block: int) -> None:
        """Check invariant 4 at the reader: it gives no block out again while bytes of a read may land
        there."""
        for read in self._landing[reader]:
            if block in read.action.local_blocks:
                raise Violation(
                    4,
                    f"{reader} gives out block {block}, and read {read.action.read_id} of "
                    f"{read.action.owner} may still write there",
                )

    def _landed(self, read: SimRead) -> None:
        self._landing[read.reader.worker_id].remove(read)

    def start(self, reader: PoolOwner, action: BlockRead) -> None:
        self._check_shape(reader, action)
        counts = self.run.counts
        counts["reads"] += 1
        source = self.workers.get(action.owner)
        if source is None or not source.is_alive:
            counts["reads of a dead owner"] += 1
            self.run.clock.after(
                min(action.timeout_s, 10 * self.latency_s),
                lambda: reader.post_event(ReadDone(action.read_id, error="no such peer")),
            )
            return
        links = links_between(reader, source)
        counts["reads between unlike shapes"] += reader.memory.places != source.memory.places
        counts["reads of parts"] += len(links) > 1
        whole = PendingRead(action, reader, len(links))
        for link in links:
            self._start_part(SimRead(whole, link, source, self.run.clock.now_s))

    def _start_part(self, read: SimRead) -> None:
        rng, faults, timeout_s = self._rng, self.faults, read.action.timeout_s
        self._check_lease(read)
        self._by_owner[read.source.worker_id].append(read)
        self._landing[read.reader.worker_id].append(read)
        draw = rng.random()
        cut_s = max(
            self._network.cut_off_for_s(read.source.worker_id),
            self._network.cut_off_for_s(read.reader.worker_id),
        )
        if cut_s > 0:
            self._post(read, cut_s + self._duration_s(read))
        elif draw < faults.fail:
            self.run.clock.after(self._duration_s(read) / 2, lambda: self._fail_midway(read))
        elif draw < faults.fail + faults.hang:
            self._post(read, timeout_s + rng.uniform(0.01, 2 * self.late_s))
        elif draw < faults.fail + faults.hang + faults.late:
            self.run.counts["reads posted late"] += 1
            self.run.clock.after(
                rng.uniform(0.1, 1.5) * self.late_s, lambda: self._post(read, self._duration_s(read))
            )
        else:
            self._post(read, self._duration_s(read))

    def _check_shape(self, reader: PoolOwner, action: BlockRead) -> None:
        count = len(action.source_blocks)
        if not count or len(action.local_blocks) != count or len(action.generations) != count:
            raise Violation(4, f"{reader.worker_id}: malformed {action}")
        if action.timeout_s <= 0:
            raise Violation(6, f"{reader.worker_id}: a read with no time left: {action}")
        if len(set(action.local_blocks)) != count:
            raise Violation(3, f"{reader.worker_id}: one block is the target of two: {action}")

    def _check_lease(self, read: SimRead) -> None:
        """Check invariant 5 at the reader: when its clock can be trusted, it does not begin to read what has
        been given to somebody else, since its lease ended first."""
        action, source = read.action, read.source
        is_trusted = self.run.clock.now_s >= read.reader.clock_trusted_from_s
        if is_trusted and not matches(source.generations, action):
            raise Violation(
                5,
                f"{read.reader.worker_id} begins read {action.read_id} of {action.owner} after its lease",
            )

    def _duration_s(self, read: SimRead) -> float:
        blocks_s = self.block_s * len(read.action.source_blocks)
        return (self.latency_s + blocks_s) * self.slowness * (0.5 + self._rng.random())

    def _post(self, read: SimRead, duration_s: float) -> None:
        """Begin the read on the NIC. The adapter's timeout counts from here."""
        timeout_s = read.action.timeout_s
        half = len(read.action.source_blocks) // 2
        if half:
            self.run.clock.after(duration_s / 2, lambda: read.copy(half))
        if duration_s < timeout_s:
            self.run.clock.after(duration_s, lambda: self._landed_in_time(read))
        else:
            self.run.clock.after(timeout_s, lambda: self._time_out(read))
            self.run.clock.after(duration_s, lambda: self._landed_late(read))

    def _landed_in_time(self, read: SimRead) -> None:
        read.copy(len(read.action.source_blocks))
        self._landed(read)
        if read.is_answered:
            self.run.counts["reads that settled late"] += 1
            read.settle()
            return
        self.run.clock.after(self.latency_s * self.slowness, lambda: self._compare(read))

    def _compare(self, read: SimRead) -> None:
        action = read.action
        if read.is_answered:
            read.settle()
        elif not read.source.is_alive:
            self._answer(read, ReadDone(action.read_id, error="source died"))
        elif generations_match(read.source.generations, action):
            if read.mismatch:
                raise Violation(
                    4,
                    f"{read.reader.worker_id} accepts read {action.read_id} of {action.owner}, although a "
                    "block had been given to somebody else when it was copied",
                )
            self._answer(read, ReadDone(action.read_id))
        else:
            self.run.counts["stale reads refused"] += 1
            self._answer(read, ReadDone(action.read_id, error="generations differ", is_stale=True))

    def _fail_midway(self, read: SimRead) -> None:
        self._landed(read)
        if read.is_answered:
            read.settle()
            return
        self.run.counts["reads failed"] += 1
        read.copy(len(read.action.source_blocks) // 2)
        self._answer(read, ReadDone(read.action.read_id, error="the fabric dropped it"))

    def _time_out(self, read: SimRead) -> None:
        if read.is_answered:
            return  # The read was given up earlier; `_landed_late` settles it.
        self.run.counts["reads unsettled"] += 1
        self._answer(read, ReadDone(read.action.read_id, error="out of time", is_settled=False))

    def _landed_late(self, read: SimRead) -> None:
        read.copy(len(read.action.source_blocks))
        self._landed(read)
        self.run.counts["reads that settled late"] += 1
        read.settle()

    def _answer(self, read: SimRead, done: ReadDone) -> None:
        if not read.is_answered:
            self._by_owner[read.source.worker_id].remove(read)
            read.answer(done)

    def give_up(self, reader: PoolOwner, source: WorkerId) -> None:
        """Drop a peer, as the adapter does: its reads end with an error now, and settle when they settle."""
        for read in [r for r in self._by_owner.get(source, ()) if r.reader is reader]:
            self.run.counts["reads unsettled"] += 1
            self._answer(read, ReadDone(read.action.read_id, error="peer removed", is_settled=False))

    def reader_died(self, reader: PoolOwner) -> None:
        for reads in self._by_owner.values():
            for read in [r for r in reads if r.reader is reader]:
                read.is_answered = True
                reads.remove(read)


def matches(current: MutableSequence[int], action: BlockRead) -> bool:
    """Return whether the owner's blocks are still those that were granted."""
    return all(
        current[block] == granted
        for block, granted in zip(action.source_blocks, action.generations, strict=True)
    )


def generations_match(current: MutableSequence[int], action: BlockRead) -> bool:
    """Make the adapter's check after a read."""
    return matches(current, action)
