"""Orders from the leader of a worker to followers that may be on other hosts, and their reports to it.

They are what `engine.parallel.order_channel` has within a host, over TCP. The next plan is sent while the
followers execute this one: it waits in the connection.
"""

import time

import msgspec

from engine.parallel.mesh import Mesh
from engine.parallel.order_codec import OrderDecoder, OrderEncoder
from engine.parallel.orders import FollowerReport, RankOrder

LEADER = 0


class OrderStreamSender:
    """The leader's end. One thread may wait in `receive` while another sends."""

    def __init__(self, mesh: Mesh, *, deadline_s: float) -> None:
        """Take the mesh over, a star whose ranks need not all be there yet."""
        self._mesh, self._deadline_s = mesh, deadline_s
        self._encode = OrderEncoder().encode
        self._decode = msgspec.msgpack.Decoder(FollowerReport).decode

    @property
    def address(self) -> str:
        return self._mesh.address

    def wait_for_all(self, *, timeout_s: float) -> None:
        """Wait until every rank has joined. Raises GroupBroken."""
        self._mesh.wait_for_all(timeout_s)

    def send(self, order: RankOrder) -> None:
        """Send to every follower, in order. It waits while a connection is full, at most until the deadline.
        Raises GroupBroken."""
        data, end_s = self._encode(order), time.monotonic() + self._deadline_s
        for rank in range(1, self._mesh.size):
            self._mesh.send_frame(rank, data, end_s)

    def receive(self, *, timeout_s: float) -> tuple[int, FollowerReport] | None:
        """(rank, report) of the next report of any follower; None: there was none in time. Raises
        GroupBroken, at once if a follower dies."""
        found = self._mesh.receive_frame(timeout_s, self._deadline_s)
        return None if found is None else (found[0], self._decode(found[1]))

    def end_reason(self) -> str:
        """Why the stream is over; empty: it is not. Any thread may ask."""
        return self._mesh.end_reason()

    def abort(self, reason: str) -> None:
        self._mesh.abort(reason)

    def be_strict(self) -> None:
        """See `Mesh.be_strict`."""
        self._mesh.be_strict()

    def close(self) -> None:
        self._mesh.close()


class OrderStreamReceiver:
    """A follower's end. One thread may report while another waits in `receive`."""

    def __init__(self, mesh: Mesh, *, deadline_s: float) -> None:
        """Take the mesh over, a star whose ranks need not all be there yet."""
        self.rank = mesh.rank
        self._mesh, self._deadline_s = mesh, deadline_s
        self._decode, self._encode = OrderDecoder().decode, msgspec.msgpack.Encoder().encode

    def wait_for_all(self, *, timeout_s: float) -> None:
        """Wait until every rank has joined. Raises GroupBroken."""
        self._mesh.wait_for_all(timeout_s)

    def receive(self, *, timeout_s: float) -> RankOrder | None:
        """The next order; None: there was none in time. Raises GroupBroken, at once if the leader dies."""
        found = self._mesh.receive_frame(timeout_s, self._deadline_s)
        return None if found is None else self._decode(bytes(found[1]))

    def report(self, report: FollowerReport) -> None:
        """Tell the leader. Raises GroupBroken."""
        self._mesh.send_frame(LEADER, self._encode(report), time.monotonic() + self._deadline_s)

    def be_strict(self) -> None:
        """See `Mesh.be_strict`."""
        self._mesh.be_strict()

    def abort(self, reason: str) -> None:
        self._mesh.abort(reason)

    def close(self) -> None:
        self._mesh.close()
