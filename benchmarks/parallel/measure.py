"""Workers of two ranks beside a worker of one rank, in turn within one run, so that ratios hold on a busy
machine.

Every worker is a process of its own that stays for the whole comparison, and waits while the other is timed.
"""

import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import msgspec

from baton.core.costs import StepCosts
from baton.core.errors import SetupError
from benchmarks.parallel.cores import on_cores
from benchmarks.parallel.model_requests import (
    Decode,
    Greeting,
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

END_S = 10.0
PROFILE_STEPS = 10
T = TypeVar("T")


class ModelSizes(msgspec.Struct, frozen=True):
    prefill_tokens: tuple[int, ...] = (512, 2048)
    """Prompts that are computed in one chunk."""
    batches: tuple[int, ...] = (1, 8, 32)
    context_tokens: int = 512
    long_prompt_tokens: int = 8192
    chunk_tokens: int = 512
    """Chunks of the long prompt."""
    steps: int = 20
    """Decode steps of one round."""
    rounds: int = 7

    @property
    def kv_tokens(self) -> int:
        decode = max(self.batches) * (self.context_tokens + 512)  # a block table ends on a whole block
        return max(decode, self.long_prompt_tokens, *self.prefill_tokens)


class Comparison(msgspec.Struct, frozen=True):
    """The same work by one rank and by several, in turn. Seconds of each round."""

    work: str
    """prefill or decode."""
    case: str
    alone_s: list[float]
    together_s: list[float]

    @property
    def ratio(self) -> float:
        """The median over the rounds of the seconds of several ranks to those of one."""
        return statistics.median(
            together / alone for alone, together in zip(self.alone_s, self.together_s, strict=True)
        )

    @property
    def best_ratio(self) -> float:
        """The ratio of the shortest times, which other work on the machine disturbs least."""
        return min(self.together_s) / min(self.alone_s)


class StepProfile(msgspec.Struct, frozen=True):
    """Seconds of a decode step of the leader by part, see `step_profile`, in the round with the shortest."""

    shape: str
    batch: int
    parts: dict[str, float]


class ShapeResult(msgspec.Struct, frozen=True):
    shape: str
    alone: str
    """What the ranks are compared with."""
    kernels: str
    comparisons: list[Comparison]
    profiles: list[StepProfile]


class MemoryResult(msgspec.Struct, frozen=True):
    """Peak memory of each rank after a long prompt has filled the KV pool."""

    shape: str
    ranks: list[RankMemory]
    alone: RankMemory

    @property
    def peak_ratio(self) -> float:
        """The largest rank's peak to that of a worker of one rank, libraries and all."""
        return max(rank.peak for rank in self.ranks) / self.alone.peak

    @property
    def model_ratio(self) -> float:
        """The same without what every process has before it loads anything."""
        return max(rank.model for rank in self.ranks) / self.alone.model


class ModelProcess:
    """See `model_process`."""

    def __init__(self, launch: Launch, cores: Sequence[int]) -> None:
        """Start the process. Raises SetupError if it cannot load the model."""
        command = [sys.executable, "-m", "benchmarks.parallel.model_process", str(os.getpid())]
        with on_cores(cores):
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        try:
            greeting = msgspec.json.decode(self._exchange(launch), type=Greeting)
            if isinstance(greeting, ModelFailed):
                raise SetupError(greeting.reason)
        except BaseException:
            self.close()
            raise
        self.ready: ModelLoaded = greeting

    def prefill(self, tokens: int, chunk_tokens: int) -> float:
        return self._request(Prefill(tokens, chunk_tokens), float)

    def decode(self, batch: int, context_tokens: int, steps: int) -> float:
        return self._request(Decode(batch, context_tokens, steps), float)

    def scheduled_prefill(self, tokens: int, chunk_tokens: int) -> float:
        """Seconds of one prompt in chunks as a scheduler makes them. `self_timed` comes first."""
        return self._request(ScheduledPrefill(tokens, chunk_tokens), float)

    def self_timed(self, chunk_tokens: int, *, records: bool = True) -> StepCosts:
        return self._request(SelfTimed(chunk_tokens, records), StepCosts)

    def profile(self, batch: int, context_tokens: int) -> dict[str, float]:
        return self._request(Profile(batch, context_tokens, PROFILE_STEPS), dict[str, float])

    def memory(self) -> list[RankMemory]:
        return self._request(Memory(), list[RankMemory])

    def close(self) -> None:
        process = self._process
        with process:  # closes both pipes: the process ends when there are no more requests
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()  # its followers end with it

    def _request(self, request: Request, answer: type[T]) -> T:
        return msgspec.json.decode(self._exchange(request), type=answer)

    def _exchange(self, request: Launch | Request) -> bytes:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(msgspec.json.encode(request) + b"\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = b""
        if not line:
            raise SetupError("a measured process has ended; its messages are above")
        return line


@contextmanager
def loaded(launch: Launch, cores: Sequence[int]) -> Generator[ModelProcess]:
    """A process that ends with the block. Raises SetupError if it cannot load the model."""
    process = ModelProcess(launch, cores)
    try:
        yield process
    finally:
        process.close()


def tensor_2(
    folder: Path, sizes: ModelSizes, cores: Sequence[int], *, progress: Callable[[str], None]
) -> ShapeResult:
    """Two tensor ranks with a core each, beside one rank with a thread on each. Raises SetupError."""
    progress(f"tp2 and one rank of two threads: {folder.name}")
    kv_tokens = sizes.kv_tokens
    alone_launch = Launch(str(folder), "1", len(cores), kv_tokens)
    with (
        loaded(alone_launch, cores) as alone,
        loaded(Launch(str(folder), "tp2", 1, kv_tokens), cores) as together,
    ):
        context, steps = sizes.context_tokens, sizes.steps
        compared: list[Comparison] = []
        for tokens in sizes.prefill_tokens:
            times = _in_turn(sizes.rounds, alone, together, lambda p, n=tokens: p.prefill(n, n))
            compared.append(Comparison("prefill", f"{tokens} tokens", *times))
        profiles: list[StepProfile] = []
        for batch in sizes.batches:
            progress(f"decode steps of {batch}")
            times = _in_turn(sizes.rounds, alone, together, lambda p, b=batch: p.decode(b, context, steps))
            compared.append(Comparison("decode", f"{batch} at {context}", *times))
            profiles += _profiles(sizes, {"1": alone, "tp2": together}, batch)
        return ShapeResult("tp2", "two threads", together.ready.kernels, compared, profiles)


def beside_one_core(
    shape: str, folder: Path, sizes: ModelSizes, cores: Sequence[int], *, progress: Callable[[str], None]
) -> ShapeResult:
    """Two stages or context ranks with a core each, beside one rank on one core. Raises SetupError."""
    progress(f"{shape} and one rank on one core: {folder.name}")
    tokens, chunk, kv_tokens = sizes.long_prompt_tokens, sizes.chunk_tokens, sizes.kv_tokens
    with (
        loaded(Launch(str(folder), "1", 1, kv_tokens), cores[:1]) as alone,
        loaded(Launch(str(folder), shape, 1, kv_tokens), cores) as together,
    ):
        context, steps = sizes.context_tokens, sizes.steps
        times = _in_turn(sizes.rounds, alone, together, lambda p: p.prefill(tokens, chunk))
        compared = [Comparison("prefill", f"{tokens} tokens in chunks of {chunk}", *times)]
        for batch in sizes.batches:
            times = _in_turn(sizes.rounds, alone, together, lambda p, b=batch: p.decode(b, context, steps))
            compared.append(Comparison("decode", f"{batch} at {context}", *times))
        return ShapeResult(shape, "one core", together.ready.kernels, compared, [])


def memory(
    folder: Path, sizes: ModelSizes, cores: Sequence[int], *, progress: Callable[[str], None]
) -> list[MemoryResult]:
    """Raises SetupError."""
    (alone,) = _memory_of(folder, "1", sizes, cores, progress)
    return [
        MemoryResult(shape, _memory_of(folder, shape, sizes, cores, progress), alone)
        for shape in ("tp2", "pp2")
    ]


def _memory_of(
    folder: Path, shape: str, sizes: ModelSizes, cores: Sequence[int], progress: Callable[[str], None]
) -> list[RankMemory]:
    progress(f"memory of shape {shape}: {folder.name}")
    tokens = sizes.long_prompt_tokens
    threads = len(cores) if shape == "1" else 1
    with loaded(Launch(str(folder), shape, threads, tokens, writes_pool=False), cores) as process:
        process.prefill(tokens, sizes.chunk_tokens)
        process.decode(1, tokens, 1)
        return process.memory()


def _in_turn(
    rounds: int, alone: ModelProcess, together: ModelProcess, measure: Callable[[ModelProcess], float]
) -> tuple[list[float], list[float]]:
    """Seconds of each round, after one that does not count."""
    alone_s: list[float] = []
    together_s: list[float] = []
    for number in range(rounds + 1):
        # The order changes, so that neither is always the one that finds cold caches.
        first, second = (alone, together) if number % 2 else (together, alone)
        seconds = {first: measure(first), second: measure(second)}
        if number:
            alone_s.append(seconds[alone])
            together_s.append(seconds[together])
    return alone_s, together_s


def _profiles(sizes: ModelSizes, processes: dict[str, ModelProcess], batch: int) -> list[StepProfile]:
    rounds: dict[str, list[dict[str, float]]] = {shape: [] for shape in processes}
    for _ in range(sizes.rounds):
        for shape, process in processes.items():
            rounds[shape].append(process.profile(batch, sizes.context_tokens))
    return [
        StepProfile(shape, batch, min(seen, key=lambda parts: sum(parts.values())))
        for shape, seen in rounds.items()
    ]
