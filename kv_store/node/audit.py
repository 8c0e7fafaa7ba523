"""Whether a node's accounts balance, and what they show."""

import heapq
from collections import Counter

from baton.core.store import Tier
from kv_store.node.components import Parts
from kv_store.node.counts import NodeStatus, TierStatus
from kv_store.node.size_classes import HostCopy

TENANTS_TOLD = 10


def check(parts: Parts) -> None:
    """Check that every held slot has one owner and every pin a reason. Raises AssertionError."""
    parts.index.check()
    parts.shares.check()
    parts.bringer.check()
    parts.ssd.check()
    parts.peers.check()
    _check_slots(parts)
    _check_pins(parts)
    told = parts.publisher.told()
    for entry in parts.index:
        is_told_host = told.get(entry.facts.block_hash) is Tier.HOST
        assert is_told_host == (entry.host is not None and not entry.host.is_transient)
        assert entry.ssd is None or entry.facts.block_hash in told
    known = sum(1 for e in parts.index if e.ssd is not None or (e.host and not e.host.is_transient))
    assert known == len(told)


def _check_slots(parts: Parts) -> None:
    owners: Counter[tuple[int, int]] = Counter()
    for space in parts.index.spaces.values():
        owners.update((space.block_bytes, copy.slot) for copy in space.host_blocks)
    for worker in parts.workers.values():
        for writes in worker.offers.values():
            owners.update((worker.space.block_bytes, write.slot) for write in writes)
    owners.update((space.block_bytes, slot) for space, slot in parts.ssd.read_slots())
    owners.update((space.block_bytes, slot) for space, slot in parts.peers.read_slots())
    assert all(count == 1 for count in owners.values()), owners
    held = {(s.block_bytes, slot) for s in parts.index.spaces.values() for slot in s.arena.held_slots()}
    assert owners.keys() == held
    for space in parts.index.spaces.values():
        ssd_slots = [e.ssd.ssd_slot for e in parts.index if e.ssd is not None and e.space is space]
        assert len(ssd_slots) == len(set(ssd_slots))
        assert space.ssd.held.keys() >= set(ssd_slots)
        for copy in space.host_blocks:
            assert space.arena.tenant(copy.slot) == copy.facts.tenant, "charged to another tenant"
        here = [entry.ssd for entry in parts.index if entry.ssd is not None and entry.space is space]
        assert all(space.ssd.held[copy.ssd_slot] == copy.facts.tenant for copy in here)


def _check_pins(parts: Parts) -> None:
    pins: Counter[HostCopy] = Counter(parts.bringer.pins())
    pins.update(parts.ssd.write_pins())
    for space in parts.index.spaces.values():
        for copy in space.host_blocks:
            assert copy.pins == pins[copy], (copy, pins[copy])
    writing = sum(
        len(writes) * worker.space.slot_bytes
        for worker in parts.workers.values()
        for writes in worker.offers.values()
    )
    assert parts.shares.total_bytes >= writing


def status(parts: Parts) -> NodeStatus:
    counts = parts.context.counts
    return NodeStatus(
        tiers={tier: _tier(parts, tier) for tier in Tier},
        paths={
            "ssd_read": parts.ssd.read_meter.status(),
            "ssd_write": parts.ssd.write_meter.status(),
            "peer_read": parts.peers.meter.status(),
        },
        miss_blocks=counts.miss_blocks,
        miss_bytes=counts.miss_bytes,
        dropped=dict(counts.dropped),
        loaded_blocks=dict(counts.loaded_blocks),
        loaded_bytes=dict(counts.loaded_bytes),
        loads_done=counts.loads_done,
        loads_failed=dict(counts.loads_failed),
        refused=dict(counts.refused),
        corrupt=dict(counts.corrupt),
        fetched_bytes=counts.fetched_bytes,
        replicated_bytes=counts.replicated_bytes,
        served_bytes=counts.served_bytes,
        fetches_failed=counts.fetches_failed,
        leases_lapsed=counts.leases_lapsed,
        ssd_write_errors=counts.ssd_write_errors,
        ssd_read_errors=counts.ssd_read_errors,
        ssd_full=counts.ssd_full,
        ssd_skipped=counts.ssd_skipped,
        workers_dropped=counts.workers_dropped,
        worker_count=len(parts.workers),
        peer_count=len(parts.lookups.peers),
        loads_open=sum(len(worker.loads) for worker in parts.workers.values()),
        writes_open=parts.writes.open_count,
        fetches_open=parts.peers.fetch_count,
        leases_open=parts.leases.count,
        io_in_flight=parts.ssd.io_count,
        is_draining=parts.drainer.is_draining,
        tenants=_tenants(parts),
        notes=tuple(note for note in (parts.ssd.note,) if note),
    )


def _tenants(parts: Parts) -> tuple[tuple[str, int, int], ...]:
    host, ssd = parts.index.host_tenants, parts.index.ssd_tenants
    largest = heapq.nlargest(TENANTS_TOLD, host.keys() | ssd.keys(), key=lambda t: (host[t] + ssd[t], t))
    return tuple((tenant, host[tenant], ssd[tenant]) for tenant in largest)


def _tier(parts: Parts, tier: Tier) -> TierStatus:
    counts, index = parts.context.counts, parts.index
    taken_bytes = limit_bytes = 0
    if tier is Tier.HOST:
        taken_bytes = sum(s.arena.held_count * s.slot_bytes for s in index.spaces.values())
        limit_bytes = parts.context.config.host_bytes
    elif tier is Tier.SSD:
        taken_bytes, limit_bytes = index.ssd_bytes, parts.ssd.limit_bytes
    return TierStatus(
        block_count=index.block_counts[tier],
        bytes=taken_bytes,
        limit_bytes=limit_bytes,
        pinned_count=index.pinned_counts[tier],
        hit_blocks=counts.hit_blocks[tier],
        hit_bytes=counts.hit_bytes[tier],
        stored_blocks=counts.stored[tier],
    )
