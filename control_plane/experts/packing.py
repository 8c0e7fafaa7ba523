"""The ranks of all replicas, for all rows at once: few replicas move, and the busiest rank gets less.

A row is a layer, or the part of a layer that one node holds. Rows know nothing of each other, so that every
step below is one numpy operation over all of them.

Shapes: B rows, E experts of a row, R ranks, S slots of the rank that has most, N nodes. Arrays over experts
have E + 1 columns: EMPTY, which is -1, is the last, has no load and is held by nobody.
"""

import numpy as np
import numpy.typing as npt

from control_plane.experts.replicas import Counts
from control_plane.experts.values import EMPTY, Loads, Slots

Indices = npt.NDArray[np.intp]
Flags = npt.NDArray[np.bool_]


class Packing:
    """The replicas of all rows while they are moved. `slots` is changed in place."""

    def __init__(self, loads: Loads, slots: Slots, capacity: Counts, nodes: Indices, per_load: Loads) -> None:
        """`loads` is [B, E], `slots` [B, R, S], `capacity` [B, R], `nodes` [R] and `per_load` [B, R]: what a
        replica of load 1 adds to the load of a rank, which is less on a fast one. No rank holds more than its
        capacity or an expert twice."""
        rows, ranks, _ = slots.shape
        columns = loads.shape[1] + 1
        self.loads, self.slots, self.capacity, self.nodes = loads, slots, capacity, nodes
        self.per_load = per_load
        self.rows: Indices = np.arange(rows)
        at = self.rows[:, None, None]
        self.placed = _number_of_each(at * columns + slots % columns, (rows, columns))
        """[B, E + 1]: replicas that there are."""
        self.placed[:, EMPTY] = 0
        self.counts: Counts = self.placed.copy()
        """[B, E + 1]: replicas that there shall be. They divide an expert's load."""
        self.holds: Flags = np.zeros((rows, columns, ranks), dtype=np.bool_)
        self.holds[at, slots, np.arange(ranks)[:, None]] = True
        self.holds[:, EMPTY] = False
        self.held_before = self.holds.copy()
        self.moved: Counts = np.zeros(rows, dtype=np.int64)
        """[B]: replicas that ranks have and did not have before."""
        self.used: Counts = (slots != EMPTY).sum(axis=2)
        node_count = int(nodes.max(initial=0)) + 1
        places = (at * columns + slots % columns) * node_count + nodes[:, None]
        self.on_node = _number_of_each(places, (rows, columns, node_count))
        """[B, E + 1, N]: replicas on each node."""
        self.on_node[:, EMPTY] = 0
        self._others_on: Flags = np.zeros(self.on_node.shape, dtype=np.bool_)
        """[B, E + 1, N]: whether an expert has several replicas, and all but one are on the node."""
        self._much = 1 + 2 * loads.sum(axis=1) * per_load.max(axis=1, initial=0.0)
        self.is_even = bool((per_load == 1.0).all())
        self._divide()

    def _divide(self) -> None:
        """Compute the loads of replicas and ranks anew."""
        self.sizes: Loads = np.zeros(self.counts.shape)
        self.sizes[:, :EMPTY] = self.loads / np.maximum(self.counts[:, :EMPTY], 1)
        held = self.sizes[self.rows[:, None, None], self.slots]
        self.rank_loads: Loads = held.sum(axis=2) * self.per_load
        self._open_loads = self.rank_loads

    @property
    def has_nodes(self) -> bool:
        return self.on_node.shape[2] > 1

    def fill(self, counts: Counts) -> None:
        """Give experts `counts` [B, E] replicas: take those away that are too many, and place those that are
        missing. An expert whose last replicas find no rank has fewer."""
        self.counts[:, :EMPTY] = counts
        self._divide()
        self._remove_surplus()
        self._open_loads = np.where(self.used < self.capacity, self.rank_loads, np.inf)
        for experts in _by_size(self.counts - self.placed, self.sizes).T:
            rows = np.nonzero(experts != EMPTY)[0]
            self._place(rows, experts[rows])
        if (self.placed != self.counts).any():
            self.counts = self.placed.copy()
            self._divide()
        if self.has_nodes:
            self._others_on[:] = False
            self._find_others(*np.nonzero(self.counts > 1))

    def _remove_surplus(self) -> None:
        """Take the largest replicas first: from nodes that have another one, then from ranks without a free
        slot, so that free slots are on many ranks, then from busy ranks."""
        for experts in _by_size(self.placed - self.counts, self.sizes).T:
            rows = np.nonzero(experts != EMPTY)[0]
            experts = experts[rows]
            much = self._much[rows, None]
            priority = self.rank_loads[rows] + much * (self.used[rows] == self.capacity[rows])
            if self.has_nodes:
                priority += 2 * much * (self.on_node[rows, experts] > 1)[:, self.nodes]
            priority[~self.holds[rows, experts]] = -1.0
            ranks = priority.argmax(axis=1)
            places = (self.slots[rows, ranks] == experts[:, None]).argmax(axis=1)
            self.slots[rows, ranks, places] = EMPTY
            self.moved[rows] -= ~self.held_before[rows, experts, ranks]
            self.holds[rows, experts, ranks] = False
            self.used[rows, ranks] -= 1
            self.placed[rows, experts] -= 1
            self.rank_loads[rows, ranks] -= self.sizes[rows, experts] * self.per_load[rows, ranks]
            if self.has_nodes:
                self.on_node[rows, experts, self.nodes[ranks]] -= 1

    def _place(self, rows: Indices, experts: Slots) -> None:
        """Put one replica of one expert in each of these rows on the rank with the least load, on a second
        node if the expert is on one."""
        loads = self._open_loads[rows]
        if not self.is_even:
            loads += self.sizes[rows, experts][:, None] * self.per_load[rows]
        again = np.nonzero(self.placed[rows, experts] > 0)[0]
        if len(again):
            loads[again] = self._loads_for_another(rows[again], experts[again], loads[again])
        ranks = loads.argmin(axis=1)
        fits = np.isfinite(loads[np.arange(len(rows)), ranks])
        self._put(rows[fits], experts[fits], ranks[fits])
        if not fits.all():
            self._place_by_moving_another(rows[~fits], experts[~fits])

    def _loads_for_another(self, rows: Indices, experts: Slots, loads: Loads) -> Loads:
        """Loads of ranks for an expert that other ranks hold: infinite where it cannot be, and more than any
        other on the only node that has it."""
        loads = np.where(self.holds[rows, experts], np.inf, loads)
        if self.has_nodes:
            on_node = self.on_node[rows, experts] > 0
            on_one = np.nonzero(on_node.sum(axis=1) == 1)[0]
            loads[on_one] += np.where(on_node[on_one][:, self.nodes], self._much[rows[on_one], None], 0.0)
        return loads

    def _put(self, rows: Indices, experts: Slots, ranks: Indices) -> None:
        places = (self.slots[rows, ranks] == EMPTY).argmax(axis=1)
        self.slots[rows, ranks, places] = experts
        self.holds[rows, experts, ranks] = True
        self.used[rows, ranks] += 1
        self.placed[rows, experts] += 1
        self.moved[rows] += ~self.held_before[rows, experts, ranks]
        self.rank_loads[rows, ranks] += self.sizes[rows, experts] * self.per_load[rows, ranks]
        self._refresh(rows, ranks)
        if self.has_nodes:
            self.on_node[rows, experts, self.nodes[ranks]] += 1

    def _refresh(self, rows: Indices, ranks: Indices) -> None:
        has_room = self.used[rows, ranks] < self.capacity[rows, ranks]
        self._open_loads[rows, ranks] = np.where(has_room, self.rank_loads[rows, ranks], np.inf)

    def _place_by_moving_another(self, rows: Indices, experts: Slots) -> None:
        """All ranks with a free slot hold the expert already: another expert moves there from a rank that
        does not, and the expert takes its slot. If there is none, the expert has one replica less."""
        free = (self.used[rows] < self.capacity[rows]).argmax(axis=1)
        others = self.slots[rows]
        at = rows[:, None, None]
        moved = self.sizes[at, others]
        is_valid = (others != EMPTY) & ~self.holds[at, others, free[:, None, None]]
        is_valid &= ~self.holds[rows, experts][:, :, None]
        size = self.sizes[rows, experts][:, None, None]
        reached = np.maximum(
            (self.rank_loads[rows, free] + moved.T * self.per_load[rows, free]).T,
            self.rank_loads[rows][:, :, None] + (size - moved) * self.per_load[rows][:, :, None],
        )
        reached = np.where(is_valid, reached, np.inf).reshape(len(rows), -1)
        best = reached.argmin(axis=1)
        found = np.isfinite(reached[np.arange(len(rows)), best])
        rows, experts, free, best = rows[found], experts[found], free[found], best[found]
        ranks, places = np.divmod(best, self.slots.shape[2])
        self.move(rows, ranks, places, free, (self.slots[rows, free] == EMPTY).argmax(axis=1))
        self._refresh(rows, free)
        self._put(rows, experts, ranks)

    def move(self, rows: Indices, ranks: Indices, places: Indices, others: Indices, at: Indices) -> None:
        """Exchange what is in two slots of each row, (ranks, places) and (others, at); one may be empty. No
        rank occurs twice in a row."""
        one, two = self.slots[rows, ranks, places], self.slots[rows, others, at]
        self.slots[rows, ranks, places], self.slots[rows, others, at] = two, one
        both, experts = np.concatenate([rows, rows]), np.concatenate([one, two])
        old, new = np.concatenate([ranks, others]), np.concatenate([others, ranks])
        was_there, is_back = self.held_before[both, experts, old], self.held_before[both, experts, new]
        np.add.at(self.moved, both, (experts != EMPTY) * (was_there.astype(np.int64) - is_back))
        self.holds[both, experts, old] = False
        self.holds[both, experts, new] = True
        self.holds[rows, EMPTY] = False
        if self.has_nodes:
            np.subtract.at(self.on_node, (both, experts, self.nodes[old]), 1)
            np.add.at(self.on_node, (both, experts, self.nodes[new]), 1)
            self.on_node[rows, EMPTY] = 0
            self._find_others(both, experts)
        less = self.sizes[rows, one] - self.sizes[rows, two]
        self.rank_loads[rows, ranks] -= less * self.per_load[rows, ranks]
        self.rank_loads[rows, others] += less * self.per_load[rows, others]
        if (one == EMPTY).any() or (two == EMPTY).any():
            change = (one != EMPTY).astype(np.int64) - (two != EMPTY)
            self.used[rows, ranks] -= change
            self.used[rows, others] += change

    def stays(self, rows: Indices, experts: Slots | Indices, old: Indices, new: Indices) -> Flags:
        """Whether an expert cannot move from rank `old` to rank `new`: it is there, or it is on two nodes and
        would be on one. The arguments broadcast against each other."""
        # The same elements of the arrays in one dimension, which numpy finds faster. EMPTY is then the last
        # expert of the row before, which is EMPTY too.
        at = rows * self.counts.shape[1] + experts
        is_there = self.holds.reshape(-1).take(at * self.capacity.shape[1] + new)
        if not self.has_nodes:
            return is_there
        node = self.nodes[new]
        others_there = self._others_on.reshape(-1).take(at * self.on_node.shape[2] + node)
        return is_there | others_there & (node != self.nodes[old])

    def _find_others(self, rows: Indices, experts: Slots | Indices) -> None:
        """Compute `_others_on` anew for these experts."""
        count = self.counts[rows, experts][..., None]
        self._others_on[rows, experts] = (count > 1) & (self.on_node[rows, experts] == count - 1)

    def spread(self) -> bool:
        """Bring experts that have several replicas, all on one node, to a second node, if an expert can be
        found to take the slot. Return whether any was brought."""
        if not self.has_nodes:
            return False
        rows, experts = np.nonzero(self.counts > 1)
        is_on_one = self.on_node[rows, experts].max(axis=1) == self.counts[rows, experts]
        rows, experts = rows[is_on_one], experts[is_on_one]
        turns = _rank_in_run(rows)
        found = [
            self._spread(rows[turns == turn], experts[turns == turn])
            for turn in range(turns.max(initial=-1) + 1)
        ]
        return any(found)

    def _spread(self, rows: Indices, experts: Indices) -> bool:
        """Bring one expert of each of these rows to a second node."""
        here = np.arange(len(rows))
        held = np.where(self.holds[rows, experts], self.rank_loads[rows], -1.0)
        rank = held.argmax(axis=1)
        others, at = self.slots[rows], rows[:, None, None]
        ranks, from_rank = np.arange(others.shape[1])[:, None], rank[:, None, None]
        is_valid = np.arange(others.shape[2]) < self.capacity[rows][:, :, None]
        is_valid &= ~self.stays(at, others, ranks, from_rank) & ~self.holds[rows, experts][:, :, None]
        is_valid &= self.nodes[ranks] != self.nodes[from_rank]
        less = self.sizes[rows, experts][:, None, None] - self.sizes[at, others]
        reached = np.maximum(
            (self.rank_loads[rows, rank] - less.T * self.per_load[rows, rank]).T,
            self.rank_loads[rows][:, :, None] + less * self.per_load[rows][:, :, None],
        )
        reached = np.where(is_valid, reached, np.inf).reshape(len(rows), -1)
        best = reached.argmin(axis=1)
        found = np.isfinite(reached[here, best])
        other, place = np.divmod(best, others.shape[2])
        at_place = (self.slots[rows, rank] == experts[:, None]).argmax(axis=1)
        self.move(*(values[found] for values in (rows, rank, at_place, other, place)))
        return bool(found.any())


def _number_of_each(values: Indices, shape: tuple[int, ...]) -> Counts:
    return np.bincount(values.ravel(), minlength=int(np.prod(shape))).reshape(shape)


def _by_size(missing: Counts, sizes: Loads) -> Slots:
    """Experts to place as [B, most], the largest replicas first, EMPTY behind the last of each row."""
    rows, experts = np.nonzero(missing > 0)
    times = missing[rows, experts]
    rows, experts = np.repeat(rows, times), np.repeat(experts, times)
    order = np.lexsort((experts, -sizes[rows, experts], rows))
    rows, experts = rows[order], experts[order]
    found = np.full((len(missing), int(np.bincount(rows).max(initial=0))), EMPTY, dtype=np.int32)
    found[rows, _rank_in_run(rows)] = experts
    return found


def _rank_in_run(values: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The number of equal values directly before each."""
    index = np.arange(len(values))
    is_first = np.ones(len(values), dtype=np.bool_)
    is_first[1:] = values[1:] != values[:-1]
    return index - np.maximum.accumulate(np.where(is_first, index, 0))
