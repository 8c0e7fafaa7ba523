"""Strings: lengths, patterns and formats, of which xgrammar (0.2.8) enforces one at a time. Pure."""

import re
from re._parser import parse  # pyright: ignore[reportMissingImports] - Python's own, without a stub
from typing import Any

from engine.structured.patterns import check_pattern
from engine.structured.refusal import refuse

Schema = dict[str, Any]

_YEAR = "[1-9][0-9]{3}"
_LEAP_YEAR = "([1-9][0-9](0[48]|[2468][048]|[13579][26])|([2468][048]|[13579][26])00)"
_DATE = (
    rf"({_YEAR}-((01|03|05|07|08|10|12)-(0[1-9]|[12][0-9]|3[01])|(04|06|09|11)-(0[1-9]|[12][0-9]|30)"
    rf"|02-(0[1-9]|1[0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
)
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,6})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_LABEL = "[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_LOCAL = "[A-Za-z0-9!#%&'*+/=?_~-]{1,32}"
_URI = rf"^https?://{_LABEL}(\.{_LABEL}){{0,3}}(/[A-Za-z0-9._~-]{{0,60}}){{0,4}}$"
"""Addresses of a length that is known; the format alone allows any."""
_HEX = "[0-9a-f]"
_POINTER = "(/([A-Za-z0-9_.-]|~[01])*)*"
FORMAT_PATTERNS = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}T{_TIME}$",
    "email": rf"^{_LOCAL}(\.{_LOCAL})?@{_LABEL}(\.{_LABEL}){{0,2}}$",
    "hostname": rf"^{_LABEL}(\.{_LABEL}){{0,2}}$",
    "ipv4": rf"^({_BYTE}\.){{3}}{_BYTE}$",
    "json-pointer": f"^{_POINTER}$",
    "relative-json-pointer": f"^(0|[1-9][0-9]*)(#|{_POINTER})$",
    **{
        f"uuid{version}": rf"^{_HEX}{{8}}-{_HEX}{{4}}-{version}{_HEX}{{3}}-[89ab]{_HEX}{{3}}-{_HEX}{{12}}$"
        for version in (1, 3, 4, 5)
    },
}
"""Patterns in place of xgrammar's own formats.

Those allow 30 February, bytes with leading zeros and labels of any length, and in an email address or a
pointer characters that end the JSON string or are no escape of it.
"""
FORMATS = frozenset({"duration", "ipv6", "uri", "uri-reference", "uri-template", "uuid", *FORMAT_PATTERNS})
NOTES = frozenset(
    {"password", "binary", "byte", "path", "file-path", "directory-path", "json-string", "textarea"}
)
"""Formats that say what a string is for and demand nothing of its text: OpenAPI's and pydantic's."""
_LENGTHS = {
    "date": (10, 10),
    "time": (9, 21),
    "date-time": (20, 32),
    "email": (3, 256),
    "hostname": (1, 191),
    "ipv4": (7, 15),
    "uuid": (36, 36),
    "uri": (8, 512),
    **{f"uuid{version}": (36, 36) for version in (1, 3, 4, 5)},
}
"""Shortest and longest text of formats, as they are enforced here beside a length."""
_ESCAPE_OR_CLASS = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]", re.DOTALL)
_NEGATED = {
    r"\W": r"[ !#-/:-@\[\]^`{-~]",
    r"\S": r"[!#-\[\]-~]",
    r"\D": r"[ !#-/:-\[\]-~]",
}
"""ECMAScript, Python and others differ in which characters beyond ASCII are letters, digits and spaces."""
_ONE_CLASS = re.compile(r"\^?((?:\\[dw]|\[(?:[^\]\\]|\\.)+\]))([+*])\$?")


def check_string(schema: Schema, path: str) -> None:
    """Rewrite the keywords of a string in place, so that all of them are enforced. Raises ClientError."""
    if schema.get("minLength") == 0:
        del schema["minLength"]
    if schema.get("minLength", 0) > schema.get("maxLength", 2**31):
        raise refuse(path, "minLength", "is above maxLength")
    if schema.get("format") in NOTES:
        del schema["format"]
    _merge_lengths(schema)
    given = [word for word in ("format", "pattern") if word in schema]
    lengths = [word for word in ("minLength", "maxLength") if word in schema]
    if len(given) + bool(lengths) > 1:
        extra = (lengths + given[1:])[0]
        raise refuse(path, extra, f"cannot be enforced beside {given[0]}; write both as one pattern")
    if "format" in schema:
        form = schema.pop("format")
        if not isinstance(form, str) or form not in FORMATS:
            raise refuse(
                path,
                "format",
                f"{form!r:.60} cannot be enforced, only {', '.join(sorted(FORMATS))}; leave it out",
            )
        if form in FORMAT_PATTERNS:
            schema["pattern"] = FORMAT_PATTERNS[form]
        else:
            schema["format"] = form
    elif "pattern" in schema:
        if not isinstance(schema["pattern"], str):
            raise refuse(path, "pattern", "must be a string")
        check_pattern(schema["pattern"], f"{path}.pattern", in_json=True)
        schema["pattern"] = _ESCAPE_OR_CLASS.sub(_in_every_dialect, schema["pattern"])


def _merge_lengths(schema: Schema) -> None:
    """Leave lengths out that a pattern or format keeps by itself, and write others into the pattern."""
    bounds = schema.get("minLength", 0), schema.get("maxLength", 2**31)
    if bounds == (0, 2**31):
        return
    form, pattern = schema.get("format"), schema.get("pattern")
    if isinstance(form, str) and form in _LENGTHS and pattern is None:
        known = _LENGTHS[form]
    elif isinstance(pattern, str) and form is None:
        if found := _ONE_CLASS.fullmatch(pattern):
            least, most = max(bounds[0], int(found[2] == "+")), schema.get("maxLength", "")
            schema["pattern"] = f"^{found[1]}{{{least},{most}}}$"
            known = bounds
        else:
            known = _width(pattern)
    else:
        return
    if bounds[0] <= known[0] and known[1] <= bounds[1]:
        schema.pop("minLength", None)
        schema.pop("maxLength", None)
        if form == "uri":
            del schema["format"]
            schema["pattern"] = _URI


def _in_every_dialect(found: re.Match[str]) -> str:
    """The negated class of an escape, kept to the characters on which ECMAScript and Python agree."""
    return _NEGATED.get(found[0], found[0])


def _width(pattern: str) -> tuple[int, int]:
    """The shortest and longest match of a pattern; nothing is known of one that Python does not read."""
    try:
        least, most = parse(pattern).getwidth()
    except (re.error, RecursionError, OverflowError):
        return 0, 2**32
    return least, most


def allows_string(schema: Schema, value: str) -> bool:
    """Whether a listed string keeps the lengths that stand beside the list."""
    return schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value))
