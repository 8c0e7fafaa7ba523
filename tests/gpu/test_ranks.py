"""Ranks on GPUs of their own, joined by NCCL. It needs two GPUs."""

import os
import signal

import pytest
import torch

from baton.config import EngineConfig, ModelConfig
from engine.execution.executor import Executor
from engine.parallel.group import GroupBroken
from tests.gpu.test_graphs import greedy
from tests.models import make_model
from tests.unit.engine.test_ranks import compute_for_ever

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices"),
]


@pytest.fixture
def load(tmp_path):
    folder, executors = make_model(tmp_path), []

    def start(shape):
        model = ModelConfig(path=str(folder), device="cuda", dtype="float32")
        engine = EngineConfig(kv_bytes=2**24, block_tokens=4, shape=shape, graph_sequences_max=0)
        executors.append(Executor.load(model, engine))
        return executors[-1]

    yield start
    for executor in executors:
        executor.close()


@pytest.mark.parametrize("shape", ["tp2", "pp2"])
def test_ranks_give_the_tokens_of_one(load, shape) -> None:
    assert greedy(load(shape)) == greedy(load("1"))


@pytest.mark.parametrize("shape", ["tp2", "pp2"])
@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP])
def test_a_follower_that_dies_or_stops_ends_the_step(load, shape, sign) -> None:
    executor = load(shape)
    greedy(executor)
    os.kill(executor.rank_pids[0], sign)
    with pytest.raises(GroupBroken, match="rank 1"):
        compute_for_ever(executor)
