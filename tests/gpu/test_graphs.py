"""Recorded decode steps against the same steps kernel by kernel."""

import pytest
import torch

from baton.config import EngineConfig, ModelConfig
from baton.core.ids import SeqKey, SequenceId
from baton.core.sampling import SamplingParams
from baton.core.steps import StepItem, StepPlan
from engine.execution.executor import Executor
from tests.models import make_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
PROMPTS = ((3, 7, 11, 5), (2, 9), (4, 4, 8, 1, 6, 12, 3))
STEPS = 12


def load(folder, graph_sequences_max) -> Executor:
    model = ModelConfig(path=str(folder), device="cuda", dtype="float32")
    engine = EngineConfig(kv_bytes=2**24, block_tokens=4, graph_sequences_max=graph_sequences_max)
    return Executor.load(model, engine)


def greedy(executor) -> list[list[int]]:
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


def test_tokens_do_not_depend_on_recording(tmp_path) -> None:
    folder = make_model(tmp_path)
    assert greedy(load(folder, 8)) == greedy(load(folder, 0))


def test_recorded_steps_count_their_tokens_and_no_padding(tmp_path) -> None:
    """Three sequences in a step that is recorded for four."""
    folder = make_model(tmp_path, "qwen3_moe")
    counts = []
    for graph_sequences_max in (8, 0):
        executor = load(folder, graph_sequences_max)
        greedy(executor)
        torch.cuda.synchronize()
        executor.expert_counts.read()
        torch.cuda.synchronize()
        counts.append(executor.expert_counts.read().tolist())
    computed = sum(len(prompt) for prompt in PROMPTS) + len(PROMPTS) * (STEPS - 1)
    assert sum(counts[1][0]) == 2 * computed
    assert counts[0] == counts[1]
