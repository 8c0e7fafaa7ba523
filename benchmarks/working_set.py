"""Measures goodput with and without the store, for returning sessions whose KV exceeds the pool.

Every session has a long prompt and returns for several turns, each a little longer. Together their KV is a
multiple of the pool, and all others come in between, so a pool alone has evicted each session by its next
turn. Arrivals are Poisson, open loop. First turns, which nobody can have cached, are not counted.
"""

import asyncio
import random
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import orjson

from baton.core.errors import SetupError
from benchmarks import peers
from benchmarks.bench_model import FIRST_TOKEN, VOCAB
from benchmarks.peers import MODEL_NAME, Peer
from loadgen.client import ServerUrl, request_bytes, send
from loadgen.records import RequestOutcome, RequestRecord

REQUEST_S = 300.0


class WorkingSet(msgspec.Struct, frozen=True):
    """The requests of the bench."""

    sessions: int
    turns: int
    """Counted turns per session; a first one comes before."""
    prompt_tokens: int
    """Prompt tokens of a session's first turn."""
    turn_tokens: int
    """Prompt tokens that each turn adds."""
    output_tokens: int
    rate_per_s: float
    ttft_slo_s: float
    tpot_slo_s: float


class WorkingSetResult(msgspec.Struct, frozen=True):
    name: str
    requests: int
    completed: int
    goodput_per_s: float
    """Requests that met both objectives, per second of the arrivals' span."""
    ttft_p50_s: float
    tpot_p50_s: float
    cached_share: float
    """Share of prompt tokens, as the server reports it."""


async def compare(
    servers: Sequence[Peer], load: WorkingSet, *, cores: Sequence[int], progress: Callable[[str], None]
) -> list[WorkingSetResult]:
    """Run one server after the other. Raises SetupError if one does not start."""
    results: list[WorkingSetResult] = []
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as folder:
        for peer in servers:
            progress(f"starting {peer.name}")
            async with peers.running(peer, cores=cores, log=Path(folder) / "log") as running:
                server = running.url
                await asyncio.gather(*(_ask(server, load, s, 0, 0.0) for s in range(min(2, load.sessions))))
                progress(f"{peer.name}: first turns of {load.sessions} sessions")
                for session in range(load.sessions):
                    await _ask(server, load, session, 0, 0.0)
                progress(f"{peer.name}: {load.turns} turns of each at {load.rate_per_s:g} requests/s")
                results.append(await _measure(peer.name, server, load))
    return results


async def _measure(name: str, server: ServerUrl, load: WorkingSet) -> WorkingSetResult:
    rng = random.Random("arrivals")
    turns = [(session, turn) for turn in range(1, load.turns + 1) for session in range(load.sessions)]
    delays: list[float] = []
    at_s = 0.0
    for _ in turns:
        at_s += rng.expovariate(load.rate_per_s)
        delays.append(at_s)
    records = await asyncio.gather(
        *(_ask(server, load, *turn, delay_s) for turn, delay_s in zip(turns, delays, strict=True))
    )
    completed = [record for record in records if record.outcome is RequestOutcome.COMPLETED]
    if not completed:
        raise SetupError(f"{name}: no request was completed: {records[0].error} {records[0].detail}")
    prompt_count = sum(record.prompt_tokens or 0 for record in completed)
    return WorkingSetResult(
        name=name,
        requests=len(records),
        completed=len(completed),
        goodput_per_s=sum(_is_good(record, load) for record in completed) / at_s,
        ttft_p50_s=statistics.median(record.ttft_s or 0.0 for record in completed),
        tpot_p50_s=statistics.median(record.tpot_s or 0.0 for record in completed),
        cached_share=sum(record.cached_tokens or 0 for record in completed) / max(1, prompt_count),
    )


def _is_good(record: RequestRecord, load: WorkingSet) -> bool:
    ttft_s, tpot_s = record.ttft_s, record.tpot_s
    return ttft_s is not None and ttft_s <= load.ttft_slo_s and (tpot_s or 0.0) <= load.tpot_slo_s


async def _ask(server: ServerUrl, load: WorkingSet, session: int, turn: int, delay_s: float) -> RequestRecord:
    loop = asyncio.get_running_loop()
    record = RequestRecord(session, planned_s=loop.time() + delay_s)
    body = orjson.dumps(
        {
            "model": MODEL_NAME,
            "prompt": _prompt(load, session, turn),
            "max_tokens": load.output_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )
    arrived = asyncio.Event()
    loop.call_at(record.planned_s, arrived.set)
    await arrived.wait()
    await send(server, request_bytes(server, "/v1/completions", body), record, timeout_s=REQUEST_S)
    return record


def _prompt(load: WorkingSet, session: int, turn: int) -> list[int]:
    rng = random.Random(f"working set/{session}")
    return [rng.randrange(FIRST_TOKEN, VOCAB) for _ in range(load.prompt_tokens + turn * load.turn_tokens)]
