"""What a node has done since its start, and how fast its paths are."""

from collections import Counter

import msgspec

from baton.core.store import DropReason, Tier

_MEMORY = 0.98
"""The weight of the past per operation: a path's speed is a mean over about the last fifty."""


class PathStatus(msgspec.Struct, frozen=True):
    """One way that blocks take into, out of or between tiers."""

    bytes: int
    block_count: int
    second_per_byte: float
    """The time per byte while the path is busy. Bytes that are in flight together count together."""
    latency_s: float
    """The duration of one operation."""


HALF_LIFE_S = 10.0
"""The half-life of what is known of a path that is not used."""


class PathMeter:
    """The speed of a path with several operations in flight: the time between two completions while it is
    busy, per byte, smoothed; and how long one operation takes.

    The estimate of a path that nobody uses goes back to where it began. So a path that was slow for a while,
    and is avoided since, is tried again.
    """

    def __init__(self, *, second_per_byte: float, latency_s: float) -> None:
        self._first_second_per_byte, self._first_latency_s = second_per_byte, latency_s
        self.second_per_byte = second_per_byte
        self.latency_s = latency_s
        self.bytes = 0
        self.block_count = 0
        self._busy_s = 0.0
        self._busy_bytes = 0.0
        self._last_end_s = float("-inf")

    def done(self, byte_count: int, *, block_count: int, started_s: float, now_s: float) -> None:
        remembered = self._remembered(started_s)
        self.second_per_byte, self.latency_s = self.at(started_s)
        self._busy_s *= remembered
        self._busy_bytes *= remembered
        busy_s = max(0.0, now_s - max(started_s, self._last_end_s))
        self._last_end_s = now_s
        self._busy_s = self._busy_s * _MEMORY + busy_s
        self._busy_bytes = self._busy_bytes * _MEMORY + byte_count
        self.bytes += byte_count
        self.block_count += block_count
        if self._busy_bytes > 0:
            self.second_per_byte = self._busy_s / self._busy_bytes
        self.latency_s += 0.1 * (now_s - started_s - self.latency_s)

    def at(self, now_s: float) -> tuple[float, float]:
        """The speed as (seconds per byte, seconds of one operation)."""
        remembered = self._remembered(now_s)
        first_per_byte, first_latency_s = self._first_second_per_byte, self._first_latency_s
        return (
            first_per_byte + remembered * (self.second_per_byte - first_per_byte),
            first_latency_s + remembered * (self.latency_s - first_latency_s),
        )

    def _remembered(self, now_s: float) -> float:
        return 0.5 ** (max(0.0, now_s - self._last_end_s) / HALF_LIFE_S)

    def status(self) -> PathStatus:
        return PathStatus(self.bytes, self.block_count, self.second_per_byte, self.latency_s)


class Counts:
    """Counters since the start. They count blocks unless the name says otherwise."""

    def __init__(self) -> None:
        self.hit_blocks: Counter[Tier] = Counter()
        self.hit_bytes: Counter[Tier] = Counter()
        self.miss_blocks = 0
        self.miss_bytes = 0
        self.stored: Counter[Tier] = Counter()
        self.dropped: Counter[tuple[Tier, DropReason]] = Counter()
        self.loaded_blocks: Counter[Tier] = Counter()
        self.loaded_bytes: Counter[Tier] = Counter()
        self.loads_done = 0
        self.loads_failed: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.corrupt: Counter[Tier] = Counter()
        self.fetched_bytes = 0
        self.replicated_bytes = 0
        self.served_bytes = 0
        self.fetches_failed = 0
        self.leases_lapsed = 0
        self.ssd_write_errors = 0
        self.ssd_read_errors = 0
        self.ssd_full = 0
        self.ssd_skipped = 0
        self.workers_dropped = 0


class TierStatus(msgspec.Struct, frozen=True):
    block_count: int
    """Whole blocks that can be found."""
    bytes: int
    """Bytes that are taken, by whatever."""
    limit_bytes: int
    pinned_count: int
    hit_blocks: int
    hit_bytes: int
    stored_blocks: int


class NodeStats(msgspec.Struct, frozen=True):
    """All that metrics and the doctor show of a node."""

    tiers: dict[Tier, TierStatus]
    """The tiers HOST and SSD, and PEER with its hits."""
    paths: dict[str, PathStatus]
    """The paths ssd_read, ssd_write and peer_read."""
    miss_blocks: int
    miss_bytes: int
    dropped: dict[tuple[Tier, DropReason], int]
    loaded_blocks: dict[Tier, int]
    loaded_bytes: dict[Tier, int]
    loads_done: int
    loads_failed: dict[str, int]
    """Failed loads by reason."""
    refused: dict[str, int]
    """Offered blocks that were not taken, by reason; `known` ones are here already."""
    corrupt: dict[Tier, int]
    """Corrupt blocks by the tier whose copy was found wrong."""
    fetched_bytes: int
    """Bytes fetched from peers."""
    replicated_bytes: int
    """Bytes fetched from peers and kept."""
    served_bytes: int
    """Bytes pinned for peers to read."""
    fetches_failed: int
    leases_lapsed: int
    ssd_write_errors: int
    ssd_read_errors: int
    ssd_full: int
    """Writes that found no space left on the device."""
    ssd_skipped: int
    """Blocks that had earned a write, and left the host memory without: too many writes waited."""
    workers_dropped: int
    """Sessions that were ended for breaking the protocol."""
    worker_count: int
    peer_count: int
    loads_open: int
    writes_open: int
    fetches_open: int
    leases_open: int
    io_in_flight: int
    is_draining: bool
    tenants: tuple[tuple[str, int, int], ...]
    """The tenants that hold most, as (tenant, bytes of host memory, bytes of SSD)."""
    notes: tuple[str, ...]
    """What an operator should know, in words."""
