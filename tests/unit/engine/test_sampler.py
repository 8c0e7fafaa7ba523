"""Sampling follows the distribution it says, and nothing but logits, seed and index decides."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from baton.core.sampling import SamplingParams
from engine.sampling.choose import Draw
from engine.sampling.choose import choose as sample
from engine.sampling.uniform import uniform


def params(**fields) -> SamplingParams:
    return SamplingParams(max_tokens=1, **{"temperature": 1.0, **fields})


def expected_distribution(logits: np.ndarray, p: SamplingParams) -> np.ndarray:
    """The definition, one token at a time."""
    scaled = logits.astype(np.float64) / p.temperature
    probabilities = np.exp(scaled - scaled.max())
    ranked = sorted(range(len(logits)), key=lambda token: (-probabilities[token], token))
    if p.top_k:
        ranked = ranked[: p.top_k]
    total = sum(probabilities[token] for token in ranked)
    kept, mass = [], 0.0
    for token in ranked:
        kept.append(token)
        mass += probabilities[token]
        if mass >= p.top_p * total and p.top_p < 1:
            break
    result = np.zeros(len(logits))
    result[kept] = probabilities[kept]
    return result / result.sum()


@pytest.mark.parametrize(
    "p",
    [
        params(),
        params(temperature=0.5),
        params(temperature=2.0, top_k=7),
        params(top_p=0.8),
        params(temperature=1.3, top_p=0.6, top_k=12),
        params(top_k=1),
        params(top_p=0.01),
    ],
    ids=str,
)
def test_frequencies_follow_the_distribution(p: SamplingParams) -> None:
    logits = np.random.default_rng(3).normal(size=40) * 2
    count = 12_000
    draws = [
        Draw(params(temperature=p.temperature, top_p=p.top_p, top_k=p.top_k, seed=i // 4), i % 4)
        for i in range(count)
    ]
    tokens = sample(torch.tensor(logits, dtype=torch.float32).expand(count, -1), draws)
    seen = np.bincount(tokens, minlength=len(logits))
    expected = expected_distribution(logits, p) * count
    assert seen[expected == 0].sum() == 0
    likely = expected > 5
    if likely.sum() > 1:
        observed = np.append(seen[likely], seen[~likely].sum())
        wanted = np.append(expected[likely], expected[~likely].sum())
        used = wanted > 0
        assert stats.chisquare(observed[used], wanted[used]).pvalue > 1e-4


def test_top_p_over_many_flat_tokens_looks_beyond_the_first_candidates() -> None:
    """Nearly flat over 5000 tokens: half of the mass needs about 2500 of them."""
    logits = np.linspace(0, 0.01, 5000)
    count = 1000
    draws = [Draw(params(top_p=0.5, seed=seed), 0) for seed in range(count)]
    tokens = sample(torch.tensor(logits, dtype=torch.float32).expand(count, -1), draws)
    allowed = np.flatnonzero(expected_distribution(logits, params(top_p=0.5)))
    assert min(tokens) >= allowed.min() - 2
    halves = np.histogram(tokens, bins=5, range=(allowed.min(), 5000))[0]
    assert stats.chisquare(halves).pvalue > 1e-4


rows = st.lists(
    st.builds(
        params,
        temperature=st.sampled_from((0.0, 0.3, 1.0, 5.0)),
        top_p=st.sampled_from((0.1, 0.9, 1.0)),
        top_k=st.sampled_from((0, 1, 5, 2000)),
        seed=st.integers(-(2**63), 2**64),
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=60, deadline=None)
@given(rows=rows, index=st.integers(0, 100_000), vocab=st.sampled_from((3, 50, 3000)))
def test_a_row_does_not_see_its_neighbours(rows, index, vocab) -> None:
    logits = torch.randn(len(rows), vocab, generator=torch.Generator().manual_seed(index)) * 3
    draws = [Draw(p, index + i) for i, p in enumerate(rows)]
    together = sample(logits, draws)
    assert together == [sample(logits[i : i + 1], [draw])[0] for i, draw in enumerate(draws)]
    for p, token, row in zip(rows, together, logits, strict=True):
        if p.is_greedy or p.top_k == 1:
            assert token == int(row.argmax())
        elif 0 < p.top_k < vocab:
            assert token in row.topk(p.top_k).indices


def test_equal_logits_are_ranked_by_id() -> None:
    logits = torch.zeros(200, 50)
    tokens = sample(logits, [Draw(params(top_k=3, seed=seed), 0) for seed in range(200)])
    assert set(tokens) == {0, 1, 2}


def test_tiny_temperatures_and_huge_logits_do_not_overflow() -> None:
    logits = torch.tensor([[1e30, -1e30, 0.0], [-3e38, 3e38, float("-inf")]])
    draws = [Draw(params(temperature=1e-6, top_p=0.9), 0), Draw(params(temperature=100.0), 1)]
    assert sample(logits, draws) == [0, 1]


@pytest.mark.parametrize("temperature", [5e-324, 1e-320, 1e-300, 1e-45, 1e-38, 1e300])
@pytest.mark.parametrize("fields", [{}, {"top_p": 0.9}, {"top_k": 5, "min_p": 0.1}], ids=str)
def test_temperatures_beyond_float32(temperature: float, fields: dict[str, float]) -> None:
    logits = torch.tensor([[0.5, float("-inf"), 2.0, 1.5, float("-inf")]])
    tokens = {
        sample(logits, [Draw(params(temperature=temperature, seed=s, **fields), 0)])[0] for s in range(40)
    }
    assert tokens == ({2} if temperature < 1 else {0, 2, 3})


@given(
    temperature=st.floats(5e-324, 1e3),
    steps=st.permutations([0.0, -1.0, -2.5, -7.0, -40.0, float("-inf")]),
    fields=st.sampled_from([{}, {"top_p": 0.9}, {"top_k": 3}, {"min_p": 0.2}]),
    seed=st.integers(0, 2**32),
)
@settings(deadline=None, max_examples=150)
def test_any_positive_temperature_draws_what_can_be_and_the_best_in_the_limit(
    temperature, steps, fields, seed
) -> None:
    logits = torch.tensor([steps])
    drawn = Draw(params(temperature=temperature, seed=seed, **fields), 0)
    (token,) = sample(logits, [drawn])
    assert steps[token] != float("-inf")
    # Beside a gap of 100 temperatures everything else has less than 2**-53 of the mass.
    if temperature < 0.01:
        assert token == steps.index(0.0)


def test_a_token_that_cannot_be_is_never_drawn() -> None:
    logits = torch.tensor([[float("-inf"), 0.0, float("-inf"), 0.0, float("-inf")]]).expand(2000, -1)
    tokens = sample(logits, [Draw(params(seed=seed), seed) for seed in range(2000)])
    assert set(tokens) == {1, 3}


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_no_numbers_still_give_a_valid_token(bad: float) -> None:
    """A broken sequence must not take the batch, or the worker, down with it."""
    logits = torch.zeros(4, 30)
    logits[:3, 5] = bad
    kinds = [params(temperature=0.0), params(), params(top_p=0.5, top_k=3), params(temperature=0.0)]
    tokens = sample(logits, [Draw(p, 0) for p in kinds])
    assert all(0 <= token < 30 for token in tokens)
    assert tokens[3] == 0


def test_uniform_numbers_are_uniform_and_independent_over_seeds_and_indices() -> None:
    by_index = np.array([uniform(7, index) for index in range(20_000)])
    by_seed = np.array([uniform(seed, 7) for seed in range(20_000)])
    for numbers in (by_index, by_seed):
        assert numbers.min() >= 0
        assert numbers.max() < 1
        assert stats.kstest(numbers, "uniform").pvalue > 1e-4
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.03
    assert abs(np.corrcoef(by_index, by_seed)[0, 1]) < 0.03


def test_the_numbers_are_fixed_for_all_time() -> None:
    """A sequence that is resumed on a worker of another version must go on alike. The first value is
    computed here step by step from SplitMix64's published constants."""

    def mix(z: int) -> int:
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        return z ^ (z >> 31)

    gamma = 0x9E3779B97F4A7C15
    assert uniform(0, 0) == (mix((mix(gamma) + gamma) % 2**64) >> 11) / 2**53
    assert uniform(-1, 3) == uniform(2**64 - 1, 3)
