"""Whether the branches of a oneOf exclude each other for certain; then it means the same as anyOf. Pure."""

from collections.abc import Sequence
from itertools import permutations
from typing import Any

from engine.structured.values import identity, kinds_of

Schema = dict[str, Any]

BRANCHES_MAX = 64
"""Branches are compared pairwise."""


class Disjointness:
    """Comparisons of the branches of all oneOfs of one schema.

    Branches that refer to the same definitions share what was found out about these, since a definition
    may list thousands of values and be referred to thousands of times.
    """

    def __init__(self, root: Schema) -> None:
        self._root = root
        # The schemas are kept, so that no other schema gets the same id.
        self._listed: dict[int, tuple[Schema, frozenset[bytes]]] = {}
        self._kinds_listed: dict[int, tuple[Schema, frozenset[str]]] = {}
        self._compared: dict[tuple[int, int], bool] = {}

    def holds(self, branches: Sequence[Any], asked: Sequence[Any]) -> bool:
        """Whether no value that comes of one branch is valid under another.

        `branches` are in the form that is enforced, which may allow less than what was asked: a type that
        keywords imply is named. What comes of one is therefore held against the others as they were asked.
        """
        if len(branches) > BRANCHES_MAX:
            return False
        written = [self._resolved(branch) for branch in branches]
        meant = [self._resolved(branch) for branch in asked]
        return all(self._is_apart(written[i], meant[j]) for i, j in permutations(range(len(branches)), 2))

    def _resolved(self, schema: Any) -> Schema:
        """The schema behind references; what is not understood becomes the schema of any value."""
        for _ in range(8):
            ref = schema.get("$ref") if isinstance(schema, dict) else None
            if not isinstance(ref, str):
                break
            schema = self._root
            for step in ref.split("/")[1:]:
                schema = schema.get(step) if isinstance(schema, dict) else None
        return schema if isinstance(schema, dict) else {}

    def _values(self, schema: Schema) -> frozenset[bytes] | None:
        """The values that the schema allows at most, or None if they are not listed."""
        listed = _listed(schema)
        if listed is None:
            return None
        if id(schema) not in self._listed:
            self._listed[id(schema)] = schema, frozenset(map(identity, listed))
        return self._listed[id(schema)][1]

    def _have_no_value_in_common(self, a: Schema, b: Schema) -> bool | None:
        """Whether two lists of values are disjoint, or None if either schema has no list."""
        one, other = self._values(a), self._values(b)
        if one is None or other is None:
            return None
        pair = id(a), id(b)
        if pair not in self._compared:
            self._compared[pair] = one.isdisjoint(other)
        return self._compared[pair]

    def _kinds(self, schema: Schema) -> frozenset[str] | None:
        """The types that a value of the schema may have, or None if they are not known."""
        found: set[str] = set()
        seen: set[int] = set()
        todo: list[Any] = [schema]
        while todo:
            one = self._resolved(todo.pop())
            if id(one) in seen:
                continue
            seen.add(id(one))
            branches = one.get("anyOf", one.get("allOf"))
            if _listed(one) is None and isinstance(branches, list):
                todo += branches
                continue
            kinds = self._own_kinds(one)
            if kinds is None:
                return None
            found |= kinds
        return frozenset(found)

    def _own_kinds(self, schema: Schema) -> frozenset[str] | None:
        """The types of a schema without branches."""
        listed = _listed(schema)
        if listed is not None:
            if id(schema) not in self._kinds_listed:
                kinds = frozenset(kind for value in listed for kind in kinds_of(value))
                self._kinds_listed[id(schema)] = schema, kinds
            return self._kinds_listed[id(schema)][1]
        named = schema.get("type")
        kinds = frozenset(_names(named if isinstance(named, list) else [named]))
        return (kinds | {"integer"} if "number" in kinds else kinds) or None

    def _is_apart(self, a: Schema, b: Schema) -> bool:
        disjoint = self._have_no_value_in_common(a, b)
        if disjoint is not None:
            return disjoint
        kinds_a, kinds_b = self._kinds(a), self._kinds(b)
        if kinds_a is None:
            return False
        common = kinds_a if kinds_b is None else kinds_a & kinds_b
        return not common or (common == frozenset({"object"}) and self._are_tagged_apart(a, b))

    def _are_tagged_apart(self, a: Schema, b: Schema) -> bool:
        """Whether both require a property whose values differ."""
        properties_a, properties_b = a.get("properties"), b.get("properties")
        if not isinstance(properties_a, dict) or not isinstance(properties_b, dict):
            return False
        required = set(_names(a.get("required"))) & set(_names(b.get("required")))
        return any(
            self._have_no_value_in_common(
                self._resolved(properties_a.get(name)), self._resolved(properties_b.get(name))
            )
            for name in required
        )


def _listed(schema: Schema) -> list[Any] | None:
    listed = [schema["const"]] if "const" in schema else schema.get("enum")
    return listed if isinstance(listed, list) else None


def _names(value: Any) -> list[str]:
    """The strings of a list. `value` may be anything: definitions are read here before they are checked."""
    return [one for one in value if isinstance(one, str)] if isinstance(value, list) else []
