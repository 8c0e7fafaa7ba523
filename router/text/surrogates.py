"""Lone surrogates: code points that JSON's escapes can write and that UTF-8 cannot. Pure.

A model may write one half of a pair, as in `"\\ud800"`. The half has no bytes, so an answer that contains it
could not be sent.
"""

import re
from typing import Any, cast

REPLACEMENT = "\ufffd"

_SURROGATE = re.compile("[\ud800-\udfff]")
_ESCAPE = re.compile(
    r"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|u([dD][89a-fA-F][0-9a-fA-F]{2})|.)",
    re.DOTALL,
)
"""One escape of JSON, or the two of a surrogate pair. The group is the code of a lone surrogate."""


def escaped(json_text: str) -> str:
    """Return JSON text with each lone surrogate as its escape, which is the same JSON."""
    return _SURROGATE.sub(lambda found: f"\\u{ord(found[0]):04x}", json_text)


def replaced(text: str) -> str:
    """Return text with each lone surrogate as U+FFFD."""
    return _SURROGATE.sub(REPLACEMENT, text)


def with_replaced_escapes(json_text: str) -> str:
    """Return JSON text with the escape of each lone surrogate as that of U+FFFD, which decoders accept."""
    if "\\ud" not in json_text and "\\uD" not in json_text:
        return json_text
    return _ESCAPE.sub(lambda found: found[0] if found[1] is None else "\\ufffd", json_text)


def replaced_in(value: Any) -> Any:
    """Return a JSON value with the lone surrogates of all its strings, keys too, as U+FFFD."""
    if isinstance(value, str):
        return replaced(value)
    if isinstance(value, dict):
        fields = cast("dict[str, Any]", value)
        return {replaced(key): replaced_in(item) for key, item in fields.items()}
    if isinstance(value, list | tuple):
        return [replaced_in(item) for item in cast("list[Any]", value)]
    return value
