"""The fields in which libraries ask for structured output, and the grammar that each becomes."""

import json

import pytest

from baton.core.errors import ClientError
from baton.core.sampling import Grammar, GrammarKind
from router.openai.call import RequestLimits
from router.openai.requests import parse_chat
from router.text.model_card import ModelCard
from tests.grammar_walks import Walker

WALKER = Walker()
LIMITS = RequestLimits(ModelCard(1000, 100, (1,)), 16, 256)
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
CLOSED = SCHEMA | {"additionalProperties": False}
LARK = 'start: "a" | "b"'
GBNF = 'root ::= "a" | "b"'


def grammar(**fields):
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}]} | fields
    structured = parse_chat(json.dumps(body).encode(), LIMITS).structured
    return None if structured is None else structured.grammar


def accepted(found, *texts):
    compiled = WALKER.compile(found)
    return [WALKER.accepts(compiled, text) for text in texts]


@pytest.mark.parametrize(
    "fields",
    [
        {"json_schema": SCHEMA},
        {"guided_json": json.dumps(SCHEMA)},
        {"structured_outputs": {"json": SCHEMA}},
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        {"response_format": {"type": "json_schema", "schema": SCHEMA}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
    ],
)
def test_a_schema_in_any_of_the_fields_is_the_same_grammar(fields):
    found = grammar(**fields)
    assert (found.kind, json.loads(found.text)) == (GrammarKind.JSON_SCHEMA, CLOSED)


@pytest.mark.parametrize(
    "fields",
    [
        {"ebnf": GBNF},
        {"grammar": GBNF},
        {"grammar": LARK},
        {"guided_grammar": LARK},
        {"structured_outputs": {"grammar": LARK}},
        {"structured_outputs": {"grammar": LARK}, "guided_grammar": LARK},
        {"response_format": {"type": "grammar", "grammar": GBNF}},
    ],
)
def test_a_grammar_in_either_language_is_enforced(fields):
    assert accepted(grammar(**fields), "a", "b", "c") == [True, True, False]


@pytest.mark.parametrize("fields", [{"regex": "a+"}, {"response_format": {"type": "regex", "regex": "a+"}}])
def test_regular_expressions(fields):
    assert grammar(**fields) == Grammar(GrammarKind.REGEX, "a+")


def test_two_shapes_exclude_each_other():
    with pytest.raises(ClientError, match="regex and ebnf exclude each other"):
        grammar(regex="a", ebnf=GBNF)


@pytest.mark.parametrize(
    "options", [{"disable_any_whitespace": True}, {"whitespace_pattern": "[ ]?"}, {"whitespace_pattern": ""}]
)
def test_json_without_white_space(options):
    asked = {"json": SCHEMA} | options
    found = [grammar(structured_outputs=asked), grammar(structured_outputs=options, json_schema=SCHEMA)]
    for one in found:
        assert accepted(one, '{"a":1}', '{"a": 1}', '{ "a":1}') == [True, False, False]
    assert accepted(grammar(json_schema=SCHEMA), '{"a":1}', '{"a": 1}') == [True, True]


def test_white_space_that_must_come_is_refused():
    with pytest.raises(ClientError, match="must allow no white space"):
        grammar(structured_outputs={"json": SCHEMA, "whitespace_pattern": " +"})


def test_guidances_schemas_are_spaced_as_its_own_matcher_wants():
    options = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    text = "%llguidance {}\n\nstart: j\n\nj[capture]: %json " + json.dumps(SCHEMA | {"x-guidance": options})
    assert accepted(grammar(guided_grammar=text), '{"a": 1}', '{"a":1}') == [True, False]


def test_objects_are_closed_where_the_schema_is_silent():
    silent = {"properties": {"a": {"type": "integer"}}, "required": ["b"]}
    texts = ('{"a": 1, "b": 2}', '{"b": 2, "c": 3}')
    assert accepted(grammar(json_schema=silent), *texts) == [True, False]
    assert accepted(grammar(json_schema=silent | {"additionalProperties": True}), *texts) == [True, True]
    assert accepted(grammar(json_schema={"type": "object"}), *texts) == [True, True]
    assert accepted(grammar(json_schema=silent | {"minProperties": 2}), texts[1]) == [True]


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        ({"format": "uri", "minLength": 1, "maxLength": 2083}, "https://a.org/x", "a.org"),
        ({"format": "password"}, "x", None),
        ({"format": "uuid4"}, "12345678-1234-4234-8234-123456789abc", "12345678-1234-1234-8234-123456789abc"),
        ({"pattern": "^[a-z]+$", "minLength": 2, "maxLength": 3}, "ab", "abcd"),
        ({"pattern": "^[A-Z]{3}-[0-9]$", "maxLength": 9}, "ABC-1", "ABC-"),
        ({"format": "date", "minLength": 10}, "2026-01-31", "2026-02-30"),
    ],
)
def test_strings_as_pydantic_declares_them(schema, valid, invalid):
    found = grammar(json_schema={"type": "string"} | schema)
    texts = [json.dumps(valid)] + ([] if invalid is None else [json.dumps(invalid)])
    assert accepted(found, *texts) == [True, False][: len(texts)]


@pytest.mark.parametrize(
    ("pattern", "valid", "invalid"), [(r"^\W$", "-", "é"), (r"^\S$", "a", "\u00a0"), (r"^\D$", "a", "٣")]
)
def test_negated_classes_mean_the_same_to_every_validator(pattern, valid, invalid):
    found = grammar(json_schema={"type": "string", "pattern": pattern})
    texts = [json.dumps(text, ensure_ascii=False) for text in (valid, invalid)]
    assert accepted(found, *texts) == [True, False]
