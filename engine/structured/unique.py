"""Arrays without equal items: which of them can be enforced, and what a schema says of a place in JSON. Pure.

No grammar can say that items differ, so the text itself is looked at while it comes
(`engine.unique_items`). The judge makes sure that there are enough values: the mask then never has to leave
an array without an item that it must have.
"""

import math
import re
from collections.abc import Callable, Iterator
from re._parser import parse  # pyright: ignore[reportMissingImports] - Python's own, without a stub
from typing import Any

from engine.structured.values import identity

Schema = dict[str, Any]
Places = tuple[Schema, ...]
"""The schemas that may hold at one place of a text, without references and branches."""

MANY = 1e6
"""Stands for so many values that no array could need more."""
_CLASSES_MIN = 10
"""The least number of characters that `.`, a negated class or a class of a category has."""
VISITS_MAX = 1024
"""Schemas and listed values that are looked at for one array. What lies beyond counts as one value."""


class ValueCounter:
    """Lower bounds of the number of different values that checked schemas allow."""

    def __init__(self, resolved: Callable[[Any], Any]) -> None:
        """`resolved` follows a reference, to the same object each time."""
        self._resolved = resolved
        self._known: dict[int, float] = {}
        """What was found behind references."""
        self._left = 0

    def least(self, schema: Any) -> float:
        """Return how many values the schema has at least."""
        self._left = VISITS_MAX
        return self._least(schema)

    def _least(self, schema: Any) -> float:
        self._left -= 1
        if schema is True:
            return MANY
        if not isinstance(schema, dict) or self._left < 0:
            return 1
        if "$ref" in schema:
            return self._referred(self._resolved(schema))
        if "enum" in schema:
            values = schema["enum"][: self._left + 1]
            self._left -= len(values)
            return len(set(map(identity, values)))
        for keyword in ("anyOf", "oneOf", "allOf"):
            if keyword in schema:
                return self._of_branches(schema[keyword])
        named = schema.get("type", ())
        kinds = {named} if isinstance(named, str) else set(named)
        if "number" in kinds:
            kinds.discard("integer")
        # Values of different types differ, except that an integer is a number.
        return max(1, sum(self._of_kind(schema, kind) for kind in kinds))

    def _referred(self, target: Any) -> float:
        if id(target) not in self._known:
            self._known[id(target)] = 1  # for a schema within itself
            self._known[id(target)] = self._least(target)
        return self._known[id(target)]

    def _of_branches(self, branches: list[Any]) -> float:
        kinds = [one.get("type") if isinstance(one, dict) else None for one in branches]
        single = {kind for kind in kinds if isinstance(kind, str)}
        is_apart = len(single) == len(kinds) and not single >= {"integer", "number"}
        counts = [self._least(one) for one in branches]
        return sum(counts) if is_apart else max(counts, default=1)

    def _of_kind(self, schema: Schema, kind: str) -> float:
        match kind:
            case "boolean":
                return 2
            case "string":
                return _strings(schema)
            case "integer" | "number":
                return _numbers(schema, is_whole=kind == "integer")
            case "array":
                return self._arrays(schema)
            case "object":
                return self._objects(schema)
            case _:
                return 1

    def _objects(self, schema: Schema) -> float:
        properties = schema.get("properties", {})
        optional = len(properties.keys() - set(schema.get("required", ())))
        is_open = schema.get("additionalProperties", not properties) is not False
        is_many = is_open and "maxProperties" not in schema and "propertyNames" not in schema
        return max([MANY if is_many else 1, 1 + optional, *map(self._least, properties.values())])

    def _arrays(self, schema: Schema) -> float:
        least, most = schema.get("minItems", 0), schema.get("maxItems", math.inf)
        if schema.get("prefixItems"):
            return max(map(self._least, schema["prefixItems"]))
        if most == 0:
            return 1
        items = self._least(schema.get("items", True))
        if not schema.get("uniqueItems"):
            return max(items, most - least + 1)
        lengths = range(least, int(min(most, items, least + 2)) + 1)
        return sum(math.perm(int(items), min(length, 3)) for length in lengths)


def _strings(schema: Schema) -> float:
    if "pattern" in schema:
        return _pattern_values(schema["pattern"])
    if "format" in schema:
        return 1000
    least, most = schema.get("minLength", 0), schema.get("maxLength", math.inf)
    return 1 if most == 0 else max(64 ** min(most, 3), most - least + 1)


def _numbers(schema: Schema, *, is_whole: bool) -> float:
    lows = [schema[key] for key in ("minimum", "exclusiveMinimum") if key in schema]
    highs = [schema[key] for key in ("maximum", "exclusiveMaximum") if key in schema]
    if not lows or not highs:
        return MANY
    if not is_whole:
        return max(1, math.floor((min(highs) - max(lows)) * 1e5))
    excluded = sum(key in schema for key in ("exclusiveMinimum", "exclusiveMaximum"))
    return max(1, math.floor(min(highs)) - math.ceil(max(lows)) + 1 - excluded)


def _pattern_values(pattern: str) -> float:
    try:
        parsed = parse(pattern)
    except re.error:
        return 1
    return _of_sequence(parsed)


def _of_sequence(parts: Any) -> float:
    # Where all parts but one stay as they are, different texts of that one make different texts.
    return max((_of_part(str(kind), value) for kind, value in parts), default=1)


def _of_part(kind: str, value: Any) -> float:
    match kind:
        case "ANY" | "NOT_LITERAL":
            return _CLASSES_MIN
        case "IN":
            is_negated = str(value[0][0]) == "NEGATE"
            return _CLASSES_MIN if is_negated else sum(_of_class(str(one), what) for one, what in value)
        case "BRANCH":
            return max(map(_of_sequence, value[1]))
        case "SUBPATTERN":
            return _of_sequence(value[3])
        case "MAX_REPEAT" | "MIN_REPEAT":
            least, most, inside = value
            if most == 0 or all(str(one) == "AT" for one, _ in inside):
                return 1
            return max(_of_sequence(inside), min(float(most), MANY) - least + 1)
        case _:
            return 1


def _of_class(kind: str, value: Any) -> float:
    if kind == "RANGE":
        return value[1] - value[0] + 1
    return _CLASSES_MIN if kind == "CATEGORY" else 1


class SchemaMap:
    """What a checked schema says of places in a text under it."""

    def __init__(self, root: Any) -> None:
        self._root = root

    @property
    def all(self) -> Any:
        """The whole schema."""
        return self._root

    @property
    def root(self) -> Places:
        return self._flat((self._root,))

    @staticmethod
    def has_unique_arrays(schema: Any) -> bool:
        """Whether any array of the schema must have different items."""
        todo = [schema]
        while todo:
            node = todo.pop()
            if not isinstance(node, dict):
                continue
            if node.get("uniqueItems") is True:
                return True
            todo += [node.get(word) for word in ("items", "additionalProperties", "propertyNames")]
            for word in ("anyOf", "oneOf", "allOf", "prefixItems"):
                todo += node.get(word, ())
            for word in ("properties", "patternProperties", "$defs", "definitions"):
                todo += node.get(word, {}).values()
        return False

    def least(self, schema: Any) -> float:
        """How many values a schema within this one has at least."""
        return ValueCounter(self._resolved).least(schema)

    def _resolved(self, schema: Any) -> Any:
        for _ in range(8):
            ref = schema.get("$ref") if isinstance(schema, dict) else None
            if not isinstance(ref, str):
                break
            schema = self._target(ref)
        return schema

    def property(self, places: Places, name: str) -> Places:
        """The schemas of a property's value."""
        return self._flat(one for place in places for one in _of_property(place, name))

    def item(self, places: Places, index: int) -> Places:
        """The schemas of an array's item."""
        return self._flat(_of_item(place, index) for place in places)

    @staticmethod
    def is_unique(places: Places) -> bool:
        """Whether an array there must have different items. Where branches disagree it must."""
        return any(place.get("uniqueItems") is True for place in places)

    def _flat(self, schemas: Any) -> Places:
        found: list[Schema] = []
        todo, seen = list(schemas), set[int]()
        while todo:
            one = todo.pop()
            if not isinstance(one, dict) or id(one) in seen:
                continue
            seen.add(id(one))
            ref = one.get("$ref")
            branches = [branch for word in ("anyOf", "allOf", "oneOf") for branch in one.get(word, ())]
            if isinstance(ref, str):
                todo.append(self._target(ref))
            elif branches:
                todo += branches
            else:
                found.append(one)
        return tuple(found)

    def _target(self, ref: str) -> Any:
        found = self._root
        for step in ref.split("/")[1:]:
            found = found.get(step) if isinstance(found, dict) else None
        return found


def _of_property(place: Schema, name: str) -> Iterator[Any]:
    if name in place.get("properties", {}):
        yield place["properties"][name]
        return
    yield from place.get("patternProperties", {}).values()
    yield place.get("additionalProperties")


def _of_item(place: Schema, index: int) -> Any:
    prefix = place.get("prefixItems", [])
    return prefix[index] if index < len(prefix) else place.get("items")
