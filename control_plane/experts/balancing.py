"""Lower the load of the busiest ranks by exchanging experts between ranks, with as few exchanges as will do.

A row is done when its busiest rank is at its goal. Busy ranks are paired with ranks of little load, several
pairs at a time; if that does not help a busiest rank that has more than is acceptable, a few busy ranks are
compared with more ranks each, and the busiest with all at last. If none is of use, two exchanges at once are
tried (`detours`).
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from control_plane.experts.detours import detour
from control_plane.experts.packing import Flags, Indices, Packing
from control_plane.experts.values import Loads

GAIN_MIN = 0.002
"""Part of the mean load that an exchange must take from the busier of two ranks."""
COMPARED_MAX = 512
"""Pairs of slots that are compared in a row at a time."""
PAIRS_MIN = 4
WIDER = 4
"""Factor by which more ranks are compared if none was of use."""
BUSY_MAX, PARTNERS_MIN = 6, 8
"""Busy ranks of a row that are compared with several ranks each at a time, and how many each needs for that.
A row of ranks with two or three experts has tens of busy ranks: one at a time would take too long."""
RANK_BITS = 16
"""Bits of a load that give way to the number of its rank when ranks are sorted by load."""
WORK_MAX = 20_000_000
STEP_WORK, RANK_WORK, SLOT_WORK = 50_000, 100, 20
"""The search ends after so much work: what a step, each busy rank in it, and each slot of its partners cost,
in a unit of about 4 ns. It is counted and not timed, so that the same input gives the same map."""
DETOUR_PART = 4
"""Two exchanges at once get at most the work divided by this: where many rows need them, smaller replicas
help more."""


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
    fewest = int(ready[is_active].min(initial=packing.capacity.shape[1]))
    stages = _stages(fewest, packing.slots.shape[2], at_once=at_once)
    gains = packing.rank_loads.sum(axis=1) / np.maximum(ready, 1) * GAIN_MIN
    stage_of = np.zeros(len(is_active), dtype=np.int64)
    work = detour_work = 0
    while work < work_max:
        busiest = packing.rank_loads.max(axis=1)
        is_active &= busiest > goals.load
        is_active &= (busiest > goals.acceptable) | (packing.moved < goals.moved)
        if not is_active.any():
            break
        stage = int(stage_of[is_active].min())
        rows = np.nonzero(is_active & (stage_of == stage))[0]
        busy, light = _partners(packing, rows, *stages[stage])
        has_helped, done = _exchange(packing, rows, busy, light, goals.load[rows], gains[rows])
        work += STEP_WORK + done
        stuck = rows[~has_helped]
        is_behind = busiest[stuck] > goals.acceptable[stuck]
        if stage < len(stages) - 1:
            is_active[stuck] = is_behind
            stage_of[stuck] = stage + 1
            continue
        behind = stuck[is_behind]
        left = min(work_max - work, work_max // DETOUR_PART - detour_work)
        found, done = detour(packing, behind, goals.acceptable[behind], gains[behind], left)
        work, detour_work = work + done, detour_work + done
        is_active[stuck] = False
        is_active[behind[found]] = True
        # The ranks that are now the busiest may need no more than the stage before has.
        stage_of[rows] = max(stage - 1, 0)
    return work


def _stages(fewest: int, places: int, *, at_once: bool) -> list[tuple[int, int]]:
    """How many busy ranks are compared at a time, and with how many others each, from pairs of ranks to the
    busiest and all others."""
    narrow = max(1, COMPARED_MAX // places**2)
    pairs = min(fewest // 2, max(narrow, PAIRS_MIN)) if at_once else 1
    found, width = [(pairs, 1)], narrow
    while found[-1] != (1, fewest - 1):
        width = min(width, fewest - 1)
        busy = max(1, min(pairs, BUSY_MAX, width // PARTNERS_MIN))
        found.append((busy, min(width, fewest - busy) // busy))
        if width == fewest - 1 and busy > 1:
            found.append((1, width))
        width *= WIDER
    return found


def _partners(packing: Packing, rows: Indices, busy: int, others: int) -> tuple[Indices, Indices]:
    """Busy ranks as [b, P] and their partners as [b, P, K], `busy` and `others` of them. All are different
    ranks. The first gets the lightest, the next one the next, and so on in turn."""
    is_ready = packing.capacity[rows] > 0
    order = _by_load(np.where(is_ready, packing.rank_loads[rows], np.inf))
    last = is_ready.sum(axis=1)[:, None] - 1
    light = order[:, : busy * others].reshape(len(rows), others, busy).swapaxes(1, 2)
    return np.take_along_axis(order, last - np.arange(busy), axis=1), light


def _by_load(loads: Loads) -> Indices:
    """The ranks [b, R] of each row from the least load to the most. Numpy sorts numbers that contain the rank
    several times faster than it finds the order of loads, and the result is the same on every machine."""
    ranks = (1 << RANK_BITS) - 1
    keys = loads.view(np.int64) & ~ranks | np.arange(loads.shape[1])
    keys.sort(axis=1)
    return keys & ranks


def _exchange(
    packing: Packing, rows: Indices, busy: Indices, light: Indices, goals: Loads, gains: Loads
) -> tuple[Flags, int]:
    """Make the best exchange of each busy rank with its partners. Return whether the first of each row had
    one, and the work.

    Shapes: n busy ranks above their goals, K partners of each, S slots.
    """
    row, pair = np.nonzero(packing.rank_loads[rows[:, None], busy] > goals[:, None])
    at, from_rank, to_ranks = rows[row], busy[row, pair], light[row, pair]
    own = packing.slots[at, from_rank]  # [n, S]
    others = packing.slots[at[:, None], to_ranks]  # [n, K, S]
    here, there, of = from_rank[:, None, None], to_ranks[:, :, None], at[:, None, None]
    own_stays = packing.stays(of, own[:, None], here, there)
    other_stays = packing.stays(of, others, there, here)
    other_stays |= np.arange(others.shape[2]) >= packing.capacity[at[:, None], to_ranks][:, :, None]
    own_sizes, sizes = packing.sizes[at[:, None], own], packing.sizes[of, others]
    given = np.where(own_stays, np.inf, own_sizes[:, None])
    taken = np.where(other_stays, -np.inf, sizes)
    reached = _reached(packing, at, from_rank, to_ranks, given, taken)
    best = reached.argmin(axis=1)
    helps = reached[np.arange(len(at)), best] < packing.rank_loads[at, from_rank] - gains[row]
    helps = np.nonzero(helps)[0]
    partner, places = np.divmod(best[helps], others.shape[2] ** 2)
    place, other_place = np.divmod(places, others.shape[2])
    packing.move(at[helps], from_rank[helps], place, to_ranks[helps, partner], other_place)
    has_helped = np.zeros(len(rows), dtype=np.bool_)
    has_helped[row[helps[pair[helps] == 0]]] = True
    return has_helped, len(at) * RANK_WORK + sizes.size * SLOT_WORK


def _reached(
    packing: Packing, at: Indices, busy: Indices, partners: Indices, given: Loads, taken: Loads
) -> npt.NDArray[np.float32]:
    """The load of the busier of two ranks after each exchange, as [n, K * S * S]."""
    loads, light_loads = packing.rank_loads[at, busy, None], packing.rank_loads[at[:, None], partners]
    per_load, light_per_load = packing.per_load[at, busy, None], packing.per_load[at[:, None], partners]
    # Ranks of load a and b have the same load when the first gives the second (a - b) / (1 / v + 1 / w),
    # where v and w are their speeds. With every other amount, the busier of the two has more.
    wanted = (loads - light_loads) / (per_load + light_per_load)  # [n, K]
    least = (light_loads + wanted * light_per_load).astype(np.float32)
    most = (taken + wanted[:, :, None]).astype(np.float32)
    more = given.astype(np.float32)[:, :, :, None] - most[:, :, None]  # [n, K, S, S]
    if packing.is_even:
        np.abs(more, out=more)
    else:
        up, down = light_per_load.astype(np.float32), per_load.astype(np.float32)
        np.maximum(more * up[:, :, None, None], more * -down[:, :, None, None], out=more)
    more += least[:, :, None, None]
    return more.reshape(len(at), -1)
