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
HELLO_TIMEOUT_S = 5.0
ANSWER_TIMEOUT_S = 30.0
"""Time from a request's first byte to its answer's last; readers give up far sooner."""
IDLE_S = 24 * 3600.0

log = logging.getLogger(__name__)


class TcpServer:
    def __init__(self, memory: KVMemory, io: PoolIO, *, host: str, token: bytes) -> None:
        self._memory, self._io, self._token = memory, io, token
        self._lock = threading.Lock()
        self._lines: dict[Line, threading.Thread] = {}
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
            threads = list(self._lines.values())
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
            line = Line(sock, deadline_s=time.monotonic() + HELLO_TIMEOUT_S)
            thread = threading.Thread(target=self._serve, args=(line,), name="kv tcp line", daemon=True)
            with self._lock:
                if self._is_closed or len(self._lines) >= CONNECTIONS_MAX:
                    line.close()
                    continue
                self._lines[line] = thread
                thread.start()

    def _serve(self, line: Line) -> None:
        try:
            self._greet(line)
            self._io.greeted(line, is_source=True)
            while True:
                line.deadline_s = time.monotonic() + IDLE_S
                head = line.take(REQUEST.size)
                line.deadline_s = time.monotonic() + ANSWER_TIMEOUT_S
                self._answer(line, head)
        except Malformed as error:
            log.warning("KV transfer connection closed: %s", error)
        except OSError:
            pass  # the reader left, or gave up: its business
        finally:
            with self._lock:
                del self._lines[line]
            line.close()

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
        return [(start, length) for start, length in pairs]
