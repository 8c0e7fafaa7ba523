"""The limits of a device, measured in the run that needs them."""

import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

READ_BYTES = 512 * 2**20
"""More bytes than any cache holds."""
MATMUL_SIZE = {"cpu": 1024, "cuda": 8192}


def seconds(call: Callable[[], object], *, rounds: int, device: torch.device) -> float:
    """The median seconds of one call, after one call that does not count."""
    times: list[float] = []
    for _ in range(rounds + 1):
        synchronize(device)
        started_s = time.perf_counter()
        call()
        synchronize(device)
        times.append(time.perf_counter() - started_s)
    return statistics.median(times[1:])


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def read_bandwidth(device: torch.device) -> float:
    """Bytes per second of summing memory."""
    data = torch.ones(READ_BYTES // 4, dtype=torch.float32, device=device)
    return READ_BYTES / seconds(data.sum, rounds=7, device=device)


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second of copying memory, counting both reads and writes."""
    source = torch.ones(READ_BYTES // 8, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    return READ_BYTES / seconds(lambda: target.copy_(source), rounds=7, device=device)


def matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP per second of a square matrix product by torch."""
    size = MATMUL_SIZE[device.type]
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / seconds(lambda: F.linear(a, b), rounds=7, device=device)
