"""How the ranks of a group on several hosts find each other: through rank 0, with a secret."""

import contextlib
import hmac
import logging
import socket
import struct
import threading
import time
from collections.abc import Callable

import msgspec

from baton.core.errors import PeerFailure, SetupError
from baton.wire.address import host_port, split_address
from baton.wire.peer_sockets import accepted, connect

log = logging.getLogger(__name__)

GREET_S = 5.0
"""The longest time for a connection to be made, secured and greeted."""
GREETING_BYTES_MAX = 1024
TOKEN_BYTES = 16
GREETERS_MAX = 256
_SIZE = struct.Struct("<I")


class Greeting(msgspec.Struct, frozen=True, array_like=True):
    """The first words on every connection."""

    token: bytes
    rank: int
    purpose: str
    address: str
    """HOST:PORT at which the rank that dials listens; empty at rank 0."""


class MeetingPlace(msgspec.Struct, frozen=True):
    """The address of a group, which is also the permission to join it."""

    host: str
    port: int
    token: bytes

    def __str__(self) -> str:
        return f"{self.token.hex()}@{host_port(self.host, self.port)}"

    @classmethod
    def parse(cls, text: str) -> "MeetingPlace":
        """Raises SetupError."""
        token, _, place = text.partition("@")
        try:
            host, port = split_address(place)
            return cls(host, port, bytes.fromhex(token))
        except ValueError:
            raise SetupError("this is no address of a group of ranks") from None


Arrived = Callable[[Greeting, socket.socket], bool]
"""It is told of every connection with the right secret, and returns whether the group takes it."""


class Door:
    """Accepts the connections of ranks, and turns others away."""

    def __init__(self, host: str, token: bytes, arrived: Arrived) -> None:
        """Raises SetupError if it cannot listen there."""
        self._token, self._arrived = token, arrived
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._listener = socket.create_server((host, 0), family=family)
        except OSError as error:
            raise SetupError(f"ranks cannot listen on {host}: {error.strerror or error}") from error
        self.port: int = self._listener.getsockname()[1]
        self._room = threading.BoundedSemaphore(GREETERS_MAX)
        self._thread = threading.Thread(target=self._accept, name="ranks-door", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Idempotent."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # it ends the call in progress
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                made, _ = self._listener.accept()
            except OSError:
                return
            if not self._room.acquire(blocking=False):
                made.close()
                continue
            threading.Thread(target=self._greet, args=(made,), name="ranks-greet", daemon=True).start()

    def _greet(self, made: socket.socket) -> None:
        secured, end_s = made, time.monotonic() + GREET_S
        try:
            secured = accepted(made, timeout_s=GREET_S)
            greeting = read_greeting(secured, end_s)
            is_ours = hmac.compare_digest(greeting.token, self._token)
            if not (is_ours and self._arrived(greeting, secured)):
                secured.close()
        except (OSError, PeerFailure, msgspec.MsgspecError) as error:
            log.warning("a connection to this worker's ranks was turned away: %s", error)
            secured.close()
        finally:
            self._room.release()


def greet(address: str, greeting: Greeting) -> socket.socket:
    """Dial a rank. Raises PeerFailure."""
    made = connect(*split_address(address), timeout_s=GREET_S)
    try:
        data = msgspec.msgpack.encode(greeting)
        made.sendall(_SIZE.pack(len(data)) + data)
    except OSError as error:
        made.close()
        raise PeerFailure(f"no connection to {address}: {error.strerror or error}") from error
    return made


def read_greeting(made: socket.socket, end_s: float) -> Greeting:
    """Raises OSError, PeerFailure and MsgspecError."""
    (size,) = _SIZE.unpack(_read(made, _SIZE.size, end_s))
    if size > GREETING_BYTES_MAX:
        raise PeerFailure(f"a greeting of {size} bytes")
    return msgspec.msgpack.decode(_read(made, size, end_s), type=Greeting)


def _read(made: socket.socket, size: int, end_s: float) -> bytes:
    data = b""
    while len(data) < size:
        left_s = end_s - time.monotonic()
        if left_s <= 0:
            raise PeerFailure(f"its greeting took longer than {GREET_S:g} s")
        made.settimeout(left_s)
        piece = made.recv(size - len(data))
        if not piece:
            raise PeerFailure("it hung up before its greeting")
        data += piece
    return data
