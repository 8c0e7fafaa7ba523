"""Processes of the bench of expert ranks: ranks, and workers that use them or hold all experts.

Each runs on cores of its own, and does what it is asked over a pipe.
"""

import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from baton.config import EngineConfig, ModelConfig
from baton.config.experts import ExpertsConfig
from baton.core.experts import ExpertMapRank, ExpertMapUpdate, ExpertRankRef
from baton.core.ids import ExpertRankId, SeqKey, SequenceId
from baton.core.sampling import SamplingParams
from baton.core.steps import StepItem, StepPlan
from engine.execution.executor import Executor
from engine.experts.caller import ExpertCaller, ExpertReport
from engine.experts.rank import ExpertRankEngine
from engine.experts.routed import RemoteExperts
from engine.loading.load import load_model
from engine.model_files.division import Division

START_S, ANSWER_S = 300.0, 600.0
BLOCK_TOKENS, KV_BYTES = 32, 256 * 2**20
_spawn = multiprocessing.get_context("spawn")


class MeasuredProcess:
    """A process that answers requests, which are tuples (name, arguments…)."""

    def __init__(self, target: Callable[..., None], *arguments: object) -> None:
        self._pipe, theirs = _spawn.Pipe()
        self._process: BaseProcess = _spawn.Process(target=target, args=(theirs, *arguments), daemon=True)
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def send(self, *request: object) -> None:
        self._pipe.send(request)

    def receive(self, timeout_s: float = ANSWER_S) -> Any:
        """Raises RuntimeError if the process has ended or is late."""
        try:
            if self._pipe.poll(timeout_s):
                return self._pipe.recv()
        except EOFError:
            raise RuntimeError("a measured process has ended; its error is above") from None
        raise RuntimeError(f"a measured process did not answer for {timeout_s:g} s")

    def ask(self, *request: object) -> Any:
        self.send(*request)
        return self.receive()

    def end(self) -> None:
        self._process.kill()
        self._process.join()


def map_of(
    refs: Sequence[ExpertRankRef], held: Sequence[Sequence[int]], sizes: tuple[int, int], epoch: int
) -> ExpertMapUpdate:
    """The map in which each rank holds these experts. sizes: layers and experts of a layer."""
    ranks = tuple(ExpertMapRank(ref, tuple(own)) for ref, own in zip(refs, held, strict=True))
    return ExpertMapUpdate(epoch, *sizes, ranks)


def _engine(threads: int) -> EngineConfig:
    return EngineConfig(
        kernels="native", threads=threads, block_tokens=BLOCK_TOKENS, kv_bytes=KV_BYTES, step_tokens_max=2048
    )


# --- expert ranks ---------------------------------------------------------------------------------


def run_rank(pipe: Connection, folder: str, name: str, cores: tuple[int, ...], rows: str) -> None:
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(1)
    config = ExpertsConfig(rows=rows, threads=1)  # type: ignore[arg-type]
    rank = ExpertRankEngine.load(ModelConfig(path=folder), _engine(1), config, slots=4096)
    pipe.send((rank.start(host="127.0.0.1", rank_id=ExpertRankId(name)), rank.layer_count, rank.expert_count))
    while True:
        match pipe.recv():
            case ("load", experts):
                for expert in experts:
                    rank.load_expert(expert)
                pipe.send(len(rank.held))
            case ("drop", experts):
                for expert in experts:
                    rank.drop_expert(expert)
                pipe.send(len(rank.held))
            case ("stats",):
                pipe.send((rank.rows, rank.busy_s))
            case other:
                raise ValueError(f"no such request: {other}")


# --- workers --------------------------------------------------------------------------------------


def run_worker(
    pipe: Connection,
    folder: str,
    name: str,
    cores: tuple[int, ...],
    update: ExpertMapUpdate | None,
    rows: str,
) -> None:
    """update: the map of the ranks that hold the experts; None: this process holds all."""
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(len(cores))
    config, reports = ExpertsConfig(rows=rows), list[ExpertReport]()  # type: ignore[arg-type]
    callers: list[ExpertCaller] = []

    def routed(division: Division, dtype: torch.dtype) -> RemoteExperts:
        assert update is not None
        caller = ExpertCaller(
            config,
            layer_count=update.layer_count,
            expert_count=update.expert_count,
            hidden=division.spec.hidden_size,
            dtype=dtype,
            name=name,
            report=reports.append,
        )
        callers.append(caller)
        caller.use(update)
        assert caller.wait_complete(START_S)
        return RemoteExperts.of(caller, division)

    engine, model = _engine(len(cores)), ModelConfig(path=folder)
    loaded = load_model(model, engine, routed=routed if update is not None else None)
    steps = _Steps(Executor(loaded, engine))
    pipe.send("ready")
    while True:
        match pipe.recv():
            case ("prefill", tokens, seconds):
                pipe.send(steps.prefill(tokens, seconds))
            case ("decode", batch, context, seconds):
                pipe.send(steps.decode(batch, context, seconds))
            case ("stats",):
                pipe.send(callers[0].stats() if callers else None)
            case other:
                raise ValueError(f"no such request: {other}")


class _Steps:
    """Steps for a while, as (tokens, seconds)."""

    def __init__(self, executor: Executor) -> None:
        self._executor, self._number = executor, 0

    def prefill(self, tokens: int, seconds: float) -> tuple[int, float]:
        blocks = tuple(range(-(-tokens // BLOCK_TOKENS)))
        ids = tuple((17 * i) % 1000 + 100 for i in range(tokens))
        item = StepItem(_key(0), ids, 0, blocks, 0, SamplingParams(max_tokens=1))
        return self._run((item,), tokens, seconds)

    def decode(self, batch: int, context: int, seconds: float) -> tuple[int, float]:
        per = -(-(context + 1) // BLOCK_TOKENS)
        sampling = SamplingParams(max_tokens=1)

        def item(n: int) -> StepItem:
            blocks = tuple(range(n * per, (n + 1) * per))
            return StepItem(_key(n), ((31 * n) % 1000 + 100,), context, blocks, 0, sampling)

        return self._run(tuple(map(item, range(batch))), batch, seconds)

    def _run(self, items: tuple[StepItem, ...], tokens: int, seconds: float) -> tuple[int, float]:
        for _ in range(2):
            self._step(items)
        begun_s, done = time.perf_counter(), 0
        while (elapsed_s := time.perf_counter() - begun_s) < seconds:
            self._step(items)
            done += tokens
        return done, elapsed_s

    def _step(self, items: tuple[StepItem, ...]) -> None:
        self._number += 1
        self._executor.execute(StepPlan(items, self._number))


def _key(number: int) -> SeqKey:
    return SeqKey(SequenceId(f"bench/{number}"), 0)
