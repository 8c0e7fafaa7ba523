"""Workers of several ranks, as processes: tokens, what they share, and how they end."""

import itertools
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import torch

from baton.config import EngineConfig, ModelConfig
from baton.core.errors import SetupError
from baton.core.ids import SeqKey, SequenceId
from baton.core.sampling import SamplingParams
from baton.core.steps import PENDING_TOKEN, StepItem, StepPlan, StepResult
from engine.execution.executor import Executor
from engine.execution.step_batch import BegunStep
from engine.execution.team import RankTeam
from engine.parallel.group import GroupBroken
from tests.models import Kind, make_model
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
        *((name, "cp2") for name in ("llama", "gemma3", "mixtral", "deepseek-v3")),
        ("llama", "cp4"),
        ("qwen2-moe", "tp2cp2"),
        ("gemma2", "pp2cp2"),
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


def item(
    name: str, tokens: tuple[int, ...], first: int, blocks: tuple[int, ...], **fields: object
) -> StepItem:
    known = {"sample_index": 0, "sampling": GENERATED, **fields}
    return StepItem(SeqKey(SequenceId(name), 0), tokens, first, blocks, **known)


def features(executor: Executor) -> list[StepResult]:
    """Steps that use what only the leader does, and a token that the next plan names before it is known."""
    tokens = prompt(40)
    drawn = SamplingParams(max_tokens=9, temperature=1.0, top_p=0.95, seed=7, logprobs=3)
    told = SamplingParams(max_tokens=9, prompt_logprobs=2)
    plans = [
        StepPlan(
            (
                item("drawn", tokens, 0, (0, 1, 2), sampling=drawn, history=tokens, prompt_token_count=40),
                item("chunk", tokens[:30], 0, (3, 4, 5), sample_index=None),
                item("embedded", tokens[:21], 0, (6, 7), sample_index=None, wants_embedding=True),
                item("told", tokens[:25], 0, (8, 9), sampling=told, prompt_token_count=25),
            ),
            0,
        ),
        StepPlan(
            (
                item("drawn", (PENDING_TOKEN,), 40, (0, 1, 2), sampling=drawn, sample_index=1),
                item("chunk", tokens[30:], 30, (3, 4, 5)),
                item("told", (PENDING_TOKEN,), 25, (8, 9), sampling=told, sample_index=1),
            ),
            1,
        ),
        StepPlan((), 2, copies=((0, 10), (1, 11), (2, 12)), ended=(SeqKey(SequenceId("told"), 0),)),
        StepPlan(
            (
                item("drawn", (PENDING_TOKEN,), 41, (10, 11, 12), sampling=drawn, sample_index=2),
                item("chunk", (PENDING_TOKEN, *tokens[:3]), 40, (3, 4, 5), sample_index=1, draft_count=3),
            ),
            3,
        ),
    ]
    results: list[StepResult] = []
    for plan in plans:
        # An empty plan keeps no token, as for one rank: what follows it names tokens that are known.
        if plan.step_number == 3:
            first, chunk = results[1].results[0].tokens[-1], results[1].results[1].tokens[-1]
            known = {"drawn": first, "chunk": chunk}
            items = tuple(
                msgspec.structs.replace(one, tokens=(known[one.key.seq_id], *one.tokens[1:]))
                for one in plan.items
            )
            plan = msgspec.structs.replace(plan, items=items)
        results.append(executor.execute(plan))
    return results


@pytest.mark.parametrize(
    ("shape", "model"),
    [
        ("tp2", {}),
        ("pp2", {}),
        ("tp2pp2", {}),
        ("cp2", {}),
        ("cp2", {"quantization": "int4", "kv_dtype": "int8"}),
        ("tp2cp2", {}),
        ("pp2cp2", {}),
        ("tp2", {"kv_dtype": "int8"}),
        ("tp2", {"quantization": "int8"}),
        ("tp2", {"quantization": "int4"}),
        ("pp2", {"quantization": "int4", "kv_dtype": "int8"}),
    ],
    ids=str,
)
def test_ranks_give_what_one_gives(
    tmp_path: Path, started: list[Executor], shape: str, model: dict[str, str]
) -> None:
    folder = make_model(tmp_path, "llama", with_tokenizer=False, hidden_size=128, intermediate_size=256)
    started += [start(folder, "1", **model), start(folder, shape, **model)]
    one, several = (features(executor) for executor in started)
    for alone, together in zip(one, several, strict=True):
        for expected, found in zip(alone.results, together.results, strict=True):
            assert found.tokens == expected.tokens
            assert found.embedding == pytest.approx(expected.embedding, rel=1e-3, abs=1e-4)
            for ours, theirs in zip(
                found.logprobs + found.prompt_logprobs,
                expected.logprobs + expected.prompt_logprobs,
                strict=True,
            ):
                assert (ours.token, ours.rank) == (theirs.token, theirs.rank)
                assert ours.logprob == pytest.approx(theirs.logprob, rel=1e-3, abs=1e-3)


@pytest.mark.parametrize("shape", ["tp2pp2", "pp2cp2"])
def test_a_stage_begins_a_step_before_the_one_before_is_finished(
    tmp_path: Path, started: list[Executor], shape: str
) -> None:
    """Chunks of one prompt follow one another through the stages, and a step waits for the token that it
    names."""
    folder = make_model(tmp_path, "llama", with_tokenizer=False)
    started += [start(folder, shape) for shape in ("1", shape)]
    tokens = prompt(40)
    plans = [
        StepPlan((item("a", tokens[:16], 0, (0, 1, 2), sample_index=None),), 0),
        StepPlan((item("a", tokens[16:32], 16, (0, 1, 2), sample_index=None),), 1),
        StepPlan((item("a", tokens[32:], 32, (0, 1, 2)),), 2),
        StepPlan((item("a", (PENDING_TOKEN,), 40, (0, 1, 2), sample_index=1),), 3),
        StepPlan((item("a", (PENDING_TOKEN,), 41, (0, 1, 2), sample_index=2),), 4),
    ]
    expected = [started[0].execute(plan) for plan in plans]
    leader = started[1]
    begun = [leader.begin(plan) for plan in plans[:3]]
    assert all(isinstance(step, BegunStep) for step in begun)
    with ThreadPoolExecutor(1) as finisher:
        waits = finisher.submit(
            lambda: [leader.finish(step) for step in begun if isinstance(step, BegunStep)]
        )
        begun = [leader.begin(plans[3])]
        waits = [*waits.result(DEADLINE_S), leader.finish(begun[0]), leader.execute(plans[4])]
    assert [step.results for step in waits] == [step.results for step in expected]


@pytest.mark.parametrize(("shape", "parts"), [("tp2pp2", 4), ("tp2cp2", 2)])
def test_the_leader_sees_the_blocks_of_all_ranks(
    tmp_path: Path, started: list[Executor], shape: str, parts: int
) -> None:
    folder = make_model(tmp_path, "llama", with_tokenizer=False)
    started += [start(folder, shape) for shape in ("1", shape)]
    assert len(started[1].parts) == parts, "context ranks have one pool"
    blocks: list[torch.Tensor] = []
    for executor in started:
        Driver(executor).generate(prompt(40), GENERATED)
        geometry = executor.whole_geometry
        whole = torch.zeros(
            (executor.kv.block_count, geometry.layer_count, 2, geometry.kv_head_count, 16, geometry.head_dim)
        )
        for layers, heads, pool in executor.parts:
            whole[:, layers.start : layers.stop, :, heads.start : heads.stop] = pool.blocks
        blocks.append(whole)
    assert blocks[0].count_nonzero() > 0
    assert torch.allclose(blocks[0], blocks[1], atol=1e-4)


# --- how ranks end -----------------------------------------------------------------------------------


def compute_for_ever(executor: Executor) -> None:
    tokens = prompt(40)
    for number in itertools.count():
        executor.execute(StepPlan((item(f"s{number}", tokens, 0, (0, 1, 2)),), number))


@pytest.mark.parametrize("shape", ["tp2", "pp2", "cp2"])
@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP])
def test_a_follower_that_dies_or_stops_ends_the_step(
    tmp_path: Path, started: list[Executor], shape: str, sign: signal.Signals
) -> None:
    """Long before the ranks' deadline."""
    folder = make_model(tmp_path, "llama", with_tokenizer=False)
    started.append(start(folder, shape))
    driver = Driver(started[0])
    driver.generate(prompt(20), SamplingParams(max_tokens=3))
    os.kill(started[0].rank_pids[0], sign)
    with pytest.raises(GroupBroken, match=r"rank 1") as caught:
        compute_for_ever(started[0])
    assert ("has died" if sign is signal.SIGKILL else "is stopped") in str(caught.value)


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP])
def test_the_loss_of_an_idle_follower_is_told(
    tmp_path: Path, started: list[Executor], sign: signal.Signals
) -> None:
    folder = make_model(tmp_path, "llama", with_tokenizer=False)
    started.append(start(folder, "tp2"))
    lost, reasons = threading.Event(), list[str]()

    def on_lost(reason: str) -> None:
        reasons.append(reason)
        lost.set()

    started[0].watch_ranks(on_lost)
    os.kill(started[0].rank_pids[0], sign)
    assert lost.wait(DEADLINE_S / 2)
    assert "rank 1" in reasons[0]
    assert ("has died" if sign is signal.SIGKILL else "is stopped") in reasons[0]


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGTERM])
def test_followers_end_with_their_leader(tmp_path: Path, sign: signal.Signals) -> None:
    folder = make_model(tmp_path, "llama", with_tokenizer=False)
    script = (
        "from pathlib import Path; from tests.unit.engine.test_ranks import start; "
        f"print(*start(Path({str(folder)!r}), 'tp2pp2').rank_pids, flush=True); input()"
    )
    leader = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert leader.stdin is not None
    assert leader.stdout is not None
    followers = [psutil.Process(int(pid)) for pid in leader.stdout.readline().split()]
    assert len(followers) == 3
    leader.send_signal(sign)
    leader.wait()
    leader.stdin.close()
    leader.stdout.close()
    assert psutil.wait_procs(followers, timeout=DEADLINE_S)[1] == []


@pytest.mark.parametrize(
    ("kind", "shape", "said"),
    [
        ("llama", "tp3", "attention heads do not divide by 3; possible are tp1, tp2, tp4"),
        ("llama", "pp9", "pp9 has more stages than the model has layers: at most"),
        ("olmo2", "cp2", "cp2: Olmo2ForCausalLM runs through transformers' modules"),
    ],
)
def test_a_shape_that_does_not_fit_is_said_before_anything_starts(
    tmp_path: Path, kind: Kind, shape: str, said: str
) -> None:
    folder = make_model(tmp_path, kind, with_tokenizer=False)
    before = psutil.Process().children()
    with pytest.raises(SetupError, match=said):
        start(folder, shape)
    assert psutil.Process().children() == before


@pytest.mark.parametrize("dies", ["before it joins", "while it loads"])
def test_a_follower_that_dies_at_the_start_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies: str
) -> None:
    """It may have been killed for its memory. That is no error of the setup, which would end the cluster."""
    folder = make_model(tmp_path, "llama", with_tokenizer=False)
    teams: list[RankTeam] = []

    def kill(team: RankTeam) -> None:
        teams.append(team)
        os.kill(team.pids[0], signal.SIGKILL)

    if dies == "before it joins":
        spawn = RankTeam._spawn_all

        def spawn_and_kill(team: RankTeam, *args: Any) -> None:
            spawn(team, *args)
            kill(team)

        monkeypatch.setattr(RankTeam, "_spawn_all", spawn_and_kill)
    else:
        wait = RankTeam.wait_ready

        def kill_and_wait(team: RankTeam) -> object:
            kill(team)
            with team._changed:
                assert team._changed.wait_for(lambda: team._state.end_reason, DEADLINE_S)
                team._state.ready.clear()
            return wait(team)

        monkeypatch.setattr(RankTeam, "wait_ready", kill_and_wait)
    with pytest.raises(GroupBroken, match=r"rank 1 \(process \d+\) (ended by signal 9|has died)"):
        start(folder, "tp2")
    assert not any(psutil.pid_exists(pid) for team in teams for pid in team.pids)


def test_a_follower_that_cannot_load_says_why(tmp_path: Path) -> None:
    """The pools do not fit: the first rank that notices ends them all."""
    folder = make_model(tmp_path, "llama", with_tokenizer=False)
    engine = EngineConfig(kv_bytes=2**46, block_tokens=16, threads=1, shape="tp2", rank_timeout_s=DEADLINE_S)
    left: list[set[int]] = []
    for _ in range(2):  # the first one also starts the server of forked processes
        with pytest.raises(SetupError, match="does not fit"):
            Executor.load(ModelConfig(path=str(folder)), engine)
        left.append({process.pid for process in psutil.Process().children(recursive=True)})
    assert left[0] == left[1]
