"""The planner against every split there is."""

from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.store import FoundSpan, Tier
from kv_store.planner import GAIN_MIN_S, LoadPlan, Paths, PathTimes, PromptWork, Recompute, plan_load

BLOCK_TOKENS = 16


def prompt(blocks, *, held=0, token_s=1e-3, context_s=0.0, step_s=0.0, queue_s=0.0):
    """Costs per token, per token and thousand positions before it, per step of 4 blocks."""

    def compute_s(start, end):
        steps = -(-(end - start) // (4 * BLOCK_TOKENS))
        return steps * step_s + token_s * (end - start) + context_s * (end * end - start * start) / 2000

    return PromptWork(held, BLOCK_TOKENS, blocks * BLOCK_TOKENS + 5, compute_s, queue_s)


def seconds(spans, ask, times, first, end):
    """The duration of one way, by the formula in the module's docstring."""
    at, slowest = ask.held_count, {}
    for span in spans:
        count = len(range(max(first, at), min(end, at + span.block_count)))
        if count:
            slowest[span.tier] = slowest.get(span.tier, span.wait_s) + count * span.block_s
        at += span.block_count
    computed_s = ask.queue_s + ask.compute_s(ask.held_count * BLOCK_TOKENS, first * BLOCK_TOKENS)
    rest_s = ask.compute_s(end * BLOCK_TOKENS, ask.token_count)
    if first == end:
        return computed_s + rest_s
    loaded_s = times.answer_s + max(slowest.values()) + times.copy_block_s
    copied_s = ask.queue_s + times.copy_block_s * (end - first)
    return max(computed_s, loaded_s, copied_s) + rest_s


WAITS_S = st.sampled_from([0.0, 0.001, 0.02, 0.3])
BLOCK_S = st.sampled_from([0.0, 0.0005, 0.004, 0.02, 0.1])


@st.composite
def chains(draw):
    """Every tier has one queue and one speed."""
    speeds = {tier: (draw(WAITS_S), draw(BLOCK_S)) for tier in Tier}
    cuts = draw(st.lists(st.tuples(st.sampled_from(Tier), st.integers(1, 12)), min_size=1, max_size=4))
    return tuple(FoundSpan(tier, count, *speeds[tier]) for tier, count in cuts)


@settings(max_examples=300, deadline=None)
@given(
    spans=chains(),
    held=st.integers(0, 8),
    more=st.integers(0, 12),
    token_s=st.sampled_from([1e-5, 2e-4, 1e-3]),
    context_s=st.sampled_from([0.0, 1e-3]),
    queue_s=st.sampled_from([0.0, 0.01, 0.5]),
    copy_block_s=st.sampled_from([1e-5, 1e-3]),
)
def test_no_split_is_better_by_more_than_a_block(
    spans, held, more, token_s, context_s, queue_s, copy_block_s
):
    blocks = held + sum(span.block_count for span in spans) + more
    ask = prompt(blocks, held=held, token_s=token_s, context_s=context_s, queue_s=queue_s)
    times = PathTimes(copy_block_s=copy_block_s)
    plan = plan_load(spans, ask, times)
    found_end = held + sum(span.block_count for span in spans)
    every = [
        seconds(spans, ask, times, first, end)
        for end in range(held, found_end + 1)
        for first in range(held, end + 1)
    ]
    nothing_s = ask.queue_s + ask.rest_s(held)
    best_s = min(every, default=nothing_s)
    block_s = ask.blocks_s(max(0, blocks - 1), blocks) + max((span.block_s for span in spans), default=0.0)
    if isinstance(plan, Recompute):
        margin_s = max(GAIN_MIN_S, 0.03 * (nothing_s - queue_s))
        assert nothing_s <= best_s + margin_s + block_s
        return
    assert held <= plan.first < plan.end <= found_end
    chosen_s = seconds(spans, ask, times, plan.first, plan.end)
    assert abs(chosen_s - plan.total_s) < 1e-9
    assert chosen_s < nothing_s - GAIN_MIN_S, "never loads what is computed as fast"
    assert chosen_s <= best_s + block_s


def test_host_memory_is_loaded_wholly():
    spans = (FoundSpan(Tier.HOST, 20, 0.0, 0.0),)
    plan = plan_load(spans, prompt(20), PathTimes())
    assert (plan.first, plan.end, plan.tiers) == (0, 20, (Tier.HOST,))


def test_a_path_that_is_slower_than_computing_is_shared_with_it():
    """A block takes 30 ms to bring and 16 ms to compute: both ends meet after about a third."""
    spans = (FoundSpan(Tier.SSD, 30, 0.0, 0.030),)
    plan = plan_load(spans, prompt(30), PathTimes())
    assert plan.end == 30
    assert abs(plan.first * 0.016 - (30 - plan.first) * 0.030) < 0.046


def test_a_long_queue_at_the_engine_gives_a_slow_path_time():
    spans = (FoundSpan(Tier.SSD, 30, 0.0, 0.030),)
    plan = plan_load(spans, prompt(30, queue_s=1.0), PathTimes())
    assert (plan.first, plan.end) == (0, 30)


def test_a_long_queue_on_the_path_makes_computing_the_better_way():
    spans = (FoundSpan(Tier.SSD, 30, 1.0, 0.0),)
    plan = plan_load(spans, prompt(30), PathTimes())
    assert isinstance(plan, Recompute)


def test_what_a_path_took_is_believed_more_than_what_was_said():
    spans = (FoundSpan(Tier.PEER, 30, 0.0, 0.001),)
    times = PathTimes()
    assert isinstance(plan_load(spans, prompt(30, token_s=1e-4), times), LoadPlan)
    paths = Paths(spans)
    for _ in range(30):
        times.loaded(paths, 0, 30, seconds=30 * 0.015)
    assert times.load_s(paths, 0, 30) > 0.4
    assert isinstance(plan_load(spans, prompt(30, token_s=1e-5), times), Recompute)
    assert times.actual_s > times.predicted_s
    for _ in range(60):
        times.loaded(paths, 0, 30, seconds=0.03)
    assert times.load_s(paths, 0, 30) < 0.04


def test_many_changes_of_path_cost_little_of_the_best():
    spans = tuple(FoundSpan(list(Tier)[i % 3], 1 + i % 4, 0.01, 0.002 * (i % 3)) for i in range(90))
    ask, times = prompt(sum(span.block_count for span in spans)), PathTimes()
    plan = plan_load(spans, ask, times)
    ends = range(1, ask.token_count // BLOCK_TOKENS + 1, 5)
    best_s = min(seconds(spans, ask, times, first, end) for end in ends for first in range(0, end, 5))
    assert plan.total_s <= best_s * 1.05


def test_always_brings_everything():
    spans = (FoundSpan(Tier.SSD, 3, 9.0, 9.0), FoundSpan(Tier.HOST, 2, 0.0, 0.0))
    plan = plan_load(spans, prompt(9, held=1), PathTimes(), always=True)
    assert (plan.first, plan.end) == (1, 6)


def test_a_path_that_was_slow_is_tried_again():
    times = PathTimes()
    spans = (FoundSpan(Tier.SSD, 50, 0.05, 0.01),)
    for _ in range(50):
        times.loaded(Paths(spans), 0, 50, 30.0)
    prompt = PromptWork(
        held_count=0, block_tokens=32, token_count=50 * 32 + 1, compute_s=lambda a, b: (b - a) / 1600
    )
    plans = []
    for _ in range(100):
        plans.append(plan_load(spans, prompt, times))
        if isinstance(plans[-1], Recompute):
            times.not_tried()
    assert isinstance(plans[0], Recompute)
    assert not isinstance(plans[-1], Recompute)
