"""Decode steps of tensor ranks are replayed on all of them or on none, and give what they give without."""

import itertools
import os
import signal
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from baton.config import EngineConfig, ModelConfig
from baton.core.sampling import SamplingParams
from baton.core.steps import StepPlan
from engine.execution import replay
from engine.execution.executor import Executor
from engine.native.recording import NotRecordable
from engine.parallel.group import GroupBroken
from engine.parallel.shared_memory import SharedMemoryGroup
from tests.models import make_model
from tests.unit.engine.driver import Driver
from tests.unit.engine.test_families import prompt
from tests.unit.engine.test_ranks import item
from tests.unit.engine.test_replay import BLOCK_TOKENS, BLOCKS, batches, play

GREEDY = SamplingParams(max_tokens=20)
CASES = [
    *(("llama", "tp2", model) for model in ({}, {"quantization": "int8"}, {"kv_dtype": "int8"})),
    ("llama", "tp4", {"dtype": "bfloat16"}),
    *((family, "tp2", {}) for family in ("gemma2", "mixtral", "deepseek_v3", "gpt_oss")),
]
"""Torch computes between the kernels of gemma2 and of models of experts."""


def start(folder: Path, shape: str, *, replays: bool = True, **model: str) -> Executor:
    engine = EngineConfig(
        kv_bytes=2**22,
        block_tokens=BLOCK_TOKENS,
        threads=1,
        shape=shape,
        rank_timeout_s=60.0,
        graph_sequences_max=8 if replays else 0,
    )
    return Executor.load(ModelConfig(path=str(folder), **model), engine)


@pytest.fixture
def started() -> Iterator[list[Executor]]:
    executors: list[Executor] = []
    yield executors
    for executor in executors:
        executor.close()


@pytest.fixture(scope="module", params=CASES, ids=str)
def pair(request, tmp_path_factory) -> Iterator[tuple[Executor, Executor]]:
    family, shape, model = request.param
    folder = make_model(
        tmp_path_factory.mktemp("model"),
        family,
        **({"hidden_size": 128, "intermediate_size": 256} if model.get("quantization") else {}),
    )
    made = [start(folder, shape, replays=replays, **model) for replays in (True, False)]
    yield made[0], made[1]
    for executor in made:
        executor.close()


@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(batches())
def test_ranks_give_what_they_give_without_a_recording(pair, batch) -> None:
    """Tokens, and the KV of every rank."""
    replaying, plain = pair
    before = replaying.recorder.replayed_count
    assert play(replaying, *batch) == play(plain, *batch)
    for one, other in zip(replaying.parts, plain.parts, strict=True):
        assert one.pool.blocks[:BLOCKS].equal(other.pool.blocks[:BLOCKS])
    _, steps, _ = batch
    sizes = [len(chosen) for chosen in steps]
    assert replaying.recorder.replayed_count - before >= len(sizes) - len(set(sizes))
    assert plain.recorder is None


@pytest.mark.parametrize("what", ["too much memory", "another result", "streamed weights"])
def test_what_one_rank_cannot_replay_none_replays(tmp_path, started, monkeypatch, what: str) -> None:
    """The followers could: they are processes of their own. Ranks sum nothing while they record, so the step
    is computed once more, and its experts are not counted again."""
    folder = make_model(tmp_path, "mixtral", with_tokenizer=False)
    started += [start(folder, "1", replays=False), start(folder, "tp2")]
    if what == "streamed weights":
        monkeypatch.setattr(started[1].recorder, "_may_record", False)
    elif what == "too much memory":
        monkeypatch.setattr(replay, "_BYTES_MAX", 1000)
    else:
        monkeypatch.setattr(replay, "same_bits", lambda one, other: False)
    alone, together = (Driver(executor).generate(prompt(21), GREEDY) for executor in started)
    assert together == alone
    plain, several = (executor.expert_counts.read() for executor in started)
    assert plain.sum() > 0
    assert (several == plain).all()
    recorder = started[1].recorder
    assert isinstance(recorder, replay.DecodeReplay)
    assert (recorder.replayed_count, recorder.recorded) == (0, {})


@pytest.mark.parametrize("shape", ["pp2", "cp2", "tp2pp2"])
def test_stages_and_divided_tokens_are_not_recorded(tmp_path, started, shape: str) -> None:
    started.append(start(make_model(tmp_path, "llama", with_tokenizer=False), shape))
    assert started[0].recorder is None


def execute_all(executor: Executor, plans: Iterable[StepPlan]) -> None:
    for plan in plans:
        executor.execute(plan)


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_is_lost_in_a_replay_ends_the_step(tmp_path, started, sign: signal.Signals) -> None:
    started.append(start(make_model(tmp_path, "llama", with_tokenizer=False), "tp2"))
    executor = started[0]
    executor.execute(StepPlan((item("s", prompt(20), 0, tuple(range(5))),), 0))
    decodes = (
        StepPlan((item("s", (7,), 20 + n % 20, tuple(range(10)), sample_index=1 + n),), 1 + n)
        for n in itertools.count()
    )
    execute_all(executor, itertools.islice(decodes, 5))
    before = executor.recorder.replayed_count
    assert before >= 3
    os.kill(executor.rank_pids[0], sign)
    with pytest.raises(GroupBroken, match=r"rank 1") as caught:
        execute_all(executor, decodes)
    assert ("has died" if sign is signal.SIGKILL else "is stopped") in str(caught.value)


def test_a_group_that_is_over_or_whole_says_why_a_replay_failed() -> None:
    def fails() -> None:
        raise NotRecordable("a kernel failed")

    group = SharedMemoryGroup.create(1, deadline_s=5.0)
    with pytest.raises(NotRecordable, match="a kernel failed"):
        group.replay(fails)
    group.close()
    with pytest.raises(GroupBroken, match="has left"):
        group.replay(fails)
