"""JSON values: which types they have, which of a list remain, and what the compiler writes without loss.
Pure."""

from typing import Any

import orjson

from engine.structured.numbers import BOUNDS, INTEGER_MAX, allows_number, check_bounds, check_step
from engine.structured.refusal import refuse
from engine.structured.strings import allows_string

Schema = dict[str, Any]

BESIDE_VALUES = frozenset({*BOUNDS, "multipleOf", "minLength", "maxLength", "enum", "const", "type"})
"""Keywords that are judged value by value where they stand beside a list of values."""


def is_a(value: Any, kind: str) -> bool:
    match kind:
        case "integer":
            return type(value) is int or (isinstance(value, float) and value.is_integer())
        case "number":
            return type(value) in (int, float)
        case "null":
            return value is None
        case "boolean":
            return isinstance(value, bool)
        case "string":
            return isinstance(value, str)
        case "array":
            return isinstance(value, list)
        case _:
            return isinstance(value, dict)


def kinds_of(value: Any) -> frozenset[str]:
    """The types of JSON schema that a value has; an integer is a number as well."""
    kinds = ("integer", "number", "null", "boolean", "string", "array", "object")
    return frozenset(kind for kind in kinds if is_a(value, kind))


def identity(value: Any) -> bytes:
    """The same bytes for values that JSON schema holds equal: 1 and 1.0, objects in any order."""
    return orjson.dumps(_normal(value), option=orjson.OPT_SORT_KEYS)


def _normal(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer() and abs(value) <= INTEGER_MAX:
        return int(value)
    if isinstance(value, list):
        return [_normal(one) for one in value]
    if isinstance(value, dict):
        return {key: _normal(one) for key, one in value.items()}
    return value


def check_values(schema: Schema, kinds: list[str] | None, path: str) -> Schema:
    """The schema with the values that `enum`, `const` and the keywords beside them leave. Raises
    ClientError."""
    keyword = "enum" if "enum" in schema else "const"
    values = schema.get("enum", [schema.get("const")])
    if not isinstance(values, list) or not values:
        raise refuse(path, "enum", "must be a list of values that is not empty")
    if "const" in schema:
        wanted = identity(schema["const"])
        values = [value for value in values if identity(value) == wanted]
    check_bounds(schema, path)
    check_step(schema, path)
    left = [value for value in values if _is_allowed(schema, kinds, value)]
    if not left:
        beside = "type" if schema.keys() <= {keyword, "type"} else "keywords"
        raise refuse(path, keyword, f"has no value of the {beside} that the schema names beside it")
    for value in left:
        _check_value(value, f"{path}.{keyword}")
    return {"const": left[0]} if "const" in schema else {"enum": left}


def _is_allowed(schema: Schema, kinds: list[str] | None, value: Any) -> bool:
    if kinds is not None and not any(is_a(value, kind) for kind in kinds):
        return False
    if isinstance(value, str):
        return allows_string(schema, value)
    return type(value) not in (int, float) or allows_number(schema, value)


def _check_value(value: Any, path: str) -> None:
    """Refuse what the compiler would write as another number."""
    if isinstance(value, int) and not -INTEGER_MAX <= value <= INTEGER_MAX:
        raise refuse(path, "", f"{value} has more than 64 bits")
    for one in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _check_value(one, path)
