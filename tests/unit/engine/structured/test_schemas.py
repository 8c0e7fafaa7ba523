"""What gets through the check is enforced by xgrammar in full; what would not be is refused by name."""

import json

import pytest
import xgrammar
from xgrammar.testing import _is_grammar_accept_string

from baton.core.errors import ClientError
from engine.structured.grammars import check_regex, check_structural_tag
from engine.structured.schemas import check_schema
from router.openai.response_format import schema_grammar
from tests.grammar_walks import Walker

STR, INT = {"type": "string"}, {"type": "integer"}


WALKER = Walker()


def accepts(schema, text):
    """Whether the worker's grammar of the schema, as the router sends it, allows the text."""
    grammar = schema_grammar(schema, "s")
    return WALKER.accepts(WALKER.compile(grammar), text)


def tagged(value, **properties):
    return {"type": "object", "properties": {"k": {"const": value}, **properties}, "required": ["k"]}


ENFORCED = [
    # (schema, texts that are valid and can be generated, texts that are not valid)
    (True, ["1", "{}", '"a"'], ["x"]),
    ({"type": "object"}, ["{}", '{"a":1}'], ["1"]),
    ({"minLength": 2}, ['"ab"'], ['"a"']),
    ({"minimum": 2}, ["5"], ["1"]),
    ({"format": "date"}, ['"2020-01-31"'], ['"x"', '"2020-13-01"']),
    ({"properties": {"a": INT}}, ['{"a":1}'], ['{"a":"x"}']),
    ({"required": ["z"]}, ['{"z":1}'], ["{}", '{"y":1}']),
    ({"required": ["z"], "additionalProperties": INT}, ['{"z":1}'], ["{}", '{"z":"x"}']),
    ({"type": "array", "minItems": 1}, ["[1]"], ["[]"]),
    (
        {"type": "array", "items": INT, "minItems": 1, "maxItems": 2},
        ["[1]", "[1,2]"],
        ["[]", "[1,2,3]", '["a"]'],
    ),
    ({"type": "array", "prefixItems": [INT, STR], "items": False}, ['[1,"a"]'], ['["a"]', '[1,"a",2]']),
    ({"type": "string", "minLength": 2, "maxLength": 3}, ['"ab"'], ['"a"', '"abcd"']),
    ({"type": "string", "pattern": "^a+$"}, ['"aa"'], ['"b"', '"aab"']),
    ({"type": "string", "pattern": "^[^x]+$"}, ['"ab"'], ['"x"', '"a"b"', '"a\nb"']),
    ({"type": "integer", "minimum": 3, "maximum": 12}, ["3", "12"], ["2", "13", "-5"]),
    ({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}, ["0.5"], ["0", "1", "1.5"]),
    ({"type": "integer", "multipleOf": 3}, ["3", "0"], ["4"]),
    ({"type": ["string", "integer"], "minLength": 2, "minimum": 5}, ['"ab"', "6"], ['"a"', "1", "true"]),
    ({"enum": [1, "a", None]}, ["1", '"a"', "null"], ["2"]),
    ({"type": "string", "enum": ["a", 1]}, ['"a"'], ["1"]),
    ({"const": 'a"b\\'}, [json.dumps('a"b\\')], ['"a"']),
    ({"anyOf": [INT, STR]}, ["1", '"a"'], ["true"]),
    ({"type": "string", "anyOf": [{"minLength": 3}, {"pattern": "^x$"}]}, ['"abc"', '"x"'], ["1", '"aa"']),
    ({"oneOf": [INT, STR]}, ["1", '"a"'], ["true"]),
    ({"oneOf": [tagged("a", v=INT), tagged("b", v=STR)]}, ['{"k":"a","v":1}'], ['{"k":"a","v":"x"}']),
    ({"allOf": [INT], "description": "x"}, ["1"], ['"a"']),
    ({"type": "object", "properties": {"a": INT}, "additionalProperties": False}, ["{}"], ['{"b":1}']),
    (
        {"type": "object", "patternProperties": {"^x[a-z]*$": INT}, "additionalProperties": False},
        ['{"xa":1}'],
        ['{"xa":"s"}', '{"b":1}'],
    ),
    ({"type": "object", "propertyNames": {"pattern": "^x[a-z]$"}}, ['{"xa":1}'], ['{"b":1}']),
    ({"type": "object", "minProperties": 1}, ['{"a":1}'], ["{}"]),
    ({"$defs": {"n": INT}, "$ref": "#/$defs/n"}, ["1"], ['"a"']),
    (
        {"type": "object", "properties": {"a": {"$ref": "#"}}, "additionalProperties": False},
        ['{"a":{}}'],
        ['{"a":1}'],
    ),
    (
        {"type": "object", "properties": {"a": {"anyOf": [{"$ref": "#"}, INT]}}, "required": ["a"]},
        ['{"a":1}', '{"a":{"a":1}}'],
        ["{}"],
    ),
]

REFUSED = [
    # (schema, the path that is named)
    (False, "s"),
    ("x", "s"),
    ({"not": STR}, "s.not"),
    ({"if": STR, "then": STR}, None),
    ({"type": "number", "multipleOf": 0.5}, "s.multipleOf"),
    ({"type": "integer", "multipleOf": 5000}, "s.multipleOf"),
    ({"type": "integer", "multipleOf": 3, "minimum": 4}, "s.multipleOf"),
    ({"prefixItems": [STR, STR], "uniqueItems": True}, "s.uniqueItems"),
    ({"contains": INT}, "s.contains"),
    ({"dependentRequired": {"a": ["b"]}}, "s.dependentRequired"),
    ({"dependentSchemas": {}}, "s.dependentSchemas"),
    ({"allOf": [STR, {"minLength": 2}]}, "s.allOf"),
    ({"allOf": [INT], "minimum": 4}, "s.minimum"),
    ({"anyOf": [INT], "properties": {"a": INT}}, "s.properties"),
    ({"anyOf": []}, "s.anyOf"),
    ({"oneOf": [INT, {"type": "number"}]}, "s.oneOf"),
    ({"oneOf": [tagged("a"), tagged("a")]}, "s.oneOf"),
    ({"type": "integer", "const": "a"}, "s.const"),
    ({"enum": []}, "s.enum"),
    ({"$ref": "#/$defs/n", "minimum": 5, "$defs": {"n": INT}}, "s.minimum"),
    ({"$ref": "https://example.com/x"}, "s.$ref"),
    ({"$ref": "#/$defs/none"}, "s.$ref"),
    ({"$dynamicRef": "#a"}, "s.$dynamicRef"),
    ({"type": "string", "pattern": "^a$", "minLength": 3}, "s.minLength"),
    ({"type": "string", "format": "date", "pattern": "^2"}, "s.pattern"),
    ({"type": "string", "format": "iri"}, "s.format"),
    ({"type": "string", "pattern": '^a"b$'}, "s.pattern"),
    ({"type": "string", "pattern": r"^\n$"}, "s.pattern"),
    ({"type": "string", "pattern": "(?=a)b"}, "s.pattern"),
    ({"type": "string", "minLength": -1}, "s.minLength"),
    ({"type": "object", "patternProperties": {"^x": INT}, "properties": {"xa": STR}}, "s.patternProperties"),
    ({"type": "object", "patternProperties": {"^x": INT, "^.y$": STR}}, "s.patternProperties"),
    ({"type": "object", "patternProperties": {"^x": INT}, "required": ["xa"]}, "s.required"),
    ({"type": "object", "propertyNames": {"maxLength": 2}, "required": ["x"]}, "s.propertyNames"),
    ({"type": "object", "required": ["z"], "additionalProperties": False}, "s.required"),
    ({"type": "foo"}, "s.type"),
    ({"type": "integer", "exclusiveMinimum": True}, "s.exclusiveMinimum"),
    ({"type": "object", "properties": {"a": {"items": {"not": {}}}}}, "s.properties.a.items.not"),
    ({"anyOf": [STR, {"uniqueItems": 1}]}, "s.anyOf[1].uniqueItems"),
    ({"$defs": {"n": {"not": {}}}, "type": "string"}, "s.$defs.n.not"),
    ({"$ref": "#"}, "s.$ref"),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}, "s.$ref"),
    ({"properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "s.$ref"),
    ({"type": "array", "items": {"anyOf": [{"$ref": "#"}]}, "minItems": 1}, "s.$ref"),
    (
        {
            "type": ["array", "object"],
            "items": {"$ref": "#"},
            "minItems": 1,
            "properties": {"a": {"$ref": "#"}},
            "required": ["a"],
        },
        "s.$ref",
    ),
]


@pytest.mark.parametrize(("schema", "valid", "invalid"), ENFORCED, ids=lambda v: json.dumps(v)[:60])
def test_schemas_that_pass_are_enforced(schema, valid, invalid):
    assert [text for text in valid if not accepts(schema, text)] == []
    assert [text for text in invalid if accepts(schema, text)] == []


@pytest.mark.parametrize(("schema", "path"), REFUSED, ids=lambda v: json.dumps(v)[:60])
def test_what_cannot_be_enforced_is_refused_by_name(schema, path):
    with pytest.raises(ClientError) as error:
        check_schema(schema, "s")
    assert path is None or error.value.param == path


def many(count):
    return {f"p{i}": STR for i in range(count)}


@pytest.mark.parametrize(
    ("schema", "bound"),
    [
        ({"type": "object", "properties": many(257)}, "at most 256"),
        ({"type": "array", "items": {"anyOf": [{"const": i} for i in range(257)]}}, "at most 256"),
        ({"type": "object", "properties": many(1025), "required": list(many(1025))}, "at most 1024"),
        ({"$defs": {f"d{i}": {"properties": many(250)} for i in range(5)}}, "at most 1024"),
    ],
    ids=["optional", "branches", "required", "definitions"],
)
def test_what_takes_too_long_to_compile_is_refused(schema, bound):
    with pytest.raises(ClientError, match=bound):
        check_schema(schema, "s")
    form = {"type": "sequence", "elements": [{"type": "json_schema", "json_schema": schema}]}
    with pytest.raises(ClientError, match=bound):
        check_structural_tag({"format": form}, "s")


def test_size_and_depth_are_bounded():
    deep = INT
    for _ in range(80):
        deep = {"type": "array", "items": deep}
    with pytest.raises(ClientError, match="nested deeper"):
        check_schema(deep, "s")
    with pytest.raises(ClientError, match="bytes"):
        check_schema({"enum": ["x" * 300_000]}, "s")


GOOD_REGEX = [
    r"\d+",
    r"\w{2,3}",
    "[^a-z]",
    "(?:ab)+",
    "a*?",
    "^abc$",
    "a{2,}",
    "a|b",
    r"[\d-]",
    ".",
    r"\x41",
    r"\/",
]
BAD_REGEX = [
    "(?=a)b",
    "(?!a)b",
    "(?<=a)b",
    r"(a)\1",
    r"\bx",
    r"\p{L}",
    "(?i)a",
    "(?P<x>a)",
    "[",
    "(",
    ")",
    "a{3,1}",
    "*a",
    "a++",
    r"\A",
    r"\Z",
    "a$b",
    "a^b",
    "[a-",
    "[]",
    "[z-a]",
    "[[:alpha:]]",
    "a{,3}",
    "x{a}",
    r"\q",
    r"\e",
    "}",
    "(" * 100 + ")" * 100,
    "((a{1000}){1000}){1000}",
    "x" * 9000,
    "",
    5,
]
SAMPLES = ["a", "b", "ab", "1", "12", "aa", "aaa", "abc", "A", "é", " ", "-", "/", "\t", "ac"]


@pytest.mark.parametrize("regex", GOOD_REGEX)
def test_regular_expressions_that_pass_mean_the_same_to_xgrammar(regex):
    import re

    grammar = xgrammar.Grammar.from_regex(check_regex(regex, "r"))
    for text in SAMPLES:
        assert _is_grammar_accept_string(grammar, text) == bool(re.fullmatch(regex, text)), text


@pytest.mark.parametrize("regex", BAD_REGEX, ids=lambda r: str(r)[:20])
def test_other_regular_expressions_are_refused(regex):
    with pytest.raises(ClientError):
        check_regex(regex, "r")


def test_structures_and_triggers_become_a_structural_tag_that_compiles():
    tag = check_structural_tag(
        {
            "type": "structural_tag",
            "structures": [{"begin": "<f>", "schema": {"required": ["z"]}, "end": "</f>"}],
            "triggers": ["<f>"],
        },
        "t",
    )
    grammar = xgrammar.Grammar.from_structural_tag(json.dumps(tag))
    assert _is_grammar_accept_string(grammar, 'text <f>{"z": 1}</f> more')
    assert not _is_grammar_accept_string(grammar, "text <f>{}</f>")
    with pytest.raises(ClientError) as error:
        check_structural_tag(
            {
                "format": {
                    "type": "sequence",
                    "elements": [{"type": "json_schema", "json_schema": {"not": {}}}],
                }
            },
            "t",
        )
    assert error.value.param == "t.format.elements[0].json_schema.not"


def test_required_names_that_are_not_listed_do_not_multiply():
    schema = {"type": "integer"}
    for _ in range(4):
        schema = {"type": "object", "required": [f"k{i}" for i in range(60)], "additionalProperties": schema}
    with pytest.raises(ClientError, match="list it under properties"):
        check_schema(schema, "s")


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "unevaluatedProperties": {"properties": {f"p{i}": {} for i in range(2000)}}},
        {"type": "object", "required": [f"k{i}" for i in range(3000)]},
    ],
)
def test_all_that_is_compiled_counts(schema):
    with pytest.raises(ClientError, match="at most"):
        check_schema(schema, "s")


def test_numbers_beyond_64_bits_are_refused_or_kept_and_never_a_defect():
    check_schema({"oneOf": [{"const": 1e20}, {"const": 2}]}, "s")
    with pytest.raises(ClientError):
        check_structural_tag({"type": "structural_tag", "format": {"type": "any_text", "x": 2**70}}, "s")
