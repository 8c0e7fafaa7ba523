"""What ranks tell each other: sums over two processes beside memcpy, and plans from leader to follower.

This process is rank 0, on one core; the other rank is a process on another core.
"""

import ctypes
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager

import msgspec
import torch

from baton.core.ids import SeqKey, SequenceId
from baton.core.sampling import SamplingParams
from baton.core.steps import StepItem, StepPlan
from baton.wire.parent import end_with_parent
from benchmarks.parallel.cores import on_cores
from engine.parallel.order_channel import OrderReceiver, OrderSender
from engine.parallel.orders import RaiseGenerations, RankOrder
from engine.parallel.shared_memory import SharedMemoryGroup

SUM_BYTES = tuple(2**power * 1024 for power in (4, 6, 8, 10, 12))
DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32}
WAKE = 0
"""In place of a plan the smallest order that there is: it costs what it takes to wake a follower."""
PLAN_ITEMS = (WAKE, 1, 8, 64)
CONTEXT_TOKENS, BLOCK_TOKENS = 2048, 32
"""Context of the plans' sequences: it makes the length of their block tables."""
IDLE_S = 1e-3
"""The time between two plans, in which the follower has nothing to do and falls asleep."""
BLOCK_TABLES = tuple(tuple(range(i * 1000, (i + 1) * 1000)) for i in range(64))
SAMPLING = SamplingParams(max_tokens=4096)
WARM_CALLS = 20
DEADLINE_S = 60.0
PEER = 1


class LinkSizes(msgspec.Struct, frozen=True):
    sum_bytes: tuple[int, ...] = SUM_BYTES
    plan_items: tuple[int, ...] = PLAN_ITEMS
    calls: int = 200
    """Calls of each kind in a round."""
    plans: int = 200
    """Plans of each size in a round."""
    rounds: int = 5


class SumLatency(msgspec.Struct, frozen=True):
    """An all-reduce over two ranks. Seconds are medians over all rounds."""

    dtype: str
    size_bytes: int
    all_reduce_s: float
    memcpy_s: float

    @property
    def ratio(self) -> float:
        return self.all_reduce_s / self.memcpy_s


class PlanLatency(msgspec.Struct, frozen=True):
    """Seconds from the call that sends a decode plan until the sleeping follower has it, decoded."""

    items: int
    p50_s: float
    p99_s: float


class LinkResult(msgspec.Struct, frozen=True):
    sums: list[SumLatency]
    plans: list[PlanLatency]


class PeerSetup(msgspec.Struct, frozen=True):
    world_address: str
    orders_address: str
    sizes: LinkSizes


def measure(sizes: LinkSizes, cores: Sequence[int], *, progress: Callable[[str], None]) -> LinkResult:
    """Raises SetupError if memory cannot be shared, and GroupBroken if the other rank fails."""
    with on_cores(cores[:1]):
        world = SharedMemoryGroup.create(2, deadline_s=DEADLINE_S)
        orders = OrderSender.create(2, deadline_s=DEADLINE_S)
        setup = PeerSetup(world.address, orders.address, sizes)
        with on_cores(cores[1:2]):
            command = [sys.executable, "-m", "benchmarks.parallel.links", str(os.getpid())]
            peer = subprocess.Popen(command, stdin=subprocess.PIPE)
        try:
            assert peer.stdin is not None
            with peer.stdin as pipe:
                pipe.write(msgspec.json.encode(setup))
            world.wait_for_all(timeout_s=DEADLINE_S)
            orders.wait_for_all(timeout_s=DEADLINE_S)
            progress("all-reduce over two ranks, and memcpy")
            sums = _measure_sums(world, sizes)
            progress("plans from leader to follower")
            return LinkResult(sums, _measure_plans(world, orders, sizes))
        finally:
            world.close()
            orders.close()
            peer.kill()
            peer.wait()


# --- sums ---


def _cases(sizes: LinkSizes) -> list[tuple[str, int]]:
    return [(dtype, size) for dtype in DTYPES for size in sizes.sum_bytes]


def _measure_sums(world: SharedMemoryGroup, sizes: LinkSizes) -> list[SumLatency]:
    cases = _cases(sizes)
    sums: dict[tuple[str, int], list[float]] = {case: [] for case in cases}
    copies: dict[tuple[str, int], list[float]] = {case: [] for case in cases}
    for _ in range(sizes.rounds):
        for case in cases:
            sums[case] += _sum_times(world, *case, sizes.calls)
            copies[case] += _copy_times(case[1], sizes.calls)
    return [
        SumLatency(*case, statistics.median(sums[case]), statistics.median(copies[case])) for case in cases
    ]


def _sum_times(world: SharedMemoryGroup, dtype: str, size_bytes: int, calls: int) -> list[float]:
    kind = DTYPES[dtype]
    x = torch.zeros(size_bytes // kind.itemsize, dtype=kind)
    return _times(lambda: world.all_reduce_(x), calls)


def _copy_times(size_bytes: int, calls: int) -> list[float]:
    source, target = (torch.zeros(size_bytes, dtype=torch.uint8) for _ in range(2))
    to, start = target.data_ptr(), source.data_ptr()
    return _times(lambda: ctypes.memmove(to, start, size_bytes), calls)


def _times(call: Callable[[], object], count: int) -> list[float]:
    times: list[float] = []
    for _ in range(WARM_CALLS + count):
        started_s = time.perf_counter()
        call()
        times.append(time.perf_counter() - started_s)
    return times[WARM_CALLS:]


# --- plans ---


def decode_plan(number: int, items: int) -> StepPlan:
    """Step `number` of `items` sequences that decode."""
    position = CONTEXT_TOKENS + number
    per_sequence = (position + BLOCK_TOKENS) // BLOCK_TOKENS
    return StepPlan(
        tuple(
            StepItem(
                key=SeqKey(SequenceId(f"bench/{items}/{i}"), 0),
                tokens=(7,),
                first_position=position,
                # A scheduler's table is a new tuple of the same numbers in every step.
                block_ids=BLOCK_TABLES[i % len(BLOCK_TABLES)][:per_sequence],
                sample_index=number,
                sampling=SAMPLING,
                prompt_token_count=CONTEXT_TOKENS,
            )
            for i in range(items)
        ),
        number,
    )


def _measure_plans(world: SharedMemoryGroup, orders: OrderSender, sizes: LinkSizes) -> list[PlanLatency]:
    times: dict[int, list[float]] = {items: [] for items in sizes.plan_items}
    for number in range(sizes.rounds):
        first = number * (1 + sizes.plans)
        for items in sizes.plan_items:
            # The first plan of a round is whole in the first round, and pays for what the ones before did.
            plans = [_order(first + i, items) for i in range(1 + sizes.plans)]
            times[items] += _plan_times(world, orders, plans)[1:]
    return [PlanLatency(items, *_p50_and_p99(seen)) for items, seen in times.items()]


def _order(number: int, items: int) -> RankOrder:
    return RaiseGenerations((), ()) if items == WAKE else decode_plan(number, items)


def _plan_times(world: SharedMemoryGroup, orders: OrderSender, plans: Sequence[RankOrder]) -> list[float]:
    sent_s: list[float] = []
    for plan in plans:
        time.sleep(IDLE_S)
        sent_s.append(time.perf_counter())
        orders.send(plan)
    arrived_s = world.recv((len(plans),), torch.float64, PEER).tolist()
    return [there - begun for there, begun in zip(arrived_s, sent_s, strict=True)]


def _p50_and_p99(times: list[float]) -> tuple[float, float]:
    ordered = sorted(times)
    return statistics.median(ordered), ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]


# --- the other rank ---


def _follow(parent_pid: int) -> None:
    end_with_parent(parent_pid, signal.SIGKILL)
    setup = msgspec.json.decode(sys.stdin.buffer.read(), type=PeerSetup)
    with _joined(setup) as (world, orders):
        sizes = setup.sizes
        for _ in range(sizes.rounds):
            for case in _cases(sizes):
                _sum_times(world, *case, sizes.calls)
        for _ in range(sizes.rounds):
            for _ in sizes.plan_items:
                arrived_s: list[float] = []
                for _ in range(1 + sizes.plans):
                    orders.receive(timeout_s=DEADLINE_S)
                    arrived_s.append(time.perf_counter())  # Linux: the same clock in all processes
                world.send(torch.tensor(arrived_s, dtype=torch.float64), 0)


@contextmanager
def _joined(setup: PeerSetup) -> Generator[tuple[SharedMemoryGroup, OrderReceiver]]:
    world = SharedMemoryGroup.join(setup.world_address, PEER, deadline_s=DEADLINE_S)
    orders = OrderReceiver.join(setup.orders_address, PEER, deadline_s=DEADLINE_S)
    try:
        world.wait_for_all(timeout_s=DEADLINE_S)
        orders.wait_for_all(timeout_s=DEADLINE_S)
        yield world, orders
    finally:
        world.close()
        orders.close()


if __name__ == "__main__":
    _follow(int(sys.argv[1]))
