"""Closed-loop load: a fixed number of requests in flight at one server, each started when another one ends.

Servers are compared this way ("concurrency 8"). `baton replay` measures what users see under a given arrival
rate. Prompts are random token ids and never repeat, so no server's prefix cache helps it.
"""

import asyncio
import random
import statistics
from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec
import orjson

from baton.core.errors import SetupError
from loadgen.client import ServerUrl, request_bytes, send
from loadgen.records import RequestOutcome, RequestRecord

Dialect = Literal["vllm", "transformers"]
"""The fields of /v1/completions that make a server generate exactly `max_tokens` tokens; see
`completion_body`."""


class ClosedLoopLoad(msgspec.Struct, frozen=True):
    concurrency: int
    requests: int
    prompt_tokens: int
    output_tokens: int
    first_token: int
    end_token: int
    """Prompt ids are drawn from [first_token, end_token)."""
    timeout_s: float = 300.0
    dialect: Dialect = "vllm"


class LoadResult(msgspec.Struct, frozen=True):
    """Times in seconds, over all requests of one run."""

    concurrency: int
    requests: int
    duration_s: float
    output_tokens_per_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    tpot_p50_s: float
    tpot_p99_s: float


async def run(server: ServerUrl, model: str, load: ClosedLoopLoad, *, seed: int) -> LoadResult:
    """Run the load. Raises SetupError if any request fails, because a comparison with failures is
    meaningless."""
    loop = asyncio.get_running_loop()
    numbers = iter(range(load.requests))
    records: list[RequestRecord] = []

    async def client() -> None:
        for number in numbers:
            message = request_bytes(server, "/v1/completions", _body(model, load, seed, number))
            record = RequestRecord(number, planned_s=loop.time())
            records.append(record)
            await send(server, message, record, timeout_s=load.timeout_s)
            if record.outcome is not RequestOutcome.COMPLETED:
                raise SetupError(f"{server.origin}: request {number} failed: {record.error} {record.detail}")

    started_s = loop.time()
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(load.concurrency):
                group.create_task(client())
    except* SetupError as failures:
        failed = failures.exceptions[0]
    else:
        failed = None
    if failed is not None:
        raise failed
    return _result(load, records, loop.time() - started_s)


def _body(model: str, load: ClosedLoopLoad, seed: int, number: int) -> bytes:
    rng = random.Random(f"{seed}/{load.concurrency}/{number}")
    ids = [rng.randrange(load.first_token, load.end_token) for _ in range(load.prompt_tokens)]
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    return orjson.dumps(completion_body(model, ids, load.output_tokens, load.dialect) | streamed)


def completion_body(model: str, ids: Sequence[int], max_tokens: int, dialect: Dialect) -> dict[str, Any]:
    """The body of a greedy request that does not end before `max_tokens`.

    `transformers serve` (5.23, cli/serving/completion.py) takes text only, here the words `w123 w45 …` of the
    benchmark's tokenizer, and refuses fields that it does not know. Its first request determines how all are
    sampled.
    """
    common = {"model": model, "max_tokens": max_tokens, "temperature": 0}
    if dialect == "transformers":
        no_end = orjson.dumps({"eos_token_id": -1, "do_sample": False}).decode()
        return common | {"prompt": " ".join(f"w{token}" for token in ids), "generation_config": no_end}
    return common | {"prompt": list(ids), "ignore_eos": True}


def _result(load: ClosedLoopLoad, records: list[RequestRecord], duration_s: float) -> LoadResult:
    ttfts = [r.ttft_s for r in records if r.ttft_s is not None]
    tpots = [r.tpot_s for r in records if r.tpot_s is not None]
    short = [r for r in records if r.tokens_out < load.output_tokens]
    if short:
        raise SetupError(
            f"a request got {short[0].tokens_out} tokens instead of {load.output_tokens}: not comparable"
        )
    return LoadResult(
        concurrency=load.concurrency,
        requests=len(records),
        duration_s=duration_s,
        output_tokens_per_s=sum(r.tokens_out for r in records) / duration_s,
        ttft_p50_s=statistics.median(ttfts),
        ttft_p99_s=percentile(ttfts, 0.99),
        tpot_p50_s=statistics.median(tpots) if tpots else 0.0,
        tpot_p99_s=percentile(tpots, 0.99) if tpots else 0.0,
    )


def percentile(values: list[float], share: float) -> float:
    """The percentile by nearest rank."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def median_of(rounds: list[LoadResult]) -> LoadResult:
    """The median of each field, over runs of the same load."""

    def middle(read: Callable[[LoadResult], float]) -> float:
        return statistics.median(read(r) for r in rounds)

    first = rounds[0]
    return LoadResult(
        concurrency=first.concurrency,
        requests=first.requests,
        duration_s=middle(lambda r: r.duration_s),
        output_tokens_per_s=middle(lambda r: r.output_tokens_per_s),
        ttft_p50_s=middle(lambda r: r.ttft_p50_s),
        ttft_p99_s=middle(lambda r: r.ttft_p99_s),
        tpot_p50_s=middle(lambda r: r.tpot_p50_s),
        tpot_p99_s=middle(lambda r: r.tpot_p99_s),
    )
