"""What strangers and readers say to the TCP transfer server: it serves the next reader as before, and gives
nobody more than the pool has."""

import socket
import threading
import time
from typing import Any

from tests.fuzz.harness import Fuzzer, main

PACKAGES = ("kv_transfer.backends.tcp_server", "kv_transfer.backends.tcp_frames")
WORDS = (b"BKVT", b"\x02\x00", b"\x01\x01\x00\x00\x00", b"\x03\x01\x00\x00\x00", b"\xff" * 4, b"t" * 16)
BLOCK_BYTES, BLOCK_COUNT = 64, 8
TOKEN = b"t" * 16
PATIENCE_S = 5.0


def load() -> Fuzzer:
    import numpy as np

    from kv_transfer.backend import KVMemory
    from kv_transfer.backends.tcp_frames import HELLO, MAGIC, REQUEST, VERSION, WELCOME, HostPoolIO
    from kv_transfer.backends.tcp_server import TcpServer

    blocks = np.full((BLOCK_COUNT, BLOCK_BYTES), 5, np.uint8)
    memory = KVMemory(blocks.ctypes.data, BLOCK_BYTES, BLOCK_COUNT, np.zeros(BLOCK_COUNT, np.uint64))
    server = TcpServer(memory, HostPoolIO(memory), host="127.0.0.1", token=TOKEN)
    greeting = HELLO.pack(MAGIC, VERSION, TOKEN)
    kept: list[Any] = [blocks, server]  # for as long as the fuzzer lives

    def check(content: bytes) -> None:
        """The first byte says whether the reader has greeted well before the rest."""
        is_known = content[:1] == b"k"
        heard = _say(server.port, (greeting if is_known else b"") + content[1:])
        if not is_known and not content[1:].startswith(greeting[:4]):
            assert not heard, heard
        assert len(heard) < 2**22, len(heard)
        request = REQUEST.pack(1, 1) + (3).to_bytes(4, "little")
        answer = _say(server.port, greeting + request)
        assert answer == WELCOME.pack(MAGIC, VERSION) + BLOCK_BYTES.to_bytes(
            8, "little"
        ) + b"\5" * 64 + bytes(8)
        assert kept[1]._acceptor.is_alive()

    return Fuzzer("kv_server", check, WORDS)


def _say(port: int, data: bytes) -> bytes:
    """What the server answers until it hangs up, once nothing more is said."""
    heard = b""
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as sock:
        sender = threading.Thread(target=_send, args=(sock, data))
        sender.start()
        ends_s = time.monotonic() + PATIENCE_S
        try:
            while part := sock.recv(65_536):
                heard += part
                assert time.monotonic() < ends_s, "no end"
        except ConnectionResetError:
            pass
        sender.join()
    return heard


def _send(sock: socket.socket, data: bytes) -> None:
    try:
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
    except OSError:
        pass  # the server has had enough


if __name__ == "__main__":
    main(load, PACKAGES)
