"""Router and worker give one answer to a schema, and what is accepted is enforced.

Every row goes through the router's judgement and the worker's compilation. For those that are taken, random
texts of the compiled grammar are held against the schema by a validator that has nothing to do with either.
"""

import datetime
import ipaddress
import json
import re
import uuid

import jsonschema
import pytest
from hypothesis import HealthCheck, Phase, given, settings

from baton.core.errors import ClientError
from baton.core.sampling import Grammar, GrammarKind
from engine.grammar_compile import GrammarError
from engine.structured.grammars import check_grammar
from router.openai.response_format import schema_grammar
from tests.grammar_walks import Walker
from tests.json_schemas import WILD_SCHEMAS

INT, S, N = {"type": "integer"}, {"type": "string"}, {"type": "null"}
DRAFT_7 = {"$schema": "http://json-schema.org/draft-07/schema#"}
WALKS = 25
FORMATS = [
    "date",
    "time",
    "date-time",
    "duration",
    "email",
    "hostname",
    "ipv4",
    "ipv6",
    "uri",
    "uri-reference",
]
FORMATS += ["uri-template", "uuid", "json-pointer", "relative-json-pointer"]

ENFORCED = {
    "any value": {},
    "names beyond ASCII in an open object": {"type": "object", "properties": {"größe": INT, 'q"': INT}},
    "escaped names in an open object": {"type": "object", "properties": {"a": INT, "ab": INT}},
    "unevaluatedProperties false": {"properties": {"a": INT}, "unevaluatedProperties": False},
    "unevaluatedProperties schema": {"properties": {"a": INT}, "unevaluatedProperties": S},
    "unevaluatedProperties beside additional": {"additionalProperties": INT, "unevaluatedProperties": False},
    "unevaluatedItems false": {"prefixItems": [INT, S], "unevaluatedItems": False},
    "unevaluatedItems schema": {"prefixItems": [INT], "unevaluatedItems": S},
    "minProperties that required fulfils": {"minProperties": 2, "required": ["a", "b"]},
    "minProperties one above required": {"minProperties": 2, "required": ["a"], "properties": {"b": S}},
    "minProperties of a closed object": {
        "minProperties": 2,
        "properties": {"a": INT, "b": INT, "x": INT},
        "additionalProperties": False,
    },
    "multipleOf beside two types": {"type": ["integer", "null"], "multipleOf": 3},
    "multipleOf of a number": {"type": ["number", "string"], "multipleOf": 3.0, "minLength": 2},
    "multipleOf with bounds": {"type": "integer", "multipleOf": 5, "minimum": 3, "exclusiveMaximum": 40},
    "multipleOf with bounds, two types": {
        "type": ["number", "null"],
        "multipleOf": 5000,
        "minimum": -9000,
        "maximum": 12000.5,
    },
    "tuples of draft 7": {**DRAFT_7, "items": [INT, S], "additionalItems": False},
    "open tuples of draft 7": {**DRAFT_7, "items": [INT, S], "additionalItems": N, "minItems": 3},
    "maxItems below the tuple": {"prefixItems": [INT, S, N], "maxItems": 2},
    "a tuple's end by false": {"prefixItems": [True, False, S]},
    "patternProperties beside properties": {"properties": {"a": INT}, "patternProperties": {"^x-[ab]*$": S}},
    "patternProperties with the same schema": {"properties": {"xa": S}, "patternProperties": {"^x": S}},
    "patternProperties beside required": {"required": ["a"], "patternProperties": {"^x[ab]?$": S}},
    "several patternProperties": {"patternProperties": {"^x": S, "^.b$": S}},
    "propertyNames listed, beside required": {"propertyNames": {"enum": ["a", "b"]}, "required": ["a"]},
    "propertyNames by length": {"propertyNames": {"maxLength": 2}, "additionalProperties": INT},
    "propertyNames behind a reference": {
        "$defs": {"name": {"enum": ["a", "b"]}},
        "propertyNames": {"$ref": "#/$defs/name"},
        "additionalProperties": INT,
    },
    "forbidden property": {"properties": {"a": False, "b": INT}, "additionalProperties": False},
    "dependentRequired of a required name": {
        "required": ["a"],
        "dependentRequired": {"a": ["b"], "b": ["x"]},
    },
    "dependentRequired of no name": {
        "properties": {"b": INT},
        "additionalProperties": False,
        "dependentRequired": {"a": ["b"]},
    },
    "uniqueItems": {"type": "array", "uniqueItems": True, "minItems": 2},
    "const beside enum and type": {"type": "string", "const": "a", "enum": ["a", "b"]},
    "enum beside bounds": {"enum": [1, 2, 3, "a", "abc"], "minimum": 2, "minLength": 2},
    "bounds of an integer that are not whole": {"type": "integer", "minimum": 1.5, "exclusiveMaximum": 7.2},
    "exclusive bounds beside inclusive": {
        "type": "integer",
        "minimum": 1,
        "exclusiveMinimum": 4,
        "maximum": 9,
    },
    "exclusive bounds of numbers": {"type": "number", "exclusiveMinimum": 0.25, "exclusiveMaximum": 0.5},
    "integer and number": {"type": ["integer", "number"], "minimum": 0.5, "maximum": 2},
    "references into the schema": {
        "properties": {"a": INT, "b": {"$ref": "#/properties/a"}, "x": {"$ref": "#/$defs/p/properties/q~1r"}},
        "$defs": {"p": {"properties": {"q/r": S}}},
        "additionalProperties": False,
    },
    "a recursive reference into the schema": {
        "properties": {"a": {"type": "array", "items": {"$ref": "#/properties/a"}}},
        "additionalProperties": False,
    },
    "a type beside branches": {
        "type": ["string", "null"],
        "anyOf": [{"maxLength": 2}, {"type": "null"}, INT],
    },
    "oneOf by the types of values": {"oneOf": [{"const": "a"}, {"enum": [None, 2]}, {"type": "boolean"}]},
    "allOf of one": {"allOf": [{"type": "object", "required": ["a"]}, True, {}]},
    "a false branch": {"anyOf": [False, INT]},
    "anchors in groups": {"type": "string", "pattern": r"(^$)|(^[0-9]+(\.[0-9]+)?$)"},
    "an optional group that ends in a loop": {"type": "string", "pattern": "^a(xy{1,3})?(b(a)*)?$"},
    "alternatives that begin alike": {"type": "string", "pattern": "^(a|a(a){0,1})$"},
    "a pattern beyond ASCII": {"type": "string", "pattern": "^é[^é]{1,2}.$"},
    "a class with a quote": {"type": "string", "pattern": '^[^"x]{1,3}["\\\\a]$'},
    "a length": {"type": "string", "minLength": 1, "maxLength": 3},
    **{f"format {name}": {"type": "string", "format": name} for name in FORMATS},
}

REFUSED = {
    # name: (schema, the path that the 400 names)
    "minProperties of an open object": ({"minProperties": 2}, "s.minProperties"),
    "minProperties beside a pattern": (
        {"minProperties": 2, "required": ["a"], "patternProperties": {"^x": S}, "properties": {"b": S}},
        "s.minProperties",
    ),
    "minProperties that cannot be": ({"minProperties": 1, "additionalProperties": False}, "s.minProperties"),
    "maxProperties below required": ({"maxProperties": 1, "required": ["a", "b"]}, "s.maxProperties"),
    "multipleOf of a part": ({"type": "number", "multipleOf": 0.01}, "s.multipleOf"),
    "multipleOf beside one bound": ({"type": "integer", "multipleOf": 5, "minimum": 0}, "s.multipleOf"),
    "multipleOf with none between": (
        {"type": "integer", "multipleOf": 7, "minimum": 1, "maximum": 6},
        "s.multipleOf",
    ),
    "patternProperties that meet a property": (
        {"properties": {"xa": INT}, "patternProperties": {"^x": S}},
        "s.patternProperties",
    ),
    "several patternProperties that differ": (
        {"patternProperties": {"^x": S, "^.b$": INT}},
        "s.patternProperties",
    ),
    "propertyNames of a closed object": (
        {"propertyNames": {"pattern": "^x"}, "additionalProperties": False},
        "s.propertyNames",
    ),
    "propertyNames that are no strings": ({"propertyNames": INT}, "s.propertyNames"),
    "a forbidden name in an open object": (
        {"properties": {"a": False}, "additionalProperties": True},
        "s.properties.a",
    ),
    "dependentRequired of an optional name": ({"dependentRequired": {"a": ["b"]}}, "s.dependentRequired"),
    "dependentSchemas": ({"dependentSchemas": {"a": {"required": ["b"]}}}, "s.dependentSchemas"),
    "if": ({"if": {"required": ["a"]}, "then": {"required": ["b"]}}, "s.if"),
    "not": ({"type": "object", "not": {"required": ["a"]}}, "s.not"),
    "contains": ({"type": "array", "contains": INT}, "s.contains"),
    "uniqueItems of a tuple": ({"uniqueItems": True, "prefixItems": [INT, S]}, "s.uniqueItems"),
    "keywords beside $ref": ({"$defs": {"n": INT}, "$ref": "#/$defs/n", "minimum": 5}, "s.minimum"),
    "several allOf": ({"allOf": [{"required": ["a"]}, {"required": ["b"]}]}, "s.allOf"),
    "oneOf that overlaps": ({"oneOf": [INT, {"required": ["a"]}]}, "s.oneOf"),
    "oneOf of objects in another order": (
        {"oneOf": [{"const": {"a": 1, "b": 2}}, {"enum": [{"b": 2, "a": 1.0}]}]},
        "s.oneOf",
    ),
    "an empty range of integers": (
        {"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 4},
        "s.minimum",
    ),
    "an empty range of numbers": ({"type": "number", "minimum": 1e-7, "maximum": 2e-7}, "s.minimum"),
    "a bound beyond 64 bits": ({"type": "integer", "minimum": 2**63}, "s.minimum"),
    "a value beyond 64 bits": ({"enum": [2**63]}, "s.enum"),
    "minItems above maxItems": ({"type": "array", "minItems": 3, "maxItems": 2}, "s.minItems"),
    "minItems above the tuple": ({"prefixItems": [INT], "items": False, "minItems": 2}, "s.minItems"),
    "minLength above maxLength": ({"type": "string", "minLength": 3, "maxLength": 2}, "s.minLength"),
    "an unknown format": ({"type": "string", "format": "frob"}, "s.format"),
    "pattern beside a length": ({"type": "string", "pattern": "^a+$", "minLength": 3}, "s.minLength"),
    "an anchor in the middle": ({"type": "string", "pattern": "x(^a)"}, "s.pattern"),
    "a repeated anchor": ({"type": "string", "pattern": "(^a)*"}, "s.pattern"),
    "an escaped character": ({"type": "string", "pattern": r"^a\nb$"}, "s.pattern"),
    "an $id within": ({"properties": {"a": {"$id": "x", "$ref": "#"}}}, "s.properties.a.$id"),
    "a reference to itself": ({"anyOf": [{"$ref": "#"}, INT]}, "s.$ref"),
    "an optional property without end": (
        {"$defs": {"a": {"required": ["a"], "properties": {"a": {"$ref": "#/$defs/a"}}}},
         "properties": {"b": {"$ref": "#/$defs/a"}}},
        "s.$ref",
    ),
    "properties that none can end": (
        {"properties": {"a": {"$ref": "#"}}, "additionalProperties": False, "minProperties": 1},
        "s.$ref",
    ),
}  # fmt: skip

WALKER = Walker()


def judged(schema):
    """The grammar that the router sends, or its refusal."""
    try:
        return schema_grammar(schema, "s")
    except ClientError as error:
        return error


def compiled(schema):
    """What the worker makes of a schema that no router has seen, or its refusal."""
    try:
        return WALKER.compile(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)))
    except GrammarError as error:
        return error


def is_uri(text):
    return re.fullmatch(r"([a-zA-Z][a-zA-Z0-9+.-]*:)?[!#$&-;=?-Z_a-z~%]*", text) is not None


def is_moment(text):
    return datetime.datetime.fromisoformat(text).tzinfo is not None


def is_host(text):
    return all(re.fullmatch("(?!-)[A-Za-z0-9-]{1,63}(?<!-)", label) for label in text.split("."))


CHECKS = {
    "date": datetime.date.fromisoformat,
    "time": lambda text: is_moment("2024-02-29T" + text),
    "date-time": is_moment,
    "duration": lambda text: re.fullmatch(
        r"P(?!$)(\d+W|(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+S)?)?)", text
    ),
    "email": lambda text: re.fullmatch(r"[^@\s\"\\]{1,65}@.+", text) and is_host(text.partition("@")[2]),
    "hostname": is_host,
    "ipv4": ipaddress.IPv4Address,
    "ipv6": ipaddress.IPv6Address,
    "uri": lambda text: ":" in text and is_uri(text),
    "uri-reference": is_uri,
    "uri-template": lambda text: text.count("{") == text.count("}"),
    "uuid": uuid.UUID,
    "json-pointer": lambda text: re.fullmatch("(/([^~/]|~[01])*)*", text),
    "relative-json-pointer": lambda text: re.fullmatch(r"(0|[1-9]\d*)(#|(/([^~/]|~[01])*)*)", text),
}


def format_checker():
    checker = jsonschema.FormatChecker(formats=())
    for name, check in CHECKS.items():
        checker.checks(name, raises=ValueError)(
            lambda text, check=check: not isinstance(text, str) or bool(check(text))
        )
    return checker


def validator(schema):
    kind = jsonschema.Draft7Validator if "$schema" in schema else jsonschema.Draft202012Validator
    return kind(schema, format_checker=format_checker())


def assert_enforced(schema, grammar, walks):
    checker = validator(schema)
    found = WALKER.compile(grammar)
    for seed in range(walks):
        checker.validate(json.loads(WALKER.walk(found, seed)))


@pytest.mark.parametrize("name", ENFORCED)
def test_what_the_router_accepts_the_worker_enforces(name):
    schema = ENFORCED[name]
    grammar = judged(schema)
    assert isinstance(grammar, Grammar), grammar
    assert check_grammar(grammar, "s") == json.loads(grammar.text), "the worker would write it differently"
    assert not isinstance(compiled(schema), GrammarError)
    assert_enforced(schema, grammar, WALKS)


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_router_refuses_by_name_the_worker_refuses_too(name):
    schema, path = REFUSED[name]
    refusal = judged(schema)
    assert isinstance(refusal, ClientError)
    assert (refusal.param or "").startswith(path), refusal
    assert isinstance(compiled(schema), GrammarError)


@pytest.mark.parametrize(
    ("schema", "texts"),
    [
        # Texts that xgrammar's own grammar allows, although the schema does not.
        ({"properties": {"a": INT}}, [r'{"\u0061": "x"}', r'{"b": 1, "\u0061": "x"}']),
        ({"properties": {"é": INT, 'q"': INT}}, ['{"é": "x"}', r'{"q\"": "x"}']),
        ({"properties": {"a/b": INT}}, [r'{"a\/b": "x"}']),
        ({"properties": {"a": INT}, "unevaluatedProperties": False}, ['{"a": 1, "b": 2}']),
        ({"properties": {"b": S}, "patternProperties": {"^x": INT}}, ['{"xa": "s"}', '{"b": 1}']),
        ({"type": "integer", "multipleOf": 3, "minimum": 4, "maximum": 10}, ["7"]),
        ({"type": "number", "multipleOf": 3}, ["4", "0.5"]),
        ({"type": "string", "pattern": r"^[0-9](\.[0-9]+)?$"}, ['"12"']),
        ({"type": "string", "pattern": "^é.$"}, ['"é""', '"é\\"']),
        ({"type": "string", "minLength": 2}, ['"a\tb"', '"a\x01"']),
        ({"type": "string", "format": "date"}, ['"2023-02-29"', '"2020-02-31"', '"1900-02-29"']),
        ({"type": "string", "format": "ipv4"}, ['"01.2.3.4"']),
        ({"type": "string", "format": "json-pointer"}, ['"/""']),
        ({"type": "string", "format": "email"}, [r'"\"\a\"@b.de"']),
        ({"type": "string"}, [r'"\ud83d"']),
        ({"propertyNames": {"enum": ["a"]}, "additionalProperties": False}, ['{"a": 1}']),
    ],
)
def test_what_xgrammar_would_let_through_is_not_let_through(schema, texts):
    found = WALKER.compile(judged(schema))
    assert [text for text in texts if WALKER.accepts(found, text)] == []


@pytest.mark.parametrize(
    ("schema", "texts"),
    [
        ({"properties": {"größe": INT}}, ['{"größe": 1}', "{}"]),
        ({"type": "string", "pattern": r"^[0-9](\.[0-9]+)?$"}, ['"1"', '"1.25"']),
        ({"type": "string"}, [r'"a\n\u001f\"\\"', '"é😀"']),
        ({"type": "string", "format": "date"}, ['"2024-02-29"', '"2000-12-31"']),
        ({"type": "integer", "multipleOf": 5, "minimum": -5, "maximum": 10}, ["-5", "0", "5", "10"]),
        ({"items": [INT, S], "additionalItems": N}, ["[]", "[1]", '[1, "a", null]']),
        ({"properties": {"b": S}, "patternProperties": {"^x": INT}}, ['{"b": "s", "x": 1}', "{}"]),
        ({}, ["1", '"a"', "[null]"]),
    ],
)
def test_what_is_meant_can_still_be_said(schema, texts):
    found = WALKER.compile(judged(schema))
    assert [text for text in texts if not WALKER.accepts(found, text)] == []


@settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(schema=WILD_SCHEMAS)
def test_any_schema_has_one_answer(schema):
    grammar = judged(schema)
    assert isinstance(grammar, ClientError) == isinstance(compiled(schema), GrammarError)
    if isinstance(grammar, Grammar):
        assert check_grammar(grammar, "s") == json.loads(grammar.text)
        assert_enforced({} if schema is True else schema, grammar, 3)
