"""The steps from existing replicas to desired ones: role switches, retirements and additions. Pure.

A rolling update needs no plan and no memory. Each time anything changes, the number of processes that may run
and of replicas that may be missing decides which may go and which may come.
"""

import re
from collections.abc import Container, Iterator, Sequence

import msgspec

from baton.core.messages import Role
from baton.core.operate import Pool, ReplicaState

_P = ReplicaState


class ReplicaSummary(msgspec.Struct, frozen=True):
    """The fields of a replica that matter here."""

    name: str
    role: Role
    state: ReplicaState
    version: str
    is_wanted: bool
    may_serve: bool = False
    """An earlier control plane started it, and it has not been heard since: it may serve as well as not."""


_SWITCHED_FIRST = (_P.SWITCHING, _P.RUNNING, _P.SUSPECT, _P.STARTING, _P.WAITING)
"""States in the order in which replicas switch roles. Those that switch already come first, then those that
serve, which give their capacity to the other role soonest."""

_RETIRED_FIRST = (_P.WAITING, _P.KILLING, _P.DRAINING, _P.STARTING, _P.SUSPECT, _P.SWITCHING, _P.RUNNING)
"""States in the order in which replicas are retired, the least useful first."""


def switches(pool: Pool, have: Sequence[ReplicaSummary]) -> Iterator[tuple[str, Role]]:
    """Yield the replicas that shall switch their role, and to which. None switch during a rolling update,
    since surplus and lack are intended then."""
    if _is_rolling(pool, have):
        return
    of = {role: [h for h in have if h.is_wanted and h.role is role] for role in Role}
    lack = [role for role in Role for _ in range(pool.count(role) - len(of[role]))]
    spare = [
        h for role in Role for h in _ranked(of[role], _SWITCHED_FIRST)[: len(of[role]) - pool.count(role)]
    ]
    able = [h for h in _ranked(spare, _SWITCHED_FIRST) if h.state in _SWITCHED_FIRST]
    yield from ((h.name, role) for h, role in zip(able, lack, strict=False))


def retirements(pool: Pool, role: Role, have: Sequence[ReplicaSummary]) -> Iterator[tuple[str, str]]:
    """Yield the replicas that shall go, with the reason."""
    wanted = [h for h in have if h.is_wanted and h.role is role]
    count, old = pool.count(role), [h for h in wanted if h.version != pool.version.name]
    if len(wanted) > count + (min(len(old), pool.surge_max) if count else 0):
        surplus = len(wanted) - count
        old_first = [
            *_ranked(old, _RETIRED_FIRST),
            *_ranked([h for h in wanted if h not in old], _RETIRED_FIRST),
        ]
        yield from ((h.name, "no longer wanted") for h in old_first[:surplus])
        return
    # Replicas that do not serve are missing already, so they may go. Suspected ones may well serve: a short
    # pause of a network makes all of them suspect at once.
    missable = sum(h.state is _P.RUNNING for h in wanted) - (count - pool.unavailable_max)
    for h in _ranked(old, _RETIRED_FIRST):
        if h.state is _P.RUNNING:
            if missable <= 0:
                return
            missable -= 1
        if h.may_serve or h.state is _P.SUSPECT:
            continue  # it is heard soon and counts as running then, or is killed after its time
        if h.state not in (_P.KILLING, _P.DRAINING, _P.SWITCHING):
            yield h.name, f"version {pool.version.name} replaces it"


def add_count(pool: Pool, role: Role, have: Sequence[ReplicaSummary]) -> int:
    """Return the number of replicas to add. During a rolling update, replicas that are still leaving count as
    well."""
    mine = [h for h in have if h.role is role]
    count, wanted = pool.count(role), sum(h.is_wanted for h in mine)
    if not _is_rolling(pool, mine):
        return max(0, count - wanted)
    has_old = any(h.is_wanted and h.version != pool.version.name for h in mine)
    goal = count + (pool.surge_max if has_old and count else 0)
    old = sum(h.is_wanted and h.version != pool.version.name for h in mine)
    goal = min(goal, count + old)
    return max(0, min(goal - wanted, count + pool.surge_max - len(mine)))


def _is_rolling(pool: Pool, have: Sequence[ReplicaSummary]) -> bool:
    return any(h.version != pool.version.name for h in have)


def _ranked(have: Sequence[ReplicaSummary], order: Sequence[ReplicaState]) -> list[ReplicaSummary]:
    """Sort by state, and within one the youngest name first."""
    return sorted(
        have, key=lambda h: (order.index(h.state) if h.state in order else len(order), _young(h.name))
    )


def _young(name: str) -> tuple[int, str]:
    number = re.search(r"\d+$", name)
    return (-int(number.group()) if number else 0, name)


def names_of(prefix: str, role: Role, count: int, *, taken: Container[str]) -> list[str]:
    """Return the first free names. An empty `prefix` belongs to a single model, whose replicas are named by
    role alone."""
    names: list[str] = []
    number = 0
    while len(names) < count:
        name = f"{prefix}{role}-{number}"
        if name not in taken:
            names.append(name)
        number += 1
    return names
