"""One connection between two ranks, plain or TLS, that never waits by itself."""

import select
import socket
import ssl
import threading


class LineEnded(Exception):
    """The other end is gone, or this one is closed."""


class RankLine:
    """A connection that was made and secured. One thread may send while another receives: neither waits, and
    TLS lets only one of them in at a time."""

    def __init__(self, made: socket.socket) -> None:
        made.setblocking(False)
        self._socket, self._one_at_a_time = made, threading.Lock()
        self.is_ended = False

    def fileno(self) -> int:
        return self._socket.fileno()

    def send_some(self, data: memoryview) -> int:
        """Send what there is room for, and return the number of bytes. Raises LineEnded."""
        with self._one_at_a_time:
            try:
                return self._socket.send(data)
            except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
                return 0
            except OSError as error:
                self.is_ended = True
                raise LineEnded(error.strerror or str(error)) from error

    def receive_some(self, into: memoryview) -> int:
        """Receive what is there, 0 for nothing yet. `into` is not empty. Raises LineEnded."""
        with self._one_at_a_time:
            try:
                count = self._socket.recv_into(into)
            except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
                return 0
            except OSError as error:
                self.is_ended = True
                raise LineEnded(error.strerror or str(error)) from error
            if not count:
                self.is_ended = True
                raise LineEnded("the other end has closed the connection")
            return count

    def close(self) -> None:
        """Idempotent. No other thread may be in a call."""
        self.is_ended = True
        self._socket.close()


def wait_for(events: list[tuple[int, int]], timeout_s: float) -> set[int]:
    """Wait until one of some descriptors is ready, and return those that are. `events` are pairs of a
    descriptor and what it is waited for (`select.POLLIN`, `select.POLLOUT`)."""
    poller = select.poll()
    for descriptor, event in events:
        poller.register(descriptor, event)
    return {descriptor for descriptor, _ in poller.poll(max(0.0, timeout_s) * 1000)}
