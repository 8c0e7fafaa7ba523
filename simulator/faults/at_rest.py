"""What decision objects still hold when nothing is under way, found by walking their state.

An object's own account of what it holds may leave something out. So every container that can be reached
from a core is looked at: at rest it is empty, or `KEPT` names it with the number of entries that it may have.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import cast

from simulator.faults.run_context import Violation
from simulator.faults.scenario import GEOMETRY, Scenario

PRODUCTION = (
    "baton.",
    "decode_worker.",
    "engine.",
    "kv_store.",
    "kv_transfer.",
    "prefill_worker.",
    "worker.",
)
"""Beginnings of the modules whose objects are walked."""
VALUES = ("baton.config",)
"""Beginnings of modules whose objects are values that never change."""


class Limits:
    """The numbers by which memory at rest is bounded in one run."""

    def __init__(self, scenario: Scenario, *, sequences: int) -> None:
        self.by_kind = {
            "blocks": scenario.block_count,
            "slots": scenario.store_slot_count,
            "stored": scenario.store_slot_count + SSD_SLOTS_MAX,
            "swap slots": scenario.engine.swap_bytes // GEOMETRY.block_bytes,
            "sequences": sequences,
            "members": MEMBERS_MAX,
            "reasons": REASONS_MAX,
            "hashes": BLOCKS_PER_SEQUENCE * sequences,
            "table": TABLE_MAX,
        }


SSD_SLOTS_MAX = 400
MEMBERS_MAX = 64
"""Tenants, routers, workers of a host or nodes that were ever there, at most."""
REASONS_MAX = 32
"""Reasons, tiers and other words by which something is counted."""
BLOCKS_PER_SEQUENCE = 256
"""At most so many full blocks has a sequence; the stream that outlives twenty drains has the most."""
TABLE_MAX = 8192
"""Entries of a table of fixed size, such as learnt weights."""

KEPT = {
    "BlockPool._blank": "blocks",
    "BlockPool._kept": "blocks",
    "BlockPool._remembered": "blocks",
    "PrefixCache._block_of": "blocks",
    "PrefixCache._hash_of": "blocks",
    "PrefixCache._tail_block_of": "blocks",
    "PrefixCache._tail_hash_of": "blocks",
    "Tables._free_slots": "swap slots",
    "Scheduler._ended": "sequences",
    "Epochs._seen": "sequences",
    "Offers._known": "blocks",
    "Offers._queue": "blocks",
    "Outbox._next_number": "members",
    "LoadCounts.loaded": "reasons",
    "LoadCounts.recomputed": "reasons",
    "PathTimes.bias": "reasons",
    "_Fit._a": "reasons",
    "_Fit._a[]": "reasons",
    "_Fit._theta_min": "reasons",
    "_Fit._y": "reasons",
    "_Fit.theta": "reasons",
    "Context._timers": "hashes",
    "Components.workers": "members",
    "NodeCore._workers": "members",
    "Counts.corrupt": "reasons",
    "Counts.dropped": "reasons",
    "Counts.hit_blocks": "reasons",
    "Counts.hit_bytes": "reasons",
    "Counts.loaded_blocks": "reasons",
    "Counts.loaded_bytes": "reasons",
    "Counts.loads_failed": "reasons",
    "Counts.refused": "reasons",
    "Counts.stored": "reasons",
    "HostSlots._held": "slots",
    "HostSlots._warm": "slots",
    "SizeClass.host_blocks": "slots",
    "SsdSlots._free": "stored",
    "SsdSlots.held": "stored",
    "Index._entries": "stored",
    "Index.block_counts": "reasons",
    "Index.pinned_counts": "reasons",
    "Index.host_tenants": "members",
    "Index.ssd_tenants": "members",
    "Index.size_classes": "reasons",
    "SsdTier._backlog": "stored",
    "Lookups._locations": "hashes",
    "Lookups._seen": "hashes",
    "Lookups.peers": "members",
    "PeerFetches._peers": "members",
    "Promoter._sources": "reasons",
    "Publisher._published": "stored",
    "Quotas.holders": "members",
    "LruPolicy._aside": "stored",
    "LruPolicy._order": "stored",
    "S3FifoPolicy._aside": "stored",
    "S3FifoPolicy._ghosts": "hashes",
    "S3FifoPolicy._main": "stored",
    "S3FifoPolicy._on_trial": "stored",
    "S3FifoPolicy._small": "stored",
    "S3FifoPolicy._uses": "stored",
    "ReturnChance._squares": "table",
    "ReturnChance._weights": "table",
    "ReturnTimes.bounds": "table",
    "ServingPolicy._aside": "stored",
    "ServingPolicy._asked": "table",
    "ServingPolicy._blocks": "hashes",
    "ServingPolicy._by_worth": "table",
    "ServingPolicy._children": "hashes",
    "ServingPolicy._free_slots": "stored",
    "ServingPolicy._ghosts": "hashes",
    "ServingPolicy._lru": "table",
    "ServingPolicy._order": "stored",
    "ServingPolicy._queues": "table",
    "ServingPolicy._queues[]": "table",
    "ServingPolicy._unlabelled": "table",
    "ServingPolicy._worth": "table",
}
"""What may stay, and the kind of limit that it has."""


def held_at_rest(name: str, core: object, limits: Limits) -> None:
    """Check that nothing is held. Raises Violation 3."""
    for where, count in containers(core):
        most = limits.by_kind[KEPT[where]] if where in KEPT else 0
        if count > most:
            raise Violation(3, f"{name} is at rest, and {where} has {count} entries; {most} may stay")


def containers(root: object) -> Iterator[tuple[str, int]]:
    """Yield the containers that have entries, as (class and attribute, count of entries)."""
    seen: set[int] = set()
    todo: deque[object] = deque([root])
    while todo:
        one = todo.popleft()
        if id(one) in seen:
            continue
        seen.add(id(one))
        for attribute, value in _fields(one):
            where = f"{type(one).__name__}.{attribute}"
            yield from _look(where, value, todo)


def _look(where: str, value: object, todo: deque[object]) -> Iterator[tuple[str, int]]:
    if isinstance(value, str | bytes | tuple | int | float) or value is None:
        return
    entries = _entries(value)
    if entries is None:
        if type(value).__module__.startswith(PRODUCTION) and not type(value).__module__.startswith(VALUES):
            todo.append(value)
        return
    if entries:
        yield where, len(entries)
    for entry in entries:
        inner = _entries(entry)
        if inner is not None and not isinstance(entry, str | bytes | tuple):
            yield from _look(where + "[]", entry, todo)
        elif type(entry).__module__.startswith(PRODUCTION):
            todo.append(entry)


def _entries(value: object) -> Sequence[object] | None:
    """Return the values in a container; None for anything else."""
    if isinstance(value, Mapping):
        return list(cast("Mapping[object, object]", value).values())
    if isinstance(value, list | deque | Set):
        return list(cast("Sequence[object]", value))
    return None


def _fields(one: object) -> Iterator[tuple[str, object]]:
    """Yield the attributes of an object, whether or not its class has slots."""
    yield from getattr(one, "__dict__", {}).items()
    for kind in type(one).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            if hasattr(one, slot):
                yield slot, getattr(one, slot)
