"""Links between a caller and an expert rank of one host.

The memory is handed over through an abstract Unix socket, which stays open as the sign that the other
process lives.
"""

import contextlib
import logging
import os
import selectors
import socket
import threading
from typing import Protocol

import msgspec

from baton.core.errors import PeerFailure
from baton.core.experts import ExpertRankRef
from engine.experts.exchange import Bell, MappedMemory, SlotLayout
from engine.experts.hello import CONNECT_S, HELLO_BYTES_MAX, LinkAnswer, LinkHello, refusal

log = logging.getLogger(__name__)

CONNECTIONS_MAX = 1024


class LinkHost(Protocol):
    """The rank behind its doors. Any thread may call it."""

    hidden: int
    secret: str
    bell: Bell

    def open_link(self, layout: SlotLayout, memory: MappedMemory, bell: Bell) -> int:
        """Serve the slots of a caller whose bell this is. Returns the link's number."""
        ...

    def close_link(self, number: int) -> None:
        """Return when the link's memory is not touched any more."""
        ...


class _Accepted:
    def __init__(self, made: socket.socket, number: int, memory: MappedMemory, bell: Bell) -> None:
        self.made, self.number, self.memory, self.bell = made, number, memory, bell


class LocalDoor:
    """The rank's side: a thread that accepts callers of this host and notices their ends."""

    def __init__(self, name: str, host: LinkHost) -> None:
        """name: of the abstract socket. Raises OSError."""
        self._host = host
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(f"\0{name}")
        self._listener.listen(64)
        self._listener.setblocking(False)
        self._wake, self._waker = os.pipe()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._open: dict[int, _Accepted] = {}
        self._thread = threading.Thread(target=self._run, name="experts-door", daemon=True)
        self._thread.start()

    def close(self) -> None:
        os.write(self._waker, b"x")
        self._thread.join()
        for accepted in self._open.values():
            self._end(accepted)
        self._listener.close()
        self._selector.close()
        os.close(self._wake)
        os.close(self._waker)

    def _run(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj == self._wake:
                    return
                else:
                    self._close(key.fd)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            made, _ = self._listener.accept()
            try:
                accepted = self._greet(made)
            except (OSError, ValueError, msgspec.MsgspecError, PeerFailure) as error:
                log.warning("a caller of experts was refused: %s", error)
                made.close()
                return
            self._open[made.fileno()] = accepted
            self._selector.register(made, selectors.EVENT_READ)

    def _greet(self, made: socket.socket) -> _Accepted:
        made.settimeout(CONNECT_S)
        data, fds, _, _ = socket.recv_fds(made, HELLO_BYTES_MAX, 2)
        try:
            hello = msgspec.json.decode(data, type=LinkHello)
            reason = refusal(hello, secret=self._host.secret, hidden=self._host.hidden)
            if not reason and len(fds) != 2:
                reason = "no memory came with the greeting"
            if not reason and len(self._open) >= CONNECTIONS_MAX:
                reason = f"{CONNECTIONS_MAX} callers are connected already"
            if reason:
                made.send(msgspec.json.encode(LinkAnswer(reason)))
                raise PeerFailure(reason)
            layout, (slots, bell) = hello.layout, fds
            fds = []
            memory = MappedMemory(layout.total_bytes, fd=slots)
            callers_bell = Bell(fd=bell)
        finally:
            for fd in fds:
                os.close(fd)
        socket.send_fds(made, [msgspec.json.encode(LinkAnswer())], [self._host.bell.memory.fd])
        return _Accepted(made, self._host.open_link(layout, memory, callers_bell), memory, callers_bell)

    def _close(self, fd: int) -> None:
        accepted = self._open.pop(fd)
        self._selector.unregister(fd)
        self._end(accepted)

    def _end(self, accepted: _Accepted) -> None:
        self._host.close_link(accepted.number)
        accepted.made.close()
        accepted.memory.close()
        accepted.bell.close()


class LocalLink:
    """The caller's side of a link within a host."""

    def __init__(self, made: socket.socket, memory: MappedMemory, bell: Bell) -> None:
        self._made, self.memory, self.bell = made, memory, bell
        self.bell_address = bell.address

    @classmethod
    def connect(cls, ref: ExpertRankRef, layout: SlotLayout, bell: Bell, *, caller: str) -> "LocalLink":
        """bell: the caller's. Raises PeerFailure."""
        made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        memory: MappedMemory | None = None
        try:
            made.settimeout(CONNECT_S)
            made.connect(f"\0{ref.socket}")
            memory = MappedMemory(layout.total_bytes)
            hello = LinkHello.of(layout, secret=ref.secret, caller=caller)
            socket.send_fds(made, [msgspec.json.encode(hello)], [memory.fd, bell.memory.fd])
            data, fds, _, _ = socket.recv_fds(made, HELLO_BYTES_MAX, 1)
            answer = msgspec.json.decode(data, type=LinkAnswer)
            if answer.refusal or not fds:
                raise PeerFailure(f"expert rank {ref.rank_id} refuses rows: {answer.refusal}")
            made.setblocking(False)
            return cls(made, memory, Bell(fd=fds[0]))
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            made.close()
            if memory is not None:
                memory.close()
            raise PeerFailure(f"no connection to expert rank {ref.rank_id}: {error}") from error
        except PeerFailure:
            made.close()
            if memory is not None:
                memory.close()
            raise

    def fileno(self) -> int:
        """Readable when the rank is gone."""
        return self._made.fileno()

    @property
    def last_beat(self) -> int:
        return self.bell.last_beat

    def end_reason(self) -> str:
        """Why the link is over, after `fileno` was readable."""
        return "its process closed the connection"

    def close(self) -> None:
        """Nobody may use the slots any more."""
        self._made.close()
        self.memory.close()
        self.bell.close()
