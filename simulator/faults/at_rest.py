"""What decision objects still hold when nothing is under way, found by walking their state.

An object's own account of what it holds may leave something out. So every container that can be reached from
a core is looked at: at rest it is empty, or it is named in `KEPT` with the number of entries that it may have.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import cast

from simulator.faults.run_context import Violation
from simulator.faults.scenario import Scenario

PRODUCTION = ("baton.", "decode_worker.", "engine.", "kv_store.", "kv_transfer.", "prefill_worker.", "worker.")
"""Beginnings of the modules whose objects are walked."""
VALUES = ("baton.config",)
"""Beginnings of modules whose objects are values that never change."""


class Limits:
    """The numbers by which memory at rest is bounded in one run."""

    def __init__(self, scenario: Scenario, *, sequences: int) -> None:
        self.blocks = scenario.block_count
        self.slots = scenario.store_slot_count
        self.ssd_slots = 400
        self.sequences = sequences
        """Sequences of the run, backup attempts included."""
        self.clients = 64
        """Tenants, users, workers or nodes that were ever there."""


Limit = Callable[[Limits], int]


def _blocks(limits: Limits) -> int:
    return limits.blocks


def _slots(limits: Limits) -> int:
    return limits.slots


def _ssd_slots(limits: Limits) -> int:
    return limits.ssd_slots


def _stored(limits: Limits) -> int:
    return limits.slots + limits.ssd_slots


def _sequences(limits: Limits) -> int:
    return limits.sequences


def _clients(limits: Limits) -> int:
    return limits.clients


def _hashes(limits: Limits) -> int:
    """All blocks of all prompts and answers of a run."""
    return 40 * limits.sequences


KEPT: dict[str, Limit] = {}


def held_at_rest(name: str, core: object, limits: Limits) -> None:
    """Check that nothing is held. Raises Violation 3."""
    for where, count in containers(core):
        limit = KEPT.get(where)
        if limit is None or count > limit(limits):
            most = "nothing" if limit is None else f"{limit(limits)} entries"
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
