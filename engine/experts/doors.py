"""Links between a caller and an expert rank of one host.

Memory is handed over through an abstract Unix socket, which stays open as the sign that the other process
lives.
"""

import contextlib
import logging
import os
import selectors
import socket
import threading
import time
from dataclasses import dataclass
from typing import Protocol

import msgspec
from torch import Tensor

from baton.core.errors import PeerFailure
from baton.core.experts import ExpertRankRef
from engine.experts.exchange import Bell, MappedMemory, SlotLayout
from engine.experts.hello import CONNECT_S, HELLO_BYTES_MAX, LinkAnswer, LinkHello, refusal

log = logging.getLogger(__name__)

CONNECTIONS_MAX = 1024
SILENT_MAX = 128
"""Connections that may be silent at first; more are closed at once."""
SWEEP_S = 0.5
"""Silent connections are looked at this often."""
ACCEPT_AGAIN_S = 0.1
"""A pause after an attempt to accept that failed, as without free descriptors."""


class LinkHost(Protocol):
    """The rank behind its doors. Any thread may call it."""

    hidden: int
    secret: str
    bell: Bell

    def open_link(self, layout: SlotLayout, memory: MappedMemory, bell: Bell) -> int:
        """Serve the slots of a caller whose bell this is. Returns the link's number."""
        ...

    def expert_image(self, expert: int, kind: str) -> Tensor:
        """Return the image of an expert. Raises PeerFailure: it is not held, or is of another kind."""
        ...

    def close_link(self, number: int) -> None:
        """Return when the link's memory is not touched any more."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class _Accepted:
    """A link, as the rank has it."""

    made: socket.socket
    number: int
    memory: MappedMemory
    bell: Bell


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
        self._silent: dict[int, tuple[socket.socket, float]] = {}
        """Connections that have said nothing yet, and until when they may."""
        self._open: dict[int, _Accepted] = {}
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="experts-door", daemon=True)
        self._thread.start()

    @property
    def connection_count(self) -> int:
        return len(self._silent) + len(self._open)

    def close(self) -> None:
        self._is_closed.set()
        os.write(self._waker, b"x")
        self._thread.join()
        for accepted in self._open.values():
            self._end(accepted)
        for made, _ in self._silent.values():
            made.close()
        self._open.clear()
        self._silent.clear()
        self._listener.close()
        self._selector.close()
        os.close(self._wake)
        os.close(self._waker)

    def _run(self) -> None:
        while not self._is_closed.is_set():
            for key, _ in self._selector.select(SWEEP_S if self._silent else None):
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fd in self._silent:
                    self._hear(key.fd)
                elif key.fd in self._open:
                    self._close(key.fd)
            now_s = time.monotonic()
            for fd in [fd for fd, (_, until_s) in self._silent.items() if until_s < now_s]:
                self._selector.unregister(fd)
                self._silent.pop(fd)[0].close()

    def _accept(self) -> None:
        try:
            made, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as error:
            log.warning("no caller of experts can be accepted: %s", error)
            self._is_closed.wait(ACCEPT_AGAIN_S)
            return
        if len(self._silent) >= SILENT_MAX:
            made.close()
            return
        made.setblocking(False)
        self._silent[made.fileno()] = made, time.monotonic() + CONNECT_S
        self._selector.register(made, selectors.EVENT_READ)

    def _hear(self, fd: int) -> None:
        made, _ = self._silent.pop(fd)
        try:
            self._open[fd] = self._greet(made)
        except Exception as error:  # whatever a stranger sends, the door stays open
            log.warning("a caller of experts was refused: %s", error)
            self._selector.unregister(fd)
            made.close()

    def _greet(self, made: socket.socket) -> _Accepted:
        """Raises OSError, ValueError, MsgspecError and PeerFailure."""
        data, fds, _, _ = socket.recv_fds(made, HELLO_BYTES_MAX, 2)
        with contextlib.ExitStack() as undo:
            for fd in fds:
                undo.callback(os.close, fd)
            hello = msgspec.json.decode(data, type=LinkHello)
            reason = refusal(hello, secret=self._host.secret, hidden=self._host.hidden)
            if not reason and hello.expert >= 0:
                reason = "experts are copied over TCP"
            if not reason and len(fds) != 2:
                reason = "no memory came with the greeting"
            if not reason and len(self._open) >= CONNECTIONS_MAX:
                reason = f"{CONNECTIONS_MAX} callers are connected already"
            if reason:
                made.send(msgspec.json.encode(LinkAnswer(reason)))
                raise PeerFailure(reason)
            layout = hello.layout
            memory = MappedMemory(layout.total_bytes, fd=os.dup(fds[0]))
            undo.callback(memory.close)
            callers_bell = Bell(fd=os.dup(fds[1]))
            undo.callback(callers_bell.close)
            number = self._host.open_link(layout, memory, callers_bell)  # what it posts at once is seen
            undo.callback(self._host.close_link, number)
            socket.send_fds(made, [msgspec.json.encode(LinkAnswer())], [self._host.bell.memory.fd])
            undo.pop_all()
        for fd in fds:
            os.close(fd)
        return _Accepted(made, number, memory, callers_bell)

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
            if not data:
                raise ConnectionResetError("it closes the connection")
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
