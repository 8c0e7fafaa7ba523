"""The engine on a GPU, compared with the device's own speed, and servers on it, in turn.

Steps are timed in two ways: one after another, and begun before the one before has left the device, as a
worker runs them. Limits are measured in the same run.
"""

import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import torch

from baton.config import EngineConfig, ModelConfig
from baton.core.steps import StepPlan, StepResult
from benchmarks import closed_loop, limits, peers
from benchmarks.closed_loop import ClosedLoopLoad, LoadResult
from benchmarks.device_model import DeviceModelSizes
from benchmarks.engine import StepPlans
from benchmarks.peers import Peer
from engine.devices import torch_device
from engine.execution.executor import Executor

PREFILLS = (512, 2048, 8192)
DECODES = ((1, 512), (8, 512), (64, 512), (64, 4096))
LOADS = ((1, 6, 512, 128), (8, 32, 512, 128), (64, 256, 512, 128), (4, 8, 4000, 64))
"""(requests in flight, requests, prompt tokens, output tokens)."""
FIRST_TOKEN = 100


class DeviceStep(msgspec.Struct, frozen=True):
    """One kind of step."""

    name: str
    alone_s: float
    """Seconds of one, by itself."""
    ahead_s: float
    """Seconds that one adds where the next is begun before it is done."""
    limit: str
    limit_s: float
    """The least that the limit allows."""


class DeviceServer(msgspec.Struct, frozen=True):
    peer: str
    rounds: int
    prompt_tokens: int
    output_tokens: int
    load: LoadResult
    """Medians over the rounds."""


def measure_steps(
    folder: Path, device: str, sizes: DeviceModelSizes, rounds: int, progress: Callable[[str], None]
) -> list[DeviceStep]:
    """Raises SetupError as `Executor.load` does."""
    longest = max(PREFILLS)
    executor = Executor.load(
        ModelConfig(path=str(folder), device=device), EngineConfig(step_tokens_max=longest, speculation="off")
    )
    try:
        on = executor.kv.device
        reads, rate = limits.read_bandwidth(on), limits.matmul_rate(on, torch.bfloat16)
        plans = StepPlans(executor)
        steps: list[DeviceStep] = []
        for tokens in PREFILLS:
            attention = 2 * tokens * tokens * sizes.heads * sizes.head_dim * sizes.layers
            flops = 2 * tokens * sizes.matrix_parameters + attention
            made = _timed(executor, lambda n=tokens: plans.prefill_plan(n), rounds)
            steps.append(DeviceStep(f"prefill {tokens}", *made, "matmul rate", flops / rate))
            progress(_line(steps[-1]))
        token_bytes = executor.geometry.block_bytes / executor.geometry.block_tokens
        for batch, context in DECODES:
            if batch * executor.geometry.blocks_for(context) > executor.kv.block_count:
                progress(f"decode {batch} x {context}: the KV pool does not hold it")
                continue
            read = 2 * sizes.matrix_parameters + batch * context * token_bytes
            made = _timed(executor, lambda b=batch, c=context: plans.decode_plan(b, c), 4 * rounds)
            steps.append(DeviceStep(f"decode {batch} x {context}", *made, "memory reads", read / reads))
            progress(_line(steps[-1]))
        return steps
    finally:
        executor.close()


def _line(step: DeviceStep) -> str:
    return (
        f"{step.name}: {step.alone_s * 1e3:.2f} ms alone, {step.ahead_s * 1e3:.2f} ahead, "
        f"{step.limit_s / step.ahead_s:.2f} of the limit"
    )


def _timed(executor: Executor, plan: Callable[[], StepPlan], rounds: int) -> tuple[float, float]:
    """Seconds of a step alone (median), and of one of many that overlap (mean)."""
    alone: list[float] = []
    for _ in range(rounds + 2):
        started_s = time.perf_counter()
        executor.execute(plan())
        alone.append(time.perf_counter() - started_s)
    started_s = time.perf_counter()
    open_step = executor.begin(plan())
    for _ in range(rounds - 1):
        following = executor.begin(plan())
        if not isinstance(open_step, StepResult):
            executor.finish(open_step)
        open_step = following
    if not isinstance(open_step, StepResult):
        executor.finish(open_step)
    return statistics.median(alone[2:]), (time.perf_counter() - started_s) / rounds


async def compare(
    servers: Sequence[Peer], *, rounds: int, vocab: int, cores: Sequence[int], progress: Callable[[str], None]
) -> list[DeviceServer]:
    """Every round starts each server anew, one at a time. Raises SetupError if one does not work."""
    seen: dict[tuple[str, int], list[LoadResult]] = {}
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as logs:
        for number in range(rounds):
            for peer in servers:
                progress(f"round {number + 1} of {rounds}: {peer.name}")
                async with peers.running(peer, cores=cores, log=Path(logs) / "server.log") as running:
                    server = running.url
                    warm_up = _load((2, 4, 64, 8), vocab)
                    await closed_loop.run(server, peer.model_name, warm_up, seed=-1)
                    for index, sizes in enumerate(LOADS):
                        load = _load(sizes, vocab)
                        result = await closed_loop.run(server, peer.model_name, load, seed=number)
                        seen.setdefault((peer.name, index), []).append(result)
                        progress(f"    {sizes[0]:3d} in flight: {result.output_tokens_per_s:.0f} tok/s")
    return [
        DeviceServer(name, len(results), *LOADS[index][2:], closed_loop.median_of(results))
        for (name, index), results in seen.items()
    ]


def _load(sizes: tuple[int, int, int, int], vocab: int) -> ClosedLoopLoad:
    return ClosedLoopLoad(*sizes, first_token=FIRST_TOKEN, end_token=vocab)


def run_servers(servers: Sequence[Peer], **options: object) -> list[DeviceServer]:
    return asyncio.run(compare(servers, **options))  # pyright: ignore[reportArgumentType]


def name_of(device: torch.device) -> str:
    return torch.cuda.get_device_name(device)


def device_of(name: str) -> torch.device:
    """Raises SetupError: no such GPU."""
    return torch_device(name)
