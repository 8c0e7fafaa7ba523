"""Arrays whose items must differ: every text that comes is valid, and none runs into a dead end."""

import json
import random

import jsonschema
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from xgrammar import GrammarCompiler, GrammarMatcher, TokenizerInfo

from baton.core.errors import ClientError
from baton.core.sampling import Grammar, GrammarKind
from engine import unique_items
from engine.grammar_compile import TextMatcher, compile_grammar
from engine.sampling.masks import mask_of
from engine.unique_items import TokenBytes, UniqueItemsMatcher, scanner_of
from engine.unique_scan import Item, Items
from router.openai.response_format import schema_grammar, structural_grammar
from tests.grammar_walks import Walker

WALKER = Walker()
COLOURS = {"enum": ["red", "green", "greenish", "blue", "r"]}
POINT = {
    "type": "object",
    "properties": {"x": {"type": "number"}, "y": {"enum": [0, 1]}},
    "required": ["x", "y"],
}


def unique(items, **others):
    return {"type": "array", "uniqueItems": True, "items": items, **others}


SCHEMAS = {
    "values": unique(COLOURS, minItems=5),
    "booleans and null": unique({"type": ["boolean", "null"]}, minItems=3),
    "strings": unique({"type": "string"}, minItems=3, maxItems=6),
    "short strings": unique({"type": "string", "maxLength": 1}, minItems=2),
    "a pattern of few texts": unique({"type": "string", "pattern": "^[ab]{1,2}$"}, minItems=2),
    "integers": unique({"type": "integer"}, minItems=3),
    "all of a range": unique({"type": "integer", "minimum": 8, "maximum": 12}, minItems=5),
    "numbers": unique({"type": "number"}, minItems=3),
    "numbers between bounds": unique({"type": "number", "minimum": 0, "maximum": 1}, minItems=4),
    "objects": unique(POINT, minItems=3),
    "any": unique(True, minItems=2),
    "sets of sets": unique(unique({"type": "boolean"}), minItems=5),
    "listed numbers": unique(
        {"enum": [0.1, 1e20, 1.5e-10, 0.00015, 12345678901234567890.0, 3, -0.0]}, minItems=7
    ),
    "many values that begin alike": unique({"enum": [f"item-{n:03}" for n in range(60)]}, minItems=60),
    "branches": unique(
        {"anyOf": [{"const": 1}, {"type": "number", "maximum": 3}, {"type": "null"}]}, minItems=2
    ),
    "two below one object": {
        "properties": {"a": unique(COLOURS, minItems=2), "b": unique({"$ref": "#/$defs/n"}, minItems=2)},
        "required": ["a", "b"],
        "$defs": {"n": {"type": "integer", "minimum": 1, "maximum": 2}},
    },
    "recursive": {
        "$defs": {"node": {"properties": {"below": unique({"$ref": "#/$defs/node"})}}},
        "$ref": "#/$defs/node",
    },
}


TWO_ZEROS = {"type": "array", "items": {"enum": [0]}, "minItems": 2, "maxItems": 2}
A = "s.properties.a.uniqueItems"
INNER = "s.properties.a.items.uniqueItems"


def compiled(schema):
    return WALKER.compile(schema_grammar(schema, "s"))


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_text_is_valid(name):
    found = compiled(SCHEMAS[name])
    for seed in range(8):
        jsonschema.Draft202012Validator(SCHEMAS[name]).validate(json.loads(WALKER.walk(found, seed)))


@pytest.mark.parametrize(
    ("items", "texts"),
    [
        (True, ["[1, 1]", "[1, 1.0]", "[1e0,1]", "[-0, 0]", '[{"a":1,"b":2}, {"b":2,"a":1.0}]', "[[], [ ]]"]),
        ({"type": "string"}, ['["a","a"]', '["", "b", ""]', r'["\"", "\""]']),
        (COLOURS, ['["r", "red", "r"]']),
        (unique({"type": "boolean"}), ["[[true], [ true ]]", "[[true, true]]"]),
    ],
)
def test_equal_items_are_not_let_through(items, texts):
    found = compiled(unique(items))
    assert [text for text in texts if WALKER.accepts(found, text)] == []


@pytest.mark.parametrize(
    ("items", "texts"),
    [
        (True, ["[1, 10, true, null, [], {}]", '["1", 1, "", " "]', "[]", '[{"a":1}, {"a":1,"b":2}]']),
        ({"type": "string"}, ['["a","ab","aba"]', '["b", "a"]']),
        (COLOURS, ['["blue", "r", "red", "greenish", "green"]']),
        ({"type": "array", "items": {"type": "boolean"}}, ["[[true, true], [true]]"]),
    ],
)
def test_different_items_come_in_any_order(items, texts):
    found = compiled(unique(items))
    assert [text for text in texts if not WALKER.accepts(found, text)] == []


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        (unique(COLOURS, minItems=6), "s.minItems"),
        (unique({"type": "boolean"}, minItems=3), "s.minItems"),
        (unique({"type": "integer", "minimum": 1, "maximum": 3}, minItems=4), "s.minItems"),
        (unique({"type": "string", "pattern": "^a?$"}, minItems=3), "s.minItems"),
        ({"uniqueItems": True, "prefixItems": [True, True]}, "s.uniqueItems"),
        ({"type": "array", "uniqueItems": "yes"}, "s.uniqueItems"),
        ({"anyOf": [TWO_ZEROS, unique({"type": "string"})]}, "s.uniqueItems"),
        ({"anyOf": [{"prefixItems": [True, True], "items": False}, unique(True)]}, "s.uniqueItems"),
        ({"anyOf": [{"const": [0, 0]}, unique(True)]}, "s.uniqueItems"),
        ({"anyOf": [{"const": {"a": [1, [2, 2]]}}, {"properties": {"a": unique(unique(True))}}]}, INNER),
        (
            {
                "properties": {"a": {"anyOf": [{"$ref": "#/$defs/b"}, unique(True)]}},
                "$defs": {"b": TWO_ZEROS},
            },
            A,
        ),
        (unique({"enum": ["x" * 600 + "a", "x" * 600 + "b"]}), "s.items.enum"),
    ],
)
def test_what_cannot_be_is_refused(schema, path):
    with pytest.raises(ClientError) as refusal:
        schema_grammar(schema, "s")
    assert refusal.value.param == path


@pytest.mark.parametrize(
    "schema",
    [
        {"anyOf": [{"const": [0, 1]}, unique(True), {"type": "array", "maxItems": 1}]},
        {"anyOf": [unique({"type": "string"}), unique({"type": "integer"}), {"type": "null"}]},
        {"properties": {"a": unique(True), "b": {"type": "array"}}},
        {"additionalProperties": unique(True), "properties": {"b": {"type": "array"}}},
    ],
)
def test_arrays_at_different_places_may_disagree(schema):
    assert schema_grammar(schema, "s")


def test_a_call_of_a_tool_has_them_too():
    tags = [
        {
            "type": "tag",
            "begin": f'<call>{{"name": "{name}", "arguments": ',
            "content": {"type": "json_schema", "json_schema": {"properties": {"set": schema}}},
            "end": "}</call>",
        }
        for name, schema in (("a", unique(True)), ("b", {"type": "array"}))
    ]
    form = {"type": "tags_with_separator", "tags": tags, "separator": "\n", "at_least_one": True}
    form["stop_after_first"] = False
    found = WALKER.compile(structural_grammar({"type": "structural_tag", "format": form}, "s"))
    first, second = (
        f'<call>{{"name": "{name}", "arguments": {{"set": [{items}]}}}}</call>'
        for name, items in (("a", "1, 2"), ("b", "1, 1"))
    )
    assert WALKER.accepts(found, first + "\n" + second)
    assert not WALKER.accepts(found, second + "\n" + first.replace("2", "1"))


def test_tags_that_begin_alike_cannot_be_told_apart():
    tags = [
        {"type": "tag", "begin": begin, "end": "</a>", "content": {"type": "json_schema", "json_schema": one}}
        for begin, one in (("<a>", unique(True)), ("<b><a>", {"type": "array"}))
    ]
    with pytest.raises(ClientError) as refusal:
        structural_grammar({"type": "structural_tag", "format": {"type": "or", "elements": tags}}, "s")
    assert "begin" in str(refusal.value)


def test_a_schema_outside_of_a_tag_cannot_be_watched():
    form = {"type": "sequence", "elements": [{"type": "json_schema", "json_schema": unique(True)}]}
    with pytest.raises(ClientError):
        structural_grammar({"type": "structural_tag", "format": form}, "s")


class Words:
    """A matcher over a vocabulary of pieces, as real ones have them: some hold several items."""

    PIECES = (
        '"a',
        'a"',
        '","',
        '", "',
        '"a"',
        "1,1",
        "[1",
        "[1,1]",
        "10",
        "],",
        ', "a',
        "true,",
        "true, true",
        "[]",
        "0.",
        ".0",
    )

    def __init__(self):
        self.words = (
            [bytes([byte]) for byte in range(256)] + [b"<end>"] + [one.encode() for one in self.PIECES]
        )
        self.tokens = TokenBytes(self.words)
        info = TokenizerInfo(self.words, vocab_size=len(self.words), stop_token_ids=[256])
        self.compiler = GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def matcher(self, schema):
        grammar = schema_grammar(schema, "s")
        scanner = scanner_of(grammar)
        assert scanner is not None
        matcher = TextMatcher(GrammarMatcher(compile_grammar(self.compiler, grammar)))
        return UniqueItemsMatcher(matcher, scanner, self.tokens)

    def allowed(self, matcher):
        mask = mask_of((), len(self.words))
        matcher.fill(mask)
        return [token for token in range(len(self.words)) if mask[token >> 5] >> (token & 31) & 1]


WORDS = Words()


@settings(
    max_examples=30,
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(name=st.sampled_from(sorted(SCHEMAS)), seed=st.integers(0, 10**6))
def test_pieces_of_several_characters_and_rollback(name, seed):
    rng, matcher, text, taken = random.Random(seed), WORDS.matcher(SCHEMAS[name]), b"", []
    for _ in range(1500):
        allowed = WORDS.allowed(matcher)
        assert allowed, text
        if 256 in allowed:
            break
        dull = [t for t in allowed if t > 0x20 and t != 0xED] or allowed
        closing = [t for t in dull if t < 256 and t in b'"}],'] if len(text) > 80 else []
        pieces = [t for t in dull if t > 256] if rng.random() < 0.5 else []
        token = rng.choice(closing or pieces or dull)
        assert matcher.accept(token)
        text += WORDS.words[token]
        taken.append(token)
        if rng.random() < 0.1:  # As where draft tokens are refused.
            count = rng.randint(1, len(taken))
            matcher.rollback(count)
            assert all(matcher.accept(one) for one in taken[-count:])
            assert WORDS.allowed(matcher) is not None
    else:
        pytest.fail(f"no end: {text[:300]!r}")
    jsonschema.Draft202012Validator(SCHEMAS[name]).validate(json.loads(text))


def test_the_kind_of_grammar_without_such_arrays_is_not_followed():
    assert scanner_of(Grammar(GrammarKind.REGEX, "uniqueItems")) is None
    assert scanner_of(schema_grammar({"type": "array"}, "s")) is None


@pytest.mark.parametrize("text", ["uniqueItems", "an array of which uniqueItems is said"])
def test_the_word_alone_makes_nothing_to_follow(text):
    named = {"properties": {"uniqueItems": True, "a": {"description": text}}}
    assert scanner_of(schema_grammar(named, "s")) is None
    assert scanner_of(schema_grammar({"type": "array", "uniqueItems": False}, "s")) is None


def test_items_that_scans_share_are_those_of_each():
    rng = random.Random(1)
    for _ in range(100):
        shared, versions = Items(), [(None, ())]
        for _ in range(60):
            last, texts = rng.choice(versions)
            found = shared.at(last)
            assert (found.texts, found.values) == (sorted(texts), {one.decode() for one in texts})
            assert [one.text for one in found.order] == list(texts)
            begun = str(rng.randrange(40)).encode()
            assert found.has(begun) == any(one.startswith(begun) for one in texts)
            assert found.has_text(begun) == (begun in texts)
            assert list(found.beginning(begun)) == sorted(one for one in texts if one.startswith(begun))
            if (text := str(rng.randrange(400)).encode()) not in texts:
                versions.append((Item(last, len(texts) + 1, text, text.decode()), (*texts, text)))


@settings(max_examples=25, deadline=None, derandomize=True, phases=[Phase.generate])
@given(name=st.sampled_from(sorted(SCHEMAS)), seed=st.integers(0, 10**6))
def test_what_was_tried_and_taken_back_changes_no_mask(name, seed):
    rng, matcher, taken = random.Random(seed), WORDS.matcher(SCHEMAS[name]), []
    for step in range(60):
        allowed = [t for t in WORDS.allowed(matcher) if t not in (0x20, 256)]
        if taken and (not allowed or rng.random() < 0.3):
            count = rng.randint(1, min(8, len(taken)))
            matcher.rollback(count)
            del taken[-count:]
        else:
            token = rng.choice(allowed if rng.random() < 0.8 else range(len(WORDS.words)))
            if matcher.accept(token):
                taken.append(token)
        if step % 5 == 0:
            fresh = WORDS.matcher(SCHEMAS[name])
            assert all(fresh.accept(token) for token in taken)
            assert WORDS.allowed(fresh) == WORDS.allowed(matcher)


def test_a_look_that_takes_too_long_ends_the_text(monkeypatch):
    matcher = WORDS.matcher(unique({"type": "string"}))
    assert all(matcher.accept(token) for token in b'["a","')
    monkeypatch.setattr(unique_items, "TOKEN_S_MAX", -1.0)
    assert ord("a") not in WORDS.allowed(matcher)
    assert not matcher.accept(ord("b"))


def test_a_long_way_is_searched_once():
    same = "p" * 450
    matcher = WORDS.matcher(unique({"enum": [same + end for end in "abc"]}, minItems=3))
    for ends in ("a", "b", "c"):
        for token in (b"[" if ends == "a" else b",") + f'"{same}{ends}"'.encode():
            assert token in WORDS.allowed(matcher)
            assert matcher.accept(token)
    assert ord("]") in WORDS.allowed(matcher)


def test_text_outside_of_such_arrays_is_not_kept():
    matcher = WORDS.matcher({"properties": {"a": {}, "b": unique(True)}, "required": ["a", "b"]})
    for token in b'{"a": ["' + b"x" * 5000 + b'", {"k": 1}], "b": [1':
        assert matcher.accept(token)
    assert max(len(one.text + one.word) for one in matcher._scans if one) < 10


def test_one_long_step_is_not_counted_in_full(monkeypatch):
    times_s = iter([0.0, 5.0, *(5.0 + 0.005 * step for step in range(1, 40))])
    monkeypatch.setattr(unique_items.time, "thread_time", lambda: next(times_s))
    clock = unique_items._Clock()
    assert not any(clock.is_late() for _ in range(10))
    assert any(clock.is_late() for _ in range(20))
