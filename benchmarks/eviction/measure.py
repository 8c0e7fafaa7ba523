"""Hit ratios of the store's eviction policies on a trace as one pool, beside LRU and Belady's optimum."""

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from baton.core.errors import SetupError
from benchmarks.eviction.harness import Requests, best_possible, chains_of, run_policy
from benchmarks.eviction.table import make_compared_policy
from loadgen.traces import read_trace


class PolicyResult(msgspec.Struct, frozen=True):
    policy: str
    hit_ratio: float
    over_lru: float
    """Difference of the ratios."""
    gap_closed: float | None
    """Share of the way from LRU to the optimum; None: LRU is the optimum."""


class SizeResult(msgspec.Struct, frozen=True):
    capacity_blocks: int
    lru: float
    best_possible: float
    policies: list[PolicyResult]


class EvictionReport(msgspec.Struct, frozen=True):
    trace: str
    requests: int
    blocks_asked: int
    blocks: int
    """Distinct ones."""
    sizes: list[SizeResult]


def load_requests(path: Path) -> Requests:
    """Raises SetupError: see `read_trace`; or the trace says nothing about prefixes."""
    trace = read_trace(path)
    if not trace.has_prefixes:
        raise SetupError(f"{path}: this format says nothing about prefixes; give a trace with hash_ids")
    requests = chains_of((r.at_s, r.hash_ids) for r in trace.requests)
    if not any(chain for _, chain in requests):
        raise SetupError(f"{path}: no request has a block")
    return requests


def measure(
    path: Path, sizes: Sequence[int], policies: Sequence[str], *, progress: Callable[[str], None]
) -> EvictionReport:
    """Raises SetupError: the trace cannot be used."""
    requests = load_requests(path)
    results: list[SizeResult] = []
    for size in sizes:
        progress(f"{size} blocks: lru, optimum")
        lru = run_policy(requests, make_compared_policy("lru", size), size).ratio
        best = best_possible(requests, size).ratio
        measured: list[PolicyResult] = []
        for name in policies:
            progress(f"{size} blocks: {name}")
            policy = make_compared_policy(name, size)
            ratio = lru if name == "lru" else run_policy(requests, policy, size).ratio
            closed = (ratio - lru) / (best - lru) if best > lru else None
            measured.append(PolicyResult(name, ratio, ratio - lru, closed))
        results.append(SizeResult(size, lru, best, measured))
    chains = [chain for _, chain in requests]
    distinct = {number for chain in chains for number in chain}
    return EvictionReport(str(path), len(chains), sum(map(len, chains)), len(distinct), results)
