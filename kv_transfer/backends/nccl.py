"""KV reads through torch.distributed, for clusters whose fast network is NCCL's: NCCL between GPUs, gloo
between pools in host memory.

Collectives are two-sided, so the source answers: requests, answers and generations go over the connection of
the TCP backend, whose thread at the source gathers the blocks and sends them to the reader through a process
group of these two processes alone. A group that fails or is out of time takes only its own connection with
it. Received bytes are staged and put into the pool by the reading thread itself, so a read that has ended
can never land later.

This package knows no torch: the groups are made by whoever implements `Pairs`.
"""

import struct
from collections.abc import Sequence
from typing import Protocol

from baton.core.ids import WorkerId
from kv_transfer.backend import KVMemory
from kv_transfer.backends.tcp import TcpBackend
from kv_transfer.backends.tcp_frames import Line, Malformed, Spans

READ_THREADS = 2
"""Reads at a time, and groups per peer: a communicator costs device memory and about a second to make."""
PART_S = 3.0
"""Time to make a group, and for one request's blocks to pass; a reader's own time is rarely longer."""
FRAME = struct.Struct("<I")
"""Bytes of a message that the two sides of a new group exchange over their line."""
FRAME_BYTES_MAX = 64 * 1024


class Pair(Protocol):
    """A process group of two. All calls block, at most as long as they are given, and raise ConnectionError
    or TimeoutError; afterwards the pair is of no more use."""

    def send(self, blocks: Sequence[int], spans: Spans, *, timeout_s: float) -> None:
        """These blocks of the pool, or `spans` of each if there are any."""
        ...

    def receive(self, blocks: Sequence[int], spans: Spans, *, timeout_s: float) -> None:
        """The reverse; the pool is written when all of the bytes are here."""
        ...

    def abort(self) -> None:
        """May be called from any thread."""
        ...

    def close(self) -> None: ...


class HandshakeChannel(Protocol):
    """Messages between the two sides while they make their group. Raises OSError."""

    def send(self, message: bytes) -> None: ...

    def take(self) -> bytes: ...


class Pairs(Protocol):
    def check(self) -> None:
        """Raises SetupError: no group can be made on this machine."""
        ...

    def join(self, exchange: HandshakeChannel, *, rank: int, timeout_s: float) -> Pair:
        """Both sides at the same time; rank 0 is the source. Raises ConnectionError or TimeoutError."""
        ...


class LineExchange:
    def __init__(self, line: Line) -> None:
        self._line = line

    def send(self, message: bytes) -> None:
        self._line.send(FRAME.pack(len(message)) + message)

    def take(self) -> bytes:
        (size,) = FRAME.unpack(self._line.take(FRAME.size))
        if size > FRAME_BYTES_MAX:
            raise Malformed(f"a message of {size} B")
        return self._line.take(size)


class PairIO:
    """`tcp_frames.PoolIO` whose blocks pass through a group beside the line."""

    def __init__(self, pairs: Pairs) -> None:
        self._pairs = pairs
        pairs.check()

    def greeted(self, line: Line, *, is_source: bool) -> None:
        pair = self._pairs.join(LineExchange(line), rank=int(not is_source), timeout_s=line.left_s(PART_S))
        line.companion = pair
        if line.is_aborted:
            raise ConnectionError("given up")

    def send(self, line: Line, blocks: Sequence[int]) -> None:
        _pair(line).send(blocks, (), timeout_s=line.left_s(PART_S))

    def receive(self, line: Line, blocks: Sequence[int]) -> None:
        _pair(line).receive(blocks, (), timeout_s=line.left_s(PART_S))

    def send_spans(self, line: Line, blocks: Sequence[int], spans: Spans) -> None:
        _pair(line).send(blocks, spans, timeout_s=line.left_s(PART_S))

    def receive_spans(self, line: Line, blocks: Sequence[int], spans: Spans) -> None:
        _pair(line).receive(blocks, spans, timeout_s=line.left_s(PART_S))


def _pair(line: Line) -> Pair:
    if line.companion is None:
        raise Malformed("no process group on this line")
    return line.companion  # pyright: ignore[reportReturnType]


class NcclBackend(TcpBackend):
    """See `kv_transfer.backend.TransferBackend`. `host`: the address of this machine that peers reach."""

    name = "nccl"
    read_threads = READ_THREADS

    def __init__(self, worker_id: WorkerId, memory: KVMemory, pairs: Pairs, *, host: str) -> None:
        super().__init__(worker_id, memory, host=host)
        self._pairs = pairs

    def _make_io(self) -> PairIO:
        return PairIO(self._pairs)
