"""Workers of several ranks, as processes: tokens, what they share, and how they end."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from baton.config import EngineConfig, ModelConfig
from baton.core.errors import SetupError
from baton.core.ids import SeqKey, SequenceId
from baton.core.sampling import SamplingParams
from baton.core.steps import PENDING_TOKEN, StepItem, StepPlan
from engine.execution.executor import Executor
from engine.parallel.group import GroupBroken
from tests.models import make_model
from tests.unit.engine.driver import Driver
from tests.unit.engine.test_divided_models import GENERATED, MODELS, expected_tokens
from tests.unit.engine.test_families import prompt

DEADLINE_S = 60.0
"""Ranks on a busy machine are late. A dead one is noticed at once."""


def start(folder: Path, shape: str, *, rank_timeout_s: float = DEADLINE_S, **model: str) -> Executor:
    engine = EngineConfig(
        kv_bytes=2**21, block_tokens=16, threads=1, shape=shape, rank_timeout_s=rank_timeout_s, adapters_max=2
    )
    return Executor.load(ModelConfig(path=str(folder), **model), engine)


@pytest.fixture
def started() -> Iterator[list[Executor]]:
    executors: list[Executor] = []
    yield executors
    pids = [pid for executor in executors for pid in executor.rank_pids]
    for executor in executors:
        executor.close()
    assert not any(psutil.pid_exists(pid) for pid in pids), "followers outlive their leader"


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        *(("llama", shape) for shape in ("tp2", "tp4", "pp2", "pp3", "tp2pp2")),
        *((name, "tp2") for name in ("gemma2", "mixtral", "deepseek-v3", "gpt-oss")),
        *((name, "pp2") for name in ("gemma3", "mixtral", "deepseek-v2", "llama-uneven-vocabulary")),
        ("deepseek-v3", "tp2pp2"),
    ],
)
def test_every_shape_gives_the_tokens_of_transformers(
    tmp_path: Path, started: list[Executor], name: str, shape: str
) -> None:
    kind, changes = MODELS[name]
    layers = {} if kind == "gemma3" else {"num_hidden_layers": 3}
    folder = make_model(tmp_path, kind, with_tokenizer=False, **{**changes, **layers})
    prompts = [prompt(36), prompt(130)]
    expected = [expected_tokens(folder, tokens) for tokens in prompts]
    started.append(start(folder, shape))
    driver = Driver(started[0])
    sequences = [driver.start(tokens, GENERATED) for tokens in prompts]
    driver.finish(*sequences, chunk=50)
    assert [sequence.generated for sequence in sequences] == expected
