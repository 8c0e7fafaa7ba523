"""A process that loads a model in one shape and times steps when it is asked.

`python -m benchmarks.parallel.model_process PARENT_PID`, with a `Launch` and then requests as JSON lines on
its standard input, and an answer for each on its standard output.
"""

import os
import signal
import sys
import time
from collections import deque
from collections.abc import Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import assert_never

import msgspec

from baton.config import EngineConfig, ModelConfig
from baton.core.costs import StepCosts
from baton.core.errors import SetupError
from baton.core.ids import SeqKey, SequenceId
from baton.core.sampling import SamplingParams
from baton.core.shape import Shape
from baton.core.steps import PENDING_TOKEN, StepItem, StepPlan, StepResult
from baton.wire.parent import end_with_parent
from benchmarks.parallel.model_requests import (
    Decode,
    Launch,
    Memory,
    ModelFailed,
    ModelLoaded,
    Prefill,
    Profile,
    RankMemory,
    Request,
    ScheduledPrefill,
    SelfTimed,
)
from benchmarks.parallel.step_profile import profiled
from engine.execution.executor import Executor
from engine.execution.executor_timing import time_executor
from engine.model_files.read_spec import load_spec
from engine.model_files.sizes import kv_geometry
from engine.scheduling.step_time import StepTimeModel

KIB = 1024
SELF_TIMING_S = 4.0
"""More than a worker takes, for a machine that does other work."""


class TimedSteps:
    """Steps as a worker runs them: one thread begins them, another one finishes those of several stages."""

    def __init__(self, executor: Executor, stages: int) -> None:
        self._executor, self._stages = executor, stages
        self._finishing = ThreadPoolExecutor(1, thread_name_prefix="finish")
        self._step_number = self._sequence_number = 0
        self._costs: StepCosts | None = None

    def self_timed(self, chunk_tokens: int, *, records: bool) -> StepCosts:
        """The costs that this worker learns when it starts, or would learn if it recorded no step."""
        times = StepTimeModel(chunk_tokens=chunk_tokens, stages=self._stages)
        with nullcontext() if records else unrecorded(self._executor):
            for work, elapsed_s in time_executor(self._executor, SELF_TIMING_S, uses_cache=False):
                times.observe(work, elapsed_s)
        costs = times.seen_costs
        assert costs is not None, "self-timing runs a few steps at least"
        if records:
            self._costs = costs
        return costs

    def scheduled_prefill(self, tokens: int, chunk_tokens: int) -> float:
        """Seconds of a prompt that is alone, in chunks as `StepOverlap` makes them."""
        assert self._costs is not None, "self_timed comes first"
        plans: list[StepPlan] = []
        first = 0
        while first < tokens:
            chunk = min(chunk_tokens, self._costs.chunk_tokens(tokens - first))
            plans.append(self._chunk_plan(tokens, first, min(first + chunk, tokens)))
            first += chunk
        return self._run(plans)

    def prefill(self, tokens: int, chunk_tokens: int) -> float:
        firsts = range(0, tokens, chunk_tokens)
        return self._run([self._chunk_plan(tokens, n, min(n + chunk_tokens, tokens)) for n in firsts])

    def decode(self, batch: int, context_tokens: int, steps: int) -> float:
        """A sequence has `context_tokens - 1` tokens already, whatever stands in its blocks."""
        self._sequence_number += 1
        groups = self._groups(batch, context_tokens, 7)
        self._run(groups)
        if len(groups) == 1:
            groups = self._groups(batch, context_tokens, PENDING_TOKEN)
        return self._run(groups * steps) / steps

    def _run(self, plans: Iterable[StepPlan]) -> float:
        executor, open_steps = self._executor, deque[Future[StepResult]]()
        started_s = time.perf_counter()
        for plan in plans:
            self._step_number += 1
            begun = executor.begin(msgspec.structs.replace(plan, step_number=self._step_number))
            if isinstance(begun, StepResult):
                continue
            open_steps.append(self._finishing.submit(executor.finish, begun))
            if len(open_steps) == self._stages:
                open_steps.popleft().result()
        for step in open_steps:
            step.result()
        return time.perf_counter() - started_s

    def _chunk_plan(self, tokens: int, first: int, end: int) -> StepPlan:
        """Positions [first, end) of a prompt of `tokens`, which is a new one where `first` is 0."""
        self._sequence_number += first == 0
        chunk = tuple((i * 7919 + 11) % self._executor.vocab_size for i in range(first, end))
        blocks = tuple(range(self._executor.geometry.blocks_for(tokens)))
        return StepPlan((self._item(0, chunk, first, blocks, is_last=end == tokens),), 0)

    def _groups(self, batch: int, context_tokens: int, token: int) -> list[StepPlan]:
        """Steps in which each of `batch` sequences decodes once: the groups that take turns in the stages."""
        count = self._executor.geometry.blocks_for(context_tokens)
        items = [
            self._item(i, (token,), context_tokens - 1, tuple(range(i * count, (i + 1) * count)))
            for i in range(batch)
        ]
        size = -(-batch // self._stages)
        return [StepPlan(tuple(items[first : first + size]), 0) for first in range(0, batch, size)]

    def _item(
        self,
        number: int,
        tokens: tuple[int, ...],
        first: int,
        blocks: tuple[int, ...],
        *,
        is_last: bool = True,
    ) -> StepItem:
        return StepItem(
            key=SeqKey(SequenceId(f"bench/{self._sequence_number}/{number}"), 0),
            tokens=tokens,
            first_position=first,
            block_ids=blocks,
            sample_index=0 if is_last else None,
            sampling=SamplingParams(max_tokens=1),
        )


@contextmanager
def unrecorded(executor: Executor) -> Generator[None]:
    """Have no step recorded or replayed within the block."""
    recorder, executor.recorder = executor.recorder, None
    try:
        yield
    finally:
        executor.recorder = recorder


def _load(launch: Launch) -> Executor:
    model = ModelConfig(path=launch.model)
    engine = EngineConfig(threads=launch.threads, shape=launch.shape, rank_timeout_s=60.0)
    geometry = kv_geometry(load_spec(Path(launch.model)), model, engine)
    kv_bytes = geometry.blocks_for(launch.kv_tokens) * geometry.block_bytes
    executor = Executor.load(model, engine.model_copy(update={"kv_bytes": kv_bytes}))
    executor.pin()  # as a worker does with the thread of its steps
    if launch.writes_pool:
        for part in executor.parts:
            for block in range(part.pool.block_count):
                part.pool.clear(block)
    return executor


def _answer(executor: Executor, steps: TimedSteps, request: Request, libraries: int) -> object:
    match request:
        case Prefill(tokens, chunk_tokens):
            return steps.prefill(tokens, chunk_tokens)
        case ScheduledPrefill(tokens, chunk_tokens):
            return steps.scheduled_prefill(tokens, chunk_tokens)
        case SelfTimed(chunk_tokens, records):
            return steps.self_timed(chunk_tokens, records=records)
        case Decode(batch, context_tokens, count):
            return steps.decode(batch, context_tokens, count)
        case Profile(batch, context_tokens, count):
            with unrecorded(executor):
                steps.decode(batch, context_tokens, 1)
                return profiled(executor, lambda: steps.decode(batch, context_tokens, count - 1), count)
        case Memory():
            return _memory(executor, libraries)
        case _:
            assert_never(request)


def _memory(executor: Executor, libraries: int) -> list[RankMemory]:
    pids = (os.getpid(), *executor.rank_pids)
    pools = [part.pool.block_count * part.pool.geometry.block_bytes for part in executor.parts]
    return [
        RankMemory(_status_bytes(pid, "VmHWM"), libraries, pool)
        for pid, pool in zip(pids, pools, strict=True)
    ]


def _status_bytes(pid: int, name: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * KIB
    raise OSError(f"/proc/{pid}/status has no {name}")


def main(arguments: Sequence[str]) -> None:
    end_with_parent(int(arguments[0]), signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)  # nothing else writes between the answers, followers neither

        def say(answer: object) -> None:
            answers.write(msgspec.json.encode(answer) + b"\n")
            answers.flush()

        libraries = _status_bytes(os.getpid(), "VmRSS")
        launch = msgspec.json.decode(sys.stdin.buffer.readline(), type=Launch)
        try:
            executor = _load(launch)
        except SetupError as error:
            say(ModelFailed(str(error)))
            return
        try:
            say(ModelLoaded(type(executor.kernels).__name__))
            stages = Shape.parse(launch.shape).pipeline
            steps, decoder = TimedSteps(executor, stages), msgspec.json.Decoder(Request)
            for line in sys.stdin.buffer:
                say(_answer(executor, steps, decoder.decode(line), libraries))
        finally:
            executor.close()


if __name__ == "__main__":
    main(sys.argv[1:])
