"""What a node has done since its start, and how fast its paths are."""

from collections import Counter

import msgspec

from baton.core.store import DropReason, Tier

_MEMORY = 0.98
"""Weight of the past per operation: a path's speed is a mean over about the last fifty."""


class PathStatus(msgspec.Struct, frozen=True):
    """One way that blocks take into, out of or between tiers."""

    bytes: int
    block_count: int
    second_per_byte: float
    """While it is busy: what is in flight together counts together."""
    latency_s: float
    """Of one operation."""


HALF_LIFE_S = 10.0
"""Of what is known of a path without use."""


class PathMeter:
    """Speed of a path with several operations in flight: the time between two completions while it is busy,
    per byte, smoothed; and how long one operation takes.

    A path that nobody uses is forgotten about: its estimate goes back to where it began, so that one that was
    slow for a while, and is avoided since, is tried again."""

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
        """(seconds per byte, seconds of one operation)."""
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
    """Counters since the start. Blocks unless the name says otherwise."""

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
    """Whole ones that can be found."""
    bytes: int
    """Taken, by whatever."""
    limit_bytes: int
    pinned_count: int
    hit_blocks: int
    hit_bytes: int
    stored_blocks: int


class NodeStatus(msgspec.Struct, frozen=True):
    """All that metrics and the doctor show of a node."""

    tiers: dict[Tier, TierStatus]
    """HOST and SSD; PEER with its hits."""
    paths: dict[str, PathStatus]
    """ssd_read, ssd_write, peer_read."""
    miss_blocks: int
    miss_bytes: int
    dropped: dict[tuple[Tier, DropReason], int]
    loaded_blocks: dict[Tier, int]
    loaded_bytes: dict[Tier, int]
    loads_done: int
    loads_failed: dict[str, int]
    """By reason."""
    refused: dict[str, int]
    """Offered blocks not taken, by reason; `known` are here already."""
    corrupt: dict[Tier, int]
    """By the tier whose copy was found wrong."""
    fetched_bytes: int
    """From peers."""
    replicated_bytes: int
    """Of these, kept."""
    served_bytes: int
    """Pinned for peers to read."""
    fetches_failed: int
    leases_lapsed: int
    ssd_write_errors: int
    ssd_read_errors: int
    ssd_full: int
    """Writes that found no space left on the device."""
    ssd_skipped: int
    """Blocks that had earned a write, and left the host memory without: too many writes waiting."""
    workers_dropped: int
    """Sessions ended for breaking the protocol."""
    worker_count: int
    peer_count: int
    loads_open: int
    writes_open: int
    fetches_open: int
    leases_open: int
    io_in_flight: int
    is_draining: bool
    tenants: tuple[tuple[str, int, int], ...]
    """(tenant, bytes of host memory, bytes of SSD) of those that hold most."""
    notes: tuple[str, ...]
    """What an operator should know, in words."""
