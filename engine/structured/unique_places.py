"""Places where arrays with `uniqueItems` stand beside others, and lists of values that are too alike. Pure.

The text tells `engine.unique_items` where an array stands, and not which branch of an anyOf it belongs to. So
items that must differ in one branch would have to differ in the others, and what needs equal items there
would come to a dead end.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import orjson

from engine.structured.refusal import refuse
from engine.structured.unique import Places, SchemaMap
from engine.structured.values import identity

LOOKS_MAX = 64 * 1024
"""Schemas that are looked at, each of them for each property at its place."""
ALIKE_MAX = 512
"""Characters with which two listed values may both begin. The way from the first of them to the one in which
they differ is searched while everybody in the batch waits."""
Schema = dict[str, Any]


def check_unique_places(schema: Any, where: str) -> None:
    """Refuse a checked schema in which arrays at one place disagree about `uniqueItems`."""
    if SchemaMap.has_unique_arrays(schema):
        _Places(schema, where).check()


def tags_of(node: Any) -> Iterator[tuple[str, Any]]:
    """The begin texts and schemas of the tags in a structural tag that was checked."""
    if isinstance(node, list):
        for one in node:
            yield from tags_of(one)
    elif isinstance(node, dict):
        content = node.get("content")
        if node.get("type") == "tag" and isinstance(content, dict) and "json_schema" in content:
            yield str(node["begin"]), content["json_schema"]
        else:
            for value in node.values():
                yield from tags_of(value)


def check_unique_tags(form: Any, where: str) -> None:
    """Refuse a checked tag whose arrays must have different items and which cannot be told from another."""
    tags = list(tags_of(form))
    for begin, schema in tags:
        for other, another in tags if SchemaMap.has_unique_arrays(schema) else ():
            if (begin.endswith(other) or other.endswith(begin)) and identity(schema) != identity(another):
                why = "beside uniqueItems no two tags of different schemas may end in the same begin text"
                raise refuse(where, "begin", why)


class _Places:
    def __init__(self, schema: Any, where: str) -> None:
        self._map, self._where = SchemaMap(schema), where
        self._todo: list[tuple[Places, str]] = [(self._map.root, where)]
        self._looks = 0
        self._listed: dict[int, tuple[Schema, Places]] = {}
        """Lists of values as schemas of one value each. The lists are kept, so that no other gets the id."""

    def check(self) -> None:
        seen = set[frozenset[int]]()
        while self._todo:
            places, path = self._todo.pop()
            places = tuple(one for place in places for one in self._written_out(place))
            key = frozenset(map(id, places))
            if not key or key in seen:
                continue
            seen.add(key)
            self._count(len(places))
            self._arrays([one for one in places if _is(one, "array")], path)
            self._objects([one for one in places if _is(one, "object")], path)

    def _count(self, looks: int) -> None:
        self._looks += looks
        if self._looks > LOOKS_MAX:
            raise refuse(self._where, "", "has too many properties and branches beside uniqueItems")

    def _written_out(self, place: Schema) -> Places:
        if id(place) not in self._listed:
            values = [place["const"]] if "const" in place else place.get("enum")
            found = (place,) if values is None else tuple(map(_schema_of, values))
            self._listed[id(place)] = place, tuple(one for one in found if one)
        return self._listed[id(place)][1]

    def _arrays(self, places: list[Schema], path: str) -> None:
        unique = [one for one in places if one.get("uniqueItems") is True]
        if unique and any(_may_repeat(one) for one in places):
            why = "an array that may stand at the same place (in another branch) has no uniqueItems; say the "
            raise refuse(path, "uniqueItems", why + "same in both, or leave it out")
        for one in unique:
            for items in self._map.item((one,), 0):
                _check_alike(items, f"{path}.items")
        for index in range(max((len(one.get("prefixItems", ())) for one in places), default=-1) + 1):
            self._todo.append((self._map.item(tuple(places), index), f"{path}.items"))

    def _objects(self, places: list[Schema], path: str) -> None:
        names = {name for one in places for name in one.get("properties", {})}
        self._count(len(names) * len(places))
        other = "x" * (max(map(len, names), default=0) + 1)
        for name in (*sorted(names), other) if places else ():
            word = "additionalProperties" if name == other else f"properties.{name}"
            self._todo.append((self._map.property(tuple(places), name), f"{path}.{word}"))


def _is(place: Schema, kind: str) -> bool:
    named = place.get("type")
    return named == kind or (isinstance(named, list) and kind in named)


def _may_repeat(array: Schema) -> bool:
    length_max = len(array.get("prefixItems", ())) if array.get("items") is False else 2
    return array.get("uniqueItems") is not True and min(length_max, array.get("maxItems", 2)) > 1


def _schema_of(value: Any) -> Schema:
    """What is to be known of a listed value: the arrays and objects in it."""
    if isinstance(value, dict):
        return {"type": "object", "properties": {name: {"const": one} for name, one in value.items()}}
    if not isinstance(value, list):
        return {}
    is_unique = len(set(map(identity, value))) == len(value)
    items = [{"const": one} for one in value]
    return {"type": "array", "prefixItems": items, "items": False, "uniqueItems": is_unique}


def _check_alike(items: Schema, path: str) -> None:
    texts = sorted(orjson.dumps(value) for value in items.get("enum", ()))
    for one, other in pairwise(texts):
        if one[:ALIKE_MAX] == other[:ALIKE_MAX] and len(one) > ALIKE_MAX:
            why = f"has values that are the same for more than {ALIKE_MAX} characters, too many to keep apart"
            raise refuse(path, "enum", why)
