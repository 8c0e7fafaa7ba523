"""Memory that the ranks of one host share. It has no name, so nothing stays behind, however they end.

Rank 0 makes it as a memfd, and the others open it through /proc by the address that they are told: they run
as the same user in the same process namespace. It is gone with the last process that has it.
"""

import ctypes
import fcntl
import mmap
import os
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from baton.core.errors import SetupError
from baton.core.shape import RANKS_MAX
from engine.native.build import NativeUnavailable
from engine.native.library import library
from engine.native.recording import NotRecordable, RecordableLibrary
from engine.parallel.group import GroupBroken

_POINTER, _I32, _I64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
_UNIT_BYTES = 64
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_TOKEN_BYTES = 16
_BROKEN = -1
"""`enum Outcome` in native/src/segment.h."""
_CLOSED = "this rank has left the group"
SPIN_S, YIELD_S = 50e-6, 300e-6
"""A rank that waits spins for so long, then lets others run for so long, then sleeps. A sleeper takes some
50 µs to wake up, which is more than an all-reduce of a small step takes. Where others keep the core for
milliseconds, a rank sleeps at once."""
SPIN_SHARED_S = 1e-6
"""The time to spin where there are more ranks than cores: the peer may need this very core."""


@dataclass(frozen=True, slots=True)
class SegmentSizes:
    """The parts of a segment. Zero leaves a part out."""

    ranks: int
    chunk_bytes: int = 0
    """A collective moves at most this many bytes of each rank in one step."""
    ring_bytes: int = 0
    """What one rank may have sent to another that it has not received."""
    plan_bytes: int = 0
    """What the leader may have sent that some follower has not received."""

    def __post_init__(self) -> None:
        if not 1 <= self.ranks <= RANKS_MAX:
            raise ValueError(f"{self.ranks} ranks share memory: 1 to {RANKS_MAX} can")
        for part in (self.chunk_bytes, self.ring_bytes, self.plan_bytes):
            if part < 0 or part % _UNIT_BYTES:
                raise ValueError(f"{part} bytes are no multiple of {_UNIT_BYTES}")
        if 0 < self.chunk_bytes < 4 * self.ranks:
            raise ValueError(
                f"a chunk of {self.chunk_bytes} bytes has no room for parts of {self.ranks} ranks"
            )


@cache
def functions() -> RecordableLibrary:
    native = library()
    sizes = [_I64] * 4
    native.baton_segment_bytes.argtypes, native.baton_segment_bytes.restype = sizes, _I64
    native.baton_segment_rings.argtypes, native.baton_segment_rings.restype = [_I64] * 3, _I64
    native.baton_ring_place.argtypes, native.baton_ring_place.restype = [_POINTER, _I32, _POINTER], None
    native.baton_segment_format.argtypes, native.baton_segment_format.restype = (
        [_POINTER, _POINTER, *sizes],
        None,
    )
    native.baton_segment_join.argtypes = [_POINTER, _I64, _POINTER, _I32, *[_I64] * 3, _POINTER]
    native.baton_segment_join.restype = _POINTER
    native.baton_segment_wait.argtypes, native.baton_segment_wait.restype = [_POINTER, _I64], _I32
    native.baton_segment_abort.argtypes, native.baton_segment_abort.restype = (
        [_POINTER, ctypes.c_char_p],
        None,
    )
    for name in ("leave", "free"):
        function = getattr(native, f"baton_segment_{name}")
        function.argtypes, function.restype = [_POINTER], None
    native.baton_segment_reason.argtypes, native.baton_segment_reason.restype = [_POINTER], ctypes.c_char_p
    native.baton_segment_sizes.argtypes, native.baton_segment_sizes.restype = [_POINTER, _POINTER], None
    native.baton_segment_is_over.argtypes, native.baton_segment_is_over.restype = [_POINTER, _POINTER], _I32
    return native


class Segment:
    """One rank's mapping of the shared memory. Made by `create` on rank 0 and by `join` on the others."""

    def __init__(self, fd: int, rank: int, token: bytes) -> None:
        """Take the descriptor over. Raises SetupError."""
        self._fd, self.rank, self._token = fd, rank, token
        self._native = functions()
        self._memory: mmap.mmap | None = None
        self._endpoint: int | None = None
        self._in_call, self._in_call_aside = threading.Lock(), threading.Lock()
        self._in_abort = threading.Lock()
        self._stopped_since_ns = (_I64 * RANKS_MAX)()
        try:
            self._memory = mmap.mmap(fd, 0)
            self._endpoint = self._join()
            found = (_I64 * 4)()
            self._native.baton_segment_sizes(self._endpoint, found)
            self.sizes = SegmentSizes(*found)
        except (OSError, ValueError) as error:
            self._unmap()
            raise SetupError(f"the ranks' shared memory cannot be mapped: {error}") from error
        except SetupError:
            self._unmap()
            raise

    @classmethod
    def create(cls, sizes: SegmentSizes) -> "Segment":
        """Make the memory and join it as rank 0. Raises SetupError."""
        arguments = (sizes.ranks, sizes.chunk_bytes, sizes.ring_bytes, sizes.plan_bytes)
        try:
            native = functions()
        except NativeUnavailable as error:
            raise SetupError(
                f"ranks share memory through the native kernels, which are not here: {error}"
            ) from error
        token = secrets.token_bytes(_TOKEN_BYTES)
        fd = -1
        try:
            fd = os.memfd_create("baton-ranks", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(fd, native.baton_segment_bytes(*arguments))
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            # Pages that the system lacks are an error here, and would be a signal later.
            os.posix_fallocate(
                fd, 0, native.baton_segment_rings(sizes.ranks, sizes.chunk_bytes, sizes.plan_bytes)
            )
            with mmap.mmap(fd, 0) as memory:
                base = ctypes.c_char.from_buffer(memory)
                native.baton_segment_format(ctypes.addressof(base), token, *arguments)
                del base
        except OSError as error:
            if fd >= 0:
                os.close(fd)
            raise SetupError(f"no memory to share between {sizes.ranks} ranks: {error.strerror}") from error
        return cls(fd, 0, token)

    @classmethod
    def join(cls, address: str, rank: int) -> "Segment":
        """Map the memory behind `address`, which rank 0 has made. Raises SetupError."""
        try:
            functions()
            process, descriptor, token = address.split(".")
            fd = os.open(f"/proc/{int(process)}/fd/{int(descriptor)}", os.O_RDWR | os.O_CLOEXEC)
            return cls(fd, rank, bytes.fromhex(token))
        except NativeUnavailable as error:
            raise SetupError(
                f"ranks share memory through the native kernels, which are not here: {error}"
            ) from error
        except ValueError as error:
            raise SetupError(f'"{address}" is no address of memory that ranks share') from error
        except OSError as error:
            raise SetupError(
                f"rank {rank} cannot open the memory of rank 0 ({error.strerror}): ranks that share memory "
                "run on one host, as one user, in one process namespace, and rank 0 must be alive"
            ) from error

    @property
    def address(self) -> str:
        """What the other ranks of this host are told. It holds as long as this process does."""
        return f"{os.getpid()}.{self._fd}.{self._token.hex()}"

    def wait_for_all(self, timeout_s: float) -> None:
        """Wait until every rank has joined. Raises GroupBroken."""
        self.call(self._native.baton_segment_wait, nanoseconds(timeout_s))

    def call(self, function: Callable[..., int], *arguments: object) -> int:
        """function(endpoint, *arguments), one call at a time. Raises GroupBroken if the group is over."""
        with self._in_call:
            return self._run(function, arguments)

    def replay(self, calls: Callable[[], None]) -> None:
        """Let `calls` make recorded calls again, with nobody else's between them. Raises GroupBroken if they
        fail because the group is over."""
        with self._in_call:
            if self._endpoint is None:
                raise GroupBroken(_CLOSED)
            try:
                calls()
            except NotRecordable:
                text: bytes = self._native.baton_segment_reason(self._endpoint)
                if text:
                    raise GroupBroken(text.decode(errors="replace")) from None
                raise

    def call_aside(self, function: Callable[..., int], *arguments: object) -> int:
        """A call like `call`, which may run while one of those does."""
        with self._in_call_aside:
            return self._run(function, arguments)

    def _run(self, function: Callable[..., int], arguments: tuple[object, ...]) -> int:
        if self._endpoint is None:
            raise GroupBroken(_CLOSED)
        result = function(self._endpoint, *arguments)
        if result == _BROKEN:
            text: bytes = self._native.baton_segment_reason(self._endpoint)
            raise GroupBroken(text.decode(errors="replace"))
        return result

    def reserve_ring(self, to: int) -> None:
        """Take the pages of the ring from this rank to another. Raises GroupBroken."""
        with self._in_call:
            if self._fd < 0:
                raise GroupBroken(_CLOSED)
            place = (_I64 * 2)()
            self._native.baton_ring_place(self._endpoint, to, place)
            try:
                os.posix_fallocate(self._fd, *place)
            except OSError as error:
                raise GroupBroken(f"no memory for what rank {self.rank} sends: {error.strerror}") from error

    def end_reason(self) -> str:
        """Why the group is over, by a look at every rank; empty: it is not. Other threads may ask."""
        return self._look(None)

    def watch(self) -> str:
        """What `end_reason` says, and a rank that is seen stopped for a while ends the group too. Whoever
        calls it does so several times a second, as long as it waits for something."""
        return self._look(self._stopped_since_ns)

    def _look(self, stopped_since_ns: "ctypes.Array[ctypes.c_int64] | None") -> str:
        with self._in_abort:
            if self._endpoint is None:
                return _CLOSED
            if not self._native.baton_segment_is_over(self._endpoint, stopped_since_ns):
                return ""
            text: bytes = self._native.baton_segment_reason(self._endpoint)
            return text.decode(errors="replace")

    def abort(self, reason: str) -> None:
        with self._in_abort:
            if self._endpoint is not None:
                self._native.baton_segment_abort(self._endpoint, reason.encode())

    def close(self) -> None:
        with self._in_abort:
            if self._endpoint is None:
                return
            self._native.baton_segment_leave(self._endpoint)
            with self._in_call, self._in_call_aside:  # calls in progress end, because this rank has left
                endpoint, self._endpoint = self._endpoint, None
                self._native.baton_segment_free(endpoint)
                self._unmap()

    def _join(self) -> int:
        assert self._memory is not None
        base = ctypes.c_char.from_buffer(self._memory)
        failure = _I32()
        endpoint = self._native.baton_segment_join(
            *(ctypes.addressof(base), len(self._memory), self._token, self.rank),
            *(nanoseconds(SPIN_S), nanoseconds(SPIN_SHARED_S), nanoseconds(YIELD_S), ctypes.byref(failure)),
        )
        if endpoint is None:
            reason = (
                "has been joined before" if failure.value == 2 else "is not in this memory, or it is not ours"
            )
            raise SetupError(f"rank {self.rank} {reason}")
        return endpoint

    def _unmap(self) -> None:
        if self._memory is not None:
            self._memory.close()
        os.close(self._fd)
        self._memory, self._fd = None, -1


class OverSegment:
    """What a rank carries over a segment, which it takes over. Its ranks need not all be there yet."""

    def __init__(self, segment: Segment, *, deadline_s: float) -> None:
        self._segment, self._timeout_ns = segment, nanoseconds(deadline_s)
        self.rank = segment.rank

    @property
    def address(self) -> str:
        return self._segment.address

    def wait_for_all(self, *, timeout_s: float) -> None:
        """Wait until every rank has joined. Raises GroupBroken."""
        self._segment.wait_for_all(timeout_s)

    def end_reason(self) -> str:
        """Why the group is over, by a look at every rank; empty: it is not. Any thread may ask."""
        return self._segment.end_reason()

    def watch(self) -> str:
        """See `Segment.watch`."""
        return self._segment.watch()

    def settle(self) -> None:
        """Calls have ended when they return."""

    def be_strict(self) -> None:
        """Ranks of one host are watched alike from the start."""

    def abort(self, reason: str) -> None:
        self._segment.abort(reason)

    def close(self) -> None:
        self._segment.close()


def nanoseconds(span_s: float) -> int:
    return int(span_s * 1e9)
