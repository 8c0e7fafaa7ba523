"""The one judge of JSON schemas: whether a schema can be enforced, and the form in which it is. Pure.

xgrammar (0.2.8) compiles many JSON schemas that it then enforces only in part: some keywords it does not
know, some it ignores beside others, some with a warning in its log. The rules here were found by experiment,
and `tests/unit/engine/structured` repeats the experiments. A schema gets through if every text that the
compiled grammar accepts is valid under the schema; the grammar may accept less. Keywords are those of draft
2020-12, with draft 7's tuples.

The router calls `check_schema` at its door and sends what it returns; the worker calls it again on what
arrives. A schema that was returned once is returned unchanged, so that both always give the same answer.
"""

from typing import Any

import orjson

from engine.structured.arrays import check_array
from engine.structured.endless import circular_ref, endless_ref
from engine.structured.numbers import BOUNDS, check_numbers, listed_multiples
from engine.structured.objects import check_object
from engine.structured.one_of import Disjointness
from engine.structured.references import DEFINITIONS, References
from engine.structured.refusal import refuse
from engine.structured.size import check_size
from engine.structured.strings import check_string
from engine.structured.unique import ValueCounter
from engine.structured.unique_places import check_unique_places
from engine.structured.values import BESIDE_VALUES, check_values, identity

SCHEMA_BYTES_MAX = 256 * 1024
SCHEMA_DEPTH_MAX = 64
"""Levels of a schema. The time of its compilation grows with their third power."""
VISITS_MAX = 16 * 1024
"""Schemas within a schema, with those that are copied."""

TYPES = ("string", "number", "integer", "boolean", "null", "array", "object")
_BY_TYPE: dict[str, frozenset[str]] = {
    "string": frozenset({"minLength", "maxLength", "pattern", "format"}),
    "number": frozenset({*BOUNDS, "multipleOf"}),
    "array": frozenset({"items", "prefixItems", "minItems", "maxItems", "uniqueItems", "unevaluatedItems"})
    | {"additionalItems"},
    "object": frozenset(
        {"properties", "required", "additionalProperties", "patternProperties", "propertyNames"}
    )
    | {"minProperties", "maxProperties", "unevaluatedProperties", "dependentRequired"},
}
_ASSERTIONS = frozenset().union(*_BY_TYPE.values())
_CHOOSERS = ("$ref", "enum", "const", "anyOf", "oneOf", "allOf")
"""Keywords that xgrammar looks at alone: it takes the first of them and nothing beside it."""
_REFUSED = {
    "not": "say what is allowed instead",
    "if": "list the cases in an anyOf",
    "then": "list the cases in an anyOf",
    "else": "list the cases in an anyOf",
    "contains": "describe all items with items or prefixItems",
    "minContains": "describe all items with items or prefixItems",
    "maxContains": "describe all items with items or prefixItems",
    "dependentSchemas": "list the cases in an anyOf",
    "dependencies": "list the cases in an anyOf",
    "$dynamicRef": "use $ref",
    "$recursiveRef": "use $ref",
}
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
WHITE_SPACE = "x-white-space"
"""Keyword of the root that says how JSON is spaced; any other value, or none, leaves it to the model."""
COMPACT = "none"
"""JSON has no white space outside of its strings."""
SPACED = "single"
"""One space comes after each comma and colon, and no other."""
Schema = dict[str, Any]


def check_schema(schema: Any, where: str) -> Any:
    """The schema, written so that all of it is enforced. Raises ClientError that names keyword and path."""
    # Twice, since the worker judges what comes out, and copies count against the bounds as well.
    checked = _rewritten(_rewritten(schema, where), where)
    if isinstance(checked, dict) and (ref := endless_ref(checked)) is not None:
        raise refuse(where, "$ref", f"{ref!r:.200} needs itself again and again, so that no text fulfils it")
    if isinstance(checked, dict) and (ref := circular_ref(checked)) is not None:
        raise refuse(where, "$ref", f"{ref!r:.200} leads back to itself with nothing between")
    check_unique_places(checked, where)
    return checked


def _rewritten(schema: Any, where: str) -> Any:
    if isinstance(schema, bool):
        return _Checker({}, where).checked(schema, where, depth=0)
    if not isinstance(schema, dict):
        raise refuse(where, "", "must be a JSON schema, which is an object")
    check_bytes(schema, where)
    check_size(schema, where)
    checker = _Checker(schema, where)
    checked = checker.with_definitions(checker.checked(schema, where, depth=0))
    space = _white_space(schema)
    return {**checked, WHITE_SPACE: space} if space and isinstance(checked, dict) else checked


def _white_space(schema: Schema) -> str | None:
    """How the root wants JSON to be spaced. guidance says it in a keyword of its own."""
    if schema.get(WHITE_SPACE) in (COMPACT, SPACED):
        return schema[WHITE_SPACE]
    options = schema.get("x-guidance")
    if isinstance(options, dict) and options.get("whitespace_flexible") is False:
        return COMPACT if options.get("item_separator") == "," else SPACED
    return None


def check_bytes(value: Any, where: str) -> None:
    try:
        size = len(orjson.dumps(value))
    except (TypeError, RecursionError, orjson.JSONEncodeError) as error:
        raise refuse(where, "", f"is no JSON: {error}") from error
    if size > SCHEMA_BYTES_MAX:
        raise refuse(where, "", f"has {size} bytes, at most {SCHEMA_BYTES_MAX} are allowed")


class _Checker:
    def __init__(self, root: Schema, where: str) -> None:
        self._root, self._where = root, where
        self._references = References(root, where)
        self._disjointness = Disjointness(root)
        self._counter = ValueCounter(lambda one: self._resolved(one, where))
        self._visits = 0

    def checked(self, schema: Any, path: str, *, depth: int) -> Any:
        """The schema at `path` in the form that is enforced, with no keyword that has no effect."""
        if schema is True:
            return True
        if schema is False:
            raise refuse(path, "", "'false' allows no value at all")
        if not isinstance(schema, dict):
            raise refuse(path, "", "must be a JSON schema: an object or true")
        self._visits += 1
        if self._visits > VISITS_MAX:
            raise refuse(
                self._where, "", f"has more than {VISITS_MAX} schemas, with those that are referred to"
            )
        if depth > SCHEMA_DEPTH_MAX:
            raise refuse(path, "", f"is nested deeper than {SCHEMA_DEPTH_MAX}")
        for keyword, advice in _REFUSED.items():
            if keyword in schema:
                raise refuse(path, keyword, f"this keyword cannot be enforced; {advice}")
        if depth and isinstance(schema.get("$id"), str):
            raise refuse(
                path, "$id", "is supported at the root alone, since it moves what references lead to"
            )
        found = {
            key: value for key, value in schema.items() if key in _ASSERTIONS or key in (*_CHOOSERS, "type")
        }
        self._check_counts(found, path)
        chooser = next((word for word in _CHOOSERS if word in found), None)
        if chooser is None:
            return self._typed(found, path, depth)
        return self._chosen(found, chooser, path, depth)

    def with_definitions(self, checked: Any) -> Any:
        """The checked root with its definitions, and with the copies that references lead to."""
        definitions: Schema = {}
        for keyword in DEFINITIONS:
            if keyword not in self._root:
                continue
            named, path = self._root[keyword], f"{self._where}.{keyword}"
            if not isinstance(named, dict):
                raise refuse(path, "", "must be an object of schemas")
            definitions[keyword] = {
                name: self.checked(one, f"{path}.{name}", depth=1) for name, one in named.items()
            }
        while (copy := self._references.next_copy()) is not None:
            name, target, path = copy
            definitions.setdefault("$defs", {})[name] = self.checked(target, path, depth=1)
        return checked | definitions if definitions and isinstance(checked, dict) else checked

    @staticmethod
    def _check_counts(schema: Schema, path: str) -> None:
        for keyword in _COUNTS:
            value = schema.get(keyword, 0)
            if isinstance(value, float) and value.is_integer():
                value = schema[keyword] = int(value)
            if type(value) is not int or not 0 <= value < 2**31:
                raise refuse(path, keyword, "must be a whole number that is not negative")

    # --- one of several -----------------------------------------------------------------------------

    def _chosen(self, schema: Schema, chooser: str, path: str, depth: int) -> Any:
        if chooser in ("anyOf", "oneOf", "allOf"):
            return self._branches(schema, chooser, path, depth)
        beside = BESIDE_VALUES if chooser in ("enum", "const") else frozenset({"$ref"})
        if others := sorted(schema.keys() - beside):
            raise refuse(path, others[0], f"cannot be enforced beside {chooser}")
        if chooser == "$ref":
            return {"$ref": self._references.kept(schema["$ref"], path)}
        return check_values(schema, _kinds_of(schema, path) if "type" in schema else None, path)

    def _branches(self, schema: Schema, keyword: str, path: str, depth: int) -> Any:
        branches = schema.pop(keyword)
        if not isinstance(branches, list) or not branches:
            raise refuse(path, keyword, "must be a list of schemas that is not empty")
        if keyword == "allOf":
            branches = [one for one in branches if one is not True and one != {}]
            if not branches:
                return self.checked(schema, path, depth=depth)
            if len(set(map(identity, branches))) > 1:  # Python's == takes 1 and True for the same value.
                raise refuse(path, keyword, "more than one schema cannot be enforced at once; merge them")
            branches = branches[:1]
        else:
            branches = [one for one in branches if one is not False]
        if others := sorted(schema.keys() - {"type"}):
            raise refuse(path, others[0], f"cannot be enforced beside {keyword}; write it into the branches")
        if "type" in schema:
            branches = self._with_types(branches, _kinds_of(schema, path), f"{path}.{keyword}")
        if not branches:
            raise refuse(path, keyword, "has no branch that allows a value")
        found = [
            self.checked(one, f"{path}.{keyword}[{i}]", depth=depth + 1) for i, one in enumerate(branches)
        ]
        if keyword == "oneOf" and not self._disjointness.holds(found, branches):
            raise refuse(
                path, keyword, "its branches may hold at once, which cannot be enforced; tell them apart by "
                "their types or by a required property with different const values, or use anyOf",
            )  # fmt: skip
        # Branches that exclude each other mean the same under both keywords.
        return {"allOf": found} if keyword == "allOf" else {"anyOf": found}

    def _with_types(self, branches: list[Any], kinds: list[str], path: str) -> list[Any]:
        """xgrammar ignores a type beside branches, so every branch gets it."""
        found: list[Any] = []
        for number, branch in enumerate(branches):
            where = f"{path}[{number}]"
            if branch is True:
                found.append({"type": kinds})
            elif not isinstance(branch, dict):
                raise refuse(where, "", "must be a JSON schema: an object or true")
            elif "$ref" in branch:
                target = self._resolved(branch, where)
                own = _kinds_of(target, where) if isinstance(target, dict) and "type" in target else None
                if own is None or _common(own, kinds) != own:
                    raise refuse(where, "$ref", "cannot be enforced beside the type outside of the branches")
                found.append(branch)
            else:
                common = _common(_kinds_of(branch, where), kinds) if "type" in branch else kinds
                found += [branch | {"type": common}] if common else []
        return found

    def _resolved(self, schema: Any, path: str) -> Any:
        for _ in range(8):
            ref = schema.get("$ref") if isinstance(schema, dict) else None
            if not isinstance(ref, str):
                break
            self._references.kept(ref, path)
            schema = self._references.target(ref, path)
        return schema

    # --- one type, or several -----------------------------------------------------------------------

    def _typed(self, schema: Schema, path: str, depth: int) -> Any:
        if "type" in schema:
            kinds = _kinds_of(schema, path)
        else:
            kinds = [kind for kind, words in _BY_TYPE.items() if schema.keys() & words]
            if not kinds:
                return True

        def visit(one: Any, where: str) -> Any:
            return self.checked(one, where, depth=depth + 1)

        if "string" in kinds:
            check_string(schema, path)
        if {"number", "integer"} & set(kinds):
            check_numbers(schema, kinds, path)
        if "array" in kinds:
            check_array(schema, path, visit, self._counter)
        if "object" in kinds:
            check_object(schema, path, visit, self._resolved)
        words = [_BY_TYPE.get("number" if kind == "integer" else kind, ()) for kind in kinds]
        schema = {key: value for key, value in schema.items() if any(key in some for some in words)}
        return self._split(schema, kinds, path) if "integer" in kinds else _named(schema, kinds)

    @staticmethod
    def _split(schema: Schema, kinds: list[str], path: str) -> Schema:
        """Integers that are listed one by one, beside the other types."""
        multiples = listed_multiples(schema, path)
        if multiples is None:
            return _named(schema, kinds)
        listed: Schema = {"enum": multiples}
        others = [kind for kind in kinds if kind != "integer"]
        if not others:
            return listed
        rest = {key: value for key, value in schema.items() if key not in _BY_TYPE["number"]}
        return {"anyOf": [listed, _named(rest, others)]}


def _named(schema: Schema, kinds: list[str]) -> Schema:
    return {"type": kinds[0] if len(kinds) == 1 else kinds, **schema}


def _kinds_of(schema: Schema, path: str) -> list[str]:
    named = schema["type"]
    kinds = named if isinstance(named, list) else [named]
    for kind in kinds or [None]:
        if not isinstance(kind, str) or kind not in TYPES:
            raise refuse(path, "type", f"{kind!r:.60} is no type of JSON schema")
    return list(dict.fromkeys(kinds))


def _common(kinds: list[str], others: list[str]) -> list[str]:
    """The types that both lists allow; an integer is a number."""
    found = [kind for kind in kinds if kind in others or (kind == "integer" and "number" in others)]
    if "number" in kinds and "integer" in others and "number" not in others:
        found.append("integer")
    return list(dict.fromkeys(found))
