"""Every parameter of a request, against its definition computed one row at a time in float64, and
against transformers' own processors."""

import msgspec
import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from baton.core.ids import SeqKey
from baton.core.sampling import SamplingParams
from engine.sampling.logprobs import logprobs_of
from engine.sampling.sampler import Sampler, SampleRequest

VOCAB = 40
PROMPT = (3, 3, 17, 22)
GENERATED = (5, 5, 5, 9, 22, 31)
STOPS = (38, 39)


def params(**fields):
    return SamplingParams(99, **{"temperature": 1.0, **fields})


def definition(logits, p, prompt=PROMPT, generated=GENERATED):
    """The distribution, in the order that SamplingParams documents."""
    x = np.array(logits, dtype=np.float64)
    if p.allowed_token_ids:
        x[[i for i in range(len(x)) if i not in p.allowed_token_ids]] = -np.inf
    if len(generated) < p.min_tokens:
        x[list(p.stop_token_ids)] = -np.inf
    for token, bias in p.logit_bias:
        x[token] += bias
    for token in {*prompt, *generated}:
        x[token] = x[token] / p.repetition_penalty if x[token] > 0 else x[token] * p.repetition_penalty
    for token in set(generated):
        x[token] -= p.presence_penalty + p.frequency_penalty * generated.count(token)
    x /= p.temperature
    mass = np.exp(x - x.max())
    ranked = sorted(range(len(x)), key=lambda i: (-mass[i], i))
    ranked = ranked[: p.top_k or None]
    total, kept, reached = sum(mass[i] for i in ranked), [], 0.0
    for i in ranked:
        if p.top_p < 1 and reached >= p.top_p * total:
            break
        kept.append(i)
        reached += mass[i]
    kept = [i for i in kept if mass[i] >= p.min_p * mass.max()]
    result = np.zeros(len(x))
    result[kept] = mass[kept]
    return result / result.sum()


class NoGrammars:
    def matcher(self, grammar, stop_token_ids):
        raise AssertionError("no grammar here")


def frequencies(logits, p, count):
    """The frequency of each token, over seeds."""
    sampler = Sampler(vocab=len(logits), grammars=NoGrammars(), eos_token_ids=STOPS)
    history = (*PROMPT, *GENERATED)
    requests = [
        SampleRequest(
            SeqKey(str(seed), 0),
            msgspec.structs.replace(p, seed=seed),
            len(GENERATED),
            (),
            history,
            len(PROMPT),
        )
        for seed in range(count)
    ]
    rows = torch.tensor(logits, dtype=torch.float32).repeat(count, 1)
    tokens = [sampled.tokens[0] for sampled in sampler.sample(rows, requests)]
    return np.bincount(tokens, minlength=len(logits))


def assert_follows(seen, wanted):
    expected = wanted * seen.sum()
    assert seen[wanted == 0].sum() == 0
    likely = expected > 5
    observed = np.append(seen[likely], seen[~likely].sum())
    theory = np.append(expected[likely], expected[~likely].sum())
    used = theory > 0
    if used.sum() > 1:
        assert stats.chisquare(observed[used], theory[used]).pvalue > 1e-4


CASES = [
    params(),
    params(temperature=0.6),
    params(min_p=0.1),
    params(min_p=0.05, top_p=0.8, top_k=20),
    params(repetition_penalty=1.8),
    params(repetition_penalty=0.6, temperature=1.4),
    params(presence_penalty=1.5),
    params(frequency_penalty=0.7),
    params(presence_penalty=-1.0, frequency_penalty=-0.5, repetition_penalty=1.2),
    params(logit_bias=((2, 3.0), (5, -100.0), (31, 1.5))),
    params(logit_bias=((31, 4.0),), repetition_penalty=2.0, presence_penalty=0.5),
    params(allowed_token_ids=(1, 5, 9, 30)),
    params(min_tokens=7, stop_token_ids=STOPS, logit_bias=((38, 5.0),)),
    params(min_tokens=6, stop_token_ids=STOPS, logit_bias=((38, 5.0),)),
    params(
        temperature=0.8,
        top_k=25,
        top_p=0.9,
        min_p=0.02,
        repetition_penalty=1.3,
        presence_penalty=0.4,
        frequency_penalty=0.2,
        logit_bias=((7, 1.0),),
        allowed_token_ids=(*range(0, 40, 2), 5, 9, 31),
        min_tokens=10,
        stop_token_ids=STOPS,
    ),
]


@pytest.mark.parametrize("p", CASES, ids=range(len(CASES)))
def test_frequencies_follow_the_definition(p):
    logits = np.random.default_rng(8).normal(size=VOCAB) * 2
    assert_follows(frequencies(logits, p, 4000), definition(logits, p))


@pytest.mark.parametrize("p", CASES, ids=range(len(CASES)))
def test_greedy_takes_the_first_of_the_definitions_most_likely(p):
    for seed in range(20):
        logits = np.random.default_rng(seed).normal(size=VOCAB).astype(np.float32)
        wanted = definition(logits, p)
        greedy = msgspec.structs.replace(p, temperature=0.0)
        assert frequencies(logits, greedy, 1).argmax() == wanted.argmax()


PROCESSORS = {
    "repetition": (
        transformers.RepetitionPenaltyLogitsProcessor(1.7),
        params(repetition_penalty=1.7),
    ),
    "temperature": (transformers.TemperatureLogitsWarper(0.7), params(temperature=0.7)),
    "top-k": (transformers.TopKLogitsWarper(9), params(top_k=9)),
    "top-p": (transformers.TopPLogitsWarper(0.75), params(top_p=0.75)),
    "min-p": (transformers.MinPLogitsWarper(0.08), params(min_p=0.08)),
    "bias": (
        transformers.SequenceBiasLogitsProcessor([[[4], 2.5], [[30], -9.0]]),
        params(logit_bias=((4, 2.5), (30, -9.0))),
    ),
}


@pytest.mark.parametrize("name", PROCESSORS)
def test_transformers_agrees(name):
    processor, p = PROCESSORS[name]
    logits = np.random.default_rng(2).normal(size=VOCAB) * 1.5
    scores = torch.tensor(logits, dtype=torch.float32)[None]
    theirs = processor(torch.tensor([[*PROMPT, *GENERATED]]), scores)
    wanted = torch.softmax(theirs.double(), dim=-1)[0].numpy()
    np.testing.assert_allclose(definition(logits, p), wanted, atol=1e-6)
    assert_follows(frequencies(logits, p, 4000), wanted)


some_params = st.builds(
    params,
    temperature=st.sampled_from((0.0, 0.5, 1.0, 3.0)),
    top_p=st.sampled_from((0.3, 0.95, 1.0)),
    top_k=st.sampled_from((0, 3, 30)),
    min_p=st.sampled_from((0.0, 0.2)),
    seed=st.integers(0, 2**64 - 1),
    repetition_penalty=st.sampled_from((1.0, 1.5)),
    frequency_penalty=st.sampled_from((0.0, 0.5)),
    logit_bias=st.sampled_from(((), ((3, 2.0),))),
    allowed_token_ids=st.sampled_from(((), tuple(range(20)))),
    min_tokens=st.sampled_from((0, 3)),
    stop_token_ids=st.just((2,)),
    logprobs=st.sampled_from((None, 0, 4)),
)
drafts = st.lists(st.integers(0, VOCAB - 1), max_size=3).map(tuple)


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(st.tuples(some_params, drafts), min_size=2, max_size=6), seed=st.integers(0, 99))
def test_nobody_sees_who_else_is_in_the_batch(rows, seed):
    """Three steps run, so that remembered state is compared too."""

    def run(members):
        sampler = Sampler(vocab=VOCAB, grammars=NoGrammars(), eos_token_ids=(2,))
        known = {i: [] for i in members}
        for step in range(3):
            requests, logits = [], []
            for i in members:
                p, drafts = rows[i]
                history = PROMPT if step == 0 else None
                key = SeqKey(str(i), 0)
                requests.append(SampleRequest(key, p, len(known[i]), drafts, history, len(PROMPT)))
                random = torch.Generator().manual_seed(1000 * seed + 10 * i + step)
                logits.append(torch.randn(1 + len(drafts), VOCAB, generator=random) * 2)
            found = sampler.sample(torch.cat(logits), requests)
            results = dict(zip(members, found, strict=True))
            for i in members:
                known[i] += results[i].tokens
        return {i: (known[i], results[i].logprobs) for i in members}

    together = run(range(len(rows)))
    for i in range(len(rows)):
        assert run([i])[i] == together[i]


def test_ids_beyond_the_vocabulary_are_left_out():
    """A client's list may be longer than the model; the router cannot always know."""
    p = params(
        temperature=0.0,
        logit_bias=((2, 1.0), (VOCAB + 7, 5.0)),
        allowed_token_ids=(2, 4, VOCAB + 900),
        repetition_penalty=1.5,
    )
    assert frequencies(np.zeros(VOCAB), p, 1).argmax() == 2


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_logits_that_are_no_numbers_give_some_token_with_every_parameter(bad):
    for p in CASES:
        logits = np.zeros(VOCAB)
        logits[5] = bad
        assert frequencies(logits, p, 2).sum() == 2
        assert frequencies(np.full(VOCAB, bad), p, 2).sum() == 2


@given(
    values=st.lists(st.floats(-30, 30, width=32), min_size=3, max_size=30),
    token=st.integers(0, 2),
    count=st.integers(0, 40),
)
def test_logprobs_are_log_softmax_with_ranks(values, token, count):
    row = torch.tensor([values])
    [found] = logprobs_of(row, [token], [count])
    wanted = torch.log_softmax(row.double(), dim=-1)[0]
    assert found.logprob == pytest.approx(float(wanted[token]), abs=1e-4)
    assert found.rank == 1 + sum(value > values[token] for value in values)
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))[:count]
    assert [i for i, _ in found.top] == order
    assert [value for _, value in found.top] == pytest.approx([float(wanted[i]) for i in order], abs=1e-4)
