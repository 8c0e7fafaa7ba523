"""Links between a caller and an expert rank of another host, over TCP.

Both ends have slots of their own, of the same sizes. The caller's end plays the rank towards its process: it
takes what is posted, sends it, and marks a slot finished when the result has come. The rank's end plays the
caller. A link has two connections, one for each direction, since a TLS connection cannot be read and written
by two threads at once. Signs of life travel with the results.
"""

import contextlib
import logging
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from baton.core.errors import PeerFailure
from baton.core.experts import ExpertRankRef
from baton.wire import peer_sockets
from engine.experts.doors import CONNECTIONS_MAX, LinkHost
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
from engine.experts.hello import CONNECT_S, HELLO_BYTES_MAX, LinkAnswer, LinkHello, refusal

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
HALF_OPEN_S = 5.0
"""The longest time between the two connections of a link."""


def send_message(made: socket.socket, data: bytes) -> None:
    made.sendall(_LENGTH.pack(len(data)) + data)


def receive_message(made: socket.socket) -> bytes:
    """Raises OSError, and ValueError for a message that is too long."""
    head = bytearray(_LENGTH.size)
    receive_into(made, memoryview(head))
    (size,) = _LENGTH.unpack(head)
    if size > HELLO_BYTES_MAX:
        raise ValueError(f"a greeting of {size} bytes")
    data = bytearray(size)
    receive_into(made, memoryview(data))
    return bytes(data)


def receive_into(made: socket.socket, into: memoryview) -> None:
    """Raises OSError, ConnectionError at the end of the stream included."""
    done = 0
    while done < len(into):
        count = made.recv_into(into[done:])
        if not count:
            raise ConnectionError("the other end closed the connection")
        done += count


class _End:
    """One end of a link: its slots and its threads."""

    def __init__(self, layout: SlotLayout, requests: socket.socket, results: socket.socket) -> None:
        self._layout, self._requests, self._results = layout, requests, results
        self.memory = MappedMemory(layout.total_bytes)
        self._slots = [SlotView(self.memory, layout, index) for index in range(layout.slot_count)]
        self._is_over = threading.Event()
        self._threads: list[threading.Thread] = []

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
            with contextlib.suppress(OSError):
                made.shutdown(socket.SHUT_RDWR)

    def _close(self) -> None:
        self._end("this end was closed")
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()
        self._requests.close()
        self._results.close()
        self.memory.close()


class FarLink(_End):
    """The caller's end."""

    def __init__(
        self, layout: SlotLayout, requests: socket.socket, results: socket.socket, bell: Bell
    ) -> None:
        """bell: the caller's."""
        super().__init__(layout, requests, results)
        self._callers_bell = bell
        self.bell = Bell()
        """The one that is rung for this link's slots, in the rank's place."""
        self.bell_address = self.bell.address
        self.last_beat = 0
        self._reason = ""
        self._over, self._teller = os.pipe()
        self._start(self._send_requests, self._receive_results)

    @classmethod
    def connect(cls, ref: ExpertRankRef, layout: SlotLayout, bell: Bell, *, caller: str) -> "FarLink":
        """Raises PeerFailure."""
        host, _, port = ref.address.rpartition(":")
        hello = LinkHello.of(layout, secret=ref.secret, caller=caller)
        hello = msgspec.structs.replace(hello, link=secrets.token_hex(8))
        made: list[socket.socket] = []
        try:
            for carries_results in (False, True):
                one = peer_sockets.connect(host.strip("[]"), int(port), timeout_s=CONNECT_S)
                made.append(one)
                own = msgspec.structs.replace(hello, carries_results=carries_results)
                send_message(one, msgspec.json.encode(own))
                answer = msgspec.json.decode(receive_message(one), type=LinkAnswer)
                if answer.refusal:
                    raise PeerFailure(f"expert rank {ref.rank_id} refuses rows: {answer.refusal}")
                one.settimeout(SEND_S)
            requests, results = made
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
        self._close()
        self.bell.close()
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
            receive_into(self._results, memoryview(head))
            index, _, _, pairs, refused = _HEAD.unpack(head)
            self.last_beat += 1
            if index == _BEAT:
                continue
            if not 0 <= index < len(self._slots) or self._slots[index].state != TAKEN:
                raise ValueError(f"a result for slot {index}, which waits for none")
            slot = self._slots[index]
            layer, rows, asked, _ = slot.sizes
            if pairs not in (0, asked):
                raise ValueError(f"{pairs} results for {asked} pairs")
            if pairs:
                receive_into(self._results, slot.results[: pairs * self._layout.result_bytes])
                slot.state = FINISHED
            else:
                slot.set_sizes(layer, rows, asked, refused)
                slot.state = REFUSED
            self._callers_bell.ring()


class _FarCaller(_End):
    """The rank's end."""

    def __init__(
        self, layout: SlotLayout, requests: socket.socket, results: socket.socket, host: LinkHost
    ) -> None:
        super().__init__(layout, requests, results)
        self._host, self._bell = host, Bell()
        self._number = host.open_link(layout, self.memory, self._bell)
        self._start(self._receive_requests, self._send_results)

    @property
    def is_over(self) -> bool:
        return self._is_over.is_set()

    def close(self) -> None:
        self._end("")
        self._host.close_link(self._number)
        self._close()
        self._bell.close()

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
            slot.state = POSTED
            self._host.bell.ring()

    def _send_results(self) -> None:
        beat_s = 0.0
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
            now_s = time.monotonic()
            if now_s >= beat_s:
                self._results.sendall(_HEAD.pack(_BEAT, 0, 0, 0, -1))
                beat_s = now_s + BEAT_S
            self._bell.wait(seen, BEAT_S)


@dataclass(slots=True)
class _Half:
    """A link of which one connection is there."""

    made: socket.socket
    until_s: float


class FarDoor:
    """The rank's side: a thread that accepts callers of other hosts."""

    def __init__(self, address: str, host: LinkHost) -> None:
        """address: of the interface. Raises OSError."""
        self._host = host
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, 0), family=family, backlog=64)
        self._listener.settimeout(WAIT_S)
        self.port: int = self._listener.getsockname()[1]
        self._halves: dict[str, _Half] = {}
        self._ends: list[_FarCaller] = []
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="experts-far-door", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._is_closed.set()
        self._thread.join()
        self._listener.close()
        for half in self._halves.values():
            half.made.close()
        for end in self._ends:
            end.close()

    def _run(self) -> None:
        while not self._is_closed.is_set():
            self._sweep()
            try:
                made, _ = self._listener.accept()
            except (TimeoutError, OSError):
                continue
            try:
                self._greet(peer_sockets.accepted(made, timeout_s=CONNECT_S))
            except (OSError, ValueError, msgspec.MsgspecError, PeerFailure) as error:
                log.warning("a caller of experts was refused: %s", error)
                made.close()

    def _sweep(self) -> None:
        now_s = time.monotonic()
        for link in [name for name, half in self._halves.items() if half.until_s < now_s]:
            self._halves.pop(link).made.close()
        over = [end for end in self._ends if end.is_over]
        self._ends = [end for end in self._ends if not end.is_over]
        for end in over:
            end.close()

    def _greet(self, made: socket.socket) -> None:
        made.settimeout(CONNECT_S)
        hello = msgspec.json.decode(receive_message(made), type=LinkHello)
        reason = refusal(hello, secret=self._host.secret, hidden=self._host.hidden)
        if not reason and len(self._ends) + len(self._halves) >= CONNECTIONS_MAX:
            reason = f"{CONNECTIONS_MAX} callers are connected already"
        send_message(made, msgspec.json.encode(LinkAnswer(reason)))
        if reason:
            raise PeerFailure(reason)
        if not hello.carries_results:
            made.settimeout(None)
            self._halves[hello.link] = _Half(made, time.monotonic() + HALF_OPEN_S)
            return
        half = self._halves.pop(hello.link, None)
        if half is None:
            raise PeerFailure("the connection for results came without the other")
        made.settimeout(SEND_S)
        self._ends.append(_FarCaller(hello.layout, half.made, made, self._host))
