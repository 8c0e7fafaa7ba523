"""Two exchanges at once, for rows whose busiest rank has none with another one that would help: a second rank
exchanges an expert with a rank of little load, and then has room for one of the busiest rank's.

Ranks of two or three experts need it. What their busiest could give is about half of its load. Ranks of
little load have no room for so much, and those that hold an expert of nearly the same load are nearly full.

Shapes: n rows, R ranks, K of them with little load, S slots.
"""

import numpy as np

from control_plane.experts.packing import Flags, Indices, Packing
from control_plane.experts.values import EMPTY, Loads

LIGHT_RANKS = 16
COMPARED_MAX = 20_000
"""Pairs of slots that are compared in a row. Where slots are many, fewer ranks of little load are tried."""
DETOUR_WORK, SLOT_WORK, PAIR_WORK = 80_000, 16, 2
"""What a call costs, each slot of a second rank beside each rank of little load, and each pair of slots, in
the unit of `balancing.WORK_MAX`."""


def detour(packing: Packing, rows: Indices, goals: Loads, gains: Loads, work_max: int) -> tuple[Flags, int]:
    """Make the two exchanges that leave least load on the busier of the busiest and the second rank, if that
    is less than the busiest has by more than `gains` [n]. No rank of little load gets more than `goals` [n].
    Return which rows had exchanges, and the work: the first rows come first, as far as it goes."""
    _, rank_count, places = packing.slots.shape
    light_count = min(LIGHT_RANKS, rank_count - 2, COMPARED_MAX // (rank_count * places**2))
    of_row = rank_count * (light_count + 1) * places * (SLOT_WORK + PAIR_WORK * places)
    tried = max(0, min(len(rows), (work_max - DETOUR_WORK) // of_row)) if light_count > 0 else 0
    has_helped = np.zeros(len(rows), dtype=np.bool_)
    if not tried:
        return has_helped, 0
    rows, goals, gains = rows[:tried], goals[:tried], gains[:tried]
    is_ready = packing.capacity[rows] > 0
    order = np.argsort(np.where(is_ready, packing.rank_loads[rows], np.inf), axis=1, kind="stable")
    busiest = np.take_along_axis(order, is_ready.sum(axis=1)[:, None] - 1, axis=1)[:, 0]
    passed = _Passed(packing, rows, busiest, order[:, :light_count], goals)
    has_helped[:tried] = _exchange(packing, rows, busiest, passed, gains)
    return has_helped, DETOUR_WORK + tried * of_row


class _Passed:
    """The exchange of each rank, as a second one, with a rank of little load that takes most from it: the
    rank, both slots, the expert that it brings, and by how much it is `less`. All are [n, R]."""

    def __init__(
        self, packing: Packing, rows: Indices, busiest: Indices, light: Indices, goals: Loads
    ) -> None:
        of, here = rows[:, None, None, None], np.arange(len(rows))[:, None]
        slots = packing.slots[rows]
        ranks, lights = np.arange(slots.shape[1])[:, None, None], light[:, None, :, None]
        given, taken = slots[:, :, None], slots[here, light][:, None]  # [n, R, 1, S], [n, 1, K, S]
        given_stays = packing.stays(of, given, ranks, lights) | (given == EMPTY)
        first = busiest[:, None, None, None]
        given_stays |= (ranks == lights) | (ranks == first) | (lights == first)
        taken_stays = packing.stays(of, taken, lights, ranks)
        capacity = packing.capacity[rows[:, None], light]
        taken_stays |= (np.arange(slots.shape[2]) >= capacity[:, :, None])[:, None]
        given_sizes = np.where(given_stays, -np.inf, packing.sizes[of, given]).astype(np.float32)
        taken_sizes = np.where(taken_stays, np.inf, packing.sizes[of, taken]).astype(np.float32)
        less = given_sizes[:, :, :, :, None] - taken_sizes[:, :, :, None]  # [n, R, K, S, S]
        room = goals[:, None] - packing.rank_loads[rows[:, None], light]
        room = (room / packing.per_load[rows[:, None], light]).astype(np.float32)
        less[less > room[:, None, :, None, None]] = -np.inf
        choices = less.reshape(*slots.shape[:2], -1)
        best = choices.argmax(axis=2)
        number, places = np.divmod(best, slots.shape[2] ** 2)
        self.less: Loads = np.take_along_axis(choices, best[:, :, None], axis=2)[:, :, 0].astype(np.float64)
        self.light = light[here, number]
        self.place, self.light_place = np.divmod(places, slots.shape[2])
        self.brought = slots[here, self.light, self.light_place]


def _exchange(packing: Packing, rows: Indices, busiest: Indices, passed: _Passed, gains: Loads) -> Flags:
    """Choose the second rank of each row and what the busiest exchanges with it, and make both exchanges."""
    of, here = rows[:, None, None], np.arange(len(rows))
    slots, first, ranks = packing.slots[rows], busiest[:, None, None], np.arange(packing.slots.shape[1])
    own = slots[here, busiest][:, None]  # [n, 1, S]
    own_stays = packing.stays(of, own, first, ranks[:, None])
    own_stays |= (own == EMPTY) | (own == passed.brought[:, :, None])
    other_stays = packing.stays(of, slots, ranks[:, None], first)
    numbers = np.arange(slots.shape[2])
    other_stays |= (numbers >= packing.capacity[rows][:, :, None]) | (numbers == passed.place[:, :, None])
    given = np.where(own_stays, np.inf, packing.sizes[of, own])
    taken = np.where(other_stays, -np.inf, packing.sizes[of, slots])
    moved = given[:, :, :, None] - taken[:, :, None]  # [n, R, S, S]
    loads, per_load = packing.rank_loads[rows], packing.per_load[rows]
    before = loads[here, busiest]
    kept = before[:, None, None, None] - moved * per_load[here, busiest][:, None, None, None]
    after = (loads - passed.less * per_load)[:, :, None, None] + moved * per_load[:, :, None, None]
    reached = np.maximum(kept, after).reshape(len(rows), -1)
    best = reached.argmin(axis=1)
    has_helped = reached[here, best] < before - gains
    here = np.nonzero(has_helped)[0]
    second, places = np.divmod(best[here], slots.shape[2] ** 2)
    place, second_place = np.divmod(places, slots.shape[2])
    by = passed.place[here, second], passed.light[here, second], passed.light_place[here, second]
    packing.move(rows[here], second, *by)
    packing.move(rows[here], busiest[here], place, second, second_place)
    return has_helped
