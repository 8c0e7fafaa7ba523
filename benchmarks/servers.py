"""Compares Baton with other servers: same model, same cores, same load, in turn, several rounds.

A machine that is shared with others changes its speed within a minute, by half and more. So that a comparison
says something there, servers take turns load by load, all within a minute or two, and are compared within a
round: they are started once, and all but the one that has its turn are paused.
"""

import asyncio
import itertools
import statistics
import tempfile
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from baton.core.errors import SetupError
from benchmarks import closed_loop, peers
from benchmarks.bench_model import FIRST_TOKEN, VOCAB
from benchmarks.closed_loop import ClosedLoopLoad, LoadResult
from benchmarks.peers import Peer, RunningPeer

REQUESTS_PER_CLIENT = 2
REQUESTS_MIN = 10
WARM_UP = (2, 4)
"""Requests in flight and requests after a start."""
WAKE_UP = (1, 1)
"""Those after a pause, in which others used the caches."""


class ServerResult(msgspec.Struct, frozen=True):
    peer: str
    cores: int
    rounds: int
    load: LoadResult
    """The median of each field over the rounds."""
    output_tokens_per_s: tuple[float, ...]
    """One number for each round."""


class MeasuredLoads:
    """What the servers did with their loads so far, which is what there is when a comparison ends early."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, int, int], list[LoadResult]] = {}

    def add(self, peer: str, cores: int, result: LoadResult) -> None:
        self._seen.setdefault((peer, cores, result.concurrency), []).append(result)

    def results(self) -> list[ServerResult]:
        return [
            ServerResult(
                name,
                cores,
                len(results),
                closed_loop.median_of(results),
                tuple(result.output_tokens_per_s for result in results),
            )
            for (name, cores, _), results in self._seen.items()
        ]


@dataclass(frozen=True, slots=True)
class ServerComparison:
    """What every server is given, `rounds` times."""

    loads: Sequence[ClosedLoopLoad]
    rounds: int
    keeps_all: bool
    """Whether all servers are in memory at once, paused between their turns. Otherwise each is started anew
    for each round: for models of which memory does not hold as many as there are servers."""
    progress: Callable[[str], None]


def loads_of(concurrencies: Sequence[int], prompt_tokens: int, output_tokens: int) -> list[ClosedLoopLoad]:
    return [
        ClosedLoopLoad(
            concurrency=count,
            requests=max(REQUESTS_MIN, count * REQUESTS_PER_CLIENT),
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            first_token=FIRST_TOKEN,
            end_token=VOCAB,
        )
        for count in concurrencies
    ]


async def compare(
    servers: Sequence[Peer],
    comparison: ServerComparison,
    *,
    core_counts: Sequence[int],
    measured: MeasuredLoads | None = None,
) -> list[ServerResult]:
    """Give every server all loads. Raises SetupError if one does not work.

    measured: is told of every load when it has ended.
    """
    measured = measured or MeasuredLoads()
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as logs:
        for count in core_counts:
            async with AsyncExitStack() as stack:
                turns = _Turns(stack, range(count), Path(logs), comparison)
                for peer in servers if comparison.keeps_all else ():
                    await turns.keep(peer)
                await _rounds(servers, turns, comparison, measured, cores=count)
    return measured.results()


async def _rounds(
    servers: Sequence[Peer],
    turns: "_Turns",
    comparison: ServerComparison,
    measured: MeasuredLoads,
    *,
    cores: int,
) -> None:
    loads = comparison.loads
    # A server that is started for its turn is given all loads, since a start takes long.
    groups = [[load] for load in loads] if comparison.keeps_all else [loads]
    for number in range(comparison.rounds):
        comparison.progress(f"{cores} core(s), round {number + 1} of {comparison.rounds}")
        first = number % len(servers)  # nobody is always the one that comes after a certain other
        for group in groups:
            for peer in (*servers[first:], *servers[:first]):
                async with turns.turn(peer) as server:
                    for load in group:
                        result = await _run(server, peer, load, seed=number)
                        measured.add(peer.name, cores, result)
                        comparison.progress(f"    {peer.name}, {_line(result)}")


class _Turns:
    """Servers that are ready and warm while it is their turn."""

    def __init__(
        self, stack: AsyncExitStack, cores: Sequence[int], logs: Path, comparison: ServerComparison
    ) -> None:
        self._stack, self._cores, self._logs, self._comparison = stack, list(cores), logs, comparison
        self._kept: dict[str, RunningPeer] = {}
        self._seeds = itertools.count(-1, -1)
        """No warm-up has the prompts of another one, or of a load."""

    async def keep(self, peer: Peer) -> None:
        server = await self._stack.enter_async_context(self._started(peer))
        await server.pause()
        self._kept[peer.name] = server

    @asynccontextmanager
    async def turn(self, peer: Peer) -> AsyncGenerator[RunningPeer]:
        server = self._kept.get(peer.name)
        if server is None:
            async with self._started(peer) as started:
                yield started
            return
        server.resume()
        await self._warm_up(server, peer, WAKE_UP)
        yield server
        await server.pause()

    @asynccontextmanager
    async def _started(self, peer: Peer) -> AsyncGenerator[RunningPeer]:
        self._comparison.progress(f"{len(self._cores)} core(s): starting {peer.name}")
        async with peers.running(peer, cores=self._cores, log=self._logs / f"{peer.name}.log") as server:
            await self._warm_up(server, peer, WARM_UP)
            yield server

    async def _warm_up(self, server: RunningPeer, peer: Peer, size: tuple[int, int]) -> None:
        concurrency, requests = size
        load = msgspec.structs.replace(self._comparison.loads[0], concurrency=concurrency, requests=requests)
        await _run(server, peer, load, seed=next(self._seeds))


async def _run(server: RunningPeer, peer: Peer, load: ClosedLoopLoad, *, seed: int) -> LoadResult:
    own = msgspec.structs.replace(load, dialect=peer.dialect)
    try:
        return await closed_loop.run(server.url, peer.model_name, own, seed=seed)
    except SetupError as error:
        raise SetupError(f"{peer.name}: {error}", log=server.log_tail()) from error


def _line(r: LoadResult) -> str:
    return (
        f"{r.concurrency} in flight: {r.output_tokens_per_s:.1f} tok/s, TTFT {r.ttft_p50_s * 1e3:.1f} ms, "
        f"TPOT {r.tpot_p50_s * 1e3:.2f} ms"
    )


def ratios(result: ServerResult, results: Sequence[ServerResult]) -> list[float]:
    """Return its output beside that of the best other server (by its median) in the same round, ascending;
    empty if there is no other. The last round may have ended early."""
    others = [
        other
        for other in results
        if (other.cores, other.load.concurrency) == (result.cores, result.load.concurrency)
        and not other.peer.startswith("baton")
    ]
    if not others:
        return []
    best = max(others, key=lambda other: statistics.median(other.output_tokens_per_s))
    pairs = zip(result.output_tokens_per_s, best.output_tokens_per_s, strict=False)
    return sorted(own / other for own, other in pairs)


def run(
    servers: Sequence[Peer],
    comparison: ServerComparison,
    *,
    core_counts: Sequence[int],
    measured: MeasuredLoads | None = None,
) -> list[ServerResult]:
    return asyncio.run(compare(servers, comparison, core_counts=core_counts, measured=measured))
