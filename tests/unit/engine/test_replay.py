"""Decode steps that are replayed on the CPU give what they give without a recording, bit for bit."""

import ctypes
import gc
import random
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from baton.config import EngineConfig, ModelConfig
from baton.core.ids import SeqKey, SequenceId
from baton.core.sampling import SamplingParams
from baton.core.steps import PENDING_TOKEN, StepItem, StepPlan
from engine.execution import replay
from engine.execution.executor import Executor
from engine.execution.step_buffers import StepBuffers
from engine.execution.tracing import trace
from engine.kernels.interface import BatchLayout, Span
from engine.native.library import library
from engine.native.recording import NotRecordable
from tests.models import make_model

FAMILIES = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "mistral": {"sliding_window": 12},
    "phi3": {},
    "gemma": {},
    "gemma2": {},
    "gemma3": {},
    "mixtral": {},
    "qwen2_moe": {},
    "qwen3_moe": {},
    "deepseek_v2": {},
    "deepseek_v3": {},
    "gpt_oss": {},
}
NATIVE_ALONE = ("llama", "qwen2", "qwen3", "mistral", "phi3", "gemma", "gemma3")
"""Families whose steps are calls of kernels and nothing else."""
BLOCK_TOKENS, BLOCKS = 4, 200
LOADS = [("bfloat16", {}), ("float32", {}), ("bfloat16", {"quantization": "int8"})]
SAMPLINGS = (
    SamplingParams(max_tokens=64, temperature=0.0),
    SamplingParams(max_tokens=64, temperature=0.8, seed=3),
    SamplingParams(max_tokens=64, temperature=1.3, top_k=7, top_p=0.9, seed=4),
    SamplingParams(max_tokens=64, temperature=0.7, min_p=0.05, seed=5),
)


def executor_of(folder, *, replays: bool, **model) -> Executor:
    engine = EngineConfig(
        kv_bytes=2**23, block_tokens=BLOCK_TOKENS, threads=1, graph_sequences_max=8 if replays else 0
    )
    return Executor.load(ModelConfig(path=str(folder), **model), engine)


@pytest.fixture(scope="module", params=[(f, d, o) for f in FAMILIES for d, o in LOADS], ids=str)
def pair(request, tmp_path_factory) -> tuple[str, Executor, Executor]:
    family, dtype, options = request.param
    folder = make_model(tmp_path_factory.mktemp("model"), family, **FAMILIES[family])
    made = [executor_of(folder, replays=replays, dtype=dtype, **options) for replays in (True, False)]
    return family, made[0], made[1]


@st.composite
def batches(draw):
    """Prompt lengths, and which sequences decode in each step."""
    lengths = draw(st.lists(st.integers(1, 30), min_size=1, max_size=4))
    everyone = range(len(lengths))
    steps = draw(
        st.lists(
            st.lists(st.sampled_from(everyone), min_size=1, max_size=len(lengths), unique=True),
            min_size=2,
            max_size=8,
        )
    )
    kinds = draw(st.lists(st.sampled_from(range(len(SAMPLINGS))), min_size=4, max_size=4))
    return lengths, steps, kinds


def play(executor: Executor, lengths, steps, kinds, wrap: Callable = lambda params: params) -> list:
    """Tokens of every sequence, and the bytes of all KV at the end."""
    for block in range(BLOCKS):
        executor.kv.clear(block)
    numbers = random.Random(1)
    texts = [[numbers.randrange(5, 500) for _ in range(length)] for length in lengths]
    generated = [0] * len(lengths)
    computed = [0] * len(lengths)
    last: set[int] = set()
    for number, chosen in enumerate([list(range(len(lengths))), *steps]):
        items = []
        for i in chosen:
            known = tuple(texts[i][computed[i] :])
            blocks = -(-len(texts[i]) // BLOCK_TOKENS)
            if len(known) == 1 and i in last:
                known = (PENDING_TOKEN,)
            items.append(
                StepItem(
                    key=SeqKey(SequenceId(f"s{i}"), 0),
                    tokens=known,
                    first_position=computed[i],
                    block_ids=tuple(range(40 * i, 40 * i + blocks)),
                    sample_index=generated[i],
                    sampling=wrap(SAMPLINGS[kinds[i]]),
                )
            )
        result = executor.execute(StepPlan(tuple(items), number))
        for i, one in zip(chosen, result.results, strict=True):
            computed[i] = len(texts[i])
            texts[i].append(one.tokens[0])
            generated[i] += 1
        last = set(chosen)
    used = executor.kernels.gather_blocks(range(40 * len(lengths)))
    return [texts, used.tolist()]


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(batches())
def test_replayed_steps_are_those_without_a_recording(pair, batch) -> None:
    _, replaying, plain = pair
    before = replaying.recorder.replayed_count
    assert play(replaying, *batch) == play(plain, *batch)
    _, steps, _ = batch
    sizes = [len(chosen) for chosen in steps]
    assert replaying.recorder.replayed_count - before >= len(sizes) - len(set(sizes))
    assert plain.recorder is None


def test_logits_of_a_replay_are_those_without_a_recording(pair) -> None:
    family, replaying, plain = pair
    play(replaying, [9, 5], [[0, 1]] * 3, [0, 1, 0, 0])
    play(plain, [9, 5], [[0, 1]] * 3, [0, 1, 0, 0])
    layout = BatchLayout.of([Span(7, 1, (0, 1)), Span(3, 1, (40,))])
    tokens = torch.tensor([17, 23])
    with torch.inference_mode():
        hidden = replaying.recorder.run(tokens, layout)
        expected = plain._model.forward(tokens, layout, torch.arange(2))
        assert torch.equal(hidden, expected)
        assert torch.equal(replaying._model.logits(hidden), plain._model.logits(expected))
    kernels, others = replaying.recorder.recorded[2]
    assert kernels > 0
    assert (others == 0) == (family in NATIVE_ALONE)
    if family in NATIVE_ALONE:
        assert sorted(replaying.recorder.recorded) == list(range(1, 9))


@pytest.mark.parametrize("family", NATIVE_ALONE)
def test_one_step_tells_the_calls_of_all_sizes(tmp_path, family) -> None:
    folder = make_model(tmp_path, family, **FAMILIES[family])
    executor, plain = (executor_of(folder, replays=r) for r in (True, False))
    batch = ([9, 5, 7, 3], [[2], [0, 1, 2, 3], [1, 3], [0, 1, 2], [3]], [0, 1, 2, 3])
    assert play(executor, *batch) == play(plain, *batch)
    assert executor.recorder.replayed_count == 4


def test_experts_are_counted_as_often_as_without_a_recording(tmp_path) -> None:
    folder = make_model(tmp_path, "qwen3_moe")
    counts = []
    for replays in (True, False):
        executor = executor_of(folder, replays=replays)
        play(executor, [5, 6], [[0, 1]] * 5, [0] * 4)
        counts.append(executor.expert_counts.read().tolist())
    assert counts[0] == counts[1]


@pytest.mark.parametrize(
    "changes",
    [
        {"logprobs": 2},
        {"repetition_penalty": 1.5},
        {"min_tokens": 9},
        {"logit_bias": ((7, 5.0),)},
        {"allowed_token_ids": (5, 6, 7, 8)},
    ],
)
def test_requests_that_change_logits_are_sampled_as_ever(tmp_path, changes) -> None:
    """Their kernels are replayed, their tokens are chosen in Python."""
    import msgspec

    def wrap(params):
        return msgspec.structs.replace(params, **changes)

    folder = make_model(tmp_path, "llama")
    replaying, plain = (executor_of(folder, replays=replays) for replays in (True, False))
    batch = ([9], [[0]] * 6, [1] * 4)
    if "repetition_penalty" in changes:
        texts = [with_history(executor, wrap(SAMPLINGS[0])) for executor in (replaying, plain)]
        assert texts[0] == texts[1]
    else:
        assert play(replaying, *batch, wrap) == play(plain, *batch, wrap)
    assert replaying.recorder.replayed_count


def with_history(executor: Executor, params: SamplingParams) -> list[int]:
    text = [3, 9, 4]
    for index in range(6):
        item = StepItem(
            key=SeqKey(SequenceId("s"), 0),
            tokens=tuple(text) if not index else (text[-1],),
            first_position=len(text) - 1 if index else 0,
            block_ids=tuple(range(-(-len(text) // BLOCK_TOKENS))),
            sample_index=index,
            sampling=params,
            prompt_token_count=3,
            history=tuple(text) if not index else None,
        )
        text.append(executor.execute(StepPlan((item,), index)).results[0].tokens[0])
    return text


def test_steps_say_whether_they_were_replayed(tmp_path) -> None:
    executor = executor_of(make_model(tmp_path, "llama"), replays=True)
    said = []
    for step in range(4):
        tokens = (5, 6, 7) if not step else (8,)
        item = StepItem(
            key=SeqKey(SequenceId("s"), 0),
            tokens=tokens,
            first_position=0 if not step else 2 + step,
            block_ids=(0, 1),
            sample_index=step,
            sampling=SAMPLINGS[0],
        )
        said.append(executor.execute(StepPlan((item,), step)).is_replayed)
    assert said == [False, False, True, True]  # a prompt; the first decode, which is recorded


def test_wrong_blocks_and_tokens_are_refused_before_memory_is_touched(tmp_path) -> None:
    executor = executor_of(make_model(tmp_path, "llama"), replays=True)
    play(executor, [5], [[0]] * 3, [0] * 4)

    def decode(token: int, position: int, blocks: tuple[int, ...]) -> None:
        key = SeqKey(SequenceId("t"), 0)
        executor.execute(StepPlan((StepItem(key, (token,), position, blocks, 0, SAMPLINGS[0]),), 9))

    with pytest.raises(IndexError, match="blocks"):
        decode(5, 5, (0, executor.kv.block_count))
    with pytest.raises(IndexError, match="tokens"):
        decode(executor.vocab_size, 5, (0, 1))
    decode(5, 5, (0, 1))


def test_a_replay_that_differs_is_never_used(tmp_path, monkeypatch) -> None:
    executor, plain = (executor_of(make_model(tmp_path, "llama"), replays=r) for r in (True, False))
    monkeypatch.setattr(replay, "same_bits", lambda one, other: False)
    batch = ([5], [[0]] * 4, [0] * 4)
    assert play(executor, *batch) == play(plain, *batch)
    assert not executor.recorder.replayed_count
    assert not executor.recorder.recorded


@pytest.mark.parametrize(
    ("family", "bytes_max", "sizes"),
    [("mixtral", 40_000, [1]), ("llama", 24_000, [1, 2, 3, 4]), ("llama", 16_000, [1])],
)
def test_sizes_beyond_the_memory_go_on_as_before(tmp_path, monkeypatch, family, bytes_max, sizes) -> None:
    monkeypatch.setattr(replay, "_BYTES_MAX", bytes_max)
    executor, plain = (executor_of(make_model(tmp_path, family), replays=r) for r in (True, False))
    batch = ([5, 6, 7, 8, 4], [[0], [0], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]], [0] * 5)
    assert play(executor, *batch) == play(plain, *batch)
    assert sorted(executor.recorder.recorded) == sizes


def test_a_step_beyond_the_memory_leaves_the_smaller_ones_theirs(tmp_path, monkeypatch) -> None:
    """Recordings of up to four sequences wait, and count, until such a step comes."""
    monkeypatch.setattr(replay, "_BYTES_MAX", 24_000)
    executor, plain = (executor_of(make_model(tmp_path, "llama"), replays=r) for r in (True, False))
    batch = ([5, 6, 7, 8, 4], [[0, 1, 2, 3, 4], [0, 1], [2, 3, 4], [0]], [0] * 5)
    assert play(executor, *batch) == play(plain, *batch)
    assert sorted(executor.recorder.recorded) == [1, 2, 3, 4]
    assert executor.recorder.replayed_count == 2


def test_what_depends_on_numbers_is_not_recorded() -> None:
    x = torch.arange(6.0)
    for compute in (
        lambda: x[x > 2],
        lambda: x * int(x.sum()),
        lambda: torch.nonzero(x),
        lambda: torch.rand(3),
    ):
        with pytest.raises(NotRecordable), torch.inference_mode():
            trace(compute, StepBuffers(2**20))


def test_finalisers_are_no_part_of_a_step() -> None:
    """What was dropped before is freed once, not again by every replay."""

    class Dropped:
        def __init__(self) -> None:
            self.me = self

        def __del__(self) -> None:
            library().baton_sum_tasks(0, None)

    library().baton_sum_tasks.argtypes = [ctypes.c_int64, ctypes.c_void_p]
    gc.disable()
    try:
        Dropped()
        threshold = gc.get_threshold()
        gc.set_threshold(1)
        gc.enable()
        x = torch.ones(4)
        made = trace(lambda: [[[i]] for i in range(2000)] and x + x, StepBuffers(2**12))
    finally:
        gc.enable()
        gc.set_threshold(*threshold)
    assert made.native_calls == 1
    assert gc.isenabled()


def test_a_recording_loads_no_compiler() -> None:
    """Torch wraps such modes for its compiler, which is 100 MB of a worker that nothing uses."""
    script = """
import sys
import torch
from engine.execution.step_buffers import StepBuffers
from engine.execution.tracing import trace
from engine.native.library import library

library()  # its first call starts it, which is no part of a step
x = torch.ones(4)
made = trace(lambda: x + x, StepBuffers(2**12))
assert made.native_calls == 1
print([name for name in ("torch._dynamo", "torch._inductor", "sympy", "triton") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_memory_is_used_again_when_nobody_refers_to_it() -> None:
    buffers = StepBuffers(2**16)
    one = buffers.empty((8, 8), torch.float32)
    view, place = one[2:], one.data_ptr()
    del one
    assert buffers.empty((8, 8), torch.float32).data_ptr() != place
    del view
    assert buffers.empty((8, 8), torch.float32).data_ptr() == place
    with pytest.raises(NotRecordable):
        buffers.empty((2**16,), torch.float32)
