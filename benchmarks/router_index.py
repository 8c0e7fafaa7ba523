"""Measures one decision of the router when it knows millions of blocks."""

import time
from random import Random

import msgspec
import numpy as np

from baton.config.router import RouterConfig
from baton.core.ids import BlockHash, RequestId, SequenceId, WorkerId
from baton.core.messages import BlockEvents, LoadReport, Role, WorkerHello
from baton.core.sampling import SamplingParams
from benchmarks.router_load import at
from router.decisions.core import RouterCore
from router.decisions.events import ClientGone, FromWorker, Submit, WorkerJoined
from router.decisions.prompt_hashes import PromptHashes

FINGERPRINT = "0" * 32
BLOCK_TOKENS = 16
CHAIN_BLOCKS = 1000
KEPT_CHAINS = 200
DECISION_S = 0.01
"""Seconds between two decisions on the core's clock."""


class IndexSeen(msgspec.Struct, frozen=True):
    workers: int
    blocks: int
    bytes_per_block: float
    prompt_tokens: int
    decision_p50_s: float
    decision_p99_s: float
    """Placing one sequence whose hashes are computed, from the event to the last action."""
    decision_cpu_p50_s: float
    decision_cpu_p99_s: float
    """The same without what other processes took from this one."""
    match_p50_s: float
    match_p99_s: float
    events_p99_s: float
    """One message with 1,000 new blocks, while the table was built."""


class Known:
    """Hashes that were computed before."""

    def __init__(self, hashes: list[BlockHash]) -> None:
        self._hashes = hashes

    def of(self, tokens: object, fingerprint: str, block_tokens: int) -> list[BlockHash]:
        return self._hashes


def _filled(workers: int, blocks: int) -> tuple[RouterCore, list[list[BlockHash]], list[float]]:
    """A core whose index is full; some of the chains in it; how long its block events took."""
    rng, bytes_rng = Random(1), np.random.default_rng(1)
    core = RouterCore(config=RouterConfig(worker_silence_s=3600), rng=Random(2), now_s=0.0)
    ids = [WorkerId(f"w{i}") for i in range(workers)]
    numbers = dict.fromkeys(ids, 1)
    for worker_id in ids:
        hello = WorkerHello(worker_id, Role.AGGREGATED, FINGERPRINT, "m", BLOCK_TOKENS, 10**7, 10**6)
        core.handle(WorkerJoined(hello, "a:1"), now_s=0.0)
        core.handle(FromWorker(worker_id, BlockEvents(0, is_snapshot=True)), now_s=0.0)
        core.handle(
            FromWorker(worker_id, LoadReport(Role.AGGREGATED, False, 10**7, 0, 0, 0, 0.01)), now_s=0.0
        )
    kept: list[list[BlockHash]] = []
    took: list[float] = []
    for number in range(max(1, blocks // CHAIN_BLOCKS)):
        raw = bytes_rng.bytes(16 * CHAIN_BLOCKS)
        chain = [BlockHash(raw[i : i + 16]) for i in range(0, len(raw), 16)]
        if number % max(1, blocks // CHAIN_BLOCKS // KEPT_CHAINS) == 0:
            kept.append(chain)
        for worker_id in rng.sample(ids, min(workers, rng.choice((1, 1, 1, 2, 2, 3, 8)))):
            events = BlockEvents(numbers[worker_id], stored=tuple(chain))
            numbers[worker_id] += 1
            began_s = time.perf_counter()
            core.handle(FromWorker(worker_id, events), now_s=0.0)
            took.append(time.perf_counter() - began_s)
    return core, kept, sorted(took)


def run(*, workers: int, blocks: int, prompt_tokens: int, decisions: int = 1000) -> IndexSeen:
    core, kept, events = _filled(workers, blocks)
    depth = prompt_tokens // BLOCK_TOKENS
    sampling = SamplingParams(max_tokens=64)
    prompt = range(prompt_tokens)
    fresh = PromptHashes(b"fresh").of(range(1_000_000, 1_000_000 + prompt_tokens), FINGERPRINT, BLOCK_TOKENS)
    took: list[float] = []
    cpu: list[float] = []
    matches: list[float] = []
    now_s = 1.0
    for number in range(decisions):
        chain = kept[number % len(kept)]
        # Half of the prompt is cached somewhere, half of it nowhere.
        hashes = [*chain[: depth // 2], *fresh][:depth]
        seq_id = SequenceId(f"s{number}")
        submit = Submit(
            seq_id, RequestId(f"r{number}"), prompt, sampling, b"", now_s + 60.0, hashes=Known(hashes)
        )
        began_s, cpu_s = time.perf_counter(), time.thread_time()
        core.handle(submit, now_s=now_s)
        cpu.append(time.thread_time() - cpu_s)
        took.append(time.perf_counter() - began_s)
        core.handle(ClientGone(seq_id), now_s=now_s)
        began_s = time.perf_counter()
        core.index.match(hashes)
        matches.append(time.perf_counter() - began_s)
        now_s += DECISION_S
    status = core.status()
    took.sort()
    cpu.sort()
    matches.sort()
    return IndexSeen(
        workers,
        core.index.total_blocks,
        status.index_bytes / max(1, core.index.total_blocks),
        prompt_tokens,
        at(took, 0.5),
        at(took, 0.99),
        at(cpu, 0.5),
        at(cpu, 0.99),
        at(matches, 0.5),
        at(matches, 0.99),
        at(events, 0.99),
    )
