"""How many replicas each expert has, for all rows at once.

A row is a layer, or the part of a layer that one node holds. Shapes: B rows, E experts of a row, R ranks.
An expert's load is divided evenly among its replicas.
"""

import numpy as np
import numpy.typing as npt

from control_plane.experts.values import Loads

Counts = npt.NDArray[np.int64]
"""Numbers as [B, E]: replicas; or as [B, R]: slots."""
Most = npt.NDArray[np.int64]
"""[B, 1]: replicas that an expert may have."""

BISECTIONS, COARSE = 30, 8
"""Steps to the smallest load of a replica, and those after which experts that need one replica anyway are no
longer looked at."""
LARGE_REPLICA = (0.75, 0.4, 0.0)
"""The part of the busiest rank's load that a replica may be without getting company, and what is tried next
if ranks cannot be balanced. A larger one leaves too little room for others beside it, a smaller one is copied
for nothing: with 0.9 balance is lost at 32 and 64 ranks, with 0.4 a quarter more experts migrate."""


def load_per_replica_min(
    loads: Loads, slot_counts: npt.NDArray[np.int64], *, most: Most, least: int
) -> Loads:
    """The smallest load of the largest replica that can be reached, as [B]."""
    low = np.zeros(len(loads))
    high = np.maximum(loads.max(axis=1), 1e-9) * (1 + 1e-9)
    loads, others = np.sort(loads, axis=1)[:, ::-1], 0
    wanted = np.empty_like(loads)
    for step in range(BISECTIONS):
        if step == COARSE:
            several = int((loads > low[:, None]).sum(axis=1).max(initial=0))
            others = least * (loads.shape[1] - several)
            loads, wanted = loads[:, :several].copy(), wanted[:, :several].copy()
        middle = (low + high) / 2
        np.divide(loads, middle[:, None], out=wanted)
        np.ceil(wanted, out=wanted)
        np.maximum(wanted, least, out=wanted)
        np.minimum(wanted, most, out=wanted)
        fits = wanted.sum(axis=1) + others <= slot_counts
        high, low = np.where(fits, middle, high), np.where(fits, low, middle)
    return high


def replica_counts(
    loads: Loads,
    current: Counts,
    slot_counts: npt.NDArray[np.int64],
    smallest: Loads,
    *,
    most: Most,
    least: int,
    enough: Loads,
) -> Counts:
    """Replicas of each expert as [B, E], near the current ones.

    Every expert has at least `least` and at most `most` [B, 1]. All slots are used unless nothing is left to
    copy. Replicas are taken from one expert for another until no replica is larger than `enough` [B], or than
    what can be reached: `smallest`, of `load_per_replica_min`.
    """
    counts = np.clip(current, least, most)
    _take_surplus(loads, counts, slot_counts, least)
    needed = np.clip(np.ceil(loads / (smallest * (1 + 1e-7))[:, None]), least, most).astype(np.int64)
    raised = np.maximum(counts, needed)
    counts = np.where((raised.sum(axis=1) <= slot_counts)[:, None], raised, counts)
    _use_free_slots(loads, counts, slot_counts, most)
    _exchange(loads, counts, np.maximum(smallest * (1 + 1e-4), enough), most=most, least=least)
    return counts


def _take_surplus(loads: Loads, counts: Counts, slot_counts: npt.NDArray[np.int64], least: int) -> None:
    while len(rows := np.nonzero(counts.sum(axis=1) > slot_counts)[0]):
        left = _load_if_one_less(loads[rows], counts[rows], least)
        counts[rows, left.argmin(axis=1)] -= 1


def _use_free_slots(loads: Loads, counts: Counts, slot_counts: npt.NDArray[np.int64], most: Most) -> None:
    free = slot_counts - counts.sum(axis=1)
    largest = _load_of_replica(loads, counts, most)
    rows = np.nonzero(free > 0)[0]
    while len(rows):
        experts = largest[rows].argmax(axis=1)
        has_use = largest[rows, experts] > 0
        rows, experts = rows[has_use], experts[has_use]
        counts[rows, experts] += 1
        free[rows] -= 1
        largest[rows, experts] = _load_of_replica(loads[rows, experts], counts[rows, experts], most[rows, 0])
        rows = rows[free[rows] > 0]


def _exchange(loads: Loads, counts: Counts, enough: Loads, *, most: Most, least: int) -> None:
    """Take replicas where they are missed least and give them to the largest. Each step lowers the
    largest."""
    rows = np.arange(len(loads))
    largest, left = _load_of_replica(loads, counts, most), _load_if_one_less(loads, counts, least)
    for _ in range(int(counts.sum(axis=1).max(initial=0))):
        given, taken = largest[rows].argmax(axis=1), left[rows].argmin(axis=1)
        before, after = largest[rows, given], left[rows, taken]
        pays = (before > enough[rows]) & (after < before * (1 - 1e-4))
        rows, given, taken = rows[pays], given[pays], taken[pays]
        if not len(rows):
            return
        counts[rows, given] += 1
        counts[rows, taken] -= 1
        for experts in (given, taken):
            load, count = loads[rows, experts], counts[rows, experts]
            largest[rows, experts] = _load_of_replica(load, count, most[rows, 0])
            left[rows, experts] = _load_if_one_less(load, count, least)


def _load_of_replica(loads: Loads, counts: Counts, most: Most) -> Loads:
    """-1 for an expert that may have no further replica. The arguments broadcast against each other."""
    return np.where(counts < most, loads / np.maximum(counts, 1), -1.0)


def _load_if_one_less(loads: Loads, counts: Counts, least: int) -> Loads:
    """Infinite for an expert that has no replica to spare."""
    return np.where(counts > least, loads / np.maximum(counts - 1, 1), np.inf)


def reference_load(
    loads: Loads, slots: Counts, per_load: Loads, smallest: Loads, *, most: Most, least: int
) -> Loads:
    """The busiest rank's load as [B] if everything were placed anew: replicas by size, each on the rank with
    the least load that has a free slot. `slots` and `per_load` are [B, R], `smallest` is
    `load_per_replica_min`."""
    none = np.zeros(loads.shape, dtype=np.int64)
    nothing = np.zeros(len(loads))
    counts = replica_counts(loads, none, slots.sum(axis=1), smallest, most=most, least=least, enough=nothing)
    totals = counts.sum(axis=1)
    sizes = np.zeros((len(loads), int(totals.max(initial=0))))
    sizes[np.arange(sizes.shape[1]) < totals[:, None]] = np.repeat(
        (loads / np.maximum(counts, 1)).ravel(), counts.ravel()
    )
    sizes = -np.sort(-sizes, axis=1)
    is_even = bool((per_load == 1.0).all())
    rank_loads, open_loads = np.zeros(slots.shape), np.zeros(slots.shape)
    open_loads[slots == 0] = np.inf
    # The same arrays in one dimension, whose elements numpy finds faster.
    reached, open_reached, left, factors = (
        each.reshape(-1) for each in (rank_loads, open_loads, slots.copy(), per_load)
    )
    first = np.arange(len(loads)) * slots.shape[1]
    for size in sizes.T:
        at = first + (open_loads if is_even else open_loads + size[:, None] * per_load).argmin(axis=1)
        reached[at] += size if is_even else size * factors[at]
        left[at] -= 1
        open_reached[at] = np.where(left[at] > 0, reached[at], np.inf)
    return rank_loads.max(axis=1)
