"""The pulse between the ranks of a group on several hosts: who is alive, who gave up, who left.

Each rank sends a beat to every other several times a second, from a thread that does nothing else. A process
that dies ends its connections at once. One that is stopped, or whose host or network is gone, is missed when
its beats are.
"""

import contextlib
import os
import select
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from engine.parallel.lines import LineEnded, RankLine, wait_for

BEAT_S = 0.25
SILENCE_S = 1.5
"""A rank that has not been heard for so long is taken for lost."""
LATE_S = 0.75
"""A pulse that itself was kept from running for so long does not blame others for what it did not hear."""
TOLD_S = 0.5
"""The longest time that giving up waits until the others know."""
FAREWELL_S = 0.3
"""A rank may leave while what others sent before is still on its way to this one."""
_HEAD = struct.Struct("<cH")
_BEAT, _ABORT, _HEARD, _LEFT = b"B", b"A", b"K", b"L"
_READ_BYTES = 4096
_REASON_BYTES_MAX = 2000


@dataclass(eq=False)
class _Peer:
    rank: int
    line: RankLine
    heard_s: float
    unread: bytearray = field(default_factory=bytearray)
    unsent: bytearray = field(default_factory=bytearray)


class Pulse:
    """One rank's end. From the pulse's thread it calls `on_left(reason)` when another rank has left, and
    `on_over(reason)` when the group has ended: FAREWELL_S after that without a reason, else at once."""

    def __init__(
        self,
        on_over: Callable[[str], object],
        on_left: Callable[[str], object],
        *,
        silence_s: float = SILENCE_S,
        is_farewell_final: bool = True,
    ) -> None:
        """is_farewell_final: the group ends when another rank leaves."""
        self.silence_s = silence_s
        self._on_over, self._on_left = on_over, on_left
        self._is_farewell_final = is_farewell_final
        self._left_s: list[float] = []
        self._changed = threading.Condition()
        self._peers: dict[int, _Peer] = {}
        self._untold: set[int] = set()
        """Peers that have not confirmed that the group is given up."""
        self._is_leaving = False
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="pulse", daemon=True)
        self._thread.start()

    def add(self, rank: int, line: RankLine) -> None:
        with self._changed:
            self._peers[rank] = _Peer(rank, line, time.monotonic())
        os.eventfd_write(self._wake, 1)

    def abort(self, reason: str) -> None:
        """Tell the others that the group is over, and wait a moment until they know."""
        text = reason.encode()[:_REASON_BYTES_MAX]
        with self._changed:
            if self._is_leaving:
                return
            for peer in self._peers.values():
                peer.unsent += _HEAD.pack(_ABORT, len(text)) + text
                self._untold.add(peer.rank)
            os.eventfd_write(self._wake, 1)
            if threading.current_thread() is not self._thread:
                self._changed.wait_for(lambda: not self._untold, TOLD_S)

    def leave(self) -> None:
        """Say goodbye and end. Idempotent."""
        with self._changed:
            is_first, self._is_leaving = not self._is_leaving, True
            if is_first:
                os.eventfd_write(self._wake, 1)
        if threading.current_thread() is not self._thread:
            self._thread.join()
        if is_first:
            os.close(self._wake)

    def _run(self) -> None:
        beaten_s = turned_s = time.monotonic()
        while not self._is_leaving:
            with self._changed:
                peers = list(self._peers.values())
            wait_for(
                [(self._wake, select.POLLIN), *((peer.line.fileno(), select.POLLIN) for peer in peers)],
                BEAT_S,
            )
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake)
            for peer in peers:
                self._hear(peer)
            now_s = time.monotonic()
            if now_s - turned_s > LATE_S:
                for peer in peers:
                    peer.heard_s = now_s
            turned_s = now_s
            self._miss(now_s)
            if now_s - beaten_s >= BEAT_S:
                beaten_s = now_s
                self._say(_BEAT)
            self._flush()
        self._say(_LEFT)
        self._flush()

    def _hear(self, peer: _Peer) -> None:
        buffer = memoryview(bytearray(_READ_BYTES))
        try:
            while count := peer.line.receive_some(buffer):
                peer.heard_s = time.monotonic()
                peer.unread += buffer[:count]
        except LineEnded:
            self._read(peer)
            if self._forget(peer):
                self._over(f"rank {peer.rank} has died")
            return
        self._read(peer)

    def _read(self, peer: _Peer) -> None:
        while len(peer.unread) >= _HEAD.size:
            kind, size = _HEAD.unpack_from(peer.unread)
            if len(peer.unread) < _HEAD.size + size:
                return
            text = bytes(peer.unread[_HEAD.size : _HEAD.size + size]).decode(errors="replace")
            del peer.unread[: _HEAD.size + size]
            if kind == _ABORT:
                self._on_over(text)
                peer.unsent += _HEAD.pack(_HEARD, 0)
            elif kind == _HEARD:
                with self._changed:
                    self._untold.discard(peer.rank)
                    self._changed.notify_all()
            elif kind == _LEFT and self._forget(peer):
                self._on_left(f"rank {peer.rank} has left the group")
                if self._is_farewell_final:
                    self._left_s.append(time.monotonic())

    def _miss(self, now_s: float) -> None:
        if self._left_s and now_s - self._left_s[0] > FAREWELL_S:
            self._on_over("")
        with self._changed:
            silent = [peer for peer in self._peers.values() if now_s - peer.heard_s > self.silence_s]
        for peer in silent:
            if self._forget(peer):
                self._over(
                    f"rank {peer.rank} has not been heard for {self.silence_s:g} s: it is stopped, or its "
                    "host cannot be reached"
                )

    def _over(self, reason: str) -> None:
        """This rank has found it out: the others may not have."""
        self._on_over(reason)
        self.abort(reason)

    def _forget(self, peer: _Peer) -> bool:
        with self._changed:
            self._untold.discard(peer.rank)
            self._changed.notify_all()
            return self._peers.pop(peer.rank, None) is not None

    def _say(self, kind: bytes) -> None:
        with self._changed:
            for peer in self._peers.values():
                peer.unsent += _HEAD.pack(kind, 0)

    def _flush(self) -> None:
        with self._changed:
            for peer in self._peers.values():
                try:
                    while peer.unsent and (count := peer.line.send_some(memoryview(bytes(peer.unsent)))):
                        del peer.unsent[:count]
                except LineEnded:
                    peer.unsent.clear()  # the next look finds its end
