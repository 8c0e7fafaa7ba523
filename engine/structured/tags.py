"""Structural tags: xgrammar's format, and OpenAI-style structures and triggers, which become it. Pure."""

from typing import Any

import msgspec

from engine.structured.ebnf_size import ebnf_size
from engine.structured.patterns import NESTED_REPEATS_MAX, SIZE_MAX, SKIPPED_MAX, regex_size
from engine.structured.refusal import refuse
from engine.structured.schemas import SCHEMA_DEPTH_MAX, check_bytes, check_schema
from engine.structured.size import BRANCHES_MAX, PARTS_MAX, check_size, too_large
from engine.structured.unique import SchemaMap
from engine.structured.unique_places import check_unique_tags

_REPEATS = ("optional", "star", "plus", "repeat")
_CHOICES = ("elements", "tags", "rules")
"""Keys of the lists of formats: of a sequence or choice, of tags, and of what a dispatch leads to."""


def check_structural_tag(tag: Any, where: str) -> dict[str, Any]:
    """Check a structural tag, and write it as it is enforced. Raises ClientError."""
    if not isinstance(tag, dict):
        raise refuse(where, "", "must be an object")
    if "format" not in tag:
        tag = {"type": "structural_tag", "format": _format_of_structures(tag, where)}
    check_bytes(tag, where)
    form = _FormatChecker(where).checked(tag["format"], f"{where}.format", depth=0, repeats=0, times=1)
    check_unique_tags(form, where)
    checked = {"type": "structural_tag", "format": form}
    # What was rewritten is judged again by the worker, as a whole.
    check_bytes(checked, where)
    return checked


class _Structure(msgspec.Struct):
    begin: str
    end: str
    schema: dict[str, Any] | bool = True


def _format_of_structures(tag: dict[str, Any], where: str) -> dict[str, Any]:
    try:
        structures = msgspec.convert(tag.get("structures"), list[_Structure])
        triggers = msgspec.convert(tag.get("triggers"), list[str])
    except msgspec.ValidationError as error:
        raise refuse(where, "", f"needs a format, or structures and triggers: {error}") from error
    tags = [
        {"type": "tag", "begin": one.begin, "content": {"type": "json_schema", "json_schema": one.schema}}
        | {"end": one.end}
        for one in structures
    ]
    return {"type": "triggered_tags", "triggers": triggers, "tags": tags}


class _FormatChecker:
    """Rewrites the formats of one tag. What is in them counts together."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._parts = 0
        """Properties, branches, alternatives and repetitions."""
        self._elements = 0
        """Formats and elements of grammars, with repetitions written out."""
        self._after_begin = set[int]()
        """Formats that follow a text by which `engine.unique_items` knows them."""

    def checked(self, node: Any, path: str, *, depth: int, repeats: int, times: int) -> Any:
        if depth > SCHEMA_DEPTH_MAX:
            raise refuse(path, "", f"is nested deeper than {SCHEMA_DEPTH_MAX}")
        if isinstance(node, list):
            return [
                self.checked(one, f"{path}[{i}]", depth=depth + 1, repeats=repeats, times=times)
                for i, one in enumerate(node)
            ]
        if not isinstance(node, dict):
            return node
        if node.get("type") in ("json_schema", "qwen_xml_parameter") or "json_schema" in node:
            return self._with_schema(node, path)
        if node.get("type") == "tag" and isinstance(node.get("begin"), str) and node["begin"]:
            self._after_begin.add(id(node.get("content")))
        if node.get("type") in _REPEATS:
            repeats, times = repeats + 1, times * _times(node, path)
            if repeats > NESTED_REPEATS_MAX:
                raise too_large(path, f"{repeats} nested repetitions", NESTED_REPEATS_MAX)
        self._count(0, times)
        self._check_lists(node, path)
        if node.get("type") == "regex":
            self._count(0, times * regex_size(node.get("pattern"), f"{path}.pattern"))
        elif node.get("type") == "grammar":
            parts, elements = ebnf_size(node.get("grammar"), f"{path}.grammar")
            self._count(parts, times * elements)
        return {
            key: self.checked(value, f"{path}.{key}", depth=depth + 1, repeats=repeats, times=times)
            for key, value in node.items()
        }

    def _with_schema(self, node: dict[str, Any], path: str) -> dict[str, Any]:
        for option in ("any_order", "excludes"):
            if node.get(option):
                raise refuse(path, option, "cannot be enforced together with a schema; leave it out")
        schema = check_schema(node.get("json_schema"), f"{path}.json_schema")
        is_json = node.get("type") == "json_schema" and node.get("style", "json") == "json"
        if SchemaMap.has_unique_arrays(schema) and not (is_json and id(node) in self._after_begin):
            why = "uniqueItems is enforced in the JSON of a tag that has a begin text; leave it out here"
            raise refuse(path, "json_schema", why)
        self._count(check_size(schema, f"{path}.json_schema"), 1)
        return node | {"json_schema": schema}

    def _check_lists(self, node: dict[str, Any], path: str) -> None:
        for key in _CHOICES:
            formats = node.get(key)
            if not isinstance(formats, list):
                continue
            is_sequence = node.get("type") == "sequence"
            if not is_sequence and len(formats) > BRANCHES_MAX:
                raise too_large(f"{path}.{key}", f"{len(formats)} formats", BRANCHES_MAX)
            # What is in a tag counts, and not the tag itself: there is one for each tool.
            self._count(0 if key == "tags" else len(formats), 0)
            run = 0
            for one in formats if is_sequence else ():
                run = run + 1 if _may_be_left_out(one) else 0
                if run > SKIPPED_MAX:
                    what = f"{run} formats in a row that may be left out"
                    raise too_large(f"{path}.{key}", what, SKIPPED_MAX)

    def _count(self, parts: int, elements: int) -> None:
        self._parts += parts
        self._elements += elements
        if self._parts > PARTS_MAX:
            what = f"{self._parts} properties, branches, formats and alternatives"
            raise too_large(self._where, what, PARTS_MAX)
        if self._elements > SIZE_MAX:
            what = f"{self._elements} elements, repetitions written out,"
            raise too_large(self._where, what, SIZE_MAX)


def _times(node: dict[str, Any], path: str) -> int:
    if node.get("type") != "repeat":
        return 1
    low, high = node.get("min"), node.get("max")
    if type(low) is not int or type(high) is not int or low < 0 or not (high == -1 or low <= high):
        raise refuse(path, "", "repeat needs whole numbers min and max, and -1 for a max without a bound")
    return max(1, low, high)


def _may_be_left_out(node: Any) -> bool:
    kind = node.get("type") if isinstance(node, dict) else None
    return kind in ("optional", "star") or (kind == "repeat" and node.get("min") == 0)
