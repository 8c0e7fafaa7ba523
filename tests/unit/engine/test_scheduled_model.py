"""The scheduler over a real model: whatever is planned ahead, guessed, copied, preempted or swapped, the
tokens are those of one sequence after another, one step at a time."""

from collections import deque

import msgspec
import pytest

from baton.config import EngineConfig
from baton.core.hashing import root_hash
from baton.core.ids import SeqKey
from baton.core.messages import Phase
from baton.core.sampling import SamplingParams
from engine.scheduling.block_pool import BlockPool
from engine.scheduling.prefix_cache import PrefixCache
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import Sequence
from tests.models import make_model
from tests.unit.engine.driver import Driver, load

BLOCK_TOKENS = 8
PENALISED = SamplingParams(max_tokens=12, presence_penalty=0.7, temperature=0.9, seed=5)
LOOPS = SamplingParams(max_tokens=60, allowed_token_ids=(7, 8))
"""So few tokens that a small model is soon caught in a loop: draft tokens come true."""


@pytest.fixture(scope="module")
def executor(tmp_path_factory):
    path = make_model(tmp_path_factory.mktemp("scheduled"))
    return load(path, block_tokens=BLOCK_TOKENS, kv_bytes=1 << 20, dtype="float32")


def requests():
    loop = [7, 8, 9, 10, 11]
    yield [*loop * 5, 7, 8], LOOPS
    yield list(range(30, 51)), PENALISED
    yield list(range(30, 51)), PENALISED  # the very same
    yield [*range(30, 46), 99, 98], SamplingParams(max_tokens=20, temperature=0.7, seed=3)
    yield [5], SamplingParams(max_tokens=30)
    yield list(range(100, 140)), SamplingParams(max_tokens=1)


def run(executor, *, blocks, **engine):
    config = EngineConfig(step_tokens_max=24, batch_sequences_max=4, chunk_tokens_min=8, **engine)
    pool = BlockPool(blocks, [0] * blocks)
    cache = PrefixCache(pool)
    block_bytes = executor.geometry.block_bytes
    scheduler = Scheduler(cache, config, block_tokens=BLOCK_TOKENS, block_bytes=block_bytes)
    root = root_hash("f", b"")
    sequences = [
        Sequence(SeqKey(f"s{i}", 0), Phase.AGGREGATED, list(prompt), len(prompt), params, root, BLOCK_TOKENS)
        for i, (prompt, params) in enumerate(requests())
    ]
    for seq in sequences:
        scheduler.add(seq, now_s=0.0)
    line = deque()
    while not scheduler.is_empty:
        while scheduler.can_plan and (plan := scheduler.plan(now_s=0.0)) is not None:
            line.append(plan)
        # Decisions follow from how long steps take; the same ones in every run of the test.
        result = msgspec.structs.replace(executor.execute(line.popleft()), elapsed_s=0.01)
        for progress in scheduler.finish_step(result):
            if progress.sequence.finish is not None:
                scheduler.remove(progress.sequence)
        scheduler.check()
        pool.check()
    assert pool.held_count == 0
    return [seq.tokens[seq.prompt_token_count :] for seq in sequences], scheduler


@pytest.fixture(scope="module")
def undisturbed(executor):
    driver = Driver(executor)
    tokens = []
    for prompt, params in requests():
        tokens.append(driver.generate(prompt, params) if params.is_greedy else None)
    roomy, _ = run(executor, blocks=60, overlap_steps=False, speculation="off")
    assert all(a is None or a == b for a, b in zip(tokens, roomy, strict=True))
    return roomy


@pytest.mark.parametrize(
    "engine",
    [
        {"blocks": 60},
        {"blocks": 60, "overlap_steps": False},
        {"blocks": 60, "speculation": "off"},
        {"blocks": 13},
        {"blocks": 13, "swap_bytes": 1 << 20},
    ],
    ids=str,
)
def test_tokens_do_not_depend_on_how_they_are_scheduled(executor, undisturbed, engine):
    executor.swap = type(executor.swap)(executor.kv, engine.get("swap_bytes", 0))
    tokens, scheduler = run(executor, **engine)
    assert tokens == undisturbed
    assert (scheduler.preemption_count > 0) == (engine["blocks"] == 13)
    if engine.get("speculation") != "off":
        assert scheduler.accepted_count > 0
