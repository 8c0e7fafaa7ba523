"""Orders from the leader of a worker to followers that may be on other hosts, and their reports to it.

They are what `engine.parallel.order_channel` has within a host, over TCP. The next plan is sent while the
followers execute this one: it waits in the connection.
"""

import time

import msgspec

from baton.wire.options import MESSAGE_BYTES_MAX
from engine.parallel.mesh import FrameLimit, Mesh, OverMesh
from engine.parallel.order_codec import OrderDecoder, OrderEncoder
from engine.parallel.orders import FollowerReport, RankOrder, shortened

LEADER = 0
ORDER = FrameLimit("an order", 4 * MESSAGE_BYTES_MAX)
"""All that a plan says of a sequence came to the worker in one message, a prompt that it repeats included. A
plan repeats those only that sample their first token in it, of which a full batch stays far below this."""
REPORT = FrameLimit("a report", 64 * 1024)
"""Texts of reports are shortened to much less."""


class OrderStreamSender(OverMesh):
    """The leader's end, over a star. One thread may wait in `receive` while another sends."""

    def __init__(self, mesh: Mesh, *, deadline_s: float) -> None:
        super().__init__(mesh, deadline_s=deadline_s)
        self._encode = OrderEncoder().encode
        self._decode = msgspec.msgpack.Decoder(FollowerReport).decode

    def send(self, order: RankOrder) -> None:
        """Send to every follower, in order. It waits while a connection is full, at most until the deadline.
        Raises GroupBroken."""
        data, end_s = self._encode(order), time.monotonic() + self._deadline_s
        for rank in range(1, self._mesh.size):
            self._mesh.send_frame(rank, data, end_s, ORDER)

    def receive(self, *, timeout_s: float) -> tuple[int, FollowerReport] | None:
        """(rank, report) of the next report of any follower; None: there was none in time. Raises
        GroupBroken, at once if a follower dies."""
        found = self._mesh.receive_frame(timeout_s, self._deadline_s, REPORT)
        return None if found is None else (found[0], self._decode(found[1]))


class OrderStreamReceiver(OverMesh):
    """A follower's end, over a star. One thread may report while another waits in `receive`."""

    def __init__(self, mesh: Mesh, *, deadline_s: float) -> None:
        super().__init__(mesh, deadline_s=deadline_s)
        self._decode, self._encode = OrderDecoder().decode, msgspec.msgpack.Encoder().encode

    def receive(self, *, timeout_s: float) -> RankOrder | None:
        """The next order; None: there was none in time. Raises GroupBroken, at once if the leader dies."""
        found = self._mesh.receive_frame(timeout_s, self._deadline_s, ORDER)
        return None if found is None else self._decode(bytes(found[1]))

    def report(self, report: FollowerReport) -> None:
        """Tell the leader. Raises GroupBroken."""
        data, end_s = self._encode(shortened(report)), time.monotonic() + self._deadline_s
        self._mesh.send_frame(LEADER, data, end_s, REPORT)
