"""Replayed steps with prompts and drafts give what they give without a recording, bit for bit."""

import ctypes
import random
from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from baton.config import EngineConfig, ModelConfig
from baton.core.ids import SeqKey, SequenceId
from baton.core.sampling import SamplingParams
from baton.core.steps import StepItem, StepPlan
from engine.execution import mixed_replay
from engine.execution.executor import Executor
from engine.execution.step_buffers import LargestStepBuffers
from engine.native.library import library
from engine.native.recording import NotRecordable, Tape
from engine.native.sized_replay import SizedReplay
from tests.models import make_model

NATIVE_ALONE = {"llama": {}, "qwen3": {}, "mistral": {"sliding_window": 12}, "phi3": {}, "gemma2": {}}
"""Families whose steps are calls of kernels and nothing else."""
WITH_TORCH = ("mixtral", "qwen3_moe")
BLOCK_TOKENS, BLOCKS, STEP_TOKENS, SEQUENCES = 4, 200, 48, 4
LOADS = [("bfloat16", {}), ("float32", {}), ("bfloat16", {"quantization": "int8"})]
GREEDY = SamplingParams(max_tokens=64, temperature=0.0)
PROMPTS_TOO = SamplingParams(max_tokens=64, temperature=0.0, prompt_logprobs=1)


def executor_of(folder, *, replays: bool, **model) -> Executor:
    engine = EngineConfig(
        kv_bytes=2**23,
        block_tokens=BLOCK_TOKENS,
        threads=1,
        step_tokens_max=STEP_TOKENS,
        graph_sequences_max=8 if replays else 0,
    )
    return Executor.load(ModelConfig(path=str(folder), **model), engine)


def item_of(
    number: int, tokens: tuple[int, ...], first: int, *, samples: bool = True, drafts: int = 0, params=GREEDY
) -> StepItem:
    blocks = -(-(first + len(tokens)) // BLOCK_TOKENS)
    return StepItem(
        key=SeqKey(SequenceId(f"s{number}"), 0),
        tokens=tokens,
        first_position=first,
        block_ids=tuple(range(40 * number, 40 * number + blocks)),
        sample_index=first if samples else None,
        sampling=params,
        draft_count=drafts,
        prompt_token_count=first + len(tokens),
    )


@st.composite
def schedules(draw):
    """Draw steps; each has, for some sequences, how many tokens are computed, whether one is sampled, how
    many are drafts, and whether the prompt's own logprobs are wanted."""
    steps = []
    for _ in range(draw(st.integers(2, 6))):
        chosen = draw(
            st.lists(st.sampled_from(range(SEQUENCES)), min_size=1, max_size=SEQUENCES, unique=True)
        )
        step = []
        for number in chosen:
            count = draw(st.integers(1, STEP_TOKENS // SEQUENCES))
            samples = draw(st.booleans())
            drafts = draw(st.integers(0, count - 1)) if samples else 0
            wants_prompt = draw(st.integers(0, 5)) == 0
            step.append((number, count, samples, drafts, wants_prompt))
        steps.append(step)
    return steps


def play(executor: Executor, steps) -> list:
    """All results, and the bytes of all KV at the end."""
    for block in range(BLOCKS):
        executor.kv.clear(block)
    numbers = random.Random(7)
    computed = [0] * SEQUENCES
    found = []
    for number, step in enumerate(steps):
        items = []
        for sequence, count, samples, drafts, wants_prompt in step:
            tokens = tuple(numbers.randrange(5, 500) for _ in range(count))
            items.append(
                item_of(
                    sequence,
                    tokens,
                    computed[sequence],
                    samples=samples,
                    drafts=drafts,
                    params=PROMPTS_TOO if wants_prompt else GREEDY,
                )
            )
            computed[sequence] += count
        found.append(executor.execute(StepPlan(tuple(items), number)).results)
    return [found, executor.kernels.gather_blocks(range(40 * SEQUENCES)).tolist()]


@pytest.fixture(scope="module", params=[(f, d, o) for f in NATIVE_ALONE for d, o in LOADS], ids=str)
def pair(request, tmp_path_factory) -> tuple[Executor, Executor]:
    family, dtype, options = request.param
    folder = make_model(tmp_path_factory.mktemp("model"), family, **NATIVE_ALONE[family])
    replaying, plain = (executor_of(folder, replays=r, dtype=dtype, **options) for r in (True, False))
    for samples in (True, False):  # the first step of each kind is the one that is recorded
        replaying.execute(StepPlan((item_of(0, (5, 6, 7), 0, samples=samples),), 0))
    return replaying, plain


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(schedules())
def test_replayed_steps_are_those_without_a_recording(pair, steps) -> None:
    replaying, plain = pair
    before = replaying.mixed_replay.replayed_count
    assert play(replaying, steps) == play(plain, steps)
    with_prompts = sum(any(count > 1 for _, count, *_ in step) for step in steps)
    assert replaying.mixed_replay.replayed_count - before >= with_prompts
    assert plain.mixed_replay is None


@pytest.mark.parametrize("family", WITH_TORCH)
def test_models_that_need_torch_go_on_as_before(tmp_path, family) -> None:
    folder = make_model(tmp_path, family)
    replaying, plain = (executor_of(folder, replays=r) for r in (True, False))
    steps = [[(0, 9, False, 0, False)], [(0, 3, True, 0, False), (1, 5, True, 2, False)]] * 2
    assert play(replaying, steps) == play(plain, steps)
    assert replaying.mixed_replay.replayed_count == 0


def prompts(executor: Executor, count: int = 4) -> list:
    return play(executor, [[(0, 3, True, 0, False)], *[[(1, 4, False, 0, False)]] * (count - 1)])


def test_a_replay_that_differs_is_never_used(tmp_path, monkeypatch) -> None:
    executor, plain = (executor_of(make_model(tmp_path, "llama"), replays=r) for r in (True, False))
    monkeypatch.setattr(mixed_replay, "same_bits", lambda one, other: False)
    assert prompts(executor) == prompts(plain)
    assert executor.mixed_replay.replayed_count == 0


def test_a_model_too_large_for_the_memory_goes_on_as_before(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(mixed_replay, "_BYTES_MAX", 4_000)
    executor, plain = (executor_of(make_model(tmp_path, "llama"), replays=r) for r in (True, False))
    assert prompts(executor) == prompts(plain)
    assert executor.mixed_replay.replayed_count == 0


def test_more_tokens_than_a_step_has_go_on_as_before(tmp_path) -> None:
    executor, plain = (executor_of(make_model(tmp_path, "llama"), replays=r) for r in (True, False))
    prompts(executor)
    before = executor.mixed_replay.replayed_count
    steps = [[(0, STEP_TOKENS + 2, True, 0, False)]]
    assert play(executor, steps) == play(plain, steps)
    assert executor.mixed_replay.replayed_count == before


def test_a_replayed_step_checks_blocks_positions_and_tokens(tmp_path) -> None:
    executor = executor_of(make_model(tmp_path, "llama"), replays=True)
    prompts(executor)
    key = SeqKey(SequenceId("t"), 0)

    def chunk(tokens: tuple[int, ...], blocks: tuple[int, ...]) -> None:
        executor.execute(StepPlan((StepItem(key, tokens, 0, blocks, 0, GREEDY),), 9))

    with pytest.raises(IndexError, match="blocks"):
        chunk((5, 6, 7, 8, 9), (0, executor.kv.block_count))
    with pytest.raises(IndexError, match="tokens"):
        chunk((5, executor.vocab_size), (0, 1))
    chunk((5, 6), (0, 1))


# --- calls of other sizes ---


def taken(calls: Callable[[Tape], None]) -> Tape:
    tape = Tape(is_dry=True)
    calls(tape)
    return tape


def scale_of() -> ctypes._CFuncPtr:
    function = library().raw("baton_scale")
    pointer = ctypes.c_void_p
    function.argtypes = [pointer, pointer, ctypes.c_int32, ctypes.c_int64, ctypes.c_float]
    function.restype = None
    return function


def test_calls_are_made_for_sizes_that_were_not_recorded() -> None:
    x, out = torch.arange(24.0), torch.zeros(24)

    def of(rows: int) -> Tape:
        arguments = (x.data_ptr(), out.data_ptr(), 0, 3 * rows, 2.0)
        return taken(lambda tape: tape.add("baton_scale", scale_of(), arguments))

    replay = SizedReplay(library(), [of(8), of(4), of(3)], [(8,), (4,), (3,)])
    replay(5)
    assert out.tolist() == [2.0 * i if i < 15 else 0.0 for i in range(24)]
    assert len(replay) == 1


@pytest.mark.parametrize(
    "size", [lambda rows: rows * rows, lambda rows: max(rows, 4), lambda rows: rows // 3]
)
def test_arguments_that_are_no_multiples_are_refused(size) -> None:
    def of(rows: int) -> Tape:
        return taken(lambda tape: tape.add("baton_scale", scale_of(), (0, 0, 0, size(rows), 2.0)))

    with pytest.raises(NotRecordable, match="multiples"):
        SizedReplay(library(), [of(8), of(4), of(3)], [(8,), (4,), (3,)])


def test_other_calls_for_another_size_are_refused() -> None:
    def of(rows: int) -> Tape:
        def calls(tape: Tape) -> None:
            for _ in range(1 if rows > 3 else 2):
                tape.add("baton_scale", scale_of(), (0, 0, 0, rows, 2.0))

        return taken(calls)

    with pytest.raises(NotRecordable, match="which kernels"):
        SizedReplay(library(), [of(8), of(4), of(3)], [(8,), (4,), (3,)])


def test_results_of_all_sizes_lie_where_those_of_the_largest_do() -> None:
    buffers = LargestStepBuffers(2**16)

    def places(rows: int) -> list[int]:
        buffers.begin()
        first = buffers.empty((rows, 8), torch.float32)
        second = buffers.empty((2 * rows, 8), torch.float32)
        found = [first.data_ptr(), second.data_ptr()]
        del first
        return [*found, buffers.empty((rows, 8), torch.float32).data_ptr()]

    largest = places(64)
    assert [places(rows) for rows in (1, 7, 64)] == [largest] * 3
    assert largest[0] == largest[2]
    buffers.begin()
    with pytest.raises(NotRecordable):
        buffers.empty((65, 8), torch.float32)
