"""Ranks over torch.distributed, with gloo on CPUs, and KV pools that only their own rank reaches."""

import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest

from baton.config import EngineConfig, ModelConfig
from baton.core.errors import SetupError
from baton.core.sampling import SamplingParams
from baton.core.shape import Shape
from engine.execution.executor import Executor
from engine.execution.load_ranks import check_ranks, claim_device, on_device
from engine.execution.spread import FollowerSetup, Reach, Spread
from engine.execution.team import RankTeam
from engine.parallel.collectives import collectives_of
from engine.parallel.group import GroupBroken
from engine.parallel.torch_group import TorchGroup
from tests.models import make_model
from tests.unit.engine.driver import Driver
from tests.unit.engine.test_divided_models import GENERATED, MODELS, expected_tokens
from tests.unit.engine.test_families import prompt
from tests.unit.engine.test_ranks import compute_for_ever, features
from tests.unit.engine.test_spread_ranks import HostOfProcesses
from tests.unit.engine.test_spread_ranks import start as start_spread

DEADLINE_S = 60.0


def start(folder: Path, shape: str, **model: str) -> Executor:
    engine = EngineConfig(
        kv_bytes=2**21,
        block_tokens=16,
        threads=1,
        shape=shape,
        rank_timeout_s=DEADLINE_S,
        collectives="torch",
    )
    return Executor.load(ModelConfig.model_validate({"path": str(folder), **model}), engine)


@pytest.fixture
def started() -> Iterator[list[Executor]]:
    executors: list[Executor] = []
    yield executors
    pids = [pid for executor in executors for pid in executor.rank_pids]
    for executor in executors:
        executor.close()
    assert not any(psutil.pid_exists(pid) for pid in pids), "followers outlive their leader"


@pytest.mark.parametrize(
    ("name", "shape"), [("llama", "tp2"), ("mixtral", "tp2"), ("llama", "pp2"), ("deepseek-v3", "tp2pp2")]
)
def test_every_shape_gives_the_tokens_of_transformers(
    tmp_path: Path, started: list[Executor], name: str, shape: str
) -> None:
    kind, changes = MODELS[name]
    folder = make_model(tmp_path, kind, with_tokenizer=False, **{**changes, "num_hidden_layers": 3})
    prompts = [prompt(36), prompt(130)]
    expected = [expected_tokens(folder, tokens) for tokens in prompts]
    started.append(start(folder, shape))
    driver = Driver(started[0])
    sequences = [driver.start(tokens, GENERATED) for tokens in prompts]
    driver.finish(*sequences, chunk=50)
    assert [sequence.generated for sequence in sequences] == expected
    ranks = started[0]._ranks
    assert ranks is not None
    assert isinstance(ranks.tensor, TorchGroup) == shape.startswith("tp")
    assert isinstance(ranks.stages, TorchGroup) == shape.endswith("pp2")
    assert len(started[0].parts) == 1, "the leader maps its own pool only"


@pytest.mark.parametrize("shape", ["tp2", "pp2"])
def test_ranks_give_the_bits_of_ranks_that_share_memory(
    tmp_path: Path, started: list[Executor], shape: str
) -> None:
    folder = make_model(tmp_path, "llama", with_tokenizer=False)
    engine = EngineConfig(kv_bytes=2**21, block_tokens=16, threads=1, shape=shape, rank_timeout_s=DEADLINE_S)
    started += [Executor.load(ModelConfig(path=str(folder)), engine), start(folder, shape)]
    shared, separate = (features(executor) for executor in started)
    assert [step.results for step in separate] == [step.results for step in shared]


def test_stages_on_another_host_are_connected_to_this_one(tmp_path: Path) -> None:
    folder = make_model(tmp_path, "llama", with_tokenizer=False, num_hidden_layers=3)
    expected = expected_tokens(folder, prompt(36))
    executor, hosts = start_spread(folder, "tp2pp2", 1, 2, collectives="torch")
    try:
        assert Driver(executor).generate(prompt(36), GENERATED) == expected
    finally:
        executor.close()
    assert all(process.poll() is not None for host in hosts for process in host.processes)


@pytest.mark.parametrize(("shape", "sign"), [("tp2", signal.SIGKILL), ("pp2", signal.SIGSTOP)])
def test_a_follower_that_dies_or_stops_ends_the_step(
    tmp_path: Path, started: list[Executor], shape: str, sign: signal.Signals
) -> None:
    folder = make_model(tmp_path, "llama", with_tokenizer=False)
    started.append(start(folder, shape))
    Driver(started[0]).generate(prompt(20), SamplingParams(max_tokens=3))
    os.kill(started[0].rank_pids[0], sign)
    with pytest.raises(GroupBroken, match=r"rank 1") as caught:
        compute_for_ever(started[0])
    assert ("has died" if sign is signal.SIGKILL else "is stopped") in str(caught.value)


def test_what_carries_tensors_is_chosen_by_the_device() -> None:
    assert collectives_of("auto", "cpu") == "shared_memory"
    assert collectives_of("torch", "cpu") == "torch"
    assert collectives_of("auto", "cuda") == collectives_of("torch", "cuda:1") == "torch"
    with pytest.raises(SetupError, match="host memory"):
        collectives_of("shared_memory", "cuda")


def test_ranks_that_are_not_executed_are_refused() -> None:
    torch_engine = EngineConfig(collectives="torch")
    with pytest.raises(SetupError, match=r"engine\.shape=tp2cp2: context ranks share one KV pool"):
        check_ranks(ModelConfig(), torch_engine, Shape.parse("tp2cp2"))
    with pytest.raises(SetupError, match=r"model\.device=cuda:1 names one device"):
        check_ranks(ModelConfig(device="cuda:1"), EngineConfig(), Shape.parse("tp2"))
    check_ranks(ModelConfig(device="cuda:1"), EngineConfig(), Shape.parse("1"))
    check_ranks(ModelConfig(device="cuda"), EngineConfig(), Shape.parse("tp2pp2"))


def test_every_rank_of_a_host_has_a_device_of_its_own() -> None:
    asked = ModelConfig(path="m", device="cuda")
    assert [on_device(asked, number).device for number in range(3)] == ["cuda:0", "cuda:1", "cuda:2"]
    assert on_device(ModelConfig(device="cpu"), 1).device == "cpu"
    assert claim_device(ModelConfig()).type == "cpu"
    with pytest.raises(SetupError, match="does not exist"):
        claim_device(on_device(asked, 100))


def test_followers_are_told_their_device() -> None:
    """Devices are counted anew on each host."""
    told: list[FollowerSetup] = []

    class Started:
        def poll(self) -> int:
            return 0

    def launch(setup: FollowerSetup) -> "subprocess.Popen[bytes]":
        told.append(setup)
        return cast("subprocess.Popen[bytes]", Started())

    class Recorded(HostOfProcesses):
        def start(self, setups: Sequence[FollowerSetup]) -> None:
            told.extend(setups)

    group = cast(Any, SimpleNamespace(address="there"))
    spread = Spread(Reach("", ""), (None, Recorded()))
    team = RankTeam(Shape.parse("tp2pp2"), group, group, spread, launch)
    team._spawn_all(ModelConfig(path="m", device="cuda"), EngineConfig(shape="tp2pp2"), None)
    devices = {setup.rank: ModelConfig.model_validate_json(setup.model).device for setup in told}
    assert devices == {1: "cuda:1", 2: "cuda:0", 3: "cuda:1"}
