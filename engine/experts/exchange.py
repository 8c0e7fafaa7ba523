"""Slots and bells in memory that a caller and an expert rank both map; see native/src/expert_exchange.h."""

import contextlib
import ctypes
import mmap
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from engine.native.library import BF16, F32, library
from engine.native.recording import RecordableLibrary

_POINTER, _I32, _U32, _I64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_uint32, ctypes.c_int64

FREE, POSTED, TAKEN, FINISHED, REFUSED = range(5)
"""`enum SlotState`."""
ROW_F32, ROW_BF16, ROW_INT8 = range(3)
"""`enum RowKind`."""
SLOT_COUNT = 4
SLOT_BYTES = 4 * 2**20
"""The size that a slot has about, if rows are of usual size."""
_PAIRS_MIN, _PAIRS_MAX = 16, 2048
HEAD_BYTES = 128
"""`sizeof(SlotHead)`."""


@cache
def functions() -> RecordableLibrary:
    """Raises NativeUnavailable."""
    native = library()
    layout = [_I64, _I64, _I64, _I32, _I32]
    signatures: dict[str, tuple[Sequence[object], object]] = {
        "bell_bytes": ([], _I64),
        "bell_ring": ([_POINTER], None),
        "bell_beat": ([_POINTER], None),
        "bell_last_beat": ([_POINTER], _I64),
        "bell_count": ([_POINTER], _U32),
        "bell_wait": ([_POINTER, _U32, _I64], None),
        "slot_bytes": ([_I64, _I64, _I32, _I32], _I64),
        "slot_state": ([_POINTER], _U32),
        "slot_set_state": ([_POINTER, _U32], None),
        "caller_new": ([_POINTER], _POINTER),
        "caller_free": ([_POINTER], None),
        "caller_link": ([_POINTER, _I32, _POINTER, *layout, _POINTER], None),
        "caller_unlink": ([_POINTER, _I32], None),
        "caller_begin": (
            [*(_POINTER, _POINTER, _I64, _I64, _I32, _I64), *(_POINTER, _I64, _I32, _I64), *[_POINTER] * 3],
            _I64,
        ),
        "caller_reroute": ([_POINTER, _I64, _I64, _POINTER, _POINTER], _I64),
        "caller_finish": ([_POINTER, _I64, _I64, _POINTER], _I32),
        "caller_late": ([_POINTER, _I64, _I64, _POINTER, _I64], _I64),
        "caller_end": ([_POINTER, _I64], None),
        "caller_stats": ([_POINTER, _POINTER], None),
        "combine_rows": ([_POINTER, _POINTER, _I64, _I64, _I64, _I32, _POINTER], None),
        "rank_new": ([_POINTER, _I64, _I64, _I32, _I32, _I64], _POINTER),
        "rank_free": ([_POINTER], None),
        "rank_link": ([_POINTER, _I64, _POINTER, *layout, _POINTER], None),
        "rank_unlink": ([_POINTER, _I64], None),
        "rank_set": ([_POINTER, _I64, _I32, _POINTER, _POINTER], None),
        "rank_serve": ([_POINTER, _I64], _I32),
        "rank_take": ([_POINTER, _I64, _POINTER], _I64),
        "rank_rows": ([_POINTER, _I64, _POINTER, _POINTER, _POINTER], None),
        "rank_done": ([_POINTER, _POINTER, _I64, _I64], None),
        "rank_stats": ([_POINTER, _POINTER], None),
    }
    for name, (arguments, result) in signatures.items():
        function = getattr(native, f"baton_{name}")
        function.argtypes, function.restype = arguments, result
    return native


class MappedMemory:
    """A run of bytes in a memfd, so that another process can map it too."""

    def __init__(self, size: int, *, fd: int | None = None) -> None:
        """fd: of a memfd that somebody else has made, which is taken over; None: make one. Raises OSError,
        and ValueError if the memfd is too small."""
        if fd is None:
            fd = os.memfd_create("baton-experts", os.MFD_CLOEXEC)
            os.ftruncate(fd, size)
        self.fd = fd
        try:
            if os.fstat(fd).st_size < size:
                raise ValueError(f"{os.fstat(fd).st_size} bytes are shared, {size} are needed")
            self._map = mmap.mmap(fd, size)
        except BaseException:
            os.close(fd)
            raise
        self._view = ctypes.c_char.from_buffer(self._map)
        self.address = ctypes.addressof(self._view)

    def bytes_at(self, offset: int, size: int) -> memoryview:
        return memoryview(self._map)[offset : offset + size]

    def close(self) -> None:
        """Nobody may use the memory any more, views included."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            del self._view
            with contextlib.suppress(BufferError):  # views are left: the memory goes with the last one
                self._map.close()


class Bell:
    """Wakes the process that owns it, and shows its signs of life."""

    def __init__(self, *, fd: int | None = None) -> None:
        self._native = functions()
        self.memory = MappedMemory(self._native.baton_bell_bytes(), fd=fd)
        self.address = self.memory.address

    def ring(self) -> None:
        self._native.baton_bell_ring(self.address)

    def beat(self) -> None:
        """Show a sign of life."""
        self._native.baton_bell_beat(self.address)

    @property
    def last_beat(self) -> int:
        """A number that changes with every sign of life."""
        beat: int = self._native.baton_bell_last_beat(self.address)
        return beat

    @property
    def count(self) -> int:
        rings: int = self._native.baton_bell_count(self.address)
        return rings

    def wait(self, seen: int, timeout_s: float) -> None:
        """Return when the count is no longer `seen`, or after `timeout_s`."""
        self._native.baton_bell_wait(self.address, seen, int(timeout_s * 1e9))

    def close(self) -> None:
        self.memory.close()


@dataclass(frozen=True, slots=True)
class SlotLayout:
    """The sizes of a link's slots, which both sides compute from the same numbers."""

    hidden: int
    pairs_max: int
    slot_count: int
    row_kind: int
    result_kind: int

    @classmethod
    def of(cls, hidden: int, row_kind: int, result_kind: int) -> "SlotLayout":
        row = 4 * hidden if row_kind == ROW_F32 else 2 * hidden if row_kind == ROW_BF16 else hidden + 4
        pair = row + hidden * (4 if result_kind == F32 else 2) + 8
        pairs = min(max(SLOT_BYTES // pair, _PAIRS_MIN), _PAIRS_MAX)
        return cls(hidden, pairs, SLOT_COUNT, row_kind, result_kind)

    @property
    def slot_bytes(self) -> int:
        size: int = functions().baton_slot_bytes(self.hidden, self.pairs_max, self.row_kind, self.result_kind)
        return size

    @property
    def total_bytes(self) -> int:
        return self.slot_bytes * self.slot_count

    @property
    def row_bytes(self) -> int:
        sizes = {ROW_F32: 4 * self.hidden, ROW_BF16: 2 * self.hidden, ROW_INT8: self.hidden + 4}
        return _rounded(sizes[self.row_kind])

    @property
    def result_bytes(self) -> int:
        return _rounded((4 if self.result_kind == F32 else 2) * self.hidden)

    @property
    def list_bytes(self) -> int:
        return _rounded(4 * self.pairs_max)

    @property
    def numbers(self) -> tuple[int, int, int, int, int]:
        """Arguments of the native calls."""
        return self.hidden, self.pairs_max, self.slot_count, self.row_kind, self.result_kind

    def check(self, hidden: int) -> str:
        """Why a rank of a model with this hidden size cannot use the layout; empty: it can."""
        if self.hidden != hidden:
            return f"rows have {self.hidden} numbers, the model's hidden size is {hidden}"
        sane = (
            1 <= self.pairs_max <= _PAIRS_MAX
            and 1 <= self.slot_count <= 64
            and self.row_kind in (ROW_F32, ROW_BF16, ROW_INT8)
            and self.result_kind in (F32, BF16)
        )
        return "" if sane else f"no such slots: {self.numbers}"


class SlotView:
    """One slot, for those who carry it over a network."""

    def __init__(self, memory: MappedMemory, layout: SlotLayout, index: int) -> None:
        offset = index * layout.slot_bytes
        self._native, self._layout, self.index = functions(), layout, index
        self._head = memory.address + offset
        head = memory.bytes_at(offset, HEAD_BYTES)
        self._numbers = np.frombuffer(head, dtype=np.int32)
        self._times = np.frombuffer(head, dtype=np.int64)
        start = offset + HEAD_BYTES
        self.row_of = memory.bytes_at(start, 4 * layout.pairs_max)
        self.experts = memory.bytes_at(start + layout.list_bytes, 4 * layout.pairs_max)
        start += 2 * layout.list_bytes
        self.rows = memory.bytes_at(start, layout.pairs_max * layout.row_bytes)
        start += layout.pairs_max * layout.row_bytes
        self.results = memory.bytes_at(start, layout.pairs_max * layout.result_bytes)

    @property
    def state(self) -> int:
        state: int = self._native.baton_slot_state(self._head)
        return state

    @state.setter
    def state(self, state: int) -> None:
        self._native.baton_slot_set_state(self._head, state)

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Layer, rows, pairs, refused expert."""
        layer, rows, pairs, refused = self._numbers[1:5].tolist()
        return layer, rows, pairs, refused

    def set_sizes(self, layer: int, rows: int, pairs: int, refused: int = -1) -> None:
        self._numbers[1:5] = (layer, rows, pairs, refused)

    def stamp(self) -> None:
        """Note the time at which it is posted, by which ranks choose what to compute first."""
        self._times[3] = time.monotonic_ns()


Rows = npt.NDArray[np.int32]


def _rounded(size: int) -> int:
    return -(-size // 64) * 64
