"""Lower the load of the busiest ranks by exchanging experts between ranks, with as few exchanges as will do.

A row is done when its busiest rank is at its goal. Busy ranks are paired with ranks of little load, several
pairs at a time; if that does not help a busiest rank that has more than is acceptable, it is compared with
more ranks, and with all at last.
"""

from dataclasses import dataclass

import numpy as np

from control_plane.experts.packing import Flags, Indices, Packing
from control_plane.experts.relays import relay
from control_plane.experts.values import Loads, Slots

GAIN_MIN = 0.002
"""Part of the mean load that an exchange must take from the busier of two ranks."""
COMPARED_MAX = 512
"""Pairs of slots that are compared in a row at a time."""
PAIRS_MIN = 4
WIDER = 4
"""Factor by which more ranks are compared if none was of use."""
WORK_MAX = 20_000_000
STEP_WORK = 50_000
RANK_WORK, RELAY_WORK = 300, 50_000
"""The search ends after so much work: pairs of slots compared, and what a step and each busy rank in it cost
beside that, in the same unit (about 4 ns). It is counted and not timed, so that the same input gives the same
map."""


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
    pairs = min(fewest // 2, max(narrow, PAIRS_MIN)) if at_once else 1
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
        stuck = rows[~has_helped]
        is_behind = busiest[stuck] > goals.acceptable[stuck]
        if width >= fewest - 1:
            work += _relay(packing, stuck[is_behind], gains, has_helped, rows, work_max - work)
            stuck = rows[~has_helped]
            is_active[stuck] = False
        else:
            is_active[stuck] = is_behind
        widths[rows[has_helped]] = width
        widths[stuck] = width * WIDER if width else narrow
    return work


def _relay(
    packing: Packing, stuck: Indices, gains: Loads, has_helped: Flags, rows: Indices, work_max: int
) -> int:
    """Try exchanges of three ranks in rows that have none of two, and set `has_helped` of those that had one.
    Return the work."""
    work = 0
    for row in stuck.tolist():
        if work >= work_max:
            break
        found, compared = relay(packing, row, float(gains[row]))
        has_helped[rows == row] = found
        work += RELAY_WORK + compared
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
    own_stays = _stays(packing, at, own[:, None], from_rank[:, None, None], to_ranks[:, :, None])
    other_stays = _stays(packing, at, others, to_ranks[:, :, None], from_rank[:, None, None])
    other_stays |= np.arange(others.shape[2]) >= packing.capacity[at[:, None], to_ranks][:, :, None]
    before, light_loads = packing.rank_loads[at, from_rank], packing.rank_loads[at[:, None], to_ranks]
    per_load, light_per_load = packing.per_load[at, from_rank, None], packing.per_load[at[:, None], to_ranks]
    # Ranks of load a and b have the same load when the first gives the second (a - b) / (1 / v + 1 / w),
    # where v and w are their speeds. The closer to that, the less the busier of the two has.
    wanted = (before[:, None] - light_loads) / (per_load + light_per_load)  # [n, K]
    own_sizes, sizes = packing.sizes[at[:, None], own], packing.sizes[at[:, None, None], others]
    given = np.where(own_stays, np.inf, own_sizes[:, None]).astype(np.float32)
    taken = np.where(other_stays, -np.inf, sizes + wanted[:, :, None]).astype(np.float32)
    distances = given[:, :, :, None] - taken[:, :, None]  # [n, K, S, S]
    np.abs(distances, out=distances)
    choices = distances.reshape(*wanted.shape, -1)
    best = choices.argmin(axis=2)  # [n, K]
    place, other_place = np.divmod(best, others.shape[2])
    here, partners = np.arange(len(at))[:, None], np.arange(wanted.shape[1])
    moved = own_sizes[here, place] - sizes[here, partners, other_place]
    reached = np.maximum(before[:, None] - moved * per_load, light_loads + moved * light_per_load)
    reached[np.isinf(choices[here, partners, best])] = np.inf
    partner = reached.argmin(axis=1)
    here = np.arange(len(at))
    helps = np.nonzero(reached[here, partner] < before - gains[row])[0]
    partner = partner[helps]
    packing.move(
        at[helps],
        from_rank[helps],
        place[helps, partner],
        to_ranks[helps, partner],
        other_place[helps, partner],
    )
    has_helped = np.zeros(len(rows), dtype=np.bool_)
    has_helped[row[helps[pair[helps] == 0]]] = True
    return has_helped, distances.size + len(at) * RANK_WORK


def _stays(packing: Packing, rows: Indices, experts: Slots, old: Indices, new: Indices) -> Flags:
    """Whether an expert cannot move from rank `old` to rank `new`. All but `rows` [n] are [n, ·, ·]."""
    at = rows[:, None, None]
    stays = packing.holds[at, experts, new]
    return stays | packing.leaves_one_node(at, experts, old, new) if packing.has_nodes else stays
