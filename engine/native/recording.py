"""Calls into the library, recorded while a step is computed and made again in one call.

All modules call the library through `RecordableLibrary`, so whatever kernel is called while a tape is open is
on it: its address, and its arguments as the C interface takes them. Structures are copied as they are at the
time of the call. What pointers point to has to stay where it is for as long as the tape is replayed.
"""

import ctypes
import threading
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

_INTS_MAX = 16
_INTEGERS = (ctypes.c_int32, ctypes.c_int64, ctypes.c_int, ctypes.c_uint32, ctypes.c_uint64, ctypes.c_bool)


class NotRecordable(Exception):
    """Something that a step does could not be made again by a replay. The message says what."""


class _RecordedCall(ctypes.Structure):
    """`struct RecordedCall` in src/replay.cpp."""

    _fields_ = (
        ("function", ctypes.c_void_p),
        ("ints", ctypes.c_int64 * _INTS_MAX),
        ("real", ctypes.c_float),
        ("returns_status", ctypes.c_int32),
    )


WORD_BYTES = 8
CALL_WORDS = ctypes.sizeof(_RecordedCall) // WORD_BYTES


class Tape:
    """Calls of one thread, in order."""

    def __init__(self, *, is_dry: bool = False) -> None:
        """is_dry: calls are taken down and not made."""
        self.thread = threading.get_ident()
        self.is_dry = is_dry
        self._calls: list[_RecordedCall] = []
        self._names: list[str] = []
        self._kept: list[Any] = []
        """Copies of structures, and objects whose memory the calls refer to."""
        self._structures: list[tuple[int, int, ctypes.Structure]] = []
        """(call, which of its integers, copy): the integer is the copy's address."""

    def __len__(self) -> int:
        return len(self._calls)

    def add(self, name: str, function: Any, arguments: tuple[Any, ...]) -> None:
        """Raises NotRecordable: the function has arguments or a result of a kind that is not recorded."""
        types = function.argtypes
        if types is None or len(types) != len(arguments):
            raise NotRecordable(f"{name} declares no arguments")
        if function.restype not in (None, ctypes.c_int32, ctypes.c_int):
            raise NotRecordable(f"{name} returns more than a status")
        ints: list[int] = []
        reals: list[float] = []
        for kind, value in zip(types, arguments, strict=True):
            if kind is ctypes.c_float:
                reals.append(float(value))
            elif kind in _INTEGERS:
                ints.append(int(value))
            else:
                ints.append(self._address(name, kind, value, len(ints)))
        if len(ints) > _INTS_MAX or len(reals) > 1:
            raise NotRecordable(f"{name} has too many arguments")
        address = ctypes.cast(function, ctypes.c_void_p).value
        room = (*ints, *[0] * (_INTS_MAX - len(ints)))
        status = int(function.restype is not None)
        self._calls.append(_RecordedCall(address, room, reals[0] if reals else 0.0, status))
        self._names.append(name)

    def _address(self, name: str, kind: Any, value: Any, place: int) -> int:
        if value is None:
            return 0
        if isinstance(value, int):
            return value
        if isinstance(value, ctypes.Structure):
            copy = type(value).from_buffer_copy(value)
            self._kept.append(copy)
            self._structures.append((len(self._calls), place, copy))
            return ctypes.addressof(copy)
        if kind is ctypes.c_void_p and isinstance(value, ctypes.Array):
            self._kept.append(value)
            return ctypes.addressof(value)
        raise NotRecordable(f"{name} takes a {type(value).__name__}")

    def cut(self, native: "RecordableLibrary") -> "Replay | None":
        """The calls since the last cut; None: there are none."""
        if not self._calls:
            return None
        replay = Replay(native, self._calls, self._names, self._kept)
        self._calls, self._names, self._kept, self._structures = [], [], [], []
        return replay

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._names)

    @property
    def kept(self) -> tuple[Any, ...]:
        """What must live as long as the calls are made again."""
        return tuple(self._kept)

    @property
    def places(self) -> tuple[tuple[int, int], ...]:
        """Words of the calls that are addresses of structures, and the words of each structure."""
        own = [CALL_WORDS * call + 1 + place for call, place, _ in self._structures]
        sizes = [ctypes.sizeof(structure) // WORD_BYTES for *_, structure in self._structures]
        return tuple(zip(own, sizes, strict=True))

    def words(self) -> npt.NDArray[np.int64]:
        """The calls as C has them, then the structures that they refer to, whose addresses are 0."""
        calls = np.frombuffer(bytearray((_RecordedCall * len(self._calls))(*self._calls)), dtype=np.int64)
        for place, _ in self.places:
            calls[place] = 0
        structures = [np.frombuffer(bytes(structure), dtype=np.int64) for *_, structure in self._structures]
        return np.concatenate([calls, *structures])


def replay_function(native: "RecordableLibrary") -> Any:
    """`baton_replay` of src/replay.cpp."""
    function = native.raw("baton_replay")
    function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_int64], ctypes.c_int64
    return function


class Replay:
    """Calls that are made again, all in one."""

    def __init__(
        self, native: "RecordableLibrary", calls: list[_RecordedCall], names: list[str], kept: list[Any]
    ) -> None:
        """kept: what must live as long as the calls."""
        self._names, self._kept = names, kept
        self._count = len(calls)
        self._calls = (_RecordedCall * len(calls))(*calls)
        self._address = ctypes.addressof(self._calls)
        self._function = replay_function(native)

    def __len__(self) -> int:
        return self._count

    @property
    def memory_bytes(self) -> int:
        return ctypes.sizeof(self._calls)

    def __call__(self) -> None:
        """Make all calls. Raises NotRecordable: one of them failed, as it did not when it was recorded."""
        failed = self._function(self._address, self._count)
        if failed >= 0:
            raise NotRecordable(f"{self._names[failed]} failed in a replay")


class NativeFunction:
    """One exported function."""

    tape: ClassVar[Tape | None] = None
    """The tape that is open. Calls of other threads are not on it."""
    __slots__ = ("_function", "_name", "waits_for_ranks")

    def __init__(self, name: str, function: Any) -> None:
        self._name, self._function = name, function
        self.waits_for_ranks = False
        """Other ranks make the same call. While this thread records, it goes on the tape and is not made, so
        that each rank can record by itself."""

    def __call__(self, *arguments: Any) -> Any:
        tape = NativeFunction.tape
        if tape is not None and tape.thread == threading.get_ident():
            tape.add(self._name, self._function, arguments)
            if self.waits_for_ranks or tape.is_dry:
                return 0
        return self._function(*arguments)

    @classmethod
    def is_recording(cls) -> bool:
        """Whether this thread's calls are on a tape."""
        return cls.tape is not None and cls.tape.thread == threading.get_ident()

    @property
    def argtypes(self) -> Any:
        return self._function.argtypes

    @argtypes.setter
    def argtypes(self, types: Any) -> None:
        self._function.argtypes = types

    @property
    def restype(self) -> Any:
        return self._function.restype

    @restype.setter
    def restype(self, kind: Any) -> None:
        self._function.restype = kind


class RecordableLibrary:
    """A loaded library whose functions are attributes, as ctypes has them."""

    def __init__(self, native: ctypes.CDLL) -> None:
        self._native = native

    def __getattr__(self, name: str) -> NativeFunction:
        function = NativeFunction(name, getattr(self._native, name))
        setattr(self, name, function)
        return function

    def raw(self, name: str) -> Any:
        """The function itself, whose calls are on no tape."""
        return getattr(self._native, name)

    @property
    def path(self) -> Path:
        """The library's file, which is named after its sources, the compiler and the class of processors."""
        return Path(self._native._name)
