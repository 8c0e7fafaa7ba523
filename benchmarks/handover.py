"""Measures a hand-over: from the end of the last prefill chunk until the request is in the decode batch,
compared with the raw transfer of the same bytes.

Two real workers run in processes of their own, and this process acts as their router. The prefill worker
sends the first token at the same moment as the last grant, so the time between that token and the decode
worker's "joined", both received here, is the hand-over as the cluster sees it.
"""

import asyncio
import random
import statistics
import sys
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import msgspec

from baton.core.errors import SetupError
from baton.core.hashing import root_hash
from baton.core.ids import RouterId, SequenceId
from baton.core.messages import (
    CancelSequence,
    PeerRef,
    Phase,
    SequenceFailed,
    SequenceJoined,
    SequenceRefused,
    StartSequence,
    StepOutput,
    WorkerHello,
)
from baton.core.sampling import SamplingParams
from baton.wire.client import RouterEnd, worker_session
from benchmarks import transfer as transfer_bench

START_S = 180.0
REQUEST_S = 60.0
NEW_TOKENS = 8


class HandoverBench(msgspec.Struct, frozen=True):
    """Seconds over all requests of one prompt length; `raw_…` are medians of the same run."""

    prompt_tokens: int
    requests: int
    all_bytes: int
    last_chunk_bytes: int
    handover_p50_s: float
    handover_p99_s: float
    raw_all_s: float
    raw_last_chunk_s: float

    @property
    def overhead_p50_s(self) -> float:
        """Seconds beyond a raw transfer of the last chunk's bytes, which could not move earlier."""
        return self.handover_p50_s - self.raw_last_chunk_s


@dataclass(slots=True)
class _Worker:
    hello: WorkerHello
    link: RouterEnd
    address: str


async def run(
    model: str,
    *,
    prompt_lengths: Sequence[int],
    requests: int,
    step_tokens: int,
    settings: Sequence[str] = (),
    progress: Callable[[str], None] = lambda _: None,
) -> list[HandoverBench]:
    """Run the bench. Raises SetupError if the workers do not start."""
    sets = [f"engine.step_tokens_max={step_tokens}", *settings]
    async with AsyncExitStack() as stack:
        prefill, decode = await asyncio.gather(
            *(stack.enter_async_context(_worker(model, role, sets)) for role in ("prefill", "decode"))
        )
        results: list[HandoverBench] = []
        for length in prompt_lengths:
            progress(f"{requests} prompts of {length} tokens")
            await _one(prefill, decode, length, 0)  # the first request connects the two workers
            joins = [await _one(prefill, decode, length, i) for i in range(1, requests + 1)]
            results.append(await _result(length, step_tokens, prefill.hello, joins))
        return results


async def _one(prefill: _Worker, decode: _Worker, length: int, index: int) -> tuple[float, int]:
    """(seconds of the hand-over, bytes moved) of one request with a new prompt."""
    rng = random.Random(f"{length} {index}")
    start = StartSequence(
        seq_id=SequenceId(f"bench-{length}-{index}"),
        epoch=1,
        phase=Phase.PREFILL,
        tokens=tuple(rng.randrange(3, 256) for _ in range(length)),
        prompt_token_count=length,
        sampling=SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True),
        cache_root=root_hash(prefill.hello.fingerprint, b""),
        time_left_s=REQUEST_S,
    )
    source = PeerRef(prefill.hello.worker_id, prefill.address)
    prefill.link.send(start)
    decode.link.send(msgspec.structs.replace(start, phase=Phase.DECODE, source=source))
    async with asyncio.timeout(REQUEST_S):
        first_token_s, joined = await asyncio.gather(
            _first_token(prefill.link, start.seq_id), _joined(decode.link, start.seq_id)
        )
    decode.link.send(CancelSequence(start.seq_id, start.epoch))
    return joined[0] - first_token_s, joined[1].transferred_bytes


async def _first_token(link: RouterEnd, seq_id: SequenceId) -> float:
    async for message in link:
        if isinstance(message, StepOutput) and any(o.seq_id == seq_id for o in message.outputs):
            return time.perf_counter()
        _must_go_well(message)
    raise SetupError("the prefill worker closed its session")


async def _joined(link: RouterEnd, seq_id: SequenceId) -> tuple[float, SequenceJoined]:
    async for message in link:
        if isinstance(message, SequenceJoined) and message.seq_id == seq_id:
            return time.perf_counter(), message
        _must_go_well(message)
    raise SetupError("the decode worker closed its session")


def _must_go_well(message: object) -> None:
    if isinstance(message, SequenceFailed | SequenceRefused):
        raise SetupError(f"a request failed: {message.reason} {message.message}")


async def _result(
    length: int, step_tokens: int, hello: WorkerHello, joins: list[tuple[float, int]]
) -> HandoverBench:
    times = sorted(seconds for seconds, _ in joins)
    all_bytes = joins[0][1]
    block_count = -(-length // hello.block_tokens)
    block_bytes = all_bytes // block_count
    last_tokens = (length - 1) % step_tokens + 1
    last_blocks = min(block_count, -(-last_tokens // hello.block_tokens))
    raw_all, raw_last = [
        await asyncio.to_thread(_raw_s, block_bytes, count) for count in (block_count, last_blocks)
    ]
    return HandoverBench(
        prompt_tokens=length,
        requests=len(joins),
        all_bytes=all_bytes,
        last_chunk_bytes=last_blocks * block_bytes,
        handover_p50_s=statistics.median(times),
        handover_p99_s=times[min(len(times) - 1, int(0.99 * len(times)))],
        raw_all_s=raw_all,
        raw_last_chunk_s=raw_last,
    )


def _raw_s(block_bytes: int, block_count: int) -> float:
    result = transfer_bench.run(block_bytes=block_bytes, block_count=block_count, seconds=1.0)
    return block_bytes * block_count / result.raw_bytes_per_s


@asynccontextmanager
async def _worker(model: str, role: str, sets: Sequence[str]) -> AsyncGenerator[_Worker]:
    command = [sys.executable, "-m", "baton", "worker", "--model", model, "--role", role]
    for setting in sets:
        command += ["--set", setting]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        address = await asyncio.wait_for(_ready(process), START_S)
        async with worker_session(address, RouterId("bench")) as (hello, link):
            yield _Worker(hello, link, address)
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def _ready(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    assert process.stderr is not None
    async for line in process.stdout:
        word, _, address = line.decode().strip().partition(" ")
        if word == "ready":
            return address
    said = (await process.stderr.read()).decode().strip().splitlines()
    raise SetupError(f"a worker did not start: {said[-1] if said else 'no reason given'}")
