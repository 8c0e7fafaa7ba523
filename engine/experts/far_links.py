"""Links between a caller and an expert rank of another host, over TCP.

Both ends have slots of their own, of the same sizes. The caller's end plays the rank towards its process: it
takes what is posted, sends it, and marks a slot finished when the result has come. The rank's end plays the
caller. A link has two connections, one for each direction, since a TLS connection cannot be read and written
by two threads at once. Signs of life travel with the results, and each part of a result that arrives is one.
`far_door` accepts them.
"""

import contextlib
import logging
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Generator

import msgspec

from baton.core.errors import PeerFailure
from baton.core.experts import ExpertRankRef
from baton.wire import peer_sockets
from baton.wire.address import split_address
from engine.experts.doors import LinkHost
from engine.experts.exchange import (
    FINISHED,
    FREE,
    POSTED,
    REFUSED,
    TAKEN,
    Bell,
    MappedMemory,
    SlotLayout,
    SlotView,
)
from engine.experts.hello import CONNECT_S, HELLO_BYTES_MAX, LinkAnswer, LinkHello

log = logging.getLogger(__name__)

_HEAD = struct.Struct("<iiiii")
"""Slot (or _BEAT), layer, rows, pairs, refused expert or -1."""
_BEAT = -1
_LENGTH = struct.Struct("<I")
BEAT_S = 0.05
SEND_S = 30.0
"""The longest time that a send may take."""
WAIT_S = 0.25
"""A thread that waits for a bell looks this often whether the link is over."""
UNACKNOWLEDGED_S = 10.0
"""A connection ends when the other host has acknowledged nothing for so long: it is lost, or cut off."""


def send_message(made: socket.socket, data: bytes) -> None:
    made.sendall(_LENGTH.pack(len(data)) + data)


def receive_message(made: socket.socket, *, timeout_s: float) -> bytes:
    """Return a whole message, which must come within `timeout_s`. Raises OSError, and ValueError for a
    message that is too long."""
    until_s = time.monotonic() + timeout_s

    def receive(size: int) -> bytes:
        data = bytearray(size)
        done = 0
        while done < size:
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError(f"no whole greeting within {timeout_s:g} s")
            made.settimeout(left_s)
            count = made.recv_into(memoryview(data)[done:])
            if not count:
                raise ConnectionError("the other end closed the connection")
            done += count
        return bytes(data)

    (size,) = _LENGTH.unpack(receive(_LENGTH.size))
    if size > HELLO_BYTES_MAX:
        raise ValueError(f"a greeting of {size} bytes")
    return receive(size)


def receive_into(
    made: socket.socket, into: memoryview, on_progress: Callable[[], None] = lambda: None
) -> None:
    """Fill `into`, and call `on_progress` for each part that comes. Raises OSError, ConnectionError at the
    end of the stream included."""
    done = 0
    while done < len(into):
        count = made.recv_into(into[done:])
        if not count:
            raise ConnectionError("the other end closed the connection")
        done += count
        on_progress()


def end_connection(made: socket.socket) -> None:
    """Wake whoever sends or receives, with an error or the stream's end. The descriptor stays open."""
    with contextlib.suppress(OSError):
        # That of an SSLSocket would first have other threads go on without TLS.
        socket.socket.shutdown(made, socket.SHUT_RDWR)


def watch_for_loss(made: socket.socket) -> None:
    """Have the connection end when nothing is acknowledged. Raises OSError."""
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(UNACKNOWLEDGED_S * 1000))


class _End:
    """One end of a link: its slots and its threads."""

    def __init__(self, layout: SlotLayout, requests: socket.socket, results: socket.socket) -> None:
        self._layout, self._requests, self._results = layout, requests, results
        self.memory = MappedMemory(layout.total_bytes)
        self._slots = [SlotView(self.memory, layout, index) for index in range(layout.slot_count)]
        self._is_over = threading.Event()
        self._threads: list[threading.Thread] = []

    @contextlib.contextmanager
    def _memory_unless_done(self) -> Generator[contextlib.ExitStack]:
        """Give the memory back if the block raises, and what it adds."""
        with contextlib.ExitStack() as undo:
            undo.callback(self.memory.close)
            undo.callback(self._slots.clear)
            yield undo
            undo.pop_all()

    def _start(self, *loops: Callable[[], None]) -> None:
        for loop in loops:
            thread = threading.Thread(target=self._run, args=(loop,), name="experts-far", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _run(self, loop: Callable[[], None]) -> None:
        try:
            loop()
        except (OSError, ValueError) as error:
            self._end(str(error) or type(error).__name__)

    def _end(self, reason: str) -> None:
        """The link is over; threads notice."""
        self._is_over.set()
        for made in (self._requests, self._results):
            end_connection(made)

    def _close(self, bell: Bell) -> None:
        """bell: the one that a thread waits for."""
        self._end("this end was closed")
        bell.ring()
        for thread in self._threads:
            thread.join()
        self._requests.close()
        self._results.close()
        self._slots.clear()  # their views would keep the memory
        self.memory.close()
        bell.close()


class FarLink(_End):
    """The caller's end."""

    def __init__(
        self, layout: SlotLayout, requests: socket.socket, results: socket.socket, bell: Bell
    ) -> None:
        """bell: the caller's. Raises OSError."""
        super().__init__(layout, requests, results)
        self._callers_bell = bell
        with self._memory_unless_done() as undo:
            self.bell = Bell()
            """The one that is rung for this link's slots, in the rank's place."""
            undo.callback(self.bell.close)
            self._over, self._teller = os.pipe()
        self.bell_address = self.bell.address
        self.last_beat = 0
        """It changes with every sign of life."""
        self._reason = ""
        self._start(self._send_requests, self._receive_results)

    @classmethod
    def connect(cls, ref: ExpertRankRef, layout: SlotLayout, bell: Bell, *, caller: str) -> "FarLink":
        """Raises PeerFailure."""
        hello = LinkHello.of(layout, secret=ref.secret, caller=caller)
        hello = msgspec.structs.replace(hello, link=secrets.token_hex(8))
        made: list[socket.socket] = []
        try:
            host, port = split_address(ref.address)
            for carries_results in (False, True):
                one = peer_sockets.connect(host, port, timeout_s=CONNECT_S)
                made.append(one)
                watch_for_loss(one)
                own = msgspec.structs.replace(hello, carries_results=carries_results)
                send_message(one, msgspec.json.encode(own))
                answer = msgspec.json.decode(receive_message(one, timeout_s=CONNECT_S), type=LinkAnswer)
                if answer.refusal:
                    raise PeerFailure(f"expert rank {ref.rank_id} refuses rows: {answer.refusal}")
            requests, results = made
            requests.settimeout(SEND_S)
            results.settimeout(None)
            return cls(layout, requests, results, bell)
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            for one in made:
                one.close()
            raise PeerFailure(f"no connection to expert rank {ref.rank_id}: {error}") from error
        except PeerFailure:
            for one in made:
                one.close()
            raise

    def fileno(self) -> int:
        """Readable when the link is over."""
        return self._over

    def end_reason(self) -> str:
        return self._reason

    def close(self) -> None:
        """Nobody may use the slots any more."""
        self._close(self.bell)
        os.close(self._over)
        os.close(self._teller)

    def _end(self, reason: str) -> None:
        if not self._is_over.is_set():
            self._reason = reason
            os.write(self._teller, b"x")
        super()._end(reason)

    def _send_requests(self) -> None:
        while not self._is_over.is_set():
            seen = self.bell.count
            posted = [slot for slot in self._slots if slot.state == POSTED]
            for slot in posted:
                slot.state = TAKEN
                layer, rows, pairs, _ = slot.sizes
                self._requests.sendall(_HEAD.pack(slot.index, layer, rows, pairs, -1))
                self._requests.sendall(slot.row_of[: 4 * pairs])
                self._requests.sendall(slot.experts[: 4 * pairs])
                self._requests.sendall(slot.rows[: rows * self._layout.row_bytes])
            if not posted:
                self.bell.wait(seen, WAIT_S)

    def _receive_results(self) -> None:
        head = bytearray(_HEAD.size)
        while not self._is_over.is_set():
            receive_into(self._results, memoryview(head), self._count_beat)
            index, _, _, pairs, refused = _HEAD.unpack(head)
            if index == _BEAT:
                continue
            if not 0 <= index < len(self._slots) or self._slots[index].state != TAKEN:
                raise ValueError(f"a result for slot {index}, which waits for none")
            slot = self._slots[index]
            layer, rows, asked, _ = slot.sizes
            if pairs not in (0, asked):
                raise ValueError(f"{pairs} results for {asked} pairs")
            if pairs:
                results = slot.results[: pairs * self._layout.result_bytes]
                receive_into(self._results, results, self._count_beat)
                slot.state = FINISHED
            else:
                slot.set_sizes(layer, rows, asked, refused)
                slot.state = REFUSED
            self._callers_bell.ring()

    def _count_beat(self) -> None:
        self.last_beat += 1


class FarCaller(_End):
    """The rank's end."""

    def __init__(
        self, layout: SlotLayout, requests: socket.socket, results: socket.socket, host: LinkHost
    ) -> None:
        """Raises OSError."""
        super().__init__(layout, requests, results)
        self._host = host
        with self._memory_unless_done() as undo:
            self._bell = Bell()
            undo.callback(self._bell.close)
            self._number = host.open_link(layout, self.memory, self._bell)
        self._start(self._receive_requests, self._send_results)

    @property
    def is_over(self) -> bool:
        return self._is_over.is_set()

    def close(self) -> None:
        self._end("")
        self._host.close_link(self._number)
        self._close(self._bell)

    def _receive_requests(self) -> None:
        head = bytearray(_HEAD.size)
        most = self._layout.pairs_max
        while not self.is_over:
            receive_into(self._requests, memoryview(head))
            index, layer, rows, pairs, _ = _HEAD.unpack(head)
            if not 0 <= index < len(self._slots) or not 0 < rows <= pairs <= most:
                raise ValueError(f"a request of {rows} rows and {pairs} pairs for slot {index}")
            slot = self._slots[index]
            if slot.state != FREE:
                raise ValueError(f"a request for slot {index}, which is in use")
            receive_into(self._requests, slot.row_of[: 4 * pairs])
            receive_into(self._requests, slot.experts[: 4 * pairs])
            receive_into(self._requests, slot.rows[: rows * self._layout.row_bytes])
            slot.set_sizes(layer, rows, pairs)
            slot.stamp()
            slot.state = POSTED
            self._host.bell.ring()

    def _send_results(self) -> None:
        beat_s, told = 0.0, -1
        while not self.is_over:
            seen = self._bell.count
            for slot in self._slots:
                state = slot.state
                if state not in (FINISHED, REFUSED):
                    continue
                _, _, pairs, refused = slot.sizes
                sent = pairs if state == FINISHED else 0
                # Freed first: the caller may post to it as soon as it has the result.
                head, data = _HEAD.pack(slot.index, 0, 0, sent, refused), b""
                if sent:
                    data = bytes(slot.results[: sent * self._layout.result_bytes])
                slot.state = FREE
                self._results.sendall(head)
                if data:
                    self._results.sendall(data)
            now_s, beat = time.monotonic(), self._host.bell.last_beat
            if now_s >= beat_s and beat != told:  # the signs of life are the rank's, not this thread's
                self._results.sendall(_HEAD.pack(_BEAT, 0, 0, 0, -1))
                beat_s, told = now_s + BEAT_S, beat
            self._bell.wait(seen, BEAT_S)
