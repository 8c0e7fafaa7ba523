"""Orders from the leader of a worker to the followers of the same host, and their reports to it.

Followers take orders from a ring in shared memory, so that the leader sends the next plan while they execute
this one. Sending waits only while the ring is full.
"""

import ctypes
from functools import cache

import msgspec

from engine.native.recording import RecordableLibrary
from engine.parallel.order_codec import OrderDecoder, OrderEncoder
from engine.parallel.orders import FollowerReport, RankOrder
from engine.parallel.segment import OverSegment, Segment, SegmentSizes, functions, nanoseconds

PLAN_BYTES = 4 * 2**20
"""A ring of so many bytes holds hundreds of plans. A larger plan passes through it in pieces."""
REPORT_BYTES = 256 * 1024
_POINTER, _I32, _I64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
_NOTHING = -2
"""TIMED_OUT in native/src/segment.h."""


@cache
def _functions() -> RecordableLibrary:
    native = functions()
    native.baton_plan_send.argtypes = [_POINTER, _POINTER, _I64, _I64]
    native.baton_plan_next.argtypes, native.baton_plan_next.restype = [_POINTER, _I64], _I64
    native.baton_plan_read.argtypes = [_POINTER, _POINTER, _I64, _I64]
    native.baton_report_send.argtypes = [_POINTER, _POINTER, _I64, _I64]
    native.baton_report_next.argtypes, native.baton_report_next.restype = [_POINTER, _POINTER, _I64], _I64
    native.baton_report_read.argtypes = [_POINTER, _I32, _POINTER, _I64, _I64]
    for name in ("plan_send", "plan_read", "report_send", "report_read"):
        getattr(native, f"baton_{name}").restype = _I32
    return native


class _Buffer:
    """Memory that is kept from message to message."""

    def __init__(self) -> None:
        self._bytes = bytearray(64 * 1024)
        self.pointer = self._locate()

    def view(self, size: int) -> memoryview:
        if size > len(self._bytes):
            self._bytes = bytearray(2 * size)
            self.pointer = self._locate()
        return memoryview(self._bytes)[:size]

    def _locate(self) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(self._bytes))


class OrderSender(OverSegment):
    """The leader's end. One thread may wait in `receive` while another sends."""

    def __init__(self, segment: Segment, *, deadline_s: float) -> None:
        super().__init__(segment, deadline_s=deadline_s)
        native = _functions()
        self._send, self._next, self._read = (
            *(native.baton_plan_send, native.baton_report_next),
            native.baton_report_read,
        )
        self._encode = OrderEncoder().encode
        self._decode = msgspec.msgpack.Decoder(FollowerReport).decode
        self._buffer, self._from = _Buffer(), ctypes.c_int()

    @classmethod
    def create(cls, ranks: int, *, deadline_s: float, plan_bytes: int = PLAN_BYTES) -> "OrderSender":
        """Make the channel of a leader and `ranks - 1` followers. Raises SetupError."""
        sizes = SegmentSizes(ranks, ring_bytes=REPORT_BYTES, plan_bytes=plan_bytes)
        return cls(Segment.create(sizes), deadline_s=deadline_s)

    def send(self, order: RankOrder) -> None:
        """Send to every follower, in order. It waits while the ring is full, at most until the deadline.
        Raises GroupBroken."""
        data = self._encode(order)
        self._segment.call(self._send, data, len(data), self._timeout_ns)

    def receive(self, *, timeout_s: float) -> tuple[int, FollowerReport] | None:
        """(rank, report) of the next report of any follower; None: there was none in time. Raises
        GroupBroken, at once if a follower dies."""
        size = self._segment.call_aside(self._next, ctypes.byref(self._from), nanoseconds(timeout_s))
        if size == _NOTHING:
            return None
        rank, data = self._from.value, self._buffer.view(size)
        self._segment.call_aside(self._read, rank, self._buffer.pointer, size, self._timeout_ns)
        return rank, self._decode(data)


class OrderReceiver(OverSegment):
    """A follower's end. One thread may report while another waits in `receive`."""

    def __init__(self, segment: Segment, *, deadline_s: float) -> None:
        super().__init__(segment, deadline_s=deadline_s)
        native = _functions()
        self._decode = OrderDecoder().decode
        self._next, self._read, self._send = (
            *(native.baton_plan_next, native.baton_plan_read),
            native.baton_report_send,
        )
        self._encode = msgspec.msgpack.Encoder().encode
        self._buffer = _Buffer()

    @classmethod
    def join(cls, address: str, rank: int, *, deadline_s: float) -> "OrderReceiver":
        """Join the channel that rank 0 of this host has made. Raises SetupError."""
        return cls(Segment.join(address, rank), deadline_s=deadline_s)

    def receive(self, *, timeout_s: float) -> RankOrder | None:
        """The next order; None: there was none in time. Raises GroupBroken, at once if the leader dies."""
        size = self._segment.call(self._next, nanoseconds(timeout_s))
        if size == _NOTHING:
            return None
        data = self._buffer.view(size)
        self._segment.call(self._read, self._buffer.pointer, size, self._timeout_ns)
        return self._decode(data)

    def report(self, report: FollowerReport) -> None:
        """Tell the leader. Raises GroupBroken."""
        data = self._encode(report)
        self._segment.call_aside(self._send, data, len(data), self._timeout_ns)
