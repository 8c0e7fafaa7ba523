"""The limits of a device, measured in the run that needs them."""

import statistics
import time
import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F

READ_BYTES = {"cpu": 2**30, "cuda": 4 * 2**30}
"""More bytes than any cache holds, and so many that a device is busy for a millisecond."""
MATMUL_SIZE = {"cpu": 1024, "cuda": 8192}


def seconds(call: Callable[[], object], *, rounds: int, device: torch.device) -> float:
    """The median seconds of one call, after calls that do not count. On a GPU they are the device's, as
    its events tell, and the host's launches count only where `call` cannot be recorded as a graph."""
    if device.type == "cuda":
        return _device_seconds(call, rounds)
    times: list[float] = []
    for _ in range(rounds + 1):
        synchronize(device)
        started_s = time.perf_counter()
        call()
        synchronize(device)
        times.append(time.perf_counter() - started_s)
    return statistics.median(times[1:])


def _device_seconds(call: Callable[[], object], rounds: int) -> float:
    for _ in range(2):  # kernels are compiled, and libraries set up
        call()
    torch.cuda.synchronize()
    run = _recorded(call) or call
    events = [tuple(torch.cuda.Event(enable_timing=True) for _ in range(2)) for _ in range(rounds + 1)]
    for started, ended in events:
        started.record()
        run()
        ended.record()
    torch.cuda.synchronize()
    return statistics.median(started.elapsed_time(ended) / 1e3 for started, ended in events[1:])


def _recorded(call: Callable[[], object]) -> Callable[[], None] | None:
    """The call as a CUDA graph; None: it copies from host memory, or waits for the device."""
    graph = torch.cuda.CUDAGraph()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an empty graph is none
        try:
            with torch.cuda.graph(graph):
                call()
        except RuntimeError:
            torch.cuda.synchronize()
            return None
    return graph.replay


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def read_bandwidth(device: torch.device) -> float:
    """Bytes per second of summing memory."""
    size = READ_BYTES[device.type]
    data = torch.ones(size // 4, dtype=torch.float32, device=device)
    return size / seconds(data.sum, rounds=7, device=device)


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second of copying memory, counting both reads and writes."""
    size = READ_BYTES[device.type]
    source = torch.ones(size // 8, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    return size / seconds(lambda: target.copy_(source), rounds=7, device=device)


def matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP per second of a square matrix product by torch."""
    size = MATMUL_SIZE[device.type]
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / seconds(lambda: F.linear(a, b), rounds=7, device=device)
