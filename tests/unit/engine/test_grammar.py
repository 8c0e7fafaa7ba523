"""Structured output: what comes out matches, whatever the model would rather say."""

import json
import os
import re

import jsonschema
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from baton.core.ids import SeqKey
from baton.core.sampling import FinishReason, Grammar, GrammarKind, SamplingParams, finish_after
from engine.grammar import GrammarStore
from engine.grammar_compile import GrammarError
from engine.sampling.sampler import Sampler, SampleRequest
from tests.json_schemas import SCHEMAS
from tests.models import EOS_ID, save_tokenizer

VOCAB = 520
"""The tokenizer has 512: the rest is padding, as in many models."""
BATCH = 10
SCHEMA_BATCHES = int(os.environ.get("BATON_TEST_SCHEMA_BATCHES", "4"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def tokenizer(folder):
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def store(folder):
    return GrammarStore(folder, VOCAB, (EOS_ID,))


@pytest.fixture(scope="module")
def closers(tokenizer):
    """Tokens that bring a JSON text to its end."""
    texts = [tokenizer.decode([i]) for i in range(512)]
    return torch.tensor([i for i, text in enumerate(texts) if text and set(text) <= set('"}]')] + [EOS_ID])


def generate(store, closers, grammars, *, max_tokens=700, **params):
    """All in one batch, from logits that are random, and with time lean towards an end."""
    sampler = Sampler(vocab=VOCAB, grammars=store, eos_token_ids=(EOS_ID,))
    asked = [
        SamplingParams(
            max_tokens, **{"temperature": 1.0, "seed": i, "stop_token_ids": (EOS_ID,), **params, "grammar": g}
        )
        for i, g in enumerate(grammars)
    ]
    random = torch.Generator().manual_seed(len(grammars))
    texts = [[] for _ in asked]
    going = list(range(len(asked)))
    while going:
        step = max(len(texts[i]) for i in going)
        logits = torch.randn(len(going), VOCAB, generator=random) * 3
        logits[:, closers] += min(step / 10, 30)
        requests = [
            SampleRequest(
                SeqKey(str(i), 0), asked[i], len(texts[i]), (), (1, *texts[i]) if step == 0 else None, 1
            )
            for i in going
        ]
        for i, sampled in zip(list(going), sampler.sample(logits, requests), strict=True):
            texts[i].extend(sampled.tokens)
            if (reason := finish_after(asked[i], texts[i][-1], len(texts[i]))) is not None:
                going.remove(i)
                assert reason is FinishReason.STOP or params.get("ignore_eos"), f"no end: {grammars[i]}"
    return texts


def text_of(tokenizer, tokens):
    return tokenizer.decode([t for t in tokens if t != EOS_ID])


@settings(
    max_examples=SCHEMA_BATCHES,
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(schemas=st.lists(SCHEMAS, min_size=BATCH, max_size=BATCH))
def test_every_text_is_valid_by_its_schema(store, tokenizer, closers, schemas):
    grammars = [Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)) for schema in schemas]
    for schema, tokens in zip(schemas, generate(store, closers, grammars), strict=True):
        text = text_of(tokenizer, tokens)
        jsonschema.Draft202012Validator(schema).validate(json.loads(text))


@pytest.mark.parametrize(
    ("kind", "text", "matches"),
    [
        (GrammarKind.REGEX, r"[a-c]{3}(x|yz)+!", lambda t: re.fullmatch(r"[a-c]{3}(x|yz)+!", t)),
        (GrammarKind.CHOICE, json.dumps(["yes", 'n"o', "ü\\\n日"]), lambda t: t in ["yes", 'n"o', "ü\\\n日"]),
        (GrammarKind.EBNF, 'root ::= "(" root ")" | "x"', lambda t: re.fullmatch(r"\(*x\)*", t)),
        (GrammarKind.JSON_SCHEMA, '{"type": "object"}', lambda t: isinstance(json.loads(t), dict)),
    ],
    ids=["regex", "choice", "ebnf", "json object"],
)
def test_kinds(store, tokenizer, closers, kind, text, matches):
    closers = torch.cat((closers, torch.tensor([tokenizer.convert_tokens_to_ids("!")])))
    for tokens in generate(store, closers, [Grammar(kind, text)] * 8):
        assert matches(text_of(tokenizer, tokens))


def test_a_structural_tag_constrains_its_segments_only(store, tokenizer):
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    tag = {
        "type": "triggered_tags",
        "triggers": ["<call"],
        "tags": [
            {
                "type": "tag",
                "begin": "<call>",
                "content": {"type": "json_schema", "json_schema": schema},
                "end": "</call>",
            }
        ],
    }
    grammar = Grammar(GrammarKind.STRUCTURAL_TAG, json.dumps({"type": "structural_tag", "format": tag}))
    assert accepts(store, tokenizer, grammar, "anything < goes")
    assert accepts(store, tokenizer, grammar, 'first <call>{"n": 3}</call> then')
    assert not accepts(store, tokenizer, grammar, 'first <call>{"m": 3}</call>')


def accepts(store, tokenizer, grammar, text):
    matcher = store.matcher(grammar, (EOS_ID,))
    if not all(matcher.accept(t) for t in tokenizer.encode(text, add_special_tokens=False)):
        return False
    mask = np.zeros(-(-VOCAB // 32), dtype=np.int32)
    matcher.fill(mask)
    return bool(mask[EOS_ID // 32] >> (EOS_ID % 32) & 1)


def test_reasoning_is_free_until_its_end(store, tokenizer, closers):
    """The end is found although its beginning comes again within it."""
    end = (300, 300, 301)
    grammar = Grammar(GrammarKind.REGEX, "[01]{4}", end)
    sampler = Sampler(vocab=VOCAB, grammars=store, eos_token_ids=(EOS_ID,))
    params = SamplingParams(50, stop_token_ids=(EOS_ID,), grammar=grammar)
    said = [77, 300, 78, 300, 300, 300, 301]
    logits = torch.zeros(1, VOCAB)
    for index, token in enumerate(said):
        row = logits.clone()
        row[0, token] = 9.0
        history = (5,) if index == 0 else None
        [sampled] = sampler.sample(row, [SampleRequest(SeqKey("s", 0), params, index, (), history, 1)])
        assert sampled.tokens == (token,)
    text = []
    while EOS_ID not in text:
        row = logits.clone()
        row[0, 77] = 9.0
        index = len(said) + len(text)
        [sampled] = sampler.sample(row, [SampleRequest(SeqKey("s", 0), params, index, (), None, 1)])
        text += sampled.tokens
    assert re.fullmatch("[01]{4}", text_of(tokenizer, text))


def test_a_complete_text_ends_though_more_is_asked_for(store, tokenizer, closers):
    grammar = Grammar(GrammarKind.CHOICE, '["yes"]')
    [tokens] = generate(store, closers, [grammar], max_tokens=12, ignore_eos=True)
    assert len(tokens) == 12
    assert text_of(tokenizer, tokens) == "yes"
    [tokens] = generate(store, closers, [grammar], min_tokens=10)
    assert text_of(tokenizer, tokens) == "yes"


def test_stop_tokens_that_the_model_does_not_have_end_nothing(store, tokenizer, closers):
    grammar = Grammar(GrammarKind.CHOICE, '["yes"]')
    [tokens] = generate(store, closers, [grammar], stop_token_ids=(EOS_ID, VOCAB, 10**9))
    assert text_of(tokenizer, tokens) == "yes"
    [tokens] = generate(store, closers, [grammar], stop_token_ids=(10**9,), max_tokens=6, ignore_eos=True)
    assert len(tokens) == 6


def test_min_tokens_delays_an_end_that_may_come_later(store, tokenizer, closers):
    [tokens] = generate(store, closers, [Grammar(GrammarKind.REGEX, "[ab]+")], min_tokens=30)
    assert len(tokens) > 30
    assert re.fullmatch("[ab]+", text_of(tokenizer, tokens))


def test_where_grammar_and_allowed_tokens_share_nothing_the_text_ends(store, closers):
    grammar = Grammar(GrammarKind.CHOICE, '["yes"]')
    assert generate(store, closers, [grammar], allowed_token_ids=(400, 401)) == [[EOS_ID]]


def test_allowed_tokens_that_all_end_the_text_end_it_in_spite_of_min_tokens(store, closers):
    assert generate(store, closers, [None], allowed_token_ids=(EOS_ID,), min_tokens=5) == [[EOS_ID]]


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (GrammarKind.EBNF, "root ::= root"),
        (GrammarKind.EBNF, 'root ::= x "a"\nx ::= x'),
    ],
)
def test_a_grammar_without_a_first_token_is_refused(store, kind, text):
    with pytest.raises(GrammarError, match="allows no text"):
        store.prepare(Grammar(kind, text))


def test_a_schema_of_thousands_of_schemas_is_refused(store):
    properties = {f"p{i}": {"type": "string"} for i in range(5000)}
    text = json.dumps({"type": "object", "properties": properties, "additionalProperties": False})
    with pytest.raises(GrammarError, match="take too long to compile"):
        store.prepare(Grammar(GrammarKind.JSON_SCHEMA, text))


def test_a_grammar_that_is_slow_from_the_start_is_refused(folder, monkeypatch):
    monkeypatch.setattr("engine.grammar_compile.START_S_MAX", -1.0)
    store = GrammarStore(folder, VOCAB, (EOS_ID,))
    with pytest.raises(GrammarError, match="ambiguous"):
        store.prepare(Grammar(GrammarKind.REGEX, "(([a-z]?){1,5}x?){1,5}"))


def test_a_text_ends_where_its_grammar_leads_nowhere(store, tokenizer, closers):
    grammar = Grammar(GrammarKind.EBNF, 'root ::= "a" x\nx ::= x')
    for tokens in generate(store, closers, [grammar] * 4):
        assert text_of(tokenizer, tokens) == "a"


@pytest.mark.parametrize("is_tag", [False, True], ids=["schema", "tag"])
def test_white_space_in_json_is_bounded(store, tokenizer, is_tag):
    grammar = Grammar(GrammarKind.JSON_SCHEMA, '{"type": "object"}')
    if is_tag:
        form = {"type": "json_schema", "json_schema": {"type": "object"}}
        tag = json.dumps({"type": "structural_tag", "format": form})
        grammar = Grammar(GrammarKind.STRUCTURAL_TAG, tag)
    assert accepts(store, tokenizer, grammar, '{ "a":' + " " * 32 + "1}")
    assert not accepts(store, tokenizer, grammar, '{ "a":' + " " * 33 + "1}")


def test_a_model_without_stop_tokens_goes_on_after_the_text(folder, tokenizer, closers):
    """Nothing could end it; it must not stumble either."""
    store = GrammarStore(folder, VOCAB, ())
    sampler = Sampler(vocab=VOCAB, grammars=store, eos_token_ids=())
    params = SamplingParams(9, grammar=Grammar(GrammarKind.CHOICE, '["0"]'))
    tokens = []
    for index in range(9):
        history = (5,) if index == 0 else None
        tokens += sampler.sample(
            torch.randn(1, VOCAB), [SampleRequest(SeqKey("s", 0), params, index, (), history, 1)]
        )[0].tokens
    assert len(tokens) == 9
    assert tokenizer.decode(tokens[:1]) == "0"


def test_a_grammar_that_takes_ever_longer_ends_the_text(store, tokenizer, monkeypatch):
    monkeypatch.setattr("engine.grammar_compile.TOKEN_S_MAX", 0.002)
    grammar = Grammar(GrammarKind.EBNF, 'root ::= s\ns ::= s s | "a" | ""')
    sampler = Sampler(vocab=VOCAB, grammars=store, eos_token_ids=(EOS_ID,))
    params = SamplingParams(2000, stop_token_ids=(EOS_ID,), grammar=grammar)
    logits = torch.zeros(1, VOCAB)
    logits[0, tokenizer.encode("a", add_special_tokens=False)[0]] = 9.0
    for index in range(2000):
        history = (5,) if index == 0 else None
        [sampled] = sampler.sample(
            logits.clone(), [SampleRequest(SeqKey("s", 0), params, index, (), history, 1)]
        )
        if sampled.tokens == (EOS_ID,):
            return
    pytest.fail("it goes on for ever")


def test_what_the_judge_refuses_is_refused_here_as_well(store):
    """The router has asked the same judge, so this is for what another client of the worker sends."""
    with pytest.raises(
        GrammarError, match=re.escape("json_schema.items.not: this keyword cannot be enforced")
    ):
        store.prepare(Grammar(GrammarKind.JSON_SCHEMA, '{"items": {"not": {"type": "string"}}}'))


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (GrammarKind.REGEX, "(a"),
        (GrammarKind.REGEX, r"(a)\1"),
        (GrammarKind.REGEX, "a\0"),
        (GrammarKind.EBNF, "root ::= foo"),
        (GrammarKind.EBNF, ""),
        (GrammarKind.EBNF, "root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000),
        (GrammarKind.CHOICE, "[]"),
        (GrammarKind.CHOICE, '["a", 1]'),
        (GrammarKind.CHOICE, '"a"'),
        (GrammarKind.JSON_SCHEMA, "{"),
        (GrammarKind.JSON_SCHEMA, "5"),
        (GrammarKind.JSON_SCHEMA, '{"allOf": 5}'),
        (GrammarKind.JSON_SCHEMA, "[" * 100_000),
        (GrammarKind.JSON_SCHEMA, '"' + "a" * 300_000 + '"'),
        (GrammarKind.STRUCTURAL_TAG, "[1]"),
        (GrammarKind.STRUCTURAL_TAG, '{"type": "structural_tag", "format": {"type": "frob"}}'),
    ],
)
def test_what_does_not_compile_is_one_line(store, kind, text):
    with pytest.raises(GrammarError) as raised:
        store.prepare(Grammar(kind, text))
    assert len(str(raised.value)) < 400
    assert "\n" not in str(raised.value)
    assert not re.match(
        r"(?!json_schema|regex|ebnf|choice|structural_tag)\w+: |Check failed", str(raised.value)
    )
    assert "/project/" not in str(raised.value)
    assert not store.has(Grammar(kind, text))


def test_the_cache_is_bounded_and_what_left_it_still_works(folder, tokenizer, monkeypatch):
    monkeypatch.setattr("engine.grammar.CACHE_BYTES", 100_000)
    store = GrammarStore(folder, VOCAB, (EOS_ID,))
    grammars = [Grammar(GrammarKind.REGEX, f"[a-z]{{{n},{n + 9}}}x{n}") for n in range(1, 12)]
    for grammar in grammars:
        store.prepare(grammar)
        assert store._bytes <= 100_000
    assert not store.has(grammars[0])
    assert accepts(store, tokenizer, grammars[0], "abcx1")


def test_a_folder_without_a_tokenizer_says_so(tmp_path):
    with pytest.raises(GrammarError, match="tokenizer"):
        GrammarStore(tmp_path, VOCAB, ()).prepare(Grammar(GrammarKind.REGEX, "a"))
