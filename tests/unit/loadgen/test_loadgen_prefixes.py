"""Scaling, prompts and the expected cache agree with models that are too simple to be wrong."""

from fractions import Fraction

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from baton.core.errors import SetupError
from loadgen.expected_cache import block_hit_ratio, expected_cache
from loadgen.lengths import TraceScaling, make_plan, parse_factor
from loadgen.prompts import PromptMaker, TokenRange
from loadgen.traces import Trace, TraceFormat, TraceRequest


@st.composite
def traces(draw, id_max=12, block_sizes=(512,)):
    block = draw(st.sampled_from(block_sizes))
    ids = st.integers(0, id_max)
    chains = draw(st.lists(st.lists(ids, min_size=1, max_size=9), min_size=1, max_size=12))
    last_tokens = st.integers(1, block)
    own_tokens = draw(st.sampled_from([0, 0, 0, 37]))
    last = st.just(block + own_tokens) if own_tokens else last_tokens
    return Trace(
        TraceFormat.MOONCAKE,
        tuple(
            TraceRequest(float(t), block * (len(chain) - 1) + draw(last), 10, tuple(chain), row=t)
            for t, chain in enumerate(chains)
        ),
        block_tokens=block,
    )


def shared(a, b):
    count = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        count += 1
    return count


SCALES = st.sampled_from([Fraction(1, 64), Fraction(3, 64), Fraction(1, 16), Fraction(1, 8)])


ODD_SCALES = st.sampled_from(
    [Fraction(1, 512), Fraction(1, 100), Fraction(3, 10), Fraction(7, 16), Fraction(1), Fraction(3, 2)]
)


@given(traces(2**31, block_sizes=(512, 16, 24)), SCALES | ODD_SCALES, st.integers(0, 5))
@settings(max_examples=150, deadline=None)
def test_requests_share_exactly_the_blocks_their_hash_ids_share(trace, scale, seed):
    """This holds at any block size and any factor. Blocks that would be too short to tell apart are grouped
    into runs."""
    plan = make_plan(trace, TraceScaling(scale), spread=True, seed=seed)
    make = PromptMaker(plan, TokenRange(1000, 3048), seed=seed)
    prompts = [make.tokens(r).tolist() for r in plan.requests]
    group = plan.blocks_grouped
    block = trace.hash_block_tokens * scale
    assert block * group == plan.block_tokens >= 4
    assert group == 1 or block < 4
    for request, original, prompt in zip(plan.requests, trace.requests, prompts, strict=True):
        assert len(prompt) == request.input_tokens
        assert 0 <= request.input_tokens - original.input_tokens * scale < 1
        assert len(request.hash_ids) == -(-len(original.hash_ids) // group)
        assert all(1000 <= t < 3048 for t in prompt)
    for a, one, tokens_a in zip(plan.requests, trace.requests, prompts, strict=True):
        for b, other, tokens_b in zip(plan.requests, trace.requests, prompts, strict=True):
            if a is b:
                continue
            runs = shared(one.hash_ids, other.hash_ids) // group
            if one.hash_ids == other.hash_ids:
                runs = len(a.hash_ids)
            same = shared(tokens_a, tokens_b)
            shorter = min(len(tokens_a), len(tokens_b), plan.edge(runs))
            assert same >= shorter
            assert same < plan.edge(runs + 1) or same == min(len(tokens_a), len(tokens_b))


def test_tokens_follow_from_seed_and_hash_id_alone():
    def prompt(ids, seed):
        trace = Trace(TraceFormat.MOONCAKE, (TraceRequest(0.0, 512 * len(ids), 1, ids),))
        plan = make_plan(trace, TraceScaling(Fraction(1, 16)), spread=False, seed=seed)
        return PromptMaker(plan, TokenRange(), seed=seed).tokens(plan.requests[0]).tolist()

    assert prompt((5, 9), 0)[32:] == prompt((9,), 0)
    assert prompt((9, 5, 180_000), 0)[:64] == prompt((9, 5), 0)
    assert prompt((9,), 0)[0] != prompt((9,), 1)[0]
    blocks = {tuple(prompt((i,), 0)) for i in range(3000)}
    assert len(blocks) == 3000


def test_ids_that_are_hashes_are_numbered_anew():
    big = 2**63 + 5
    trace = Trace(
        TraceFormat.MOONCAKE,
        (TraceRequest(0.0, 1024, 1, (big, 7)), TraceRequest(0.0, 1024, 1, (big, 2**70), row=1)),
    )
    plan = make_plan(trace, TraceScaling(Fraction(1, 16)), spread=False, seed=0)
    make = PromptMaker(plan, TokenRange(), seed=0)
    a, b = (make.tokens(r).tolist() for r in plan.requests)
    assert shared(a, b) == 32


def test_azure_prompts_share_nothing_and_text_keeps_prefixes():
    azure = Trace(TraceFormat.AZURE, tuple(TraceRequest(0.0, 100, 1) for _ in range(50)))
    plan = make_plan(azure, TraceScaling(Fraction(3, 10)), spread=True, seed=0)
    make = PromptMaker(plan, TokenRange(), seed=0)
    assert {len(make.tokens(r)) for r in plan.requests} == {30}
    assert len({int(make.tokens(r)[0]) for r in plan.requests}) == 50
    assert expected_cache(plan, server_block_tokens=1).hit_ratio == 0

    pair = Trace(
        TraceFormat.MOONCAKE, (TraceRequest(0.0, 1024, 1, (1, 2)), TraceRequest(0.0, 1024, 1, (1, 3)))
    )
    plan = make_plan(pair, TraceScaling(Fraction(1, 16)), spread=False, seed=0)
    make = PromptMaker(plan, TokenRange(), seed=0)
    a, b = (make.text(r).split() for r in plan.requests)
    assert shared(a, b) == 32
    assert len(a) == 64


@pytest.mark.parametrize("text", ["0", "-1", "1/0", "a lot", "", "nan", "inf"])
def test_factors_must_be_positive_numbers(text):
    with pytest.raises(SetupError):
        parse_factor(text)


def test_what_cannot_be_told_apart_is_refused():
    trace = Trace(TraceFormat.MOONCAKE, (TraceRequest(0.0, 512, 1, (5000,)),))
    plan = make_plan(trace, TraceScaling(parse_factor("1/128")), spread=True, seed=0)
    with pytest.raises(SetupError, match="tell"):
        PromptMaker(plan, TokenRange(1000, 1004), seed=0)
    with pytest.raises(SetupError, match="vocab"):
        TokenRange(1000, 1001)


def test_caps_are_counted_and_keep_the_prefix():
    trace = Trace(
        TraceFormat.MOONCAKE,
        (TraceRequest(0.0, 1500, 100, (1, 2, 3)), TraceRequest(4.0, 100, 0, (1,))),
    )
    scaling = TraceScaling(Fraction(1, 8), Fraction(1, 4), Fraction(5, 2), 100, 20)
    plan = make_plan(trace, scaling, spread=False, seed=0)
    long, short = plan.requests
    assert (plan.inputs_cut, plan.outputs_cut) == (1, 1)
    assert (long.input_tokens, long.output_tokens, long.hash_ids) == (100, 20, (1, 2))
    assert (short.input_tokens, short.output_tokens, short.at_s) == (13, 1, 10.0)


def test_lru_keeps_the_most_recent_prefixes():
    a, b = ["a0", "a1", "a2"], ["b0", "b1"]
    assert block_hit_ratio([a, b, a], capacity_blocks=None) == pytest.approx(3 / 8)
    # There is room for four: b evicts the tail of a, whose first two blocks still hit.
    assert block_hit_ratio([a, b, a], capacity_blocks=4) == pytest.approx(2 / 8)
    assert block_hit_ratio([a, b, a], capacity_blocks=2) == 0
    # A block that is used in between survives the eviction.
    assert block_hit_ratio([["x"], ["y"], ["x"], ["z"], ["x"]], capacity_blocks=2) == pytest.approx(2 / 5)


def dull_expected(prompts, block, capacity):
    """Real token tuples in a plain list, oldest first."""
    held: list[tuple[int, ...]] = []
    cached = 0
    for prompt in prompts:
        prefixes = [tuple(prompt[: (k + 1) * block]) for k in range(len(prompt) // block)]
        hits = 0
        while hits < len(prefixes) and prefixes[hits] in held:
            hits += 1
        while hits and hits * block > len(prompt) - 1:
            hits -= 1
        cached += hits * block
        for prefix in reversed(prefixes):
            if prefix in held:
                held.remove(prefix)
            held.append(prefix)
        if capacity is not None:
            del held[: max(0, len(held) - capacity)]
    return sum(len(p) for p in prompts), cached


@given(
    traces(block_sizes=(512, 16)),
    SCALES | ODD_SCALES,
    st.sampled_from([3, 8, 16, 32, 64]),
    st.sampled_from([None, 1, 2, 5, 9]),
)
@settings(max_examples=80, deadline=None)
def test_expected_hits_are_those_of_a_cache_that_sees_the_tokens(trace, scale, block, capacity):
    assume(sum(r.input_tokens for r in trace.requests) * scale < 2_500)  # the dull model is slow
    plan = make_plan(trace, TraceScaling(scale), spread=False, seed=0)
    make = PromptMaker(plan, TokenRange(), seed=0)
    prompts = [make.tokens(r).tolist() for r in plan.requests]
    expected = expected_cache(plan, server_block_tokens=block, cache_blocks=capacity)
    assert (expected.prompt_tokens, expected.cached_tokens) == dull_expected(prompts, block, capacity)


def test_a_prompt_that_is_cached_whole_computes_its_last_block():
    trace = Trace(TraceFormat.MOONCAKE, tuple(TraceRequest(0.0, 1024, 1, (1, 2)) for _ in range(2)))
    plan = make_plan(trace, TraceScaling(Fraction(1, 16)), spread=False, seed=0)
    assert expected_cache(plan, server_block_tokens=32).cached_tokens == 32
    assert expected_cache(plan, server_block_tokens=16).cached_tokens == 48
