"""How large a JSON schema may be for its compilation to take seconds, not minutes. Pure.

Measured with xgrammar 0.2.8, 17,000 tokens, one core: 256 optional properties 0.5 s, 2000 4.8 s, 1000
branches of an anyOf 12.7 s; it grows with the vocabulary, ten times as large in many models.
"""

from typing import Any

from baton.core.errors import ClientError
from engine.structured.refusal import refuse

OPTIONAL_MAX = 256
"""Properties of one object that may be left out."""
BRANCHES_MAX = 256
"""Branches of one anyOf or oneOf."""
PARTS_MAX = 1024
"""Properties and branches in all."""
OTHERS = (
    "additionalItems",
    "unevaluatedItems",
    "unevaluatedProperties",
    "additionalProperties",
    "propertyNames",
)


def check_size(schema: Any, where: str) -> int:
    """Count the properties and branches of the schema. Raises ClientError that names the bound."""
    parts, todo = 0, [schema]
    while todo:
        node = todo.pop()
        if not isinstance(node, dict):
            continue
        properties = _objects(node.get("properties"))
        required = node.get("required", ())
        optional = (
            len(properties.keys() - set(map(str, required)))
            if isinstance(required, list)
            else len(properties)
        )
        if optional > OPTIONAL_MAX:
            raise too_large(where, f"{optional} optional properties in one object", OPTIONAL_MAX)
        for keyword in ("anyOf", "oneOf", "allOf", "prefixItems"):
            branches = node.get(keyword)
            if isinstance(branches, list):
                if keyword in ("anyOf", "oneOf") and len(branches) > BRANCHES_MAX:
                    raise too_large(where, f"{keyword} of {len(branches)} schemas", BRANCHES_MAX)
                parts += len(branches)
                todo += branches
        names = set(map(str, required)) if isinstance(required, list) else set[str]()
        parts += len(properties.keys() | names)
        if parts > PARTS_MAX:
            raise too_large(where, f"{parts} properties and branches", PARTS_MAX)
        todo += properties.values()
        for keyword in ("patternProperties", "$defs", "definitions"):
            todo += _objects(node.get(keyword)).values()
        items = node.get("items")
        todo += items if isinstance(items, list) else [items]
        todo += [node.get(keyword) for keyword in OTHERS]
    return parts


def _objects(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def too_large(where: str, what: str, most: int) -> ClientError:
    return refuse(where, "", f"{what} take too long to compile, at most {most} are allowed")
