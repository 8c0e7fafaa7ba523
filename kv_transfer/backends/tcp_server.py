"""The source's side of the TCP backend: one thread accepts, one per connection answers."""

import contextlib
import hmac
import logging
import socket
import threading
import time

import numpy as np

from baton.core.errors import SetupError
from kv_transfer.backend import KVMemory
from kv_transfer.backends.tcp_frames import (
    BLOCK_ID,
    GENERATION,
    HELLO,
    MAGIC,
    RANGE,
    RANGE_COUNT,
    RANGES_MAX,
    READ,
    READ_RANGES,
    REPLY,
    REQUEST,
    REQUEST_BLOCKS_MAX,
    VERSION,
    WELCOME,
    Line,
    Malformed,
    PoolIO,
    Spans,
)

CONNECTIONS_MAX = 256
"""Connections, at most. For one more the oldest goes that has not greeted, or else the one that has been idle
for longest, so that neither strangers nor readers that left keep others out."""
LEAVING_S = 1.0
"""The longest wait for a connection that makes room to end."""
BUSY_S = 1.0
"""The longest wait for one connection to fall idle where all are busy. A reader that has its answer may come
again before the thread that sent it says so."""
HELLO_TIMEOUT_S = 5.0
ANSWER_TIMEOUT_S = 30.0
"""Time from a request's first byte to its answer's last; readers give up far sooner."""
IDLE_S = 24 * 3600.0

log = logging.getLogger(__name__)


class TcpServer:
    def __init__(self, memory: KVMemory, io: PoolIO, *, host: str, token: bytes) -> None:
        self._memory, self._io, self._token = memory, io, token
        self._lock = threading.Condition()
        """Guards what follows; notified when a line falls idle or ends."""
        self._lines: dict[Line, threading.Thread] = {}
        self._ungreeted: dict[Line, None] = {}
        """Lines whose reader has not shown the token yet, oldest first."""
        self._idle: dict[Line, None] = {}
        """Lines without a request, longest idle first."""
        self._leaving: set[threading.Thread] = set()
        """Threads of lines that had to make room."""
        self._is_closed = False
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._listener = socket.create_server((host, 0), family=family, backlog=64)
        except OSError as error:
            raise SetupError(f"KV transfer cannot listen on {host}: {error}") from error
        self.port: int = self._listener.getsockname()[1]
        self._acceptor = threading.Thread(target=self._accept, name=f"kv tcp :{self.port}", daemon=True)
        self._acceptor.start()

    def close(self) -> None:
        """Blocks until every thread has ended. Idempotent."""
        with self._lock:
            self._is_closed = True
            self._lock.notify_all()
            threads = [*self._lines.values(), *self._leaving]
            for line in self._lines:
                line.abort()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept()
        self._acceptor.join()
        self._listener.close()
        for thread in threads:
            thread.join()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                if self._is_closed:
                    return
                log.warning("KV transfer could not accept a connection", exc_info=True)
                time.sleep(0.05)  # out of descriptors: give others time to close theirs
                continue
            try:
                self._take_up(sock)
            except (OSError, RuntimeError):  # it has left already, or there is no room for a thread
                log.warning("KV transfer could not take up a connection", exc_info=True)
                sock.close()

    def _take_up(self, sock: socket.socket) -> None:
        """Raises OSError, or RuntimeError if no thread can be started."""
        self._wait_for_the_leaving()
        line = Line(sock, deadline_s=time.monotonic() + HELLO_TIMEOUT_S)
        thread = threading.Thread(target=self._serve, args=(line,), name="kv tcp line", daemon=True)
        with self._lock:
            if self._is_closed or not self._make_room():
                line.close()
                return
            thread.start()
            self._lines[line] = thread
            self._ungreeted[line] = None

    def _wait_for_the_leaving(self) -> None:
        """Give threads that were told to end the time to do it, where there are as many as there may be. On a
        busy machine strangers come faster than they go, and a reader would be turned away for them."""
        with self._lock:
            leaving = list(self._leaving) if len(self._leaving) >= CONNECTIONS_MAX else []
        if leaving:
            leaving[0].join(LEAVING_S)

    def _make_room(self) -> bool:
        """Whether one more line may be taken up. The lock is held, and let go while it waits."""
        self._lock.wait_for(self._has_room, BUSY_S)
        if self._is_closed or len(self._lines) < CONNECTIONS_MAX:
            return not self._is_closed
        victim = next(iter(self._ungreeted), None) or next(iter(self._idle), None)
        if victim is None or len(self._leaving) >= CONNECTIONS_MAX:
            return False
        self._leaving.add(self._lines.pop(victim))
        self._ungreeted.pop(victim, None)
        self._idle.pop(victim, None)
        victim.abort()
        return True

    def _has_room(self) -> bool:
        return self._is_closed or len(self._lines) < CONNECTIONS_MAX or bool(self._ungreeted or self._idle)

    def _serve(self, line: Line) -> None:
        try:
            self._greet(line)
            with self._lock:
                self._ungreeted.pop(line, None)
            self._io.greeted(line, is_source=True)
            while True:
                self._fall_idle(line)
                self._answer(line, self._next_request(line))
        except Malformed as error:
            log.warning("KV transfer connection closed: %s", error)
        except OSError:
            pass  # the reader left, or gave up: its business
        except Exception:  # ours: this connection ends, and no other
            log.exception("a KV transfer connection failed")
        finally:
            with self._lock:
                self._lines.pop(line, None)
                self._ungreeted.pop(line, None)
                self._idle.pop(line, None)
                self._leaving.discard(threading.current_thread())
                self._lock.notify_all()
            line.close()

    def _fall_idle(self, line: Line) -> None:
        with self._lock:
            if line in self._lines:
                self._idle[line] = None
                self._lock.notify_all()

    def _next_request(self, line: Line) -> bytes:
        line.deadline_s = time.monotonic() + IDLE_S
        try:
            first = line.take(1)
        finally:
            with self._lock:
                self._idle.pop(line, None)
        line.deadline_s = time.monotonic() + ANSWER_TIMEOUT_S
        return first + line.take(REQUEST.size - 1)

    def _greet(self, line: Line) -> None:
        magic, version, token = HELLO.unpack(line.take(HELLO.size))
        if magic != MAGIC or not hmac.compare_digest(token, self._token):
            raise Malformed("a stranger's greeting")
        line.send(WELCOME.pack(MAGIC, VERSION))
        if version != VERSION:
            raise Malformed(f"protocol version {version}, not {VERSION}")

    def _answer(self, line: Line, head: bytes) -> None:
        operation, count = REQUEST.unpack(head)
        if operation not in (READ, READ_RANGES) or not 0 < count <= REQUEST_BLOCKS_MAX:
            raise Malformed(f"operation {operation} on {count} blocks")
        ids = np.frombuffer(line.take(count * BLOCK_ID.itemsize), BLOCK_ID)
        if int(ids.max()) >= self._memory.block_count:
            raise Malformed(f"block {int(ids.max())} of {self._memory.block_count}")
        if operation == READ:
            line.send(REPLY.pack(count * self._memory.block_bytes))
            self._io.send(line, ids.tolist())
        else:
            spans = self._take_spans(line)
            line.send(REPLY.pack(count * sum(length for _, length in spans)))
            self._io.send_spans(line, ids.tolist(), spans)
        line.send(self._memory.generations[ids].astype(GENERATION).tobytes())

    def _take_spans(self, line: Line) -> Spans:
        (count,) = RANGE_COUNT.unpack(line.take(RANGE_COUNT.size))
        if not 0 < count <= RANGES_MAX:
            raise Malformed(f"{count} ranges of a block")
        pairs = np.frombuffer(line.take(2 * count * RANGE.itemsize), RANGE).reshape(count, 2).tolist()
        size = self._memory.block_bytes
        if not all(0 < length <= size and start <= size - length for start, length in pairs):
            raise Malformed(f"a range outside a block of {size} B")
        if sum(length for _, length in pairs) > size:  # else a small request would have any amount gathered
            raise Malformed(f"ranges of more than a block of {size} B together")
        return [(start, length) for start, length in pairs]
