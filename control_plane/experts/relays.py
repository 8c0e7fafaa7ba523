"""Exchanges between three ranks, for a row whose busiest rank has none with one other that would help: the
experts that it could give away may all be on the other rank, or stay on two nodes only where they are.

Shapes: R ranks, S slots, C candidates.
"""

import numpy as np

from control_plane.experts.packing import Flags, Packing
from control_plane.experts.values import EMPTY, Slots

LARGEST, SMALLEST = 16, 8
"""Experts of the busiest rank, and of the rank with the least load, that are tried."""
LIGHT_RANKS = 4
"""Ranks of little load that are tried, until one is of use."""


def relay(packing: Packing, row: int, gain: float) -> tuple[bool, int]:
    """Let the busiest rank give an expert to a second rank, that one another expert to a rank of little load,
    and this one a small expert or an empty slot to the busiest, if the busiest of the three then has less by
    more than `gain`. Return whether it was done, and how many choices were compared."""
    loads = np.where(packing.capacity[row] > 0, packing.rank_loads[row], np.inf)
    order = loads.argsort(kind="stable")
    busiest = int(np.where(np.isfinite(loads), loads, -1.0).argmax())
    compared = 0
    for light in order[: min(LIGHT_RANKS, int(np.isfinite(loads).sum()) - 2)].tolist():
        found, choices = _best(packing, row, busiest, light)
        compared += choices
        if found is None or found[0] >= packing.rank_loads[row, busiest] - gain:
            continue
        _, place, (second, second_place), light_place = found
        _exchange(packing, row, (busiest, place), (second, second_place))
        _exchange(packing, row, (busiest, place), (light, light_place))
        return True, compared
    return False, compared


def _best(
    packing: Packing, row: int, busiest: int, light: int
) -> tuple[tuple[float, int, tuple[int, int], int] | None, int]:
    """The least load of the busiest of three ranks, the slots on them, and how many choices there were."""
    slots, sizes, holds = packing.slots[row], packing.sizes[row], packing.holds[row]
    loads, per_load = packing.rank_loads[row], packing.per_load[row]
    places = np.argsort(-sizes[slots[busiest]], kind="stable")[:LARGEST]
    given = slots[busiest, places]  # [C1]
    room = int(packing.capacity[row, light])
    light_places = np.argsort(sizes[slots[light, :room]], kind="stable")[:SMALLEST]
    back = slots[light, light_places]  # [C3]
    back_may = ~holds[back, busiest] & ~_leaves(packing, row, back, light, busiest)
    light_places, back = light_places[back_may], back[back_may]
    seconds, second_places = np.nonzero(slots != EMPTY)
    passed = slots[seconds, second_places]  # [C2]
    may = (seconds != busiest) & (seconds != light) & ~holds[passed, light] & ~holds[passed, busiest]
    may &= ~packing.leaves_one_node(np.array(row), passed, seconds, np.array(light))
    seconds, second_places, passed = seconds[may], second_places[may], passed[may]
    to_second = ~holds[given[:, None], seconds] & (given != EMPTY)[:, None]
    to_second &= ~packing.leaves_one_node(np.array(row), given[:, None], np.array(busiest), seconds)
    second_loads = loads[seconds] + (sizes[given][:, None] - sizes[passed]) * per_load[seconds]
    second_loads[~to_second] = np.inf
    kept = loads[busiest] - (sizes[given][:, None] - sizes[back]) * per_load[busiest]  # [C1, C3]
    reached = loads[light] + (sizes[passed][:, None] - sizes[back]) * per_load[light]  # [C2, C3]
    of_all = np.maximum(kept[:, None], reached)
    np.maximum(of_all, second_loads[:, :, None], out=of_all)
    if not of_all.size:
        return None, 0
    one, two, three = np.unravel_index(int(of_all.argmin()), of_all.shape)
    second = int(seconds[two]), int(second_places[two])
    return (float(of_all[one, two, three]), int(places[one]), second, int(light_places[three])), of_all.size


def _leaves(packing: Packing, row: int, experts: Slots, old: int, new: int) -> Flags:
    return packing.leaves_one_node(np.array(row), experts, np.array(old), np.array(new))


def _exchange(packing: Packing, row: int, one: tuple[int, int], two: tuple[int, int]) -> None:
    packing.move(*(np.array([number]) for number in (row, *one, *two)))
