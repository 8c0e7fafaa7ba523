"""Bring experts back to ranks that held them, after ranks have been balanced: fewer experts migrate.

Exchanges that lower the load of a busy rank look at loads alone. Where ranks make several, an expert may have
left a rank that has room for it in the end.

Shapes: n choices, each an expert that a rank has lost and another rank that has it newly; S slots.
"""

import numpy as np

from control_plane.experts.packing import Flags, Indices, Packing
from control_plane.experts.values import EMPTY, Loads, Slots


def bring_back(packing: Packing, before: Slots, rows: Indices, limits: Loads) -> None:
    """Exchange experts between ranks so that fewer have moved. No rank gets more than its row's part of
    `limits` [B] by it. `before` [B, R, S] is what ranks held."""
    at, experts, now, then = _choices(packing, before, rows)
    others = packing.slots[at, then]  # [n, S]
    row, one, here, there = at[:, None], experts[:, None], now[:, None], then[:, None]
    # The expert comes back, which is one migration less. What makes room for it may be another one less, or
    # one more.
    leaves = (others != EMPTY) & ~packing.held_before[row, others, there]
    comes = (others != EMPTY) & ~packing.held_before[row, others, here]
    helps = leaves | ~comes
    helps &= np.arange(others.shape[1]) < packing.capacity[at, then][:, None]
    helps &= ~packing.stays(row, others, there, here) & ~packing.stays(row, one, here, there)
    more = packing.sizes[row, one] - packing.sizes[row, others]
    helps &= packing.rank_loads[row, there] + more * packing.per_load[row, there] <= limits[row]
    helps &= packing.rank_loads[row, here] - more * packing.per_load[row, here] <= limits[row]
    choice, place = np.nonzero(helps)
    fewer = leaves[choice, place].astype(np.int64) - comes[choice, place]
    order = np.argsort(-fewer, kind="stable")
    choice, place = choice[order], place[order]
    # No rank occurs twice. Nor does an expert: two exchanges might bring its replicas together on one node.
    row, other = at[choice], others[choice, place]
    first = _is_first(packing.capacity.shape, row, now[choice], then[choice])
    first &= _is_first(packing.counts.shape, row, experts[choice], other)
    choice, place = choice[first], place[first]
    at, experts, now, then = at[choice], experts[choice], now[choice], then[choice]
    packing.move(at, now, (packing.slots[at, now] == experts[:, None]).argmax(axis=1), then, place)


def _choices(packing: Packing, before: Slots, rows: Indices) -> tuple[Indices, Indices, Indices, Indices]:
    """Rows, experts, a rank that has the expert newly, and one that has lost it; all are [n]."""
    ranks, of = np.arange(before.shape[1])[:, None], rows[:, None, None]
    slots = packing.slots[rows]
    number, rank, place = np.nonzero((slots != EMPTY) & ~packing.held_before[of, slots, ranks])
    has_newly = np.full(packing.counts.shape, -1)
    has_newly[rows[number], slots[number, rank, place]] = rank
    slots = before[rows]
    number, rank, place = np.nonzero((slots != EMPTY) & ~packing.holds[of, slots, ranks])
    at, experts = rows[number], slots[number, rank, place].astype(np.intp)
    now = has_newly[at, experts]
    found = now >= 0
    return at[found], experts[found], now[found], rank[found]


def _is_first(shape: tuple[int, ...], rows: Indices, one: Indices | Slots, two: Indices | Slots) -> Flags:
    """Whether neither of two numbers occurs earlier in its row."""
    number = np.arange(len(rows))
    first = np.full(shape, len(rows))
    np.minimum.at(first, (rows, one), number)
    np.minimum.at(first, (rows, two), number)
    return (first[rows, one] == number) & (first[rows, two] == number)
