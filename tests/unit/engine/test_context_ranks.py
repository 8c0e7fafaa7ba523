"""Steps that context ranks divide give every family the tokens of transformers, and the KV of one rank."""

import queue
from collections.abc import Callable, MutableSequence
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import torch

from baton.config import EngineConfig, ModelConfig
from baton.core.sampling import SamplingParams
from baton.core.shape import Shape
from baton.core.steps import StepPlan
from engine.execution.context import ContextStage
from engine.execution.executor import Executor
from engine.execution.load_ranks import divisions_of, load_rank
from engine.execution.ranks import Ranks
from engine.loading.load import load_model
from tests.models import make_model
from tests.thread_ranks import LedThreadGroup, ThreadGroup, run_ranks
from tests.unit.engine.driver import Driver
from tests.unit.engine.test_divided_models import GENERATED, MODELS, expected_tokens
from tests.unit.engine.test_families import prompt

T = TypeVar("T")


class ThreadTeam:
    """Sends plans to followers that are threads of this process."""

    def __init__(self, ranks: int) -> None:
        self.plans = [queue.SimpleQueue[StepPlan | None]() for _ in range(ranks)]
        """What each rank is sent. None ends it."""

    def noted(self, generations: npt.NDArray[np.uint64]) -> MutableSequence[int]:
        """All ranks are of this process, so nobody needs to be told what rises."""
        return cast(MutableSequence[int], generations)

    def send(self, plan: StepPlan | None) -> None:
        for plans in self.plans[1:]:
            plans.put(plan)


def run_context(
    folder: Path, ranks: int, work: Callable[[Executor], T], *, kernels: str = "native", **model: str
) -> T:
    """What `work` returns at the leader of so many context ranks, which are threads."""
    engine = EngineConfig(kv_bytes=2**21, block_tokens=16, threads=1, kernels=kernels)
    config = ModelConfig(path=str(folder), **model)
    team: Any = ThreadTeam(ranks)

    def run(group: ThreadGroup) -> T | None:
        shape = Shape(context=ranks)
        place = Ranks(shape, group.rank, world=group, tensor=None, context=group, results=group)
        division = divisions_of(config, shape)[group.rank]
        loaded = load_rank(config, engine, place, division, None)
        if group.rank:
            follower = Executor(loaded, engine, ranks=place)
            while (plan := group.take(team.plans[group.rank])) is not None:
                follower.execute(plan)
            return None
        found = work(Executor(loaded, engine, ranks=place, team=team))
        team.send(None)
        return found

    found = run_ranks(ranks, run, kind=LedThreadGroup)[0]
    assert found is not None
    return found


def run_alone(folder: Path, work: Callable[[Executor], T], **model: str) -> T:
    engine = EngineConfig(kv_bytes=2**21, block_tokens=16, threads=1)
    return work(Executor(load_model(ModelConfig(path=str(folder), **model), engine), engine))


def other_token_count(executor: Executor) -> int:
    model = executor._model
    assert isinstance(model, ContextStage)
    return model.other_token_count


@pytest.mark.parametrize("name", MODELS)
def test_tokens_equal_transformers_at_context_2_and_3(tmp_path: Path, name: str) -> None:
    """Prompts are computed whole, in chunks beside decodes, and behind a prefix that the pool holds."""
    kind, changes = MODELS[name]
    folder = make_model(tmp_path, kind, with_tokenizer=False, **changes)
    prompts = [prompt(36), prompt(130)]
    expected = [expected_tokens(folder, tokens) for tokens in prompts]

    def generate(executor: Executor) -> list[list[int]]:
        driver = Driver(executor)
        cold = driver.generate(prompts[0], GENERATED)
        running = [driver.start(tokens, GENERATED) for tokens in prompts]
        driver.finish(*running, chunk=50)
        assert other_token_count(executor) > 60
        known = driver.start(prompts[1], GENERATED, like=running[1])
        assert known.computed == 128
        short = driver.start(prompts[1][:70] + prompts[0], GENERATED, like=running[1])
        assert short.computed == 64
        driver.finish(known, short)
        return [cold, *(one.generated for one in running), known.generated]

    for ranks, kernels in ((2, "native"), (3, "torch")):
        found = run_context(folder, ranks, generate, kernels=kernels)
        assert found == [expected[0], *expected, expected[1]], kernels


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "deepseek-v3", "gpt-oss", "qwen3-moe"])
def test_the_pool_has_the_bits_of_one_rank(tmp_path: Path, name: str, kv_dtype: str) -> None:
    """In bfloat16: with the native kernels a row does not depend on its company."""
    kind, changes = MODELS[name]
    folder = make_model(tmp_path, kind, with_tokenizer=False, **changes)
    drawn = SamplingParams(max_tokens=10, temperature=1.0, seed=3, logprobs=2)

    def compute(executor: Executor) -> tuple[list[list[int]], torch.Tensor]:
        driver = Driver(executor)
        running = [
            driver.start(prompt(n), params) for n, params in ((36, drawn), (130, GENERATED), (45, drawn))
        ]
        driver.finish(*running, chunk=50)
        return [one.generated for one in running], executor.kv.memory.clone()

    model = {"dtype": "bfloat16", "kv_dtype": kv_dtype}
    tokens, memory = run_alone(folder, compute, **model)
    for ranks in (2, 3):
        found_tokens, found = run_context(folder, ranks, compute, **model)
        assert found_tokens == tokens
        assert torch.equal(found, memory)
    assert memory.count_nonzero() > 0


def test_decodes_are_divided_too(tmp_path: Path) -> None:
    folder = make_model(tmp_path, "llama", with_tokenizer=False)
    prompts = [prompt(1 + n % 7) for n in range(40)]

    def generate(executor: Executor) -> list[list[int]]:
        driver = Driver(executor)
        running = [driver.start(tokens, GENERATED) for tokens in prompts]
        driver.finish(*running)
        return [one.generated for one in running]

    def generate_together(executor: Executor) -> list[list[int]]:
        found = generate(executor)
        steps = GENERATED.max_tokens - 1
        assert other_token_count(executor) >= steps * len(prompts) // 3
        return found

    assert run_context(folder, 2, generate_together) == run_alone(folder, generate)


@pytest.mark.parametrize("name", ["mixtral", "deepseek-v2"])
def test_experts_are_counted_for_the_tokens_of_all_ranks(tmp_path: Path, name: str) -> None:
    kind, changes = MODELS[name]
    folder = make_model(tmp_path, kind, with_tokenizer=False, **changes)

    def count(executor: Executor) -> Any:
        driver = Driver(executor)
        running = [driver.start(prompt(n), GENERATED) for n in (36, 130)]
        driver.finish(*running, chunk=50)
        assert executor.expert_counts is not None
        return executor.expert_counts.read()

    alone, together = run_alone(folder, count), run_context(folder, 2, count)
    assert alone.sum() > 0
    assert (alone == together).all()


def test_blocks_are_moved_once_and_before_anybody_reads_them(tmp_path: Path) -> None:
    """A prompt goes on from copies of its blocks, in the next step and in the same one."""
    folder = make_model(tmp_path, "llama", with_tokenizer=False)
    tokens = prompt(130)
    expected = expected_tokens(folder, tokens)

    def generate(executor: Executor) -> list[int]:
        driver = Driver(executor)
        sequence = driver.start(tokens, GENERATED)
        driver.step((sequence, 64))
        moved = [100 + block for block in sequence.blocks]
        copies = tuple(zip(sequence.blocks, moved, strict=True))
        item = driver._item(0, sequence, 66)
        blocks = (*moved, *item.block_ids[len(moved) :])
        plan = StepPlan((msgspec.structs.replace(item, block_ids=blocks),), 1, copies=copies)
        sequence.generated.extend(executor.execute(plan).results[0].tokens)
        for block, _ in copies:
            executor.kv.clear(block)
        sequence.computed, sequence.blocks, driver.step_count = 130, list(blocks), 2
        driver.finish(sequence)
        return sequence.generated

    assert run_context(folder, 2, generate) == expected
