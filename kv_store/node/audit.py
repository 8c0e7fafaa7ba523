"""Whether a node's accounts balance, and what they show."""

import heapq
from collections import Counter

from baton.core.store import Tier
from kv_store.node.components import Components
from kv_store.node.counts import NodeStats, TierStatus
from kv_store.node.size_classes import HostCopy

TENANTS_LISTED = 10


def check(components: Components) -> None:
    """Check that every held slot has one owner and every pin a reason. Raises AssertionError."""
    components.index.check()
    components.quotas.check()
    components.promoter.check()
    components.ssd.check()
    components.peers.check()
    _check_slots(components)
    _check_pins(components)
    reported = components.publisher.reported()
    for entry in components.index:
        is_published_host = reported.get(entry.facts.block_hash) is Tier.HOST
        assert is_published_host == (entry.host is not None and not entry.host.is_transient)
        assert entry.ssd is None or entry.facts.block_hash in reported
    known = sum(1 for e in components.index if e.ssd is not None or (e.host and not e.host.is_transient))
    assert known == len(reported)


def _check_slots(components: Components) -> None:
    owners: Counter[tuple[int, int]] = Counter()
    for size_class in components.index.size_classes.values():
        owners.update((size_class.block_bytes, copy.slot) for copy in size_class.host_blocks)
    for worker in components.workers.values():
        for writes in worker.offers.values():
            owners.update((worker.size_class.block_bytes, write.slot) for write in writes)
    owners.update((size_class.block_bytes, slot) for size_class, slot in components.ssd.read_slots())
    owners.update((size_class.block_bytes, slot) for size_class, slot in components.peers.read_slots())
    assert all(count == 1 for count in owners.values()), owners
    size_classes = components.index.size_classes.values()
    held = {(s.block_bytes, slot) for s in size_classes for slot in s.arena.held_slots()}
    assert owners.keys() == held
    for size_class in size_classes:
        entries = [entry for entry in components.index if entry.size_class is size_class]
        ssd_slots = [entry.ssd.ssd_slot for entry in entries if entry.ssd is not None]
        assert len(ssd_slots) == len(set(ssd_slots))
        assert size_class.ssd.held.keys() >= set(ssd_slots)
        for copy in size_class.host_blocks:
            assert size_class.arena.tenant(copy.slot) == copy.facts.tenant, "charged to another tenant"
        here = [entry.ssd for entry in entries if entry.ssd is not None]
        assert all(size_class.ssd.held[copy.ssd_slot] == copy.facts.tenant for copy in here)


def _check_pins(components: Components) -> None:
    pins: Counter[HostCopy] = Counter(components.promoter.pins())
    pins.update(components.ssd.write_pins())
    for size_class in components.index.size_classes.values():
        for copy in size_class.host_blocks:
            assert copy.pins == pins[copy], (copy, pins[copy])
    writing = sum(
        len(writes) * worker.size_class.slot_bytes
        for worker in components.workers.values()
        for writes in worker.offers.values()
    )
    assert components.quotas.total_bytes >= writing


def status(components: Components) -> NodeStats:
    counts = components.context.counts
    return NodeStats(
        tiers={tier: _tier(components, tier) for tier in Tier},
        paths={
            "ssd_read": components.ssd.read_meter.status(),
            "ssd_write": components.ssd.write_meter.status(),
            "peer_read": components.peers.meter.status(),
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
        worker_count=len(components.workers),
        peer_count=len(components.lookups.peers),
        loads_open=sum(len(worker.loads) for worker in components.workers.values()),
        writes_open=components.writes.open_count,
        fetches_open=components.peers.fetch_count,
        leases_open=components.leases.count,
        io_in_flight=components.ssd.io_count,
        is_draining=components.drainer.is_draining,
        tenants=_tenants(components),
        notes=tuple(note for note in (components.ssd.note,) if note),
    )


def _tenants(components: Components) -> tuple[tuple[str, int, int], ...]:
    host, ssd = components.index.host_tenants, components.index.ssd_tenants
    largest = heapq.nlargest(TENANTS_LISTED, host.keys() | ssd.keys(), key=lambda t: (host[t] + ssd[t], t))
    return tuple((tenant, host[tenant], ssd[tenant]) for tenant in largest)


def _tier(components: Components, tier: Tier) -> TierStatus:
    counts, index = components.context.counts, components.index
    taken_bytes = limit_bytes = 0
    if tier is Tier.HOST:
        taken_bytes = sum(s.arena.held_count * s.slot_bytes for s in index.size_classes.values())
        limit_bytes = components.context.config.host_bytes
    elif tier is Tier.SSD:
        taken_bytes, limit_bytes = index.ssd_bytes, components.ssd.limit_bytes
    return TierStatus(
        block_count=index.block_counts[tier],
        bytes=taken_bytes,
        limit_bytes=limit_bytes,
        pinned_count=index.pinned_counts[tier],
        hit_blocks=counts.hit_blocks[tier],
        hit_bytes=counts.hit_bytes[tier],
        stored_blocks=counts.stored[tier],
    )
