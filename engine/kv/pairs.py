"""Blocks of a KV pool through torch.distributed: process groups of two, outside the default group.

`torch.distributed.init_process_group` is not used: it knows one group of all processes, which would die with
any of them. Each pair of peers has a group of its own, which ends with either.
"""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from baton.core.errors import SetupError

_c10d: Any = dist
"""Its groups and stores are public, and not declared so."""

PART_BYTES = 8 * 2**20
"""Staged and sent at a time."""
TAG = 0
KEYS_MAX = 1024
"""What two sides say while they make a group, at most; usual are a few keys."""

Spans = Sequence[tuple[int, int]]
"""(offset, length) within a block; none: the whole block."""


class MessageChannel(Protocol):
    """Messages between the two sides of a group while it is made. Raises OSError."""

    def send(self, message: bytes) -> None: ...

    def take(self) -> bytes: ...


class ExchangeStore(_c10d.Store):
    """A rendezvous store in which each side knows everything that either has set, which is all that a group
    of two needs. There is no server, so nobody else can take part. Only the thread that makes the group waits
    in here."""

    def __init__(self, exchange: MessageChannel) -> None:
        super().__init__()
        self._exchange: MessageChannel | None = exchange
        self._known: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:
        self._known[key] = bytes(value)
        if self._exchange is not None:
            self._exchange.send(key.encode() + b"\0" + bytes(value))

    def get(self, key: str) -> bytes:
        while key not in self._known:
            if not self._hear():
                raise ConnectionError(f"the other side never said {key}")
        return self._known[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self.get(key)

    def check(self, keys: list[str]) -> bool:
        return all(key in self._known for key in keys)

    def commit(self) -> None:
        """The group is made: hear the rest of what the other side said, and leave the line to others."""
        assert self._exchange is not None
        self._exchange.send(b"")
        while self._hear():
            pass
        self._exchange = None

    def _hear(self) -> bool:
        """False: the other side will not say any more."""
        if self._exchange is None:
            return False
        key, _, value = self._exchange.take().partition(b"\0")
        if len(self._known) >= KEYS_MAX:
            raise ConnectionError(f"the other side says more than {KEYS_MAX} things")
        if key:
            self._known[key.decode()] = value
        return bool(key)


class TorchPairs:
    """`kv_transfer.backends.nccl.Pairs`: NCCL for a pool on a GPU, gloo for one in host memory.

    `pool`: uint8 [B, block_bytes]. `host`: the address of this machine that peers reach.
    """

    def __init__(self, pool: Tensor, *, host: str) -> None:
        self._pool, self._host = pool, host

    def check(self) -> None:
        is_cuda = self._pool.is_cuda
        if not dist.is_available() or not (dist.is_nccl_available() if is_cuda else dist.is_gloo_available()):
            raise SetupError(f"this torch was built without {'NCCL' if is_cuda else 'gloo'}")
        if not is_cuda:
            try:
                _c10d.ProcessGroupGloo.create_device(hostname=self._host)
            except RuntimeError as error:
                raise SetupError(f"gloo cannot use the address {self._host}: {error}") from error

    def join(self, exchange: MessageChannel, *, rank: int, timeout_s: float) -> "TorchPair":
        timeout = timedelta(seconds=max(timeout_s, 1e-3))
        store = ExchangeStore(exchange)
        try:
            group = self._group(store, rank, timeout)
            store.commit()
        except (RuntimeError, ValueError) as error:
            raise ConnectionError(f"no process group: {error}") from error
        return TorchPair(group, self._pool, peer_rank=1 - rank)

    def _group(self, store: Any, rank: int, timeout: timedelta) -> Any:
        if self._pool.is_cuda:
            options = _c10d.ProcessGroupNCCL.Options()
            options._timeout = timeout
            with torch.cuda.device(self._pool.device):
                group = _c10d.ProcessGroupNCCL(store, rank, 2, options)
                group.eager_connect_single_device(self._pool.device)  # while the store still hears
                return group
        gloo = _c10d.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=self._host)]
        options._timeout = timeout
        return gloo(store, rank, 2, options)


class TorchPair:
    """`kv_transfer.backends.nccl.Pair`. One thread sends or receives at a time."""

    def __init__(self, group: Any, pool: Tensor, *, peer_rank: int) -> None:
        self._group: Any = group
        self._pool, self._peer_rank = pool, peer_rank
        self._lock = threading.Lock()
        self._is_aborted = False
        self._staging: Tensor | None = None
        self._stream = torch.cuda.Stream(pool.device) if pool.is_cuda else None

    def send(self, blocks: Sequence[int], spans: Spans, *, timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        for ids, rows in self._parts(blocks, spans):
            with self._on_stream():
                at = 0
                for start, length in self._spans(spans):
                    rows[:, at : at + length] = self._pool[ids, start : start + length]
                    at += length
                self._pass(self._group.send, rows, deadline_s)

    def receive(self, blocks: Sequence[int], spans: Spans, *, timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        for ids, rows in self._parts(blocks, spans):
            with self._on_stream():
                self._pass(self._group.recv, rows, deadline_s)
                at = 0
                for start, length in self._spans(spans):
                    self._pool[ids, start : start + length] = rows[:, at : at + length]
                    at += length
                self._synchronise(deadline_s)

    def _spans(self, spans: Spans) -> Spans:
        return spans or ((0, self._pool.shape[1]),)

    def _parts(self, blocks: Sequence[int], spans: Spans) -> Iterator[tuple[Tensor, Tensor]]:
        """(block ids, staging rows [n, bytes of one block]) of each piece."""
        row_bytes = sum(length for _, length in self._spans(spans))
        step = max(1, PART_BYTES // row_bytes)
        need_bytes = min(step, len(blocks)) * row_bytes
        if self._staging is None or len(self._staging) < need_bytes:
            self._staging = torch.empty(need_bytes, dtype=torch.uint8, device=self._pool.device)
        for start in range(0, len(blocks), step):
            ids = torch.tensor(blocks[start : start + step], device=self._pool.device)
            yield ids, self._staging[: len(ids) * row_bytes].view(len(ids), row_bytes)

    def _on_stream(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _pass(self, call: Any, rows: Tensor, deadline_s: float) -> None:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("out of time")
        with self._lock:
            if self._is_aborted:
                raise ConnectionError("given up")
        try:
            work = call([rows.view(-1)], self._peer_rank, TAG)
            # gloo waits here, and closes the pair when the time is over; NCCL only orders the stream.
            work.wait(timedelta(seconds=left_s))
        except RuntimeError as error:
            raise ConnectionError(f"the process group failed: {error}") from error
        self._synchronise(deadline_s)

    def _synchronise(self, deadline_s: float) -> None:
        if self._stream is None:
            return
        # A wait for the device has no time limit: the watchdog makes NCCL's kernels end instead.
        watchdog = threading.Timer(max(0.0, deadline_s - time.monotonic()), self.abort)
        watchdog.start()
        try:
            self._stream.synchronize()
        finally:
            watchdog.cancel()
        if self._is_aborted:
            raise TimeoutError("out of time")

    def abort(self) -> None:
        with self._lock:
            if self._is_aborted:
                return
            self._is_aborted = True
        # Whoever waits in gloo hears of it when the time of its wait is over, or the peer hangs up.
        with suppress(RuntimeError, AttributeError):
            self._group.abort()

    def close(self) -> None:
        self.abort()
        self._group = None
