"""Whole models: the same tokens as with the torch kernels."""

import pytest

from baton.config import EngineConfig, ModelConfig
from baton.core.ids import SeqKey, SequenceId
from baton.core.sampling import SamplingParams
from baton.core.steps import StepItem, StepPlan
from engine.execution.executor import Executor
from tests.models import make_model

PROMPTS = ((3, 7, 11, 5), tuple(range(2, 40)))
STEPS = 2


def greedy(folder, kernels) -> list[list[int]]:
    config = ModelConfig(path=str(folder))
    executor = Executor.load(config, EngineConfig(kv_bytes=2**22, block_tokens=8, kernels=kernels))
    sampling = SamplingParams(max_tokens=STEPS, temperature=0.0)
    texts = [list(prompt) for prompt in PROMPTS]
    for step in range(STEPS):
        items = []
        for i, (text, prompt) in enumerate(zip(texts, PROMPTS, strict=True)):
            first = 0 if step == 0 else len(text) - 1
            blocks = tuple(range(8 * i, 8 * i + 8))
            key = SeqKey(SequenceId(f"s{i}"), 0)
            items.append(StepItem(key, tuple(text[first:]), first, blocks, len(text) - len(prompt), sampling))
        result = executor.execute(StepPlan(tuple(items), step))
        for text, one in zip(texts, result.results, strict=True):
            text.append(one.tokens[0])
    return texts


@pytest.mark.filterwarnings("ignore:overflow encountered in exp2")
@pytest.mark.parametrize("kind", ["deepseek_v3", "gpt_oss"])
def test_greedy_tokens(kind, tmp_path) -> None:
    folder = make_model(tmp_path, kind)
    assert greedy(folder, "triton") == greedy(folder, "torch")
