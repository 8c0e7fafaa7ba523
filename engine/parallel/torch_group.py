"""Groups over torch.distributed: NCCL where tensors are on GPUs, gloo where they are in host memory.

torch.distributed moves the bytes. All else is the work of a *control group* beside it, which is in shared
memory or over TCP: it tells that a rank has died, is stopped, gave up or left, which gloo learns from a
timeout and NCCL not at all. Sums are taken here, in the order of ranks, and not by the library, so that ranks
have the same bits as with any other group.

Host memory: ranks first tell each other through the control group what they call, so that a call begins when
all are there and agree. Then a thread waits for gloo, since a wait in gloo cannot be ended, and the caller
waits for that thread: until the deadline, or until the control group is over.

GPUs: a call is enqueued on the current stream and returns at once, without a word between the hosts. What
ranks call is not compared. A thread (`engine.parallel.enqueued`) aborts the communicator when the control
group is over, or when what was enqueued has not ended by the deadline; then streams go on, with whatever
their tensors hold. So results count only after `settle`, which every step ends with, and which raises. A call
within the capture of a CUDA graph is not watched, as it runs only in replays, before whose results `settle`
waits too. The control group tells of stopped and dead ranks, and not of devices that hang: the deadline does.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from queue import SimpleQueue
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor

from baton.wire.address import host_port, split_address
from engine.parallel.enqueued import EnqueuedCalls
from engine.parallel.group import (
    Group,
    GroupBroken,
    broadcast_address,
    check_in_place,
    check_peer,
    check_reducible,
    check_root,
    parts_along,
    parts_of_rows,
    tensor_kind,
)
from engine.parallel.torch_backend import (
    broadcast_from,
    check_backend,
    gather_to,
    join_store,
    make_backend,
    serve_store,
)

LOOK_S = 0.02
"""Whoever waits for gloo looks so often whether the other ranks are there."""
FAREWELL_S = 0.25
"""What others sent before the group ended may still be on its way."""
VERDICT_S = 2.0
"""The longest time from an error of the library until the control group says which rank is lost."""
POLL_S = 50e-6
GATHERED_BYTES = 64 * 1024
"""Tensors up to this size are summed by every rank, all of them. Of larger ones each rank sums a part, which
moves the fewest bytes and takes two steps."""
TAG = 0
_CALLS = ("all_reduce", "all_gather", "gather", "reduce_scatter", "broadcast", "send", "recv")
_MESSAGE = _CALLS.index("send")


class ControlGroup(Group, Protocol):
    """A group that knows of its ranks' ends. This one's alone."""

    def wait_for_all(self, *, timeout_s: float) -> None: ...

    def watch(self) -> str:
        """Why the group is over, by a look at every rank; empty: it is not. Called several times a second."""
        ...


class _Helper:
    """A thread that waits in calls that nobody can end. It is left behind with one that does not end."""

    def __init__(self, name: str) -> None:
        self._work: SimpleQueue[tuple[Callable[[], object], Future[object]] | None] = SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def submit(self, call: Callable[[], object]) -> "Future[object]":
        future: Future[object] = Future()
        self._work.put((call, future))
        return future

    def close(self) -> None:
        self._work.put(None)

    def _run(self) -> None:
        while (found := self._work.get()) is not None:
            call, future = found
            try:
                with torch.inference_mode():  # tensors of a step may be written in no other
                    future.set_result(call())
            except BaseException as error:
                future.set_exception(error)
            del call, future, found


class TorchGroup:
    """See `engine.parallel.group.Group`. Tensors are on the group's device."""

    def __init__(self, control: ControlGroup, *, device: torch.device, host: str, deadline_s: float) -> None:
        """Take the control group over. Its ranks need not all be there yet. `host` is an address of this
        machine at which the other ranks reach it. Raises SetupError."""
        check_backend(device)
        self._control, self._device, self._host = control, device, host
        self._deadline_s = deadline_s
        self.rank, self.size = control.rank, control.size
        self._is_cuda = device.type == "cuda"
        self._calls, self._sends = _Helper("torch-calls"), _Helper("torch-sends")
        self._library: Any = None
        self._store, self._here = None, ""
        if not self.rank and control.size > 1:  # it serves before anybody knows its address
            self._store, port = serve_store(host)
            self._here = host_port(host, port)
        self._over = ""
        self._unsent: deque[Any] = deque()
        """Messages that the device may still read from."""
        self._enqueued: EnqueuedCalls | None = None

    def wait_for_all(self, *, timeout_s: float) -> None:
        """Wait until every rank has joined, and connect with all. Raises GroupBroken."""
        self._control.wait_for_all(timeout_s=timeout_s)
        self.connect(timeout_s=timeout_s)

    def connect(self, *, timeout_s: float) -> None:
        """Connect with all ranks, who have joined the control group. Raises GroupBroken."""
        self.size = self._control.size
        if self.size == 1:
            return
        end_s = time.monotonic() + timeout_s
        host, port = split_address(broadcast_address(self._control, self._here))

        def connect() -> None:
            if self._store is None:
                self._store = join_store(host, port, timeout_s=timeout_s)
            self._library = make_backend(
                *(self._store, self.rank, self.size, self._device),
                host=self._host,
                timeout_s=timeout_s,
                deadline_s=self._deadline_s,
            )

        self._await(self._calls.submit(connect), "joining", end_s)
        if self._is_cuda:
            watch, deadline_s = self._control.watch, self._deadline_s
            self._enqueued = EnqueuedCalls(watch, self._end, deadline_s=deadline_s)

    # --- collectives --------------------------------------------------------------------------------

    def all_reduce_(self, x: Tensor) -> Tensor:
        check_reducible(x)
        check_in_place(x)
        end_s = self._begin("all_reduce", (x.numel(),), x.dtype)
        flat = x.view(-1)
        if self.size <= 2 or x.nbytes <= GATHERED_BYTES:
            flat.copy_(_sum(self._all_gather(flat, "all_reduce", end_s)))
            return x
        length = -(-flat.numel() // self.size)
        padded = flat
        if flat.numel() < length * self.size:
            padded = flat.new_zeros(length * self.size)
            padded[: flat.numel()] = flat
        parts = torch.empty_like(padded)
        self._carry_out(
            lambda: self._library.alltoall_base(_as_bytes(parts), _as_bytes(padded), [], []),
            *("all_reduce", end_s),
        )
        whole = self._all_gather(_sum(parts.view(self.size, length)), "all_reduce", end_s)
        flat.copy_(whole.view(-1)[: flat.numel()])
        return x

    def all_gather(self, x: Tensor, dim: int = 0, *, sizes: Sequence[int] | None = None) -> Tensor:
        parts = parts_along(x, dim, sizes, rank=self.rank, size=self.size)
        end_s = self._begin("all_gather", _gather_kind(x, dim, parts), x.dtype)
        found = self._all_gather(_padded(x, dim, max(parts)), "all_gather", end_s)
        return _joined(found, dim, parts)

    def gather(
        self, x: Tensor, dim: int = 0, *, sizes: Sequence[int] | None = None, to: int = 0
    ) -> Tensor | None:
        check_root(self.size, to)
        parts = parts_along(x, dim, sizes, rank=self.rank, size=self.size)
        end_s = self._begin("gather", (to, *_gather_kind(x, dim, parts)), x.dtype)
        part = _padded(x, dim, max(parts))
        found = part.new_empty((self.size, *part.shape)) if self.rank == to else None
        if self.size == 1:
            return x.clone()
        if part.nbytes:
            into = [] if found is None else [[_as_bytes(one) for one in found]]
            self._carry_out(
                lambda: self._library.gather(into, [_as_bytes(part)], gather_to(to)), "gather", end_s
            )
        return None if found is None else _joined(found, dim, parts)

    def reduce_scatter(self, x: Tensor, *, sizes: Sequence[int] | None = None) -> Tensor:
        check_reducible(x)
        parts = parts_of_rows(x, sizes, size=self.size)
        end_s = self._begin("reduce_scatter", (*parts, *x.shape), x.dtype)
        x = x.contiguous()
        own = parts[self.rank]
        found = x.new_empty((self.size, own, *x.shape[1:]))
        if self.size == 1:
            found[0] = x
        elif x.nbytes:
            row_bytes = x.nbytes // len(x)
            sent, got = [rows * row_bytes for rows in parts], [own * row_bytes] * self.size
            self._carry_out(
                lambda: self._library.alltoall_base(_as_bytes(found), _as_bytes(x), got, sent),
                *("reduce_scatter", end_s),
            )
        return _sum(found)

    def broadcast_(self, x: Tensor, *, source: int = 0) -> Tensor:
        check_root(self.size, source)
        check_in_place(x)
        end_s = self._begin("broadcast", (x.nbytes, source), torch.uint8)
        if self.size > 1 and x.nbytes:
            self._carry_out(
                lambda: self._library.broadcast([_as_bytes(x)], broadcast_from(source)), "broadcast", end_s
            )
        return x

    def _all_gather(self, part: Tensor, call: str, end_s: float) -> Tensor:
        """All ranks' parts, which have one shape: [size, *shape]."""
        found = part.new_empty((self.size, *part.shape))
        if self.size == 1:
            found[0] = part
        elif part.nbytes:
            self._carry_out(
                lambda: self._library._allgather_base(_as_bytes(found), _as_bytes(part)), call, end_s
            )
        return found

    # --- messages -----------------------------------------------------------------------------------

    def send(self, x: Tensor, to: int) -> None:
        check_peer(self.rank, self.size, to)
        self._check()
        if self._is_cuda:
            self._send_from_device(x.contiguous(), to)
            return
        self._control.send(_numbers(tensor_kind(x.shape, x.dtype)), to)
        if x.nbytes:
            data = _as_bytes(x.contiguous()).clone()  # it leaves when the other rank takes it
            self._sends.submit(lambda: self._send_now(data, to))

    def _send_now(self, data: Tensor, to: int) -> None:
        try:
            self._library.send([data], to, TAG).wait()
        except RuntimeError as error:
            if not self._verdict():
                self._control.abort(f"rank {to} did not take what rank {self.rank} sent: {_line(error)}")

    def _send_from_device(self, x: Tensor, to: int) -> None:
        while self._unsent and self._unsent[0].is_completed():
            self._unsent.popleft()
        self._enqueue(lambda: self._unsent.append(self._library.send([_as_bytes(x)], to, TAG)), "send")

    def recv(self, shape: Sequence[int], dtype: torch.dtype, source: int) -> Tensor:
        check_peer(self.rank, self.size, source)
        self._check()
        out = torch.empty(tuple(shape), dtype=dtype, device=self._device)
        end_s = time.monotonic() + self._deadline_s
        if not self._is_cuda:
            (sent,) = self._control.recv((1,), torch.int64, source).tolist()
            if sent != _numbers(tensor_kind(out.shape, dtype)).item():
                self._give_up(
                    f"ranks call different things: rank {self.rank} takes {tuple(shape)} of {dtype}, and "
                    f"rank {source} has sent something else"
                )
        if out.nbytes:
            self._carry_out(lambda: self._library.recv([_as_bytes(out)], source, TAG), "recv", end_s)
        return out

    # --- what all calls do --------------------------------------------------------------------------

    def _begin(self, call: str, numbers: Sequence[int], dtype: torch.dtype) -> float:
        """Agree with all ranks on a collective, where the host waits for it anyway. Return its deadline."""
        self._check()
        end_s = time.monotonic() + self._deadline_s
        if self._is_cuda:
            return end_s
        kind = _numbers(tensor_kind((_CALLS.index(call), *numbers), dtype))
        if self._control.all_gather(kind).unique().numel() > 1:
            self._give_up(f"ranks call different things: rank {self.rank} {call} {tuple(numbers)} of {dtype}")
        return end_s

    def _carry_out(self, issue: Callable[[], Any], call: str, end_s: float) -> None:
        if self._is_cuda:
            self._enqueue(lambda: issue().wait(), call)  # this stream waits, and not the host
        else:
            self._await(self._calls.submit(lambda: issue().wait()), call, end_s)

    def _enqueue(self, issue: Callable[[], object], call: str) -> None:
        assert self._enqueued is not None
        self._check()
        if not torch.cuda.is_current_stream_capturing():
            self._enqueued.begun(call)
        try:
            with torch.cuda.device(self._device):
                issue()
        except RuntimeError as error:
            self._explain(call, error)

    def _await(self, future: "Future[object]", call: str, end_s: float) -> None:
        """Wait for a helper. Raises GroupBroken."""
        lost_s: float | None = None
        while not wait([future], LOOK_S).done:
            now_s = time.monotonic()
            if reason := self._control.watch():
                lost_s = now_s if lost_s is None else lost_s
                if now_s - lost_s > FAREWELL_S:
                    raise GroupBroken(reason)
            elif now_s > end_s:
                self._give_up(f"a rank was not there in time: rank {self.rank} waited in {call}")
        error = future.exception()
        if error is not None:
            self._explain(call, error)

    def settle(self) -> None:
        if self._enqueued is None:
            return
        with torch.cuda.device(self._device):
            done = torch.cuda.Event()
            done.record()
            while not done.query():
                self._check()
                time.sleep(POLL_S)
        self._enqueued.settled()
        self._check()

    # --- ends ---------------------------------------------------------------------------------------

    def be_strict(self) -> None:
        self._control.be_strict()

    def abort(self, reason: str) -> None:
        self._control.abort(reason)

    def close(self) -> None:
        self._control.close()
        if self._enqueued is not None:
            self._enqueued.close()
        self._end("this rank has left the group")
        # The library waits for its calls when it is dropped, and only a helper has time for that.
        kept, self._library, self._store = [self._library, self._store], None, None
        self._calls.submit(kept.clear)
        for helper in (self._calls, self._sends):
            helper.close()

    def _end(self, reason: str) -> None:
        """Let the library go, and with it whatever waits for it on a device."""
        self._over = self._over or reason
        self._control.abort(reason)
        library = self._library
        if self._is_cuda and library is not None:
            library.abort()

    def _check(self) -> None:
        if self._over:
            raise GroupBroken(self._over)

    def _give_up(self, reason: str) -> NoReturn:
        """Raises GroupBroken, with the reason that came first."""
        self._control.abort(reason)
        raise GroupBroken(self._control.watch() or reason)

    def _explain(self, call: str, error: BaseException) -> NoReturn:
        """Raises GroupBroken for an error of the library, which often is a rank's end."""
        if not isinstance(error, RuntimeError):
            raise error
        reason = self._verdict()
        if not reason:
            self._give_up(f"torch.distributed fails in {call} at rank {self.rank}: {_line(error)}")
        raise GroupBroken(reason) from error

    def _verdict(self) -> str:
        """Why the group is over, for a call of the library that has failed; empty: it is not."""
        end_s = time.monotonic() + VERDICT_S
        while not (reason := self._control.watch()) and time.monotonic() < end_s:
            time.sleep(LOOK_S)
        return reason


def _numbers(kind: int) -> Tensor:
    """A number of 64 bits without a sign, as torch has them."""
    return torch.tensor([kind - 2**64 if kind >= 2**63 else kind])


def _line(error: BaseException) -> str:
    return str(error).partition("\n")[0][:200] or type(error).__name__


def _as_bytes(x: Tensor) -> Tensor:
    """The memory of a contiguous tensor as bytes."""
    return x.view(-1).view(torch.uint8)


def _sum(parts: Tensor) -> Tensor:
    """The sum in the order of ranks, in float32, rounded once. parts: [ranks, ...]."""
    total = parts[0].to(torch.float32, copy=True)
    for part in parts[1:]:
        total += part
    return total.to(parts.dtype)


def _gather_kind(x: Tensor, dim: int, parts: Sequence[int]) -> tuple[int, ...]:
    dim %= x.dim()
    return (dim, *x.shape[:dim], *x.shape[dim + 1 :], *parts)


def _padded(x: Tensor, dim: int, length: int) -> Tensor:
    """The library gathers parts of one size only."""
    if x.shape[dim] == length:
        return x.contiguous()
    shape = list(x.shape)
    shape[dim] = length
    out = x.new_zeros(shape)
    out.narrow(dim, 0, x.shape[dim]).copy_(x)
    return out


def _joined(found: Tensor, dim: int, parts: Sequence[int]) -> Tensor:
    pairs = zip(found, parts, strict=True)
    return torch.cat([part.narrow(dim, 0, length) for part, length in pairs], dim)
