"""Stages of one worker on several hosts, which here are processes of one: tokens, and how they end."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from baton.config import EngineConfig, ModelConfig
from baton.core.errors import SetupError
from baton.core.shape import Shape
from engine.execution import team
from engine.execution.executor import Executor
from engine.execution.follower_process import how_ended, start_follower
from engine.execution.spread import FollowerSetup, Reach, Spread, begin_mesh
from engine.execution.team import RankTeam
from engine.parallel.group import GroupBroken
from engine.parallel.mesh import LEFT, Mesh
from engine.parallel.order_channel import OrderSender
from engine.parallel.shared_memory import SharedMemoryGroup
from tests.models import Kind, make_model
from tests.unit.engine.driver import Driver
from tests.unit.engine.test_divided_models import GENERATED, expected_tokens
from tests.unit.engine.test_families import prompt

DEADLINE_S = 60.0
LOST_S = 20.0
"""Much longer than it takes to notice a lost rank, and shorter than any deadline."""


class HostOfProcesses:
    """A `StageHost` that is this one: only what passes over the network is shared with the leader."""

    def __init__(self) -> None:
        self.processes: list[Any] = []
        self.is_closed = False

    def start(self, setups: Sequence[FollowerSetup]) -> None:
        for setup in setups:
            self.processes.append(team.launch_follower(setup))

    def ended(self) -> str:
        ended = [process for process in self.processes if process.poll() is not None]
        return f"process {ended[0].pid} of another host has ended" if ended else ""

    def close(self, timeout_s: float) -> None:
        self.is_closed = True
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout_s)
            process.kill()
            process.wait()


Started = tuple[Executor, list[HostOfProcesses]]


@pytest.fixture
def started() -> Iterator[list[Started]]:
    all_started: list[Started] = []
    yield all_started
    for executor, hosts in all_started:
        executor.close()
        assert all(process.poll() is not None for host in hosts for process in host.processes)


def start(folder: Path, shape: str, own_stages: int, stages: int, **engine: object) -> Started:
    """A worker whose first stages are here, and the others on a host each."""
    hosts = [HostOfProcesses() for _ in range(stages - own_stages)]
    settings: dict[str, object] = {
        "kv_bytes": 2**21,
        "block_tokens": 16,
        "threads": 1,
        "rank_timeout_s": DEADLINE_S,
        "shape": shape,
        **engine,
    }
    spread = Spread(Reach("127.0.0.1", "127.0.0.1"), (*[None] * own_stages, *hosts))
    model = ModelConfig(path=str(folder))
    return Executor.load(model, EngineConfig.model_validate(settings), spread=spread), hosts


@pytest.mark.parametrize(
    ("kind", "shape", "own_stages", "stages"),
    [
        ("llama", "pp2", 1, 2),
        ("llama", "pp3", 2, 3),
        ("mixtral", "tp2pp2", 1, 2),
        ("deepseek_v2", "pp2", 1, 2),
    ],
)
def test_stages_on_other_hosts_give_the_tokens_of_transformers(
    tmp_path: Path, started: list[Started], kind: Kind, shape: str, own_stages: int, stages: int
) -> None:
    folder = make_model(tmp_path, kind, with_tokenizer=False, num_hidden_layers=3)
    prompts = [prompt(36), prompt(130)]
    expected = [expected_tokens(folder, tokens) for tokens in prompts]
    started.append(start(folder, shape, own_stages, stages))
    driver = Driver(started[0][0])
    sequences = [driver.start(tokens, GENERATED) for tokens in prompts]
    driver.finish(*sequences, chunk=50)
    assert [sequence.generated for sequence in sequences] == expected


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_stage_is_noticed_while_nothing_runs(
    tmp_path: Path, started: list[Started], sign: signal.Signals
) -> None:
    folder = make_model(tmp_path, "llama", with_tokenizer=False)
    started.append(start(folder, "pp2", 1, 2))
    (executor, (host,)) = started[0]
    executor.warm_up()  # the followers serve from their first order on
    reasons: list[str] = []
    lost = threading.Event()

    def on_lost(reason: str) -> None:
        reasons.append(reason)
        lost.set()

    executor.watch_ranks(on_lost)
    os.kill(host.processes[0].pid, sign)
    assert lost.wait(LOST_S)
    assert "rank 1" in reasons[0]
    assert ("died" if sign == signal.SIGKILL else "stopped") in reasons[0]
    with pytest.raises(GroupBroken, match="rank 1"):
        executor.warm_up()
    psutil.Process(host.processes[0].pid).resume()


def test_a_rank_that_ends_with_another_says_why(
    tmp_path: Path, started: list[Started], capfd: pytest.CaptureFixture[str]
) -> None:
    folder = make_model(tmp_path, "llama", with_tokenizer=False, num_hidden_layers=3)
    started.append(start(folder, "pp3", 1, 3))
    (executor, (lost, other)) = started[0]
    executor.warm_up()
    lost.processes[0].kill()
    other.processes[0].wait(LOST_S)
    # Either the mesh or the orders' connection finds it out first.
    assert re.search(r"rank 2 WARNING this rank ends: rank [01] .*", capfd.readouterr().err)


def test_a_rank_that_ends_in_good_order_says_nothing(
    tmp_path: Path, started: list[Started], capfd: pytest.CaptureFixture[str]
) -> None:
    executor, (host,) = start(make_model(tmp_path, "llama", with_tokenizer=False), "pp2", 1, 2)
    executor.warm_up()
    executor.close()
    assert host.processes[0].wait(LOST_S) == 0
    assert "this rank ends" not in capfd.readouterr().err


def test_a_follower_that_ends_before_it_reads_its_setup_is_noticed_by_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "executable", "false")
    process = start_follower(b"x" * 2**22)  # more than a pipe holds
    process.wait()
    assert how_ended(process) == "ended with exit code 1"


def test_nothing_is_left_of_a_start_that_cannot_listen(monkeypatch: pytest.MonkeyPatch) -> None:
    host, made = HostOfProcesses(), list[Mesh]()

    def begin(size: int, reach: Reach, *, is_star: bool = False) -> Mesh:
        if is_star:
            raise SetupError("ranks cannot listen")
        made.append(begin_mesh(size, reach))
        return made[0]

    monkeypatch.setattr("engine.execution.team.begin_mesh", begin)
    spread = Spread(Reach("127.0.0.1", "127.0.0.1"), (None, host))
    with pytest.raises(SetupError, match="cannot listen"):
        RankTeam.start(Shape.parse("pp2"), ModelConfig(path=""), EngineConfig(shape="pp2"), spread)
    assert made[0].end_reason() == LEFT
    assert host.is_closed


def test_nothing_is_left_of_a_start_without_memory_for_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    made, create = list[SharedMemoryGroup](), SharedMemoryGroup.create

    def create_world(size: int, *, deadline_s: float) -> SharedMemoryGroup:
        made.append(create(size, deadline_s=deadline_s))
        return made[0]

    def create_orders(*_: object, **__: object) -> OrderSender:
        raise SetupError("no memory")

    monkeypatch.setattr(SharedMemoryGroup, "create", create_world)
    monkeypatch.setattr(OrderSender, "create", create_orders)
    with pytest.raises(SetupError, match="no memory"):
        RankTeam.start(Shape.parse("tp2"), ModelConfig(path=""), EngineConfig(shape="tp2"))
    assert made[0].end_reason()


def test_a_follower_that_cannot_start_elsewhere_is_said(tmp_path: Path) -> None:
    folder = make_model(tmp_path, "llama", with_tokenizer=False)

    class Nowhere(HostOfProcesses):
        def start(self, setups: Sequence[FollowerSetup]) -> None:
            self.processes.append(subprocess.Popen(["false"]))

    spread = Spread(Reach("127.0.0.1", "127.0.0.1"), (None, Nowhere()))
    engine = EngineConfig(kv_bytes=2**21, shape="pp2", rank_timeout_s=DEADLINE_S)
    with pytest.raises((GroupBroken, SetupError), match="of another host has ended"):
        Executor.load(ModelConfig(path=str(folder)), engine, spread=spread)
