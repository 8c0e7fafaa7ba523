"""Steps that are begun before the one before is finished give the tokens of steps one after another."""

import random
import threading
from collections.abc import Sequence

import pytest
import torch

from baton.config import EngineConfig, ModelConfig
from baton.core.ids import SeqKey, SequenceId
from baton.core.sampling import SamplingParams
from baton.core.steps import PENDING_TOKEN, StepItem, StepPlan, StepResult
from engine.execution.ahead import StepsAhead
from engine.execution.executor import Executor
from engine.execution.step_batch import BegunStep
from tests.models import make_model

BLOCK_TOKENS, BLOCKS_EACH = 4, 16
GREEDY = SamplingParams(max_tokens=64, temperature=0.0)
WARM = SamplingParams(max_tokens=64, temperature=0.9, seed=7)
FILTERED = SamplingParams(max_tokens=64, temperature=1.1, top_p=0.8, seed=11)
WATCHED = SamplingParams(max_tokens=64, temperature=0.0, logprobs=2)
PROMPTS = ((3, 7, 11, 5), (2, 9), (4, 4, 8, 1, 6, 12, 3))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


def executor_of(folder, *, is_ahead: bool) -> Executor:
    engine = EngineConfig(kv_bytes=2**23, block_tokens=BLOCK_TOKENS, threads=1)
    executor = Executor.load(ModelConfig(path=str(folder), dtype="float32"), engine)
    # A GPU's executor has it: here the same steps are computed before `begin` returns.
    executor._ahead = StepsAhead(torch.device("cpu")) if is_ahead else None
    return executor


def item(index: int, tokens: Sequence[int], first: int, sampled: int, sampling: SamplingParams) -> StepItem:
    blocks = tuple(range(BLOCKS_EACH * index, BLOCKS_EACH * (index + 1)))
    key = SeqKey(SequenceId(f"s{index}"), 0)
    return StepItem(key, tuple(tokens), first, blocks, sampled, sampling)


def plans(samplings: Sequence[SamplingParams], steps: int, seed: int) -> list[StepPlan]:
    """Prompts, then decodes of changing company: a sequence that was in the step before goes on with its
    pending token, another one with a token that anybody may know."""
    rng = random.Random(seed)
    counts = [0] * len(PROMPTS)
    made = [StepPlan(tuple(item(i, p, 0, 0, samplings[i]) for i, p in enumerate(PROMPTS)), 0)]
    before = set(range(len(PROMPTS)))
    for number in range(1, steps):
        chosen = rng.sample(range(len(PROMPTS)), rng.randint(1, len(PROMPTS)))
        items = []
        for i in chosen:
            counts[i] += 1
            first = len(PROMPTS[i]) + counts[i] - 1
            token = PENDING_TOKEN if i in before else 5 + i
            items.append(item(i, (token,), first, counts[i], samplings[i]))
        before = set(chosen)
        made.append(StepPlan(tuple(items), number))
    return made


def one_after_another(executor: Executor, steps: Sequence[StepPlan]) -> list[StepResult]:
    return [executor.execute(plan) for plan in steps]


def two_at_once(executor: Executor, steps: Sequence[StepPlan]) -> tuple[list[StepResult], int]:
    """Results, and how many steps were finished after the next one had begun, as a worker does it with two
    threads."""
    results: list[StepResult] = []
    open_step: BegunStep | None = None
    begun_ahead = 0
    for plan in steps:
        finishing = None
        if open_step is not None and not executor._ahead.takes(plan):
            finishing = threading.Timer(0.0, lambda one=open_step: results.append(executor.finish(one)))
            finishing.start()
            open_step = None
        step = executor.begin(plan)
        if finishing is not None:
            finishing.join()
        if open_step is not None:
            results.append(executor.finish(open_step))
            begun_ahead += 1
        open_step = None
        if isinstance(step, StepResult):
            results.append(step)
        else:
            open_step = step
    if open_step is not None:
        results.append(executor.finish(open_step))
    return results, begun_ahead


@pytest.mark.parametrize(
    "samplings",
    [(GREEDY, GREEDY, GREEDY), (GREEDY, WARM, FILTERED), (WARM, WARM, WARM), (GREEDY, GREEDY, WATCHED)],
    ids=["greedy", "mixed", "drawn", "one with logprobs"],
)
@pytest.mark.parametrize("seed", range(4))
def test_tokens_are_those_of_steps_one_after_another(folder, samplings, seed) -> None:
    steps = plans(samplings, 24, seed)
    expected = one_after_another(executor_of(folder, is_ahead=False), steps)
    found, begun_ahead = two_at_once(executor_of(folder, is_ahead=True), steps)
    assert begun_ahead == len(steps) - 1 or WATCHED in samplings
    assert [one.results for one in found] == [one.results for one in expected]
    assert [one.step_number for one in found] == [plan.step_number for plan in steps]


def test_what_the_host_must_know_first_is_not_begun_ahead(folder) -> None:
    ahead = StepsAhead(torch.device("cpu"))
    base = item(0, (3,), 0, 0, GREEDY)
    for sampling in (
        WATCHED,
        SamplingParams(max_tokens=4, temperature=0.0, min_tokens=2),
        SamplingParams(max_tokens=4, temperature=0.0, frequency_penalty=0.5),
        SamplingParams(max_tokens=4, temperature=0.0, prompt_logprobs=1),
    ):
        assert not ahead.takes(StepPlan((item(0, (3,), 0, 0, sampling),), 0))
    assert not ahead.takes(StepPlan((), 0))
    assert ahead.takes(StepPlan((base,), 0))


def test_catching_up_ends_when_nobody_will_finish() -> None:
    ahead = StepsAhead(torch.device("cpu"))
    ahead.begun([SeqKey(SequenceId("s"), 0)], torch.tensor([4]))
    waiting = threading.Thread(target=ahead.catch_up)
    waiting.start()
    ahead.close()
    waiting.join(10)
    assert not waiting.is_alive()


def test_a_step_that_waited_for_the_one_before_counts_its_own_time(folder, monkeypatch) -> None:
    """Two decodes of 5 s each on a device that computes one after the other; the second is begun with the
    first."""
    clock = iter([0.0, 0.0, 5.0, 10.0])
    executor = executor_of(folder, is_ahead=True)
    executor.execute(StepPlan((item(0, PROMPTS[0], 0, 0, GREEDY),), 0))
    executor._finished_s = 0.0
    monkeypatch.setattr("engine.execution.executor.time.perf_counter", lambda: next(clock))
    begun = [
        executor.begin(StepPlan((item(0, (PENDING_TOKEN,), 4 + n, 1 + n, GREEDY),), 1 + n)) for n in range(2)
    ]
    results = [executor.finish(step) for step in begun]
    assert [(one.elapsed_s, one.overlap_s) for one in results] == [(5.0, 0.0), (5.0, 0.0)]
