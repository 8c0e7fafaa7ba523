"""Steps under way at the same time, where stages divide the layers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.costs import STAGE_CHUNK_MIN, StepCosts
from baton.core.steps import PENDING_TOKEN
from engine.scheduling.step_time import StepWork
from tests.unit.engine.test_scheduler import Bench, looping_token, sequence

STEADY_STEPS = 30


def bench_of(stages, *, overlap=False, **more):
    return Bench(**{"blocks": 200, "overlap": overlap, "shape": f"pp{stages}", "batch": 16, **more})


def decoding(bench, count, *, max_tokens=200):
    bench.add(*(sequence(f"s{i}", [i], max_tokens=max_tokens) for i in range(count)))
    for _ in range(STEADY_STEPS):
        bench.step()
    bench.plans.clear()
    for _ in range(STEADY_STEPS):
        bench.step()
    return bench.plans


@pytest.mark.parametrize("stages", [2, 3])
def test_chunks_of_one_prompt_follow_one_another(stages):
    bench = bench_of(stages, step_tokens=8)
    bench.step_s = lambda _: 5.0  # beside steps as long as these nothing is planned ahead
    bench.add(sequence("long", range(100)))
    bench.step()
    for _ in range(3):
        assert bench.plan()
        assert len(bench.line) == stages
        ends = [plan.items[0].first_position + len(plan.items[0].tokens) for plan in bench.line]
        assert [plan.items[0].first_position for plan in bench.line][1:] == ends[:-1]
        bench.step()
    bench.run()
    bench.assert_empty()


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("count", [2, 5, 8])
def test_decodes_take_turns(stages, overlap, count):
    plans = decoding(bench_of(stages, overlap=overlap), count)
    for plan in plans:
        assert 1 <= len(plan.items) <= -(-count // stages)
        assert all(item.tokens != (PENDING_TOKEN,) for item in plan.items)
    # Each sequence gets a token in every round of the groups.
    rounds = len(plans) // min(stages, count)
    seen = [item.key for plan in plans for item in plan.items]
    assert all(abs(seen.count(key) - rounds) <= 2 for key in set(seen))
    assert len(set(seen)) == count


def test_one_that_decodes_alone_is_planned_ahead():
    plans = decoding(bench_of(2, overlap=True), 1)
    assert all(plan.items[0].tokens == (PENDING_TOKEN,) for plan in plans[1:])


def test_a_group_speculates_while_another_is_under_way():
    bench = bench_of(2, speculation="ngram", next_token=looping_token, step_tokens=64)
    bench.add(*(sequence(f"s{i}", range(i, i + 12), max_tokens=100) for i in range(4)))
    drafted_beside_another = 0
    while bench.plan():
        drafted = [plan for plan in bench.line if any(item.draft_count for item in plan.items)]
        drafted_beside_another += len(drafted) > 0 and len(bench.line) == 2
        bench.step()
    assert drafted_beside_another > 10
    assert bench.scheduler.accepted_count > 50
    bench.assert_empty()


def test_one_that_repeats_itself_alone_speculates_between_stages():
    bench = bench_of(2, overlap=True, speculation="ngram", next_token=looping_token, step_tokens=64)
    bench.add(sequence("alone", range(12), max_tokens=150))
    bench.run()
    assert bench.scheduler.accepted_count > 50


def test_the_time_of_a_group_is_that_of_a_round():
    """A sequence that decodes waits for all groups, so the cost of a token is that of all together."""
    bench = bench_of(2)
    bench.step_s = lambda plan: 0.004 + 0.002 * len(plan.items)  # of both stages
    decoding(bench, 8)
    assert bench.scheduler.times.predict_s(StepWork(decodes=8, context_tokens=8 * 40)) == pytest.approx(
        0.012, rel=0.15
    )


def through_stages(chunks, costs):
    """When the last stage is done with the last chunk, each stage taking the same time for a chunk."""
    free_s = [0.0] * costs.stages
    for tokens in chunks:
        at_s = 0.0
        for stage, stage_free_s in enumerate(free_s):
            at_s = free_s[stage] = max(at_s, stage_free_s) + costs.base_s + costs.prompt_token_s * tokens
    return at_s


def chunks_of(tokens, size):
    return [min(size, tokens - first) for first in range(0, tokens, size)]


costs_of_stages = st.builds(
    StepCosts,
    st.floats(1e-4, 1e-2),
    st.floats(1e-5, 1e-3),
    st.just(0.0),
    st.just(0.0),
    st.just(0.0),
    st.integers(1, 8),
)


@given(costs_of_stages, st.integers(1, 20_000))
def test_the_time_of_a_prompt_is_that_of_its_way_through_the_stages(costs, tokens):
    size = min(2048, costs.chunk_tokens(tokens))
    through_s = through_stages(chunks_of(tokens, size), costs)
    last_s = costs.base_s + costs.prompt_token_s * size
    # A last chunk that is shorter is counted as a whole one in the stages after the first.
    assert through_s <= costs.prompt_s(0, tokens, chunk_tokens=2048) + 1e-9
    assert costs.prompt_s(0, tokens, chunk_tokens=2048) <= through_s + (costs.stages - 1) * last_s + 1e-9


@given(costs_of_stages, st.integers(1, 20_000))
def test_no_other_length_of_chunks_is_much_faster(costs, tokens):
    chosen_s = through_stages(chunks_of(tokens, costs.chunk_tokens(tokens)), costs)
    for count in range(1, 65):
        size = -(-tokens // count)
        if size >= STAGE_CHUNK_MIN or count == 1:
            assert chosen_s <= 1.15 * through_stages(chunks_of(tokens, size), costs)
