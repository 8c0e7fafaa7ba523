"""Whether the branches of a oneOf exclude each other for certain; then it means the same as anyOf. Pure."""

from collections.abc import Sequence
from itertools import permutations
from typing import Any

from engine.structured.values import identity, kinds_of

Schema = dict[str, Any]

BRANCHES_MAX = 64
"""Branches are compared pairwise."""


def are_disjoint(branches: Sequence[Any], asked: Sequence[Any], root: Schema) -> bool:
    """Whether no value that comes of one branch is valid under another.

    `branches` are in the form that is enforced, which may allow less than what was asked: a type that
    keywords imply is named. What comes of one is therefore held against the others as they were asked.
    """
    if len(branches) > BRANCHES_MAX:
        return False
    written = [_resolved(branch, root) for branch in branches]
    meant = [_resolved(branch, root) for branch in asked]
    return all(_is_apart(written[i], meant[j], root) for i, j in permutations(range(len(branches)), 2))


def _resolved(schema: Any, root: Schema) -> Schema:
    """The schema behind references; what is not understood becomes the schema of any value."""
    for _ in range(8):
        ref = schema.get("$ref") if isinstance(schema, dict) else None
        if not isinstance(ref, str):
            break
        schema = root
        for step in ref.split("/")[1:]:
            schema = schema.get(step) if isinstance(schema, dict) else None
    return schema if isinstance(schema, dict) else {}


def _values(schema: Schema) -> frozenset[bytes] | None:
    """The values that the schema allows at most, or None if they are not listed."""
    listed = [schema["const"]] if "const" in schema else schema.get("enum")
    return frozenset(map(identity, listed)) if isinstance(listed, list) else None


def _kinds(schema: Schema, root: Schema, depth: int = 0) -> frozenset[str] | None:
    """The types that a value of the schema may have, or None if they are not known."""
    listed = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(listed, list):
        return frozenset(kind for value in listed for kind in kinds_of(value))
    branches = schema.get("anyOf", schema.get("allOf"))
    if isinstance(branches, list) and depth < BRANCHES_MAX:
        found = [_kinds(_resolved(one, root), root, depth + 1) for one in branches]
        known = [kinds for kinds in found if kinds is not None]
        return frozenset().union(*known) if len(known) == len(found) else None
    named = schema.get("type")
    if named is None:
        return None
    kinds = set(named if isinstance(named, list) else [named])
    return frozenset(kinds | {"integer"} if "number" in kinds else kinds)


def _is_apart(a: Schema, b: Schema, root: Schema) -> bool:
    values_a, values_b = _values(a), _values(b)
    if values_a is not None and values_b is not None:
        return values_a.isdisjoint(values_b)
    kinds_a, kinds_b = _kinds(a, root), _kinds(b, root)
    if kinds_a is None:
        return False
    common = kinds_a if kinds_b is None else kinds_a & kinds_b
    return not common or (common == frozenset({"object"}) and _are_tagged_apart(a, b, root))


def _are_tagged_apart(a: Schema, b: Schema, root: Schema) -> bool:
    """Whether both require a property whose values differ."""
    for name in set(a.get("required", [])) & set(b.get("required", [])):
        one = _values(_resolved(a.get("properties", {}).get(name), root))
        other = _values(_resolved(b.get("properties", {}).get(name), root))
        if one is not None and other is not None and one.isdisjoint(other):
            return True
    return False
