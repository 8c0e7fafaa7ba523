"""Measures output tokens per second with and without speculation, through a worker's own scheduler and
executor.

There is one process and no network. The core plans as in a worker (a step ahead where that pays), and one
thread computes. All modes of speculation take turns within one run on the same requests, and must give the
same tokens.
"""

import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count
from typing import Literal

import msgspec

from baton.config import EngineConfig, ModelConfig, TransferConfig
from baton.core.errors import BatonError, SetupError
from baton.core.hashing import root_hash
from baton.core.ids import BlockHash, RouterId, SequenceId, WorkerId
from baton.core.messages import (
    Phase,
    Role,
    SequenceFailed,
    SequenceOutput,
    SequenceRefused,
    StartSequence,
    StepOutput,
)
from baton.core.sampling import SamplingParams
from baton.core.steps import StepResult
from engine.execution.executor import Executor
from worker import events as e
from worker.core import WorkerCore

Mode = Literal["off", "ngram", "draft"]
TEXTS = {
    "repeats": "greedy, after one phrase four times: a random model is soon caught in a loop",
    "half": "passages of 32 tokens in turn like `fresh` and like `repeats`, each a request that goes on "
    "with the text so far",
    "fresh": "drawn at temperature 1 with a seed from the whole vocabulary: nothing repeats if the model is "
    "random",
}
PASSAGE_TOKENS = 32
PHRASE_TOKENS = 16
PHRASE_COUNT = 4
PROMPT_TOKENS = PHRASE_TOKENS * PHRASE_COUNT
ROUTER = RouterId("bench")
TIME_LEFT_S = 3600.0
"""Deadline of a request, which is longer than any of them takes."""


class TokensDiffer(BatonError):
    """Speculation changed the tokens, which must never happen."""


class SpeculationLoad(msgspec.Struct, frozen=True):
    batch: int = 1
    """Sequences that run at once."""
    tokens: int = 128
    """Output tokens of each sequence."""
    rounds: int = 5


class TextResult(msgspec.Struct, frozen=True):
    """One text in one mode. Figures are medians over the rounds."""

    text: str
    mode: Mode
    tokens_per_s: float
    """Output tokens of all sequences per second; the time includes prompts."""
    ratio: float
    """Ratio to speculation off in the same round."""
    ratio_min: float
    ratio_max: float
    """The highest ratio of a round, which shows how reliable the median is."""
    drafted: int
    """Draft tokens that were verified, over all rounds."""
    accepted: int


class SpeculationRun(msgspec.Struct, frozen=True):
    """One batch of a text."""

    seconds: float
    outputs: list[list[int]]
    drafted: int
    accepted: int


def measure(
    model: ModelConfig, engine: EngineConfig, load: SpeculationLoad, *, progress: Callable[[str], None]
) -> list[TextResult]:
    """Measure all modes; the draft model runs if `engine.draft_model` names one.

    Raises TokensDiffer. Raises SetupError if the load does not fit, or as `Executor.load` does.
    """
    modes: list[Mode] = ["off", "ngram", "draft"] if engine.draft_model else ["off", "ngram"]
    update = {
        "batch_sequences_max": max(engine.batch_sequences_max, load.batch),
        "waiting_sequences_max": max(engine.waiting_sequences_max, load.batch),
        "speculation": modes[-1],
    }
    engine = engine.model_copy(update=update)
    progress(f"loading {model.path} ({engine.threads} threads)")
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine") as thread:
        executor = thread.submit(Executor.load, model, engine).result()
        try:
            _check_fits(executor, load)
            thread.submit(executor.warm_up).result()
            workers: dict[Mode, BenchWorker] = {
                mode: BenchWorker(executor, engine.model_copy(update={"speculation": mode}), thread)
                for mode in modes
            }
            return [r for text in TEXTS for r in _compare(text, workers, load, progress)]
        finally:
            executor.close()


def _check_fits(executor: Executor, load: SpeculationLoad) -> None:
    tokens = PROMPT_TOKENS + load.tokens
    if tokens > executor.max_model_tokens:
        reason = f"a prompt of {PROMPT_TOKENS} and {load.tokens} new tokens exceed the model's context of"
        raise SetupError(f"--tokens {load.tokens}: {reason} {executor.max_model_tokens} tokens")
    # One block more each, because planning a step ahead takes the next block before the last is full.
    blocks = load.batch * (executor.geometry.blocks_for(tokens) + 1)
    if blocks > executor.kv.block_count:
        reason = f"{blocks} KV blocks are needed, the pool has {executor.kv.block_count}"
        raise SetupError(f"--batch {load.batch}: {reason}; choose a smaller batch or fewer tokens")


def _compare(
    text: str, workers: dict[Mode, "BenchWorker"], load: SpeculationLoad, progress: Callable[[str], None]
) -> list[TextResult]:
    modes = list(workers)
    runs: dict[Mode, list[SpeculationRun]] = {mode: [] for mode in modes}
    expected: list[list[int]] | None = None
    for number in range(load.rounds + 1):
        progress(f"{text}: round {number} of {load.rounds}" + ("" if number else " (does not count)"))
        # alternate the order, so that no mode always comes first
        for mode in modes if number % 2 else modes[::-1]:
            run = workers[mode].generate(text, load)
            expected = run.outputs if expected is None else expected
            check_same(expected, run.outputs, what=f"{text}, {mode}")
            if number:
                runs[mode].append(run)
    return [_result(text, mode, runs[mode], runs["off"], load) for mode in modes]


def check_same(expected: Sequence[Sequence[int]], got: Sequence[Sequence[int]], *, what: str) -> None:
    """Raises TokensDiffer that names the first difference."""
    for number, (wanted, tokens) in enumerate(zip(expected, got, strict=True)):
        if wanted == tokens:
            continue
        pairs = enumerate(zip(wanted, tokens, strict=False))
        at = next((i for i, (a, b) in pairs if a != b), min(len(wanted), len(tokens)))
        raise TokensDiffer(
            f"{what}: sequence {number} differs from its first run at token {at}: "
            f"{wanted[at : at + 4]} became {tokens[at : at + 4]}"
        )


def _result(
    text: str, mode: Mode, runs: list[SpeculationRun], off: list[SpeculationRun], load: SpeculationLoad
) -> TextResult:
    ratios = [b.seconds / run.seconds for run, b in zip(runs, off, strict=True)]
    return TextResult(
        text=text,
        mode=mode,
        tokens_per_s=load.batch * load.tokens / statistics.median(run.seconds for run in runs),
        ratio=statistics.median(ratios),
        ratio_min=min(ratios),
        ratio_max=max(ratios),
        drafted=sum(run.drafted for run in runs),
        accepted=sum(run.accepted for run in runs),
    )


class Passage(msgspec.Struct, frozen=True):
    """A part of a text, generated by one request."""

    repeats: bool
    token_count: int


def passages(text: str, token_count: int) -> list[Passage]:
    if text != "half":
        return [Passage(text == "repeats", token_count)]
    starts = range(0, token_count, PASSAGE_TOKENS)
    sizes = (min(PASSAGE_TOKENS, token_count - start) for start in starts)
    return [Passage(bool(number % 2), size) for number, size in enumerate(sizes)]


class _TextSequence:
    """One sequence of the batch, across its requests."""

    def __init__(self, number: int, todo: list[Passage], vocab: int) -> None:
        base = vocab // 2  # spread over the vocabulary, away from the special tokens at its beginning
        phrase = [(base + (number * 31 + i) * 7919) % (vocab - 16) + 16 for i in range(PHRASE_TOKENS)]
        self.tokens = phrase * PHRASE_COUNT
        self._number, self._todo = number, deque(todo)
        self._started_count = 0

    @property
    def output(self) -> list[int]:
        return self.tokens[PROMPT_TOKENS:]

    def next_request(self, seq_id: SequenceId, root: BlockHash) -> StartSequence | None:
        """The next request; None if the text is complete."""
        if not self._todo:
            return None
        passage = self._todo.popleft()
        self._started_count += 1
        temperature = 0.0 if passage.repeats else 1.0
        seed = 1000 * self._number + self._started_count
        return StartSequence(
            seq_id=seq_id,
            epoch=0,
            phase=Phase.AGGREGATED,
            tokens=tuple(self.tokens),
            prompt_token_count=len(self.tokens),
            sampling=SamplingParams(
                max_tokens=passage.token_count, ignore_eos=True, temperature=temperature, seed=seed
            ),
            cache_root=root,
            time_left_s=TIME_LEFT_S,
        )


class BenchWorker:
    """A core and the executor, joined by function calls. Several may share the executor in turn, because no
    cached block is looked up again after another one wrote there."""

    _run_numbers = count()

    def __init__(self, executor: Executor, engine: EngineConfig, thread: ThreadPoolExecutor) -> None:
        self._executor, self._thread = executor, thread
        self._steps: deque[Future[StepResult]] = deque()
        self._outputs: deque[SequenceOutput] = deque()
        self._core = WorkerCore(
            worker_id=WorkerId("bench"),
            role=Role.AGGREGATED,
            model=executor.model_name,
            fingerprint=executor.fingerprint,
            block_tokens=executor.geometry.block_tokens,
            block_bytes=executor.geometry.block_bytes,
            block_count=executor.kv.block_count,
            max_model_tokens=executor.max_model_tokens,
            engine=engine,
            transfer=TransferConfig(),
            router_grace_s=TIME_LEFT_S,
            heartbeat_s=TIME_LEFT_S,
            generations=[0] * executor.kv.block_count,
            now_s=time.monotonic(),
        )
        self._handle(e.RouterJoined(ROUTER))

    def generate(self, text: str, load: SpeculationLoad) -> SpeculationRun:
        """Generate all sequences of the batch at once. Raises SetupError if the worker refuses one."""
        run = f"{text}/{next(self._run_numbers)}"
        root = root_hash(self._executor.fingerprint, run.encode())
        vocab = self._executor.vocab_size
        texts = [_TextSequence(i, passages(text, load.tokens), vocab) for i in range(load.batch)]
        running: dict[SequenceId, _TextSequence] = {}
        before = self._core.status()
        ids = count()

        def go_on(one: _TextSequence) -> None:
            request = one.next_request(SequenceId(f"{run}/{next(ids)}"), root)
            if request is not None:
                running[request.seq_id] = one
                self._handle(e.FromRouter(ROUTER, request))

        started_s = time.perf_counter()
        for one in texts:
            go_on(one)
        while running:
            output = self._next_output()
            running[output.seq_id].tokens.extend(output.tokens)
            if output.finish is not None:
                go_on(running.pop(output.seq_id))
        seconds = time.perf_counter() - started_s
        self._finish_steps()
        after = self._core.status()
        drafted = after.drafted_count - before.drafted_count
        accepted = after.accepted_count - before.accepted_count
        return SpeculationRun(seconds, [one.output for one in texts], drafted, accepted)

    def _next_output(self) -> SequenceOutput:
        while not self._outputs:
            assert self._steps, "the core waits for something that nobody does"
            self._handle(e.StepDone(self._steps.popleft().result()))
        return self._outputs.popleft()

    def _finish_steps(self) -> None:
        """A step that was planned ahead may still run after the last token."""
        while self._steps:
            self._handle(e.StepDone(self._steps.popleft().result()))

    def _handle(self, event: e.WorkerEvent) -> None:
        for action in self._core.handle(event, now_s=time.monotonic()):
            match action:
                case e.RunStep(plan):
                    self._steps.append(self._thread.submit(self._executor.execute, plan))
                case e.ToRouter(_, StepOutput(outputs)):
                    self._outputs.extend(outputs)
                case e.ToRouter(_, SequenceRefused() | SequenceFailed() as answer):
                    raise SetupError(f"the worker does not run the bench's requests: {answer.message}")
                case _:
                    pass  # hello, load and block events have no receiver here
