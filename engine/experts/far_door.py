"""The door of an expert rank for callers of other hosts."""

import logging
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import msgspec

from baton.core.errors import PeerFailure
from baton.wire import peer_sockets
from engine.experts.copies import COPIES_MAX, send_image
from engine.experts.doors import ACCEPT_AGAIN_S, CONNECTIONS_MAX, LinkHost
from engine.experts.exchange import SlotLayout
from engine.experts.far_links import (
    SEND_S,
    WAIT_S,
    FarCaller,
    end_connection,
    receive_message,
    send_message,
    watch_for_loss,
)
from engine.experts.hello import CONNECT_S, LinkAnswer, LinkHello, refusal

log = logging.getLogger(__name__)

HALF_OPEN_S = 5.0
"""The longest time between the two connections of a link."""
GREETERS = 8 + COPIES_MAX
"""Connections that are greeted at one time, or send experts to other ranks."""
GREETINGS_MAX = 128
"""Connections that are greeted, or wait for it; more are closed at once."""


@dataclass(frozen=True, slots=True)
class _Half:
    """A link of which one connection is there."""

    made: socket.socket
    layout: SlotLayout
    until_s: float


class FarDoor:
    """A thread accepts callers, others greet them, so that nobody who is silent holds the others up."""

    def __init__(self, address: str, host: LinkHost) -> None:
        """address: of the interface, or a name of it. Raises OSError."""
        self._host = host
        found = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, where = found[0]
        self._listener = socket.create_server((where[0], 0), family=family, backlog=64)
        self._listener.settimeout(WAIT_S)
        self.port: int = self._listener.getsockname()[1]
        self._lock = threading.Lock()
        """Guards the following three."""
        self._greeted: set[socket.socket] = set()
        """Connections that are being greeted, or wait for it."""
        self._halves: dict[str, _Half] = {}
        self._ends: list[FarCaller] = []
        self._is_closed = threading.Event()
        self._copies = threading.BoundedSemaphore(COPIES_MAX)
        self._greeters = ThreadPoolExecutor(GREETERS, thread_name_prefix="experts-greet")
        self._thread = threading.Thread(target=self._run, name="experts-far-door", daemon=True)
        self._thread.start()

    @property
    def connection_count(self) -> int:
        """Connections of callers, whether or not their links are complete."""
        with self._lock:
            return len(self._greeted) + len(self._halves) + 2 * len(self._ends)

    def close(self) -> None:
        self._is_closed.set()
        self._thread.join()
        self._listener.close()
        with self._lock:
            for made in self._greeted:
                end_connection(made)
        self._greeters.shutdown(wait=True)
        for half in self._halves.values():
            half.made.close()
        for end in self._ends:
            end.close()
        self._halves.clear()
        self._ends.clear()

    def _run(self) -> None:
        while not self._is_closed.is_set():
            self._sweep()
            try:
                made, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError as error:
                log.warning("no caller of experts can be accepted: %s", error)
                self._is_closed.wait(ACCEPT_AGAIN_S)
                continue
            with self._lock:
                is_full = len(self._greeted) >= GREETINGS_MAX
                if not is_full:
                    self._greeted.add(made)
            if is_full:
                made.close()
            else:
                self._greeters.submit(self._receive, made)

    def _sweep(self) -> None:
        now_s = time.monotonic()
        with self._lock:
            late = [name for name, half in self._halves.items() if half.until_s < now_s]
            halves = [self._halves.pop(name) for name in late]
            over = [end for end in self._ends if end.is_over]
            self._ends = [end for end in self._ends if end not in over]
        for half in halves:
            half.made.close()
        for end in over:
            end.close()

    def _receive(self, made: socket.socket) -> None:
        """Greet a connection, on a thread of its own."""
        secured = made
        try:
            secured = peer_sockets.accepted(made, timeout_s=CONNECT_S)
            with self._lock:
                self._greeted.discard(made)
                self._greeted.add(secured)
            self._greet(secured)
        except Exception as error:  # whatever a stranger sends, the door stays open
            log.warning("a caller of experts was refused: %s", error)
            secured.close()
        finally:
            with self._lock:
                self._greeted -= {made, secured}

    def _greet(self, made: socket.socket) -> None:
        """Raises OSError, ValueError, MsgspecError and PeerFailure; then the connection is not kept."""
        watch_for_loss(made)
        hello = msgspec.json.decode(receive_message(made, timeout_s=CONNECT_S), type=LinkHello)
        reason = refusal(hello, secret=self._host.secret, hidden=self._host.hidden)
        if not reason and hello.expert >= 0:
            self._send_expert(hello, made)
            return
        first: _Half | None = None
        if not reason and hello.carries_results:
            first, reason = self._first_half(hello)
        elif not reason:
            reason = self._keep_half(hello, made)
        made.settimeout(CONNECT_S)
        if reason:
            send_message(made, msgspec.json.encode(LinkAnswer(reason)))
            raise PeerFailure(reason)
        if first is None:
            self._answer_first(hello, made)
        else:
            self._open(hello.layout, first.made, made)

    def _send_expert(self, hello: LinkHello, made: socket.socket) -> None:
        """Send an image to another rank, or why it gets none, and close the connection. Raises OSError."""
        made.settimeout(CONNECT_S)
        reason = f"{COPIES_MAX} experts are being copied already"
        if self._copies.acquire(blocking=False):
            try:
                send_image(made, self._host.expert_image(hello.expert, hello.image_kind))
                reason = ""
            except PeerFailure as error:
                reason = str(error)
            finally:
                self._copies.release()
        if reason:
            log.info("%s gets no copy: %s", hello.caller, reason)
            send_message(made, msgspec.json.encode(LinkAnswer(reason)))
        made.close()

    def _keep_half(self, hello: LinkHello, made: socket.socket) -> str:
        """Keep the first connection of a link, before the caller may make the other one. Returns why it is
        refused; empty: it is not."""
        with self._lock:
            if len(self._ends) + len(self._halves) >= CONNECTIONS_MAX:
                return f"{CONNECTIONS_MAX} callers are connected already"
            if not hello.link or hello.link in self._halves:
                return "the link has no name of its own"
            self._halves[hello.link] = _Half(made, hello.layout, time.monotonic() + HALF_OPEN_S)
        return ""

    def _first_half(self, hello: LinkHello) -> tuple[_Half | None, str]:
        """The other connection of the link, or why there is none."""
        with self._lock:
            half = self._halves.pop(hello.link, None)
        if half is None:
            return None, "the connection for results came without the other"
        if half.layout != hello.layout:
            half.made.close()
            return None, "the two connections of the link have other slots"
        return half, ""

    def _answer_first(self, hello: LinkHello, made: socket.socket) -> None:
        try:
            send_message(made, msgspec.json.encode(LinkAnswer()))
        except OSError:
            with self._lock:
                self._halves.pop(hello.link, None)
            raise

    def _open(self, layout: SlotLayout, requests: socket.socket, results: socket.socket) -> None:
        try:
            send_message(results, msgspec.json.encode(LinkAnswer()))
            requests.settimeout(None)
            results.settimeout(SEND_S)
            end = FarCaller(layout, requests, results, self._host)
        except BaseException:
            requests.close()
            raise
        with self._lock:
            self._ends.append(end)
