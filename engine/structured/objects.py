"""Objects: which names may come, which must, and what stands under them. Pure.

xgrammar (0.2.8) forgets a required name that is not declared, ignores `unevaluatedProperties` beside
`properties` and `additionalProperties` beside `propertyNames`, lets any name with any value through beside
`patternProperties` unless the object is closed, takes declared names beyond plain ASCII for others as well,
and counts a name that comes twice as two.
"""

from collections.abc import Callable
from typing import Any, Protocol

import orjson

from engine.structured.patterns import check_pattern, literal_start
from engine.structured.refusal import refuse
from engine.structured.strings import allows_string
from engine.structured.values import identity

Schema = dict[str, Any]
Visit = Callable[[Any, str], Any]

COPIED_BYTES_MAX = 256
"""Bytes of a schema that is copied to several names. Copies within copies would have no bound."""


class Resolve(Protocol):
    def __call__(self, schema: Any, path: str) -> Any:
        """Return the schema behind a reference."""
        ...


def check_object(schema: Schema, path: str, visit: Visit, resolve: Resolve) -> None:
    """Rewrite the keywords of an object in place, so that all of them are enforced. Raises ClientError."""
    for keyword in ("properties", "patternProperties", "dependentRequired"):
        if not isinstance(schema.get(keyword, {}), dict):
            raise refuse(path, keyword, "must be an object")
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(one, str) for one in required):
        raise refuse(path, "required", "must be a list of names")
    if _may_close(schema):
        named = [*required, *_dependents(schema)]
        declared = schema["properties"]
        schema["properties"] = declared | {name: True for name in named if name not in declared}
        schema["additionalProperties"] = False
    # Neighbours that could evaluate properties (anyOf, $ref, if) are refused, so the two mean the same.
    unevaluated = schema.pop("unevaluatedProperties", True)
    schema.setdefault("additionalProperties", unevaluated)
    schema["required"] = list(dict.fromkeys(required))
    _require_dependents(schema, path)
    schema["properties"] = _declared(schema, path, visit)
    if schema["additionalProperties"] is not False:
        schema["additionalProperties"] = visit(schema["additionalProperties"], f"{path}.additionalProperties")
    if "propertyNames" in schema:
        _check_names(schema, path, visit, resolve)
    if schema.get("patternProperties"):
        _check_patterns(schema, path, visit)
    _declare_required(schema, path)
    _check_counts(schema, path)
    for keyword in ("properties", "required", "patternProperties"):
        if not schema.get(keyword, True):
            del schema[keyword]


def _may_close(schema: Schema) -> bool:
    """Whether an object that declares properties and is silent about others gets no others.

    Libraries that make schemas of classes leave `additionalProperties` out, and a small model invents
    properties until its tokens are spent.
    """
    others = ("additionalProperties", "unevaluatedProperties", "patternProperties", "propertyNames")
    if not schema.get("properties") or any(word in schema for word in others):
        return False
    return schema.get("minProperties", 0) <= len(schema["properties"])


def _dependents(schema: Schema) -> list[str]:
    """The names in `dependentRequired`, as far as it is well formed."""
    lists = [names for names in schema.get("dependentRequired", {}).values() if isinstance(names, list)]
    return [name for names in lists for name in names if isinstance(name, str)]


def _require_dependents(schema: Schema, path: str) -> None:
    """Names that depend on a required name are required; those that depend on an absent name do not
    matter."""
    dependents = schema.pop("dependentRequired", {})
    required = schema["required"]
    known = set(required)
    waiting = {name: names for name, names in dependents.items() if names}
    for name in required:  # It grows while it is read.
        names = waiting.pop(name, [])
        if not isinstance(names, list) or not all(isinstance(one, str) for one in names):
            raise refuse(path, f"dependentRequired.{name}", "must be a list of names")
        required += [one for one in dict.fromkeys(names) if one not in known]
        known.update(names)
    is_closed = schema["additionalProperties"] is False and not schema.get("patternProperties")
    for name, names in waiting.items():
        if is_closed and name not in schema.get("properties", {}):
            continue
        if isinstance(names, list) and all(isinstance(one, str) and one in known for one in names):
            continue
        raise refuse(
            path, "dependentRequired", f"cannot be enforced while {name!r:.100} is optional; require it, or "
            "list the cases in an anyOf",
        )  # fmt: skip


def _declared(schema: Schema, path: str, visit: Visit) -> Schema:
    """The declared properties, checked, without those that the schema forbids."""
    found: Schema = {}
    for name, one in schema.get("properties", {}).items():
        where = f"{path}.properties.{name}"
        if one is not False:
            found[name] = visit(one, where)
        elif schema["additionalProperties"] is not False or schema.get("patternProperties"):
            raise refuse(where, "", "'false' is enforced only where additionalProperties is false as well")
    return found


def _check_names(schema: Schema, path: str, visit: Visit, resolve: Resolve) -> None:
    """`propertyNames` alone is enforced; beside declared names it is decided here, name by name."""
    names = resolve(schema.pop("propertyNames"), path)
    where = f"{path}.propertyNames"
    if names is True:
        return
    names = visit({"type": "string"} | names if isinstance(names, dict) else names, where)
    values = names.get("enum", [names["const"]] if "const" in names else None)
    listed = None if values is None else dict.fromkeys(one for one in values if isinstance(one, str))
    if listed is None and names.get("type") != "string":
        raise refuse(path, "propertyNames", "must list names, or give their pattern, format or length")
    if schema.get("patternProperties"):
        raise refuse(path, "propertyNames", "cannot be enforced beside patternProperties")
    properties, required = schema["properties"], schema["required"]
    is_open = schema["additionalProperties"] is not False
    if listed is None and is_open and not properties and not required:
        if names.keys() != {"type"}:
            schema["propertyNames"] = names
        return
    if listed is None and (is_open or names.keys() & {"pattern", "format"}):
        raise refuse(
            path, "propertyNames", "cannot be enforced beside properties or required; list the names"
        )
    named = {**properties, **dict.fromkeys(required), **(listed or {})}
    allowed = {
        one: None for one in named if (one in listed if listed is not None else allows_string(names, one))
    }
    if missing := [name for name in required if name not in allowed]:
        raise refuse(
            path, "required", f"{missing[0]!r:.100} is required, but propertyNames does not allow it"
        )
    if is_open:
        others = schema["additionalProperties"]
        _check_copied(others, path, "propertyNames", "the names that it lists")
        schema["properties"] = {name: properties.get(name, others) for name in allowed}
        schema["additionalProperties"] = False
    else:
        schema["properties"] = {name: one for name, one in properties.items() if name in allowed}


def _check_patterns(schema: Schema, path: str, visit: Visit) -> None:
    """Names that match a pattern come beside the declared ones, and no others."""
    where = f"{path}.patternProperties"
    patterns: Schema = {}
    for pattern, one in schema["patternProperties"].items():
        check_pattern(pattern, f"{where}[{pattern!r:.100}]", in_json=True)
        patterns[pattern] = visit(one, f"{where}.{pattern}")
    # Python's == takes 1 and True for the same value.
    schemas = {identity(one) for one in patterns.values()}
    if len(schemas) > 1:
        raise refuse(
            path, "patternProperties", "of several patterns is enforced only with the same schema for all"
        )
    starts = [literal_start(pattern) for pattern in patterns]
    known_starts = tuple(start for start in starts if start is not None)
    for name in {**schema["properties"], **dict.fromkeys(schema["required"])}:
        if len(known_starts) == len(starts) and not name.startswith(known_starts):
            continue
        if name not in schema["properties"]:
            raise refuse(path, "required", f"{name!r:.100} may match a pattern, so list it under properties")
        if identity(schema["properties"][name]) not in schemas:
            raise refuse(
                path, "patternProperties", f"may match the property {name!r:.100}, which has another schema; "
                "begin the pattern with '^' and a text that no declared name begins with",
            )  # fmt: skip
    schema["patternProperties"] = patterns


def _declare_required(schema: Schema, path: str) -> None:
    others = schema["additionalProperties"]
    for name in schema["required"]:
        if name in schema["properties"]:
            continue
        if others is False:
            raise refuse(path, "required", f"{name!r:.100} is required, but no property may have that name")
        _check_copied(others, path, "required", repr(name)[:100])
        schema["properties"][name] = others
    # xgrammar keeps other names apart from declared ones only where these are plain.
    if schema.get("patternProperties") or not all(map(_is_plain, schema["properties"])):
        schema["additionalProperties"] = False


def _is_plain(name: str) -> bool:
    """Whether JSON writes the name as it is, in printable ASCII."""
    return name.isascii() and name.isprintable() and not {'"', "\\"} & set(name)


def _check_copied(others: Any, path: str, keyword: str, names: str) -> None:
    if len(orjson.dumps(others)) > COPIED_BYTES_MAX:
        raise refuse(
            path, keyword, f"names {names} beside a long additionalProperties: list it under properties"
        )


def _check_counts(schema: Schema, path: str) -> None:
    needed, declared = len(schema["required"]), len(schema["properties"])
    least, most = schema.get("minProperties", 0), schema.get("maxProperties", 2**31)
    patterns = schema.get("patternProperties")
    is_closed = schema["additionalProperties"] is False and not patterns
    if most < max(needed, least):
        raise refuse(path, "maxProperties", "is less than the object must have")
    if is_closed and least > declared:
        raise refuse(path, "minProperties", "is more than the properties that are declared")
    if least <= needed:
        schema.pop("minProperties", None)
    elif not is_closed and least > (max(1, needed) if patterns else needed + 1):
        # Of the names that are not declared, one may come twice, which counts once when it is read.
        raise refuse(
            path, "minProperties", f"of {least} cannot be enforced here, since a name may come twice; "
            "require more names, or set additionalProperties to false",
        )  # fmt: skip
