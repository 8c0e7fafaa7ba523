"""Compares Baton with other servers: same model, same cores, same load, in turn, several rounds."""

import asyncio
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from benchmarks import closed_loop, peers
from benchmarks.bench_model import FIRST_TOKEN, VOCAB
from benchmarks.closed_loop import ClosedLoopLoad, LoadResult
from benchmarks.peers import Peer

REQUESTS_PER_CLIENT = 2
REQUESTS_MIN = 10
WARM_UP_REQUESTS = 4


class ServerResult(msgspec.Struct, frozen=True):
    peer: str
    cores: int
    rounds: int
    load: LoadResult
    """The median of each field over the rounds."""


async def compare(
    servers: Sequence[Peer],
    *,
    core_counts: Sequence[int],
    concurrencies: Sequence[int],
    rounds: int,
    prompt_tokens: int,
    output_tokens: int,
    progress: Callable[[str], None],
) -> list[ServerResult]:
    """Every round starts each server anew, one at a time. Raises SetupError if one does not work."""
    seen: dict[tuple[int, str, int], list[LoadResult]] = {}
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as logs:
        for count in core_counts:
            for number in range(rounds):
                for peer in servers:
                    progress(f"{count} core(s), round {number + 1} of {rounds}: {peer.name}")
                    loads = [_load(c, prompt_tokens, output_tokens) for c in concurrencies]
                    log = Path(logs) / f"{peer.name}.log"
                    for result in await _measure(peer, range(count), loads, seed=number, log=log):
                        seen.setdefault((count, peer.name, result.concurrency), []).append(result)
                        progress(f"    {result.concurrency:3d} in flight: {_line(result)}")
    return [
        ServerResult(name, count, len(results), closed_loop.median_of(results))
        for (count, name, _), results in seen.items()
    ]


def _load(concurrency: int, prompt_tokens: int, output_tokens: int) -> ClosedLoopLoad:
    return ClosedLoopLoad(
        concurrency=concurrency,
        requests=max(REQUESTS_MIN, concurrency * REQUESTS_PER_CLIENT),
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        first_token=FIRST_TOKEN,
        end_token=VOCAB,
    )


async def _measure(
    peer: Peer, cores: Sequence[int], loads: Sequence[ClosedLoopLoad], *, seed: int, log: Path
) -> list[LoadResult]:
    loads = [msgspec.structs.replace(load, dialect=peer.dialect) for load in loads]
    async with peers.running(peer, cores=list(cores), log=log) as server:
        warm_up = msgspec.structs.replace(loads[0], concurrency=2, requests=WARM_UP_REQUESTS)
        await closed_loop.run(server, peer.model_name, warm_up, seed=-1)
        return [await closed_loop.run(server, peer.model_name, load, seed=seed) for load in loads]


def _line(r: LoadResult) -> str:
    return (
        f"{r.output_tokens_per_s:6.1f} tok/s, TTFT {r.ttft_p50_s * 1e3:7.1f} ms, "
        f"TPOT {r.tpot_p50_s * 1e3:6.2f} ms"
    )


def run(servers: Sequence[Peer], **options: object) -> list[ServerResult]:
    return asyncio.run(compare(servers, **options))  # pyright: ignore[reportArgumentType]
