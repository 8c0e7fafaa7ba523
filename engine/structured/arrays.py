"""Arrays: tuples of both notations, lengths, and what may follow. Pure.

xgrammar (0.2.8) knows `prefixItems` and `items` of draft 2020-12 and refuses a `maxItems` below the tuple's
length.
"""

from collections.abc import Callable
from typing import Any

from engine.structured.refusal import refuse
from engine.structured.unique import ValueCounter

Schema = dict[str, Any]
Visit = Callable[[Any, str], Any]


def check_array(schema: Schema, path: str, visit: Visit, counter: ValueCounter) -> None:
    """Rewrite the keywords of an array in place, so that all of them are enforced. Raises ClientError."""
    _write_as_2020(schema, path)
    prefix = schema.pop("prefixItems", [])
    items = schema.pop("items", True)
    if not isinstance(prefix, list):
        raise refuse(path, "prefixItems", "must be a list of schemas")
    if False in [one for one in prefix if isinstance(one, bool)]:
        # Nothing may stand at that position, so the array ends before it.
        end = next(i for i, one in enumerate(prefix) if one is False)
        prefix, items = prefix[:end], False
    most = schema.get("maxItems", 2**31)
    if most <= len(prefix):
        prefix, items = prefix[:most], False
    least = schema.get("minItems", 0)
    if least > most or (items is False and least > len(prefix)):
        raise refuse(path, "minItems", "is more than the array may have")
    is_unique = schema.pop("uniqueItems", False)
    if type(is_unique) is not bool:
        raise refuse(path, "uniqueItems", "must be true or false")
    is_unique = is_unique and min(most, len(prefix) if items is False else most) > 1
    if is_unique and prefix:
        raise refuse(path, "uniqueItems", "cannot be enforced beside a tuple; leave it out")
    if prefix:
        found = [visit(one, f"{path}.prefixItems[{i}]") for i, one in enumerate(prefix)]
        # Here, and only here, xgrammar takes no `true`.
        schema["prefixItems"] = [{} if one is True else one for one in found]
    # Said in any case: in a structural tag xgrammar takes no word for "none".
    schema["items"] = False if items is False else visit(items, f"{path}.items")
    if is_unique:
        schema["uniqueItems"] = True
        if least > 1 and counter.least(schema["items"]) < least:
            raise refuse(path, "minItems", "is more than the items are known to have different values")


def _write_as_2020(schema: Schema, path: str) -> None:
    """Draft 7 writes a tuple as a list in `items`, and `additionalItems` for the rest."""
    others = schema.pop("additionalItems", True)
    if isinstance(schema.get("items"), list):
        if "prefixItems" in schema:
            raise refuse(path, "items", "cannot be a list beside prefixItems")
        schema["prefixItems"] = schema["items"]
        schema["items"] = others
        if others is True:
            del schema["items"]
    # Neighbours that could evaluate items (anyOf, $ref, contains) are refused, so the two mean the same.
    unevaluated = schema.pop("unevaluatedItems", True)
    schema.setdefault("items", unevaluated)
