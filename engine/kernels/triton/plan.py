"""Numbers that one step's kernels read. They are made on the host and copied to the device in one piece."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from baton.core.geometry import KVGeometry
from engine.devices import to_device
from engine.kernels.interface import BatchLayout, RopeTables, Span
from engine.kernels.triton.attention_plan import (
    MERGE_FIELDS,
    TASK_FIELDS,
    Tasks,
    breadth_of,
    make_tasks,
    program_budget,
)
from engine.kernels.triton.device import DeviceFacts
from engine.kernels.triton.tiles import AttentionShape, AttentionTile, Breadth, attention_tile

Int32Array = npt.NDArray[np.int32]
ReadKey = tuple[int, int]
"""Window, and query heads per key-value head: layers that agree in both read alike."""
_ALIGNMENT = 4
"""Sections of the plan start at multiples of 16 bytes, as vector loads want."""


@dataclass(frozen=True, slots=True)
class AttentionLaunch:
    """One launch of `attention.attend`, and of `merge` where there are slots."""

    tile: AttentionTile
    tasks: Tensor
    """int32 [n, TASK_FIELDS]"""
    merges: Tensor
    """int32 [tiles, MERGE_FIELDS]"""
    slot_count: int


@dataclass(frozen=True, slots=True)
class TritonPlan:
    ints: Tensor
    """int32: the memory of all below."""
    slots: Tensor
    """int32 [T]: where each token's key goes, block * P + position in block; -1: nowhere."""
    tables: Tensor
    """int32: block ids of one sequence after another."""
    reads: dict[ReadKey, tuple[AttentionLaunch, ...]]
    ropes: RopeTables
    layout: BatchLayout


class _Sections:
    """Arrays of int32 put one after another."""

    def __init__(self) -> None:
        self._arrays: list[Int32Array] = []
        self._size = 0

    def add(self, array: npt.NDArray[np.signedinteger], *, room: int = 0, fill: int = 0) -> tuple[int, int]:
        """(start, length) of the array, padded to `room` numbers."""
        start, length = self._size, max(array.size, room)
        padded = np.full(-(-length // _ALIGNMENT) * _ALIGNMENT, fill, dtype=np.int32)
        padded[: array.size] = array.reshape(-1)
        self._arrays.append(padded)
        self._size += len(padded)
        return start, length

    def joined(self) -> Int32Array:
        return np.concatenate(self._arrays)


@dataclass(frozen=True, slots=True)
class HostLaunch:
    tile: AttentionTile
    tasks: tuple[int, int]
    merges: tuple[int, int]
    slot_count: int


@dataclass(frozen=True, slots=True)
class HostPlan:
    """A plan before it is on the device: numbers, and where in them each part lies (start, length)."""

    ints: Int32Array
    slots: tuple[int, int]
    tables: tuple[int, int]
    reads: Mapping[ReadKey, tuple[HostLaunch, ...]]
    layout: BatchLayout

    def on_device(self, ints: Tensor, ropes: RopeTables) -> TritonPlan:
        """ints: this plan's, copied to the device."""

        def view(section: tuple[int, int]) -> Tensor:
            return ints[section[0] : section[0] + section[1]]

        reads = {
            key: tuple(
                AttentionLaunch(
                    launch.tile,
                    view(launch.tasks).view(-1, TASK_FIELDS),
                    view(launch.merges).view(-1, MERGE_FIELDS),
                    launch.slot_count,
                )
                for launch in launches
            )
            for key, launches in self.reads.items()
        }
        return TritonPlan(ints, view(self.slots), view(self.tables), reads, ropes, self.layout)


class TritonPlanner:
    """Pure. Makes plans for one pool's geometry and one device."""

    def __init__(self, geometry: KVGeometry, facts: DeviceFacts) -> None:
        self._geometry, self._facts = geometry, facts

    def plan(
        self,
        layout: BatchLayout,
        *,
        reads: Sequence[ReadKey],
        capacity: int = 0,
    ) -> HostPlan:
        """capacity: 0, or decodes only, padded to so many; then plans of one capacity have the same sections
        up to the block tables, which come last, so that one can be copied over another."""
        sections = _Sections()
        spans, slots = layout.spans, _slots(layout.spans, self._geometry.block_tokens)
        starts, tables = _tables(spans)
        if capacity:
            padding = capacity - len(spans)
            # Padding reads no keys and writes none.
            spans = (*spans, *(Span(-1, 1, ()) for _ in range(padding)))
            starts.extend([0] * padding)
        slot_section = sections.add(slots, room=capacity, fill=-1)
        made = {key: tuple(self._launches(sections, spans, starts, key, capacity)) for key in reads}
        # Last, for it is what differs in length between plans of one capacity.
        table_section = sections.add(tables)
        return HostPlan(sections.joined(), slot_section, table_section, made, layout)

    def _launches(
        self,
        sections: _Sections,
        spans: Sequence[Span],
        starts: Sequence[int],
        key: ReadKey,
        capacity: int,
    ) -> list[HostLaunch]:
        window, group = key
        shape = AttentionShape(self._geometry, group)
        by_breadth: dict[Breadth, list[int]] = {}
        for i, span in enumerate(spans):
            by_breadth.setdefault(breadth_of(span, group), []).append(i)
        rows = np.cumsum([0, *(span.token_count for span in spans)])
        launches: list[HostLaunch] = []
        for breadth, members in by_breadth.items():
            tile = attention_tile(shape, self._facts, breadth)
            pairs = self._geometry.kv_head_count * -(-group // tile.heads)
            budget = program_budget(breadth, self._facts.sm_count, pairs, tile.warps)
            made = make_tasks(
                [spans[i] for i in members],
                [int(rows[i]) for i in members],
                [starts[i] for i in members],
                tile=tile,
                breadth=breadth,
                window=window,
                budget=budget,
            )
            launches.append(_add_launch(sections, tile, made, capacity, budget))
        return launches


def _add_launch(
    sections: _Sections, tile: AttentionTile, made: Tasks, capacity: int, budget: int
) -> HostLaunch:
    # `attention_plan` splits no further than the budget, and never below one task per tile.
    tasks = max(capacity, budget) if capacity else 0
    return HostLaunch(
        tile,
        sections.add(made.tasks, room=tasks * TASK_FIELDS),
        sections.add(made.merges, room=capacity * MERGE_FIELDS),
        max(made.slot_count, tasks),
    )


def _slots(spans: Sequence[Span], block_tokens: int) -> npt.NDArray[np.int64]:
    """Slot of each token in the pool."""
    parts: list[npt.NDArray[np.int64]] = []
    for span in spans:
        if span.token_count == 1:
            block = span.block_ids[span.first_position // block_tokens]
            parts.append(np.array([block * block_tokens + span.first_position % block_tokens]))
            continue
        positions = np.arange(span.first_position, span.context_tokens, dtype=np.int64)
        table = np.asarray(span.block_ids, dtype=np.int64)
        parts.append(table[positions // block_tokens] * block_tokens + positions % block_tokens)
    return np.concatenate(parts)


def _tables(spans: Sequence[Span]) -> tuple[list[int], npt.NDArray[np.int64]]:
    """(start of each sequence's block ids, all of them)."""
    lengths = [len(span.block_ids) for span in spans]
    starts = np.cumsum([0, *lengths])
    ids = np.fromiter(chain.from_iterable(span.block_ids for span in spans), np.int64, int(starts[-1]))
    return starts[:-1].tolist(), ids


def upload(ints: Int32Array, device: torch.device) -> Tensor:
    """See `to_device`."""
    host = torch.from_numpy(ints)
    return to_device(host, device) if device.type == "cuda" else host
