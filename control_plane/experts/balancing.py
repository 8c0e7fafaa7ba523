"""Lower the load of the busiest ranks by exchanging experts between ranks, with as few exchanges as will do.

A row is done when its busiest rank is at its goal. Busy ranks are paired with ranks of little load, several
pairs at a time; if that does not help a busiest rank that has more than is acceptable, it is compared with
more ranks, and with all at last.
"""

from dataclasses import dataclass

import numpy as np

from control_plane.experts.packing import Flags, Indices, Packing
from control_plane.experts.values import Loads, Slots

GAIN_MIN = 0.002
"""Part of the mean load that an exchange must take from the busier of two ranks."""
COMPARED_MAX = 512
"""Pairs of slots that are compared in a row at a time."""
WIDER = 4
"""Factor by which more ranks are compared if none was of use."""
WORK_MAX = 5_000_000
STEP_WORK = 16_000
"""The search ends after so much work: pairs of slots compared, and a step's own cost in the same unit. It is
counted and not timed, so that the same input gives the same map."""


@dataclass(frozen=True, slots=True)
class Goals:
    """What is asked of the busiest rank of each row; all are [B]."""

    load: Loads
    acceptable: Loads
    """A load that will do once `moved` replicas have moved."""
    moved: Loads


def balance(packing: Packing, goals: Goals, *, work_max: int = WORK_MAX, at_once: bool = True) -> int:
    """Bring the busiest rank of each row to its goal. Return the work that was done.

    Unless `at_once`, one pair of ranks at a time exchanges experts in each row: pairs know nothing of each
    other, so that two of them may bring an expert's replicas together on one node.
    """
    ready = (packing.capacity > 0).sum(axis=1)
    is_active = ready > 1
    fewest, places = int(ready[is_active].min(initial=packing.capacity.shape[1])), packing.slots.shape[2]
    narrow = max(1, COMPARED_MAX // places**2)
    pairs = min(fewest // 2, narrow) if at_once else 1
    gains = packing.rank_loads.sum(axis=1) / np.maximum(ready, 1) * GAIN_MIN
    widths = np.zeros(len(is_active), dtype=np.int64)
    work = 0
    while work < work_max:
        busiest = packing.rank_loads.max(axis=1)
        is_active &= busiest > goals.load
        is_active &= (busiest > goals.acceptable) | (packing.moved < goals.moved)
        if not is_active.any():
            break
        width = int(widths[is_active].min())
        rows = np.nonzero(is_active & (widths == width))[0]
        busy, light = _partners(packing, rows, pairs if width == 0 else 1, min(width, fewest - 1))
        has_helped, compared = _exchange(packing, rows, busy, light, goals.load[rows], gains[rows])
        work += STEP_WORK + compared
        widths[rows[has_helped]] = 0
        is_active[rows[~has_helped]] &= (busiest > goals.acceptable)[rows[~has_helped]] & (width < fewest - 1)
        widths[rows[~has_helped]] = width * WIDER if width else narrow
    return work


def _partners(packing: Packing, rows: Indices, pairs: int, width: int) -> tuple[Indices, Indices]:
    """Busy ranks as [b, P] and their partners as [b, P, K]: P pairs of ranks, or the busiest and `width`
    others."""
    is_ready = packing.capacity[rows] > 0
    order = np.argsort(np.where(is_ready, packing.rank_loads[rows], np.inf), axis=1, kind="stable")
    last = is_ready.sum(axis=1)[:, None] - 1
    if width == 0:
        return np.take_along_axis(order, last - np.arange(pairs), axis=1), order[:, :pairs, None]
    return np.take_along_axis(order, last, axis=1), order[:, None, :width]


def _exchange(
    packing: Packing, rows: Indices, busy: Indices, light: Indices, goals: Loads, gains: Loads
) -> tuple[Flags, int]:
    """Make the best exchange of each busy rank with its partners. Return whether the first of each row had
    one, and how many pairs of slots were compared.

    Shapes: n busy ranks above their goals, K partners of each, S slots.
    """
    row, pair = np.nonzero(packing.rank_loads[rows[:, None], busy] > goals[:, None])
    at, from_rank, to_ranks = rows[row], busy[row, pair], light[row, pair]
    own = packing.slots[at, from_rank]  # [n, S]
    others = packing.slots[at[:, None], to_ranks]  # [n, K, S]
    own_stays = _stays(packing, at, own[:, :, None], from_rank[:, None, None], to_ranks[:, None])
    other_stays = _stays(packing, at, others, to_ranks[:, :, None], from_rank[:, None, None])
    other_stays |= np.arange(others.shape[2]) >= packing.capacity[at[:, None], to_ranks][:, :, None]
    before = packing.rank_loads[at, from_rank]
    light_loads = packing.rank_loads[at[:, None], to_ranks]  # [n, K]
    # If a rank with load a gives d to one with b, the busier has (a + b) / 2 + |d - (a - b) / 2| after it.
    own_sizes = np.where(own_stays, np.inf, packing.sizes[at[:, None], own][:, :, None])  # [n, S, K]
    half = (before[:, None] - light_loads) / 2
    other_sizes = packing.sizes[at[:, None, None], others] + half[:, :, None]
    other_sizes[other_stays] = -np.inf
    reached = own_sizes[:, :, :, None] - other_sizes[:, None]  # [n, S, K, S]
    np.abs(reached, out=reached)
    reached += (light_loads + half)[:, None, :, None]
    choices = reached.reshape(len(at), -1)
    best = choices.argmin(axis=1)
    helps = choices[np.arange(len(at)), best] < before - gains[row]
    place, rest = np.divmod(best[helps], others[0].size)
    partner, other_place = np.divmod(rest, others.shape[2])
    packing.move(at[helps], from_rank[helps], place, to_ranks[helps, partner], other_place)
    has_helped = np.zeros(len(rows), dtype=np.bool_)
    has_helped[row[helps & (pair == 0)]] = True
    return has_helped, choices.size


def _stays(packing: Packing, rows: Indices, experts: Slots, old: Indices, new: Indices) -> Flags:
    """Whether an expert cannot move from rank `old` to rank `new`. All but `rows` [n] are [n, ·, ·]."""
    at = rows[:, None, None]
    stays = packing.holds[at, experts, new]
    return stays | packing.leaves_one_node(at, experts, old, new) if packing.has_nodes else stays
