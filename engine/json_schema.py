"""Which JSON schemas the grammar compiler enforces, and those put into the form in which it does.

xgrammar drops without a word what it cannot express (`not`, `uniqueItems`, a second `allOf`, …), and
text that breaks the schema would come out. Here such a schema is refused, with the keyword's name; what
means the same in another form is rewritten. Keywords of JSON Schema draft 2020-12, and draft 7's tuples.
"""

import re
from collections.abc import Iterator
from itertools import combinations
from typing import Any, TypeGuard

Schema = dict[str, Any]

NESTING_MAX = 64
"""Compile time grows with the third power of it."""
PARTS_MAX = 4096
"""Schemas within a schema. The router, which names the field, allows fewer properties and branches."""
_REFUSED = frozenset(
    {
        "not",
        "if",
        "then",
        "else",
        "uniqueItems",
        "contains",
        "minContains",
        "maxContains",
        "dependentRequired",
        "dependentSchemas",
        "dependencies",
        "unevaluatedProperties",
        "unevaluatedItems",
        "$dynamicRef",
        "$recursiveRef",
    }
)
_NUMBER = frozenset(
    {
        "minimum",
        "maximum",
        "exclusiveMinimum",
        "exclusiveMaximum",
        "multipleOf",
    }
)
_STRING = frozenset(
    {
        "minLength",
        "maxLength",
        "pattern",
    }
)
_ARRAY = frozenset(
    {
        "items",
        "prefixItems",
        "minItems",
        "maxItems",
    }
)
_OBJECT = frozenset(
    {
        "properties",
        "required",
        "additionalProperties",
        "patternProperties",
        "propertyNames",
        "minProperties",
        "maxProperties",
    }
)
_TYPED = {"number": _NUMBER, "string": _STRING, "array": _ARRAY, "object": _OBJECT}
_ALONE = ("enum", "const", "$ref", "anyOf", "oneOf", "allOf")
_VALIDATING = frozenset().union(*_TYPED.values(), _ALONE, {"type", "format"})


class Unsupported(Exception):
    """One line that names the keyword and where it is."""


def enforceable(schema: object) -> Any:
    """The schema as the compiler enforces it. Raises Unsupported."""
    return _Walk(schema).visit(schema, "#", 0)


def _is_schema(value: object) -> TypeGuard[Schema]:
    return isinstance(value, dict)


class _Walk:
    def __init__(self, root: object) -> None:
        self._root = root
        self._parts = 0

    def visit(self, schema: object, at: str, depth: int) -> Any:
        if isinstance(schema, bool):
            return schema
        if not _is_schema(schema):
            raise Unsupported(f"{at}: a schema is an object or a boolean")
        self._parts += 1
        if self._parts > PARTS_MAX:
            raise Unsupported(f"more than {PARTS_MAX} schemas within the schema take too long to compile")
        if depth > NESTING_MAX:
            raise Unsupported(f"{at[:80]}: nested more than {NESTING_MAX} levels deep")
        for keyword in sorted(_REFUSED & schema.keys()):
            if not (keyword == "uniqueItems" and schema[keyword] is False):
                raise Unsupported(f"{at}: {keyword} is not supported")
        schema = _as_2020(_with_type(schema, at))
        self._check_alone(schema, at)
        _check_typed(schema, at)
        schema = _with_required_declared(schema, at)
        return {key: self._inside(key, value, f"{at}/{key}", depth) for key, value in schema.items()}

    def _inside(self, key: str, value: Any, at: str, depth: int) -> Any:
        match key, value:
            case (("properties" | "patternProperties" | "$defs" | "definitions"), dict()):
                return {name: self.visit(sub, f"{at}/{name}", depth + 1) for name, sub in value.items()}
            case (("anyOf" | "oneOf" | "allOf" | "prefixItems"), list()):
                return [self.visit(sub, f"{at}/{i}", depth + 1) for i, sub in enumerate(value)]
            case (("items" | "additionalProperties" | "propertyNames"), _):
                return self.visit(value, at, depth + 1)
            case _:
                return value

    def _check_alone(self, schema: Schema, at: str) -> None:
        """Keywords whose neighbours the compiler does not look at."""
        for keyword in _ALONE:
            if keyword not in schema:
                continue
            beside = sorted((_VALIDATING & schema.keys()) - {keyword})
            if beside:
                raise Unsupported(f"{at}: {keyword} beside {beside[0]} is not supported")
        if "$ref" in schema and not str(schema["$ref"]).startswith("#/") and schema["$ref"] != "#":
            raise Unsupported(f"{at}: $ref {schema['$ref']!r} is not supported, only '#' and '#/…'")
        if len(schema.get("allOf", ())) > 1:
            raise Unsupported(f"{at}: allOf of more than one schema is not supported")
        for one, other in combinations(schema.get("oneOf", ()), 2):
            if not self._are_disjoint(one, other):
                raise Unsupported(f"{at}: oneOf of schemas that may both hold is not supported: use anyOf")

    def _are_disjoint(self, one: object, other: object) -> bool:
        """Certainly: by type, by listed values, or by the values of a property that both require."""
        one, other = self._resolved(one), self._resolved(other)
        if not (_is_schema(one) and _is_schema(other)):
            return one is False or other is False
        values, others = _listed(one), _listed(other)
        if values is not None and others is not None:
            return not any(_same(a, b) for a in values for b in others)
        kinds, other_kinds = _kinds(one), _kinds(other)
        if kinds and other_kinds and not kinds & other_kinds:
            return True
        shared = set(one.get("required", ())) & set(other.get("required", ()))
        inner, other_inner = one.get("properties", {}), other.get("properties", {})
        return any(
            (a := _listed(self._resolved(inner.get(name)))) is not None
            and (b := _listed(self._resolved(other_inner.get(name)))) is not None
            and not any(_same(x, y) for x in a for y in b)
            for name in shared
        )

    def _resolved(self, schema: Any) -> Any:
        for _ in range(NESTING_MAX):
            if not _is_schema(schema) or not str(schema.get("$ref", "")).startswith("#/"):
                return schema
            found: Any = self._root
            for part in str(schema["$ref"])[2:].split("/"):
                found = found.get(part) if _is_schema(found) else None
            schema = found
        return None


def _with_type(schema: Schema, at: str) -> Schema:
    """A schema of numbers that does not say so allows everything else as well; what its author means is
    a number, and every number it allows is valid by the letter too."""
    kinds = schema.get("type")
    for keyword in ("enum", "const"):
        if keyword in schema and kinds is not None:
            values = [v for v in _listed(schema) or [] if _kinds({"const": v}) & _kinds(schema)]
            if not values:
                raise Unsupported(f"{at}: no value of {keyword} has the type {kinds!r}")
            rest = {k: v for k, v in schema.items() if k not in ("type", "enum", "const")}
            return {**rest, "enum": values}
    if kinds is not None or any(keyword in schema for keyword in _ALONE):
        return schema
    meant = [kind for kind, keywords in _TYPED.items() if keywords & schema.keys()]
    if len(meant) > 1:
        raise Unsupported(f"{at}: type is missing, and could be any of {', '.join(meant)}")
    return {"type": meant[0], **schema} if meant else schema


def _as_2020(schema: Schema) -> Schema:
    """Draft 7's tuple: items is a list, additionalItems holds for the rest."""
    if not isinstance(schema.get("items"), list):
        return schema
    rest = {k: v for k, v in schema.items() if k not in ("items", "additionalItems")}
    return {**rest, "prefixItems": schema["items"], "items": schema.get("additionalItems", True)}


def _check_typed(schema: Schema, at: str) -> None:
    kinds = schema.get("type")
    several = isinstance(kinds, list) and len(kinds) > 1
    if "multipleOf" in schema and (kinds != "integer" or not isinstance(schema["multipleOf"], int)):
        raise Unsupported(f"{at}: multipleOf is supported for type integer and whole numbers only")
    if several and "multipleOf" in schema:
        raise Unsupported(f"{at}: multipleOf beside several types is not supported")
    if {"minLength", "maxLength"} & schema.keys() and {"pattern", "format"} & schema.keys():
        raise Unsupported(f"{at}: minLength and maxLength beside pattern or format are not supported")
    if {"pattern", "format"} <= schema.keys():
        raise Unsupported(f"{at}: pattern beside format is not supported")
    if "pattern" in schema:
        _check_pattern(str(schema["pattern"]), f"{at}/pattern")
    for pattern in schema.get("patternProperties", ()):
        _check_pattern(pattern, f"{at}/patternProperties")
    _check_object(schema, at)


_PATTERN_PART = re.compile(
    r"""\[\^(?:[^\]\\]|\\.)*\]|\\(?:u(?P<u>[0-9a-fA-F]{4})|x(?P<x>[0-9a-fA-F]{2})|(?P<escape>.))|(?P<plain>.)""",
    re.DOTALL,
)
"""A class of what must not come, an escaped character, or a plain one."""


def _check_pattern(pattern: str, at: str) -> None:
    """The compiler takes these characters of a pattern as they are, where JSON wants them escaped."""
    for part in _PATTERN_PART.finditer(pattern):
        code = part["u"] or part["x"]
        character = chr(int(code, 16)) if code else part["plain"] or ""
        if character in tuple('"\\') or "" < character < " " or (part["escape"] or "") in tuple("\\ntrfvc0"):
            raise Unsupported(f"{at}: {part[0]!r} is not supported in a pattern")


def _check_object(schema: Schema, at: str) -> None:
    patterns = list(schema.get("patternProperties", ()))
    if "propertyNames" in schema and (patterns or schema.get("properties") or schema.get("required")):
        raise Unsupported(f"{at}: propertyNames beside other keywords on properties is not supported")
    if len(patterns) > 1:
        raise Unsupported(f"{at}: patternProperties of more than one pattern is not supported")
    for name in {*schema.get("properties", ()), *schema.get("required", ())} if patterns else ():
        if _matches(patterns[0], name, at):
            raise Unsupported(f"{at}: patternProperties that match the property {name!r} are not supported")
    # The same name twice counts as two while the text is written, and as one when it is read.
    if schema.get("minProperties", 0) > 1 and schema.get("additionalProperties", True) is not False:
        raise Unsupported(f"{at}: minProperties above 1 needs additionalProperties: false")


def _matches(pattern: str, name: str, at: str) -> bool:
    try:
        return re.search(pattern, name) is not None
    except re.error as error:
        raise Unsupported(f"{at}: patternProperties: {error}") from None


def _with_required_declared(schema: Schema, at: str) -> Schema:
    """The compiler demands declared properties only."""
    declared = schema.get("properties", {})
    missing = [name for name in schema.get("required", ()) if name not in declared]
    if not missing:
        return schema
    others = schema.get("additionalProperties", True)
    if others is False or "patternProperties" in schema:
        raise Unsupported(f"{at}: required names {missing[0]!r}, which properties does not")
    return {**schema, "properties": {**declared, **dict.fromkeys(missing, others)}}


def _listed(schema: Any) -> list[Any] | None:
    if not _is_schema(schema):
        return None
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else None


def _same(one: Any, other: Any) -> bool:
    return one == other and isinstance(one, bool) == isinstance(other, bool)


def _kinds(schema: Schema) -> set[str]:
    """Types a value may have; empty: not said. An integer is a number too, by its finer name."""
    listed = _listed(schema)
    if listed is not None and "type" not in schema:
        return {kind for value in listed for kind in _kinds_of(value)}
    kinds = schema.get("type", [])
    found = {kinds} if isinstance(kinds, str) else set(kinds)
    return found | {"integer"} if "number" in found else found


def _kinds_of(value: Any) -> Iterator[str]:
    match value:
        case None:
            yield "null"
        case bool():
            yield "boolean"
        case int() | float():
            yield "integer" if value == int(value) else "number"
        case str():
            yield "string"
        case list():
            yield "array"
        case _:
            yield "object"
