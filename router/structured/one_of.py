"""Whether the branches of a oneOf exclude each other for certain: then it is the same as anyOf. Pure."""

from collections.abc import Sequence
from itertools import combinations
from typing import Any

import orjson

BRANCHES_MAX = 64
"""They are compared pairwise."""


def are_disjoint(branches: Sequence[Any], root: dict[str, Any]) -> bool:
    if len(branches) > BRANCHES_MAX:
        return False
    resolved = [_resolved(branch, root) for branch in branches]
    return all(_exclude_each_other(a, b, root) for a, b in combinations(resolved, 2))


def _resolved(schema: Any, root: dict[str, Any]) -> dict[str, Any]:
    """Behind references; what is not understood is any value."""
    for _ in range(8):
        ref = schema.get("$ref") if isinstance(schema, dict) else None
        if not isinstance(ref, str):
            break
        schema = root
        for step in ref.split("/")[1:]:
            schema = schema.get(step) if isinstance(schema, dict) else None
    return schema if isinstance(schema, dict) else {}


def _values(schema: dict[str, Any]) -> frozenset[bytes] | None:
    """Those it allows at most, None if they are not listed. 1 and 1.0 are one number."""
    listed = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if not isinstance(listed, list):
        return None
    return frozenset(
        orjson.dumps(int(v) if isinstance(v, float) and v.is_integer() and abs(v) < 2**63 else v)
        for v in listed
    )


def _kinds(schema: dict[str, Any]) -> frozenset[str] | None:
    named = schema.get("type")
    if named is None:
        return None
    kinds = set(named if isinstance(named, list) else [named])
    if "number" in kinds:
        kinds.add("integer")
    return frozenset(kinds)


def _exclude_each_other(a: dict[str, Any], b: dict[str, Any], root: dict[str, Any]) -> bool:
    values_a, values_b = _values(a), _values(b)
    if values_a is not None and values_b is not None:
        return values_a.isdisjoint(values_b)
    kinds_a, kinds_b = _kinds(a), _kinds(b)
    if kinds_a is None or kinds_b is None:
        return False
    common = kinds_a & kinds_b
    return not common or (set(common) == {"object"} and _are_tagged_apart(a, b, root))


def _are_tagged_apart(a: dict[str, Any], b: dict[str, Any], root: dict[str, Any]) -> bool:
    """A property that both require and that has other values in each."""
    for name in set(a.get("required", [])) & set(b.get("required", [])):
        one = _values(_resolved(a.get("properties", {}).get(name), root))
        other = _values(_resolved(b.get("properties", {}).get(name), root))
        if one is not None and other is not None and one.isdisjoint(other):
            return True
    return False
