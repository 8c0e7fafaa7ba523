"""Which structured output can be enforced, as far as it can be told without compiling it. Pure.

xgrammar (0.2.8) compiles many JSON schemas that it then enforces only in part: some keywords it does not
know, some it ignores beside others, some only with a warning in its log. What is here was found by
experiment (`tests/unit/router/test_grammar_check.py` repeats it). A schema gets through if every text that
the compiled grammar accepts is valid under the schema; the grammar may accept less. Some schemas are first
written so that it is: a type that a keyword implies is named, a required property is declared.

What only the compiler sees (a reference to nowhere, an empty range) the worker refuses with its own words.
"""

import math
import re
from typing import Any

import msgspec
import orjson

from baton.core.errors import ClientError
from router.structured.one_of import are_disjoint
from router.structured.regex_check import check_pattern
from router.structured.schema_ends import endless_ref
from router.structured.schema_size import check_size, check_sizes

SCHEMA_BYTES_MAX = 256 * 1024
COPIED_BYTES_MAX = 256
"""Of `additionalProperties`, where it is also the schema of required names that are not listed."""
SCHEMA_DEPTH_MAX = 64
GRAMMAR_CHARACTERS_MAX = 64 * 1024
CHOICES_MAX = 4096
MULTIPLE_OF_MAX = 1024

TYPES = frozenset({"string", "number", "integer", "boolean", "null", "array", "object"})
_NEEDS_TYPE: dict[str, tuple[str, ...]] = {
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "array": ("items", "prefixItems", "minItems", "maxItems", "unevaluatedItems"),
    "object": (
        "properties",
        "required",
        "additionalProperties",
        "patternProperties",
        "propertyNames",
        "minProperties",
        "maxProperties",
        "unevaluatedProperties",
    ),
}
_ASSERTIONS = frozenset(word for words in _NEEDS_TYPE.values() for word in words)
_CHOOSERS = ("$ref", "enum", "const", "anyOf", "oneOf", "allOf")
"""Of which xgrammar looks at the first alone, and at nothing beside it."""
_UNSUPPORTED = frozenset(
    {"not", "if", "then", "else", "contains", "minContains", "maxContains", "dependentRequired"}
    | {"dependentSchemas", "dependencies", "additionalItems", "$dynamicRef", "$recursiveRef"}
)
FORMATS = frozenset(
    {"email", "date", "time", "date-time", "duration", "ipv4", "ipv6", "hostname", "uuid", "uri"}
    | {"uri-reference", "uri-template", "json-pointer", "relative-json-pointer"}
)
_COUNTS = frozenset({"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"})
Schema = dict[str, Any]


def _refuse(path: str, keyword: str, reason: str) -> ClientError:
    where = f"{path}.{keyword}" if keyword else path
    return ClientError(f"{where}: {reason}", param=where, code="unsupported_grammar")


# --- JSON schemas ---------------------------------------------------------------------------------


def check_schema(schema: Any, where: str) -> Any:
    """The schema, written so that all of it is enforced. Raises ClientError naming keyword and path."""
    if schema is True:
        return True
    if schema is False:
        raise _refuse(where, "", "'false' allows no value at all")
    if not isinstance(schema, dict):
        raise _refuse(where, "", "must be a JSON schema, which is an object")
    try:
        size = len(orjson.dumps(schema))
    except (TypeError, RecursionError, orjson.JSONEncodeError) as error:
        raise _refuse(where, "", f"is no JSON: {error}") from error
    if size > SCHEMA_BYTES_MAX:
        raise _refuse(where, "", f"has {size} bytes, at most {SCHEMA_BYTES_MAX} are allowed")
    check_size(schema, where)
    checked = _Checker(schema, where).checked(schema, where, depth=0)
    if (ref := endless_ref(checked)) is not None:
        raise _refuse(where, "$ref", f"{ref!r:.200} needs itself again and again, so that no text fulfils it")
    return checked


class _Checker:
    def __init__(self, root: Schema, where: str) -> None:
        self._root, self._where = root, where

    def checked(self, schema: Any, path: str, *, depth: int) -> Any:
        if schema is True:
            return True
        if schema is False:
            raise _refuse(path, "", "'false' allows no value at all")
        if not isinstance(schema, dict):
            raise _refuse(path, "", "must be a JSON schema: an object or true")
        if depth > SCHEMA_DEPTH_MAX:
            raise _refuse(path, "", f"is nested deeper than {SCHEMA_DEPTH_MAX}")
        for keyword in schema.keys() & _UNSUPPORTED:
            raise _refuse(path, keyword, "this keyword cannot be enforced")
        if schema.get("uniqueItems"):
            raise _refuse(path, "uniqueItems", "this keyword cannot be enforced")
        found = dict(schema)
        for keyword in ("$defs", "definitions"):
            if keyword in found:
                found[keyword] = self._map(found[keyword], f"{path}.{keyword}", depth)
        chooser = next((word for word in _CHOOSERS if word in found), None)
        if chooser is not None:
            return self._chosen(found, chooser, path, depth)
        return self._typed(found, path, depth)

    def _map(self, schemas: Any, path: str, depth: int) -> Schema:
        if not isinstance(schemas, dict):
            raise _refuse(path, "", "must be an object of schemas")
        return {name: self.checked(one, f"{path}.{name}", depth=depth + 1) for name, one in schemas.items()}

    # --- one of several -----------------------------------------------------------------------------

    def _chosen(self, schema: Schema, chooser: str, path: str, depth: int) -> Schema:
        others = (schema.keys() & (_ASSERTIONS | set(_CHOOSERS))) - {chooser}
        if others:
            raise _refuse(path, min(others), f"cannot be enforced beside {chooser}")
        match chooser:
            case "$ref":
                self._check_ref(schema, path)
            case "enum" | "const":
                self._check_values(schema, chooser, path)
            case _:
                self._check_branches(schema, chooser, path, depth)
        return schema

    def _check_ref(self, schema: Schema, path: str) -> None:
        ref = schema["$ref"]
        if "type" in schema:
            raise _refuse(path, "type", "cannot be enforced beside $ref")
        if ref != "#" and not (isinstance(ref, str) and ref.startswith("#/")):
            raise _refuse(path, "$ref", "only references within the schema ('#/…') are supported")
        if "~" in ref or "%" in ref:
            raise _refuse(path, "$ref", "references with escaped characters are not supported")
        target: Any = self._root
        for step in ref.split("/")[1:]:
            if not isinstance(target, dict) or step not in target:
                raise _refuse(path, "$ref", f"{ref!r:.200} does not exist")
            target = target[step]
        # It is looked up in the schema that was checked, which is where definitions are.
        if ref != "#" and not ref.startswith(("#/$defs/", "#/definitions/")):
            raise _refuse(path, "$ref", "references must be to '#', '#/$defs/…' or '#/definitions/…'")

    def _check_values(self, schema: Schema, keyword: str, path: str) -> None:
        values = schema["enum"] if keyword == "enum" else [schema["const"]]
        if not isinstance(values, list) or not values:
            raise _refuse(path, keyword, "must be a list of values that is not empty")
        if "type" not in schema:
            return
        kinds = _types_of(schema, path)
        fitting = [value for value in values if any(_is_a(value, kind) for kind in kinds)]
        if not fitting:
            raise _refuse(path, keyword, "has no value of the type that the schema names")
        if keyword == "enum":
            schema["enum"] = fitting

    def _check_branches(self, schema: Schema, keyword: str, path: str, depth: int) -> None:
        branches = schema[keyword]
        if not isinstance(branches, list) or not branches:
            raise _refuse(path, keyword, "must be a list of schemas that is not empty")
        if keyword == "allOf" and len(branches) > 1:
            raise _refuse(path, keyword, "more than one schema cannot be enforced at once; merge them")
        kind = schema.pop("type", None)
        if kind is not None:
            branches = [
                self._with_type(one, kind, f"{path}.{keyword}[{i}]") for i, one in enumerate(branches)
            ]
        schema[keyword] = [
            self.checked(one, f"{path}.{keyword}[{i}]", depth=depth + 1) for i, one in enumerate(branches)
        ]
        if keyword == "oneOf" and not are_disjoint(schema[keyword], self._root):
            raise _refuse(
                path, keyword, "its branches may hold at once, which cannot be enforced; tell them apart by "
                "their types or by a required property with different const values, or use anyOf",
            )  # fmt: skip

    @staticmethod
    def _with_type(branch: Any, kind: Any, path: str) -> Any:
        """xgrammar ignores a type beside anyOf: every branch gets it."""
        if branch is True:
            return {"type": kind}
        if not isinstance(branch, dict) or branch.get("type") == kind:
            return branch
        if branch.keys() & {"type", *_CHOOSERS}:
            raise _refuse(path, "type", "cannot be enforced together with the type beside the branches")
        return branch | {"type": kind}

    # --- one type, or several -----------------------------------------------------------------------

    def _typed(self, schema: Schema, path: str, depth: int) -> Schema:
        if "type" not in schema:
            implied = [kind for kind, words in _NEEDS_TYPE.items() if schema.keys() & set(words)]
            if not implied:
                return schema
            schema["type"] = implied[0] if len(implied) == 1 else implied
        kinds = _types_of(schema, path)
        for keyword in schema.keys() & _COUNTS:
            value = schema[keyword]
            if type(value) is not int or not 0 <= value < 2**31:
                raise _refuse(path, keyword, "must be a whole number that is not negative")
        if "string" in kinds:
            _check_string(schema, path)
        if kinds & {"number", "integer"}:
            _check_number(schema, path, kinds)
        if "array" in kinds:
            self._check_array(schema, path, depth)
        if "object" in kinds:
            self._check_object(schema, path, depth)
        return schema

    def _check_array(self, schema: Schema, path: str, depth: int) -> None:
        prefix = schema.get("prefixItems", [])
        if not isinstance(prefix, list):
            raise _refuse(path, "prefixItems", "must be a list of schemas")
        if prefix:
            schema["prefixItems"] = [
                self.checked(one, f"{path}.prefixItems[{i}]", depth=depth + 1) for i, one in enumerate(prefix)
            ]
        for keyword in ("items", "unevaluatedItems"):
            if keyword in schema and schema[keyword] is not False:
                schema[keyword] = self.checked(schema[keyword], f"{path}.{keyword}", depth=depth + 1)
        if not schema.keys() & {"items", "unevaluatedItems"} and schema.get("minItems", 0) > len(prefix):
            schema["items"] = True

    def _check_object(self, schema: Schema, path: str, depth: int) -> None:
        properties = self._map(schema.get("properties", {}), f"{path}.properties", depth)
        for keyword in ("additionalProperties", "unevaluatedProperties"):
            if keyword in schema and schema[keyword] is not False:
                schema[keyword] = self.checked(schema[keyword], f"{path}.{keyword}", depth=depth + 1)
        required = schema.get("required", [])
        if not isinstance(required, list) or not all(isinstance(one, str) for one in required):
            raise _refuse(path, "required", "must be a list of names")
        patterns = schema.get("patternProperties", {})
        if patterns:
            self._check_pattern_properties(schema, properties, path, depth)
        if "propertyNames" in schema:
            if properties or required or patterns:
                raise _refuse(path, "propertyNames", "cannot be enforced beside properties or required")
            names = self.checked(schema["propertyNames"], f"{path}.propertyNames", depth=depth + 1)
            schema["propertyNames"] = {"type": "string"} if names is True else names
        self._declare_required(schema, properties, path)
        if properties:
            schema["properties"] = properties
        closed = schema.keys() & {"additionalProperties", "unevaluatedProperties", "patternProperties"}
        if schema.get("minProperties", 0) > len(properties) and not closed and "propertyNames" not in schema:
            schema["additionalProperties"] = True

    def _check_pattern_properties(self, schema: Schema, properties: Schema, path: str, depth: int) -> None:
        where = f"{path}.patternProperties"
        patterns = self._map(schema["patternProperties"], where, depth)
        if len(patterns) > 1 or properties:
            raise _refuse(
                path, "patternProperties", "cannot be enforced beside properties, or with two patterns"
            )
        if schema.get("required"):
            raise _refuse(path, "required", "cannot be enforced beside patternProperties")
        for pattern in patterns:
            check_pattern(pattern, f"{where}[{pattern!r:.100}]", in_json=True)
        schema["patternProperties"] = patterns

    @staticmethod
    def _declare_required(schema: Schema, properties: Schema, path: str) -> None:
        """xgrammar forgets a required name that is not among the properties."""
        others = schema.get("additionalProperties", schema.get("unevaluatedProperties", True))
        for name in schema.get("required", []):
            if name in properties:
                continue
            if others is False:
                raise _refuse(
                    path, "required", f"{name!r:.100} is required, but no property may have that name"
                )
            if len(orjson.dumps(others)) > COPIED_BYTES_MAX:  # copies within copies would have no bound
                raise _refuse(path, "required", f"{name!r:.100} is required, so list it under properties")
            properties[name] = others


def _types_of(schema: Schema, path: str) -> frozenset[str]:
    named = schema["type"]
    kinds = named if isinstance(named, list) else [named]
    for kind in kinds or [None]:
        if kind not in TYPES if isinstance(kind, str) else True:
            raise _refuse(path, "type", f"{kind!r:.60} is no type of JSON schema")
    return frozenset(kinds)


def _is_a(value: Any, kind: str) -> bool:
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


def _check_string(schema: Schema, path: str) -> None:
    given = [word for word in ("format", "pattern") if word in schema]
    lengths = [word for word in ("minLength", "maxLength") if word in schema]
    if len(given) + bool(lengths) > 1:
        raise _refuse(path, (lengths + given[1:])[0], f"cannot be enforced beside {given[0]}")
    if "format" in schema and schema["format"] not in FORMATS:
        raise _refuse(
            path, "format", f"{schema['format']!r:.60} cannot be enforced, only {', '.join(sorted(FORMATS))}"
        )
    if "pattern" in schema:
        if not isinstance(schema["pattern"], str):
            raise _refuse(path, "pattern", "must be a string")
        check_pattern(schema["pattern"], f"{path}.pattern", in_json=True)


def _check_number(schema: Schema, path: str, kinds: frozenset[str]) -> None:
    bounds = [w for w in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum") if w in schema]
    for keyword in bounds:
        value = schema[keyword]
        if type(value) not in (int, float) or not math.isfinite(value):
            raise _refuse(path, keyword, "must be a number")
        if "integer" in kinds and (value != int(value) or abs(value) >= 2**62):
            raise _refuse(path, keyword, "must be a whole number of at most 62 bits for an integer")
    if "multipleOf" not in schema:
        return
    step = schema["multipleOf"]
    if "number" in kinds or type(step) is not int or not 1 <= step <= MULTIPLE_OF_MAX:
        raise _refuse(
            path, "multipleOf", f"is enforced for integers only, and only from 1 to {MULTIPLE_OF_MAX}"
        )
    if bounds:
        raise _refuse(path, "multipleOf", f"cannot be enforced beside {bounds[0]}")


# --- everything else ------------------------------------------------------------------------------


def check_regex(text: Any, where: str) -> str:
    if not isinstance(text, str) or not text:
        raise _refuse(where, "", "must be a regular expression")
    check_pattern(text, where, in_json=False)
    return text


_ROOT_RULE = re.compile(r"^[ \t]*root[ \t]*::=", re.MULTILINE)


def check_ebnf(text: Any, where: str) -> str:
    """Size and the rule that everything starts from; the rest is the compiler's, which says what is wrong."""
    if not isinstance(text, str) or not text.strip():
        raise _refuse(where, "", "must be a grammar in EBNF (GBNF)")
    if len(text) > GRAMMAR_CHARACTERS_MAX:
        raise _refuse(where, "", f"may have at most {GRAMMAR_CHARACTERS_MAX} characters, not {len(text)}")
    if not _ROOT_RULE.search(text):
        raise _refuse(where, "", "has no rule named root ('root ::= …')")
    return text


def check_choices(choices: Any, where: str) -> list[str]:
    if not isinstance(choices, list) or not 1 <= len(choices) <= CHOICES_MAX:
        raise _refuse(where, "", f"must be a list of 1 to {CHOICES_MAX} strings")
    if not all(isinstance(one, str) and one for one in choices):
        raise _refuse(where, "", "must be a list of strings that are not empty")
    if sum(map(len, choices)) > GRAMMAR_CHARACTERS_MAX:
        raise _refuse(where, "", f"may have at most {GRAMMAR_CHARACTERS_MAX} characters in all")
    return list(dict.fromkeys(choices))


def check_structural_tag(tag: Any, where: str) -> dict[str, Any]:
    """xgrammar's format, or OpenAI-style structures and triggers, which become it."""
    if not isinstance(tag, dict):
        raise _refuse(where, "", "must be an object")
    if "format" not in tag:
        tag = {"type": "structural_tag", "format": _of_structures(tag, where)}
    try:
        size = len(orjson.dumps(tag))
    except (TypeError, RecursionError, orjson.JSONEncodeError) as error:
        raise _refuse(where, "", f"is no JSON: {error}") from error
    if size > SCHEMA_BYTES_MAX:
        raise _refuse(where, "", f"has {size} bytes, at most {SCHEMA_BYTES_MAX} are allowed")
    check_sizes(tag["format"], where)
    checked = _checked_format(tag["format"], f"{where}.format", depth=0)
    return {"type": "structural_tag", "format": checked}


def _of_structures(tag: dict[str, Any], where: str) -> dict[str, Any]:
    class Structure(msgspec.Struct):
        begin: str
        end: str
        schema: dict[str, Any] | bool = True

    try:
        structures = msgspec.convert(tag.get("structures"), list[Structure])
        triggers = msgspec.convert(tag.get("triggers"), list[str])
    except msgspec.ValidationError as error:
        raise _refuse(where, "", f"needs a format, or structures and triggers: {error}") from error
    tags = [
        {"type": "tag", "begin": one.begin, "content": {"type": "json_schema", "json_schema": one.schema}}
        | {"end": one.end}
        for one in structures
    ]
    return {"type": "triggered_tags", "triggers": triggers, "tags": tags}


def _checked_format(node: Any, path: str, *, depth: int) -> Any:
    if depth > SCHEMA_DEPTH_MAX:
        raise _refuse(path, "", f"is nested deeper than {SCHEMA_DEPTH_MAX}")
    if isinstance(node, list):
        return [_checked_format(one, f"{path}[{i}]", depth=depth + 1) for i, one in enumerate(node)]
    if not isinstance(node, dict):
        return node
    match node.get("type"):
        case "json_schema" | "qwen_xml_parameter":
            return node | {"json_schema": check_schema(node.get("json_schema"), f"{path}.json_schema")}
        case "regex":
            check_regex(node.get("pattern"), f"{path}.pattern")
        case "grammar":
            check_ebnf(node.get("grammar"), f"{path}.grammar")
        case _:
            pass
    return {key: _checked_format(value, f"{path}.{key}", depth=depth + 1) for key, value in node.items()}
