"""Whatever a client sends as a schema is answered at once: rewritten, or refused with a ClientError."""

import contextlib
import time

import pytest

from baton.core.errors import ClientError
from engine.structured.schemas import check_schema

LISTED = [f"v{i}" for i in range(9000)]
OTHERS = [f"{one}x" for one in LISTED]


def chained_dependents(count):
    """Each name depends on the one that stands after it, so that one pass finds one name."""
    names = {f"a{i}": [f"a{i + 1}"] for i in reversed(range(count))}
    return {"type": "object", "required": ["a0"], "dependentRequired": names}


def doubled_references(count):
    """Each definition leads to the next by two ways, so that there are 2**count ways."""
    defs = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(count)}
    return one_of({"$ref": "#/$defs/d0"}, {"type": "integer"}, **defs, **{f"d{count}": {"type": "string"}})


def one_of(*branches, **defs):
    return {"oneOf": list(branches), "$defs": defs}


def object_of(names, schema):
    return {"type": "object", "required": names, "properties": dict.fromkeys(names, schema)}


def spelled(number):
    """A pointer to the same property, written in another way for each number."""
    return "#/properties/" + "".join(
        f"%{ord(c):x}" if number >> i & 1 else c for i, c in enumerate("abcdefghij")
    )


NAMES = [f"p{i}" for i in range(200)]
SLOW = [
    chained_dependents(1000),
    doubled_references(40),
    one_of({"$ref": "#/$defs/a"}, {"type": "null"}, a={"anyOf": [{"$ref": "#/$defs/a"}] * 2}),
    one_of(*[object_of(NAMES, {"$ref": "#/$defs/e"})] * 2, e={"enum": LISTED}),
    {"type": "array", "prefixItems": [{"oneOf": [{"$ref": "#/$defs/e"}, {"$ref": "#/$defs/f"}]}] * 300}
    | {"$defs": {"e": {"enum": LISTED}, "f": {"enum": OTHERS}}},
    object_of([f"p{i}" for i in range(1000)], True)
    | {"patternProperties": {f"^x{i}": True for i in range(9000)}},
    {"type": "object", "propertyNames": {"enum": LISTED}},
    {"properties": {"abcdefghij": {"enum": LISTED}}}
    | {
        "type": "object",
        "patternProperties": {"^k": {"prefixItems": [{"$ref": spelled(i)} for i in range(900)]}},
    },
    {
        "$ref": "#/$defs/a0",
        "$defs": {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(6000)} | {"a6000": {}},
    },
]


@pytest.mark.parametrize("schema", SLOW, ids=range(len(SLOW)))
def test_the_time_of_the_check_does_not_explode(schema):
    begin = time.process_time()
    with contextlib.suppress(ClientError):
        check_schema(schema, "s")
    assert time.process_time() - begin < 5


def test_odd_values_are_judged():
    named = {"type": "object", "additionalProperties": False}
    for schema, checked in [
        ({"enum": [3e30, 3, 1e300], "multipleOf": 3}, {"enum": [3e30, 3]}),
        ({"enum": [1], "multipleOf": 1e-300}, {"enum": [1]}),
        ({"enum": [float("inf"), 2], "multipleOf": 2}, {"enum": [2]}),
        ({"type": "object", "propertyNames": {"type": "integer", "enum": [1]}}, named),
        ({"type": "object", "propertyNames": {"type": "array", "enum": [["a"]]}}, named),
    ]:
        assert check_schema(schema, "s") == checked


TAGGED = object_of(["k"], {"const": 1})
PATTERNS = {"^a": {"const": 1}, "^b": {"const": True}}


@pytest.mark.parametrize(
    ("schema", "where"),
    [
        ({"enum": [1, 1e300], "multipleOf": 7, "minimum": 2, "maximum": 3}, "enum"),
        ({"enum": [1, 2], "minimum": "1"}, "minimum"),
        ({"const": 1, "maximum": None}, "maximum"),
        ({"allOf": [{"enum": [1]}, {"enum": [True]}]}, "allOf"),
        ({"type": "object", "patternProperties": PATTERNS}, "patternProperties"),
        (one_of({"$ref": "#/$defs/a"}, {"type": "null"}, a={"type": [["x"]]}), "oneOf"),
        (one_of({"$ref": "#/$defs/a"}, TAGGED, a={"type": "object", "required": 5}), "oneOf"),
        (one_of({"$ref": "#/$defs/a"}, TAGGED, a=TAGGED | {"properties": 5}), "oneOf"),
    ],
)
def test_odd_values_are_refused_by_name(schema, where):
    with pytest.raises(ClientError) as caught:
        check_schema(schema, "s")
    assert caught.value.param == f"s.{where}"
