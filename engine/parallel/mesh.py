"""Connections between all ranks of a group on several hosts: what memory is to ranks of one host.

Rank 0 listens, and the others find each other through it. Between two ranks there is a connection for
messages, one for collectives where one of them is rank 0, and one for the pulse (`engine.parallel.pulse`),
which tells at once that a rank has died, gave up or left, and soon that it does not answer. Orders need a
star: connections with rank 0 only.
"""

import os
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Iterable
from enum import StrEnum, auto
from typing import NamedTuple, NoReturn

import msgspec

from baton.core.errors import PeerFailure, SetupError
from baton.core.shape import RANKS_MAX
from baton.wire.address import host_port, reachable_host, split_address
from engine.parallel.group import GroupBroken
from engine.parallel.lines import LineEnded, RankLine, wait_for
from engine.parallel.meeting import TOKEN_BYTES, Door, Greeting, MeetingPlace, greet
from engine.parallel.pulse import SILENCE_S, Pulse

LEFT = "this rank has left the group"
VERDICT_S = 1.0
"""The longest time from the end of a connection until the pulse says why."""
JOIN_GRACE_S = 0.5
"""Rank 0 knows which rank is missing. The others give it this much time to say so."""
_SIZE = struct.Struct("<I")
_ADDRESSES_BYTES_MAX = 300 * RANKS_MAX


class FrameLimit(NamedTuple):
    """The size of a kind of message. Whoever would send more breaks the group, and so does whoever is told
    of more."""

    name: str
    byte_count: int


class Purpose(StrEnum):
    PULSE = auto()
    MESSAGES = auto()
    COLLECTIVES = auto()


def purposes(one: int, other: int, *, is_star: bool) -> tuple[Purpose, ...]:
    """The connections between two ranks. In a star only rank 0 has any, and there are no collectives."""
    if 0 not in (one, other):
        return () if is_star else (Purpose.PULSE, Purpose.MESSAGES)
    return (Purpose.PULSE, Purpose.MESSAGES) if is_star else tuple(Purpose)


class Mesh:
    """One rank's connections. Made by `create` on rank 0 and by `join` on the others, and whole after
    `wait_for_all`. One thread may send while another receives."""

    def __init__(
        self, rank: int, place: MeetingPlace, door_host: str, *, silence_s: float, is_star: bool
    ) -> None:
        """Raises SetupError."""
        self._is_star = is_star
        self.rank, self.size = rank, 0
        self._lines: dict[tuple[int, Purpose], RankLine] = {}
        self._here = ""
        """The address at which this rank listens."""
        self._addresses: dict[int, str] = {}
        """Addresses at which other ranks listen, as rank 0 is told."""
        self._changed = threading.Condition()
        self._over = self._farewell = ""
        self._is_closed = False
        self._sending, self._receiving = threading.Lock(), threading.Lock()
        self._door = Door(door_host, place.token, self._arrived)
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        """Readable once the group is over."""
        self.place = place if rank else msgspec.structs.replace(place, port=self._door.port)
        # The leader of a star goes on with those who are still there.
        is_final = bool(rank) or not is_star
        self._pulse = Pulse(self._end, self._say_left, silence_s=silence_s, is_farewell_final=is_final)

    @classmethod
    def create(
        cls, size: int, *, host: str, reached_at: str, silence_s: float = SILENCE_S, is_star: bool = False
    ) -> "Mesh":
        """Begin a group of `size` ranks, as rank 0. It listens on `host`, and others reach it at
        `reached_at`. Raises SetupError."""
        if not 1 <= size <= RANKS_MAX:
            raise ValueError(f"{size} ranks in a group: 1 to {RANKS_MAX} can be")
        place = MeetingPlace(reached_at, 0, secrets.token_bytes(TOKEN_BYTES))
        mesh = cls(0, place, host, silence_s=silence_s, is_star=is_star)
        mesh.size = size
        return mesh

    @classmethod
    def join(cls, address: str, rank: int, *, silence_s: float = SILENCE_S, is_star: bool = False) -> "Mesh":
        """Join the group that rank 0 has begun. Raises SetupError."""
        place = MeetingPlace.parse(address)
        first = host_port(place.host, place.port)
        here = reachable_host("::" if ":" in place.host else "0.0.0.0", towards=first)
        mesh = cls(rank, place, here, silence_s=silence_s, is_star=is_star)
        mesh._here = host_port(here, mesh._door.port)
        try:
            mesh._dial(0, first)
        except PeerFailure as error:
            mesh.close()
            raise SetupError(f"rank {rank} does not reach rank 0: {error}") from error
        return mesh

    @property
    def address(self) -> str:
        """What the other ranks are told, and nobody else: it is the permission to join."""
        return str(self.place)

    @property
    def host(self) -> str:
        """The address of this machine at which the other ranks reach it."""
        return split_address(self._here)[0] if self.rank else self.place.host

    def wait_for_all(self, timeout_s: float) -> None:
        """Wait until every rank has joined. Raises GroupBroken."""
        end_s = time.monotonic() + timeout_s
        if self.rank:
            end_s += JOIN_GRACE_S
            self._learn_addresses(end_s)
            for rank in range(1, self.rank) if not self._is_star else ():
                try:
                    self._dial(rank, self._addresses[rank])
                except PeerFailure as error:
                    self._give_up(f"rank {self.rank} does not reach rank {rank}: {error}")
        else:
            self._await_ranks(range(1, self.size), end_s)
            for rank in range(1, self.size):
                data = msgspec.msgpack.encode([self._addresses[r] for r in range(1, self.size)])
                self.send(rank, Purpose.MESSAGES, [_SIZE.pack(len(data)) + data], "joining", end_s)
        self._await_ranks(range(self.rank + 1, self.size), end_s)
        self._door.close()

    def _learn_addresses(self, end_s: float) -> None:
        head = bytearray(_SIZE.size)
        self.receive(0, Purpose.MESSAGES, memoryview(head), "joining", end_s)
        size: int = _SIZE.unpack(head)[0]
        self._check_size(0, size, _ADDRESSES_BYTES_MAX, "addresses")
        data = bytearray(size)
        self.receive(0, Purpose.MESSAGES, memoryview(data), "joining", end_s)
        try:
            addresses = msgspec.msgpack.decode(data, type=list[str])
        except msgspec.MsgspecError as error:
            self._give_up(f"rank 0 sends what are no addresses: {error}")
        count = len(addresses) + 1
        if not self.rank < count <= RANKS_MAX:
            self._give_up(f"rank 0 tells rank {self.rank} of {count} ranks: there are up to {RANKS_MAX}")
        self._addresses = dict(enumerate(addresses, start=1))
        self.size = count

    def _await_ranks(self, ranks: Iterable[int], end_s: float) -> None:
        def missing() -> list[int]:
            wanted = [
                (rank, purpose)
                for rank in ranks
                for purpose in purposes(self.rank, rank, is_star=self._is_star)
            ]
            return [rank for rank, purpose in wanted if (rank, purpose) not in self._lines]

        with self._changed:
            self._changed.wait_for(lambda: self._over or not missing(), end_s - time.monotonic())
            late = missing()
        self.check()
        if late:
            self._give_up(f"rank {late[0]} did not join in time")

    def _dial(self, rank: int, address: str) -> None:
        """Raises PeerFailure."""
        for purpose in purposes(self.rank, rank, is_star=self._is_star):
            made = greet(address, Greeting(self.place.token, self.rank, purpose, self._here))
            if not self._take(rank, purpose, made):
                made.close()

    def _arrived(self, greeting: Greeting, made: socket.socket) -> bool:
        if greeting.purpose not in set(Purpose):
            return False
        if not self.rank < greeting.rank < (self.size or RANKS_MAX):
            return False
        with self._changed:
            self._addresses.setdefault(greeting.rank, greeting.address)
        return self._take(greeting.rank, Purpose(greeting.purpose), made)

    def _take(self, rank: int, purpose: Purpose, made: socket.socket) -> bool:
        with self._changed:
            if self._is_closed or (rank, purpose) in self._lines:
                return False
            line = self._lines[rank, purpose] = RankLine(made)
            if purpose is Purpose.PULSE:
                self._pulse.add(rank, line)
            self._changed.notify_all()
            return True

    # --- bytes --------------------------------------------------------------------------------------

    def send(
        self, peer: int, purpose: Purpose, pieces: Iterable[bytes | memoryview], call: str, end_s: float
    ) -> None:
        """Send all bytes to a rank until `end_s`. Raises GroupBroken."""
        with self._sending:
            line = self._line(peer, purpose)
            for piece in pieces:
                rest = memoryview(piece)
                while rest:
                    self.check()
                    try:
                        count = line.send_some(rest)
                    except LineEnded:
                        self._explain(peer)
                    else:
                        rest = rest[count:]
                        if not count:
                            self._wait(line, select.POLLOUT, peer, call, end_s)

    def receive(self, peer: int, purpose: Purpose, into: memoryview, call: str, end_s: float) -> None:
        """Fill `into` with bytes of a rank until `end_s`. Raises GroupBroken."""
        with self._receiving:
            self.check()
            self._fill(peer, self._line(peer, purpose), into, call, end_s)

    def _fill(self, peer: int, line: RankLine, into: memoryview, call: str, end_s: float) -> None:
        while into:
            try:
                count = line.receive_some(into)
            except LineEnded:
                self._explain(peer)
            else:
                into = into[count:]
                if not count:
                    self._wait(line, select.POLLIN, peer, call, end_s)

    def receive_frame(
        self, timeout_s: float, frame_s: float, limit: FrameLimit
    ) -> tuple[int, bytearray] | None:
        """The next message that begins with its length, and the rank that sent it: from any of them. None:
        there was none within `timeout_s`. One that has begun arrives within `frame_s`. What was sent before
        the group ended can be read. Raises GroupBroken."""
        until_s = time.monotonic() + timeout_s
        with self._receiving:
            while True:
                lines = {
                    line.fileno(): (rank, line)
                    for (rank, purpose), line in self._lines.items()
                    if purpose is Purpose.MESSAGES and not line.is_ended
                }
                wake = [] if self._is_closed else [(self._wake, select.POLLIN)]
                events = [*((descriptor, select.POLLIN) for descriptor in lines), *wake]
                ready = wait_for(events, until_s - time.monotonic())
                for rank, line in (lines[descriptor] for descriptor in sorted(ready & lines.keys())):
                    if (data := self._frame_of(rank, line, frame_s, limit)) is not None:
                        return rank, data
                self.check()
                if not ready or time.monotonic() > until_s:
                    return None

    def _frame_of(self, rank: int, line: RankLine, frame_s: float, limit: FrameLimit) -> bytearray | None:
        """The message of a rank that has sent something; None: it was no message. Raises GroupBroken."""
        head, end_s = bytearray(_SIZE.size), time.monotonic() + frame_s
        try:
            count = line.receive_some(memoryview(head))
        except LineEnded:
            with self._changed:  # after a farewell, others may still have something to say
                self._changed.wait_for(self.end_reason, VERDICT_S)
            if not self.end_reason():
                self.abort(f"rank {rank} has died")
            return None
        if not count:
            return None
        self._fill(rank, line, memoryview(head)[count:], limit.name, end_s)
        size: int = _SIZE.unpack(head)[0]
        self._check_size(rank, size, limit.byte_count, limit.name)
        data = bytearray(size)
        self._fill(rank, line, memoryview(data), limit.name, end_s)
        return data

    def send_frame(self, peer: int, data: bytes, end_s: float, limit: FrameLimit) -> None:
        """Send a message for `receive_frame`. Raises GroupBroken."""
        self.check_all_there()
        self._check_size(self.rank, len(data), limit.byte_count, limit.name)
        # One piece: TLS must not put two messages into one record, of which the second would not be noticed.
        self.send(peer, Purpose.MESSAGES, [_SIZE.pack(len(data)) + data], limit.name, end_s)

    def _check_size(self, sender: int, size: int, bytes_max: int, name: str) -> None:
        """Raises GroupBroken for more bytes than may be sent."""
        if size > bytes_max:
            self._give_up(f"rank {sender} sends {size} bytes as {name}, which may have at most {bytes_max}")

    def _line(self, peer: int, purpose: Purpose) -> RankLine:
        self.check()
        return self._lines[peer, purpose]

    def _wait(self, line: RankLine, event: int, peer: int, call: str, end_s: float) -> None:
        self.check()
        ready = wait_for([(line.fileno(), event), (self._wake, select.POLLIN)], end_s - time.monotonic())
        self.check()
        if not ready:
            self._give_up(f"rank {peer} was not there in time: rank {self.rank} waited in {call}")

    # --- ends ---------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises GroupBroken if the group is over."""
        if self._over:
            raise GroupBroken(self._over)

    def check_all_there(self) -> None:
        """Raises GroupBroken if the group is over, or a rank has left, so that no new call can end well."""
        if reason := self.end_reason():
            raise GroupBroken(reason)

    def end_reason(self) -> str:
        """Why the group is over; empty: it is not. Any thread may ask."""
        return self._over or self._farewell

    def be_strict(self) -> None:
        """Take a rank for lost that is silent for SILENCE_S, from now on. Any thread may call."""
        self._pulse.silence_s = SILENCE_S

    def abort(self, reason: str) -> None:
        if self._end(reason):
            self._pulse.abort(reason)

    def _give_up(self, reason: str) -> NoReturn:
        """Raises GroupBroken, with the reason that came first."""
        self.abort(reason)
        raise GroupBroken(self._over)

    def close(self) -> None:
        self._end(LEFT)
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
        self._pulse.leave()
        self._door.close()
        with self._sending, self._receiving:  # calls in progress end, because this rank has left
            for line in self._lines.values():
                line.close()
            os.close(self._wake)

    def _end(self, reason: str) -> bool:
        """Whether this is the first reason."""
        with self._changed:
            if self._over:
                return False
            self._over = reason or self._farewell
            os.eventfd_write(self._wake, 1)
            self._changed.notify_all()
            return True

    def _say_left(self, reason: str) -> None:
        with self._changed:
            self._farewell = self._farewell or reason
            self._changed.notify_all()

    def _explain(self, peer: int) -> None:
        """A connection has ended, and the pulse tells why. Raises GroupBroken."""
        with self._changed:
            self._changed.wait_for(self.end_reason, VERDICT_S)
            reason = self._farewell
        if reason:
            raise GroupBroken(self._over or reason)
        self._give_up(f"rank {peer} has died")


class OverMesh:
    """What a rank carries over a mesh, which it takes over. Its ranks need not all be there yet."""

    def __init__(self, mesh: Mesh, *, deadline_s: float) -> None:
        self._mesh, self._deadline_s = mesh, deadline_s
        self.rank = mesh.rank

    @property
    def address(self) -> str:
        return self._mesh.address

    @property
    def host(self) -> str:
        """The address of this machine at which the other ranks reach it."""
        return self._mesh.host

    def wait_for_all(self, *, timeout_s: float) -> None:
        """Wait until every rank has joined. Raises GroupBroken."""
        self._mesh.wait_for_all(timeout_s)

    def end_reason(self) -> str:
        """Why the group is over; empty: it is not. Any thread may ask."""
        return self._mesh.end_reason()

    def watch(self) -> str:
        """What `end_reason` says: the pulse looks for ranks that are stopped."""
        return self._mesh.end_reason()

    def settle(self) -> None:
        """Calls have ended when they return."""

    def be_strict(self) -> None:
        """See `Mesh.be_strict`."""
        self._mesh.be_strict()

    def abort(self, reason: str) -> None:
        self._mesh.abort(reason)

    def close(self) -> None:
        self._mesh.close()
