"""Typed reads from a config.json, with errors that name file and field. No torch here."""

import sys
from collections.abc import Mapping
from typing import Any, cast

from baton.core.errors import SetupError
from baton.core.geometry import DTYPE_BYTES, DTypeName

INTEGER_MAX = 1 << 24
"""Largest number that a field of a config.json may have: no vocabulary, width or context is larger."""
LAYERS_MAX = 4096
TOKEN_ID_MAX = 2**31 - 1
EOS_TOKENS_MAX = 1024


class Fields:
    """One JSON object. A field that is null counts as left out."""

    def __init__(self, data: Mapping[str, Any], where: str) -> None:
        self.data, self.where = data, where

    def with_defaults(self, defaults: Mapping[str, Any]) -> "Fields":
        """`defaults` hold for fields that are left out, not for those that are null."""
        return Fields({**defaults, **self.data}, self.where)

    def has(self, name: str) -> bool:
        return self.data.get(name) is not None

    def refused(self, name: str, reason: str) -> SetupError:
        return SetupError(f"{self.where}: {name} {self.data.get(name)!r:.100} is not supported{reason}")

    def integer(
        self, name: str, default: int | None = None, *, least: int = 1, most: int = INTEGER_MAX
    ) -> int:
        value = self._value(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise SetupError(
                f"{self.where}: {name} must be a whole number of at least {least}, is {value!r:.100}"
            )
        if value > most:
            raise SetupError(f"{self.where}: {name} must be at most {most}, is {value!r:.100}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A number that is finite."""
        value = self._value(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not _is_finite(value):
            raise SetupError(f"{self.where}: {name} must be a number, is {value!r:.100}")
        return float(value)

    def positive(self, name: str, default: float | None = None) -> float:
        """A finite number above 0."""
        value = self.number(name, default)
        if value <= 0:
            raise SetupError(f"{self.where}: {name} must be above 0, is {value:g}")
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise SetupError(f"{self.where}: {name} must be true or false, is {value!r:.100}")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        value = self._value(name, default)
        if not isinstance(value, str):
            raise SetupError(f"{self.where}: {name} must be a text, is {value!r:.100}")
        return value

    def numbers(self, name: str) -> tuple[float, ...]:
        return tuple(float(value) for value in self._items(name, "numbers", (int, float)))

    def integers(self, name: str) -> tuple[int, ...]:
        return tuple(int(value) for value in self._items(name, "whole numbers", (int,)))

    def texts(self, name: str) -> tuple[str, ...]:
        return tuple(str(value) for value in self._items(name, "texts", (str,)))

    def nested(self, name: str) -> "Fields":
        """Empty if left out."""
        value = self.data.get(name) or {}
        if not isinstance(value, dict):
            raise SetupError(f"{self.where}: {name} must be an object, is {value!r:.100}")
        return Fields(cast(dict[str, Any], value), f"{self.where}: {name}")

    def _value(self, name: str, default: object) -> object:
        value = self.data.get(name)
        return default if value is None else value

    def _items(self, name: str, what: str, kinds: tuple[type, ...]) -> list[Any]:
        value = self.data.get(name)
        items = cast(list[object], value) if isinstance(value, list) else [None]
        if not all(isinstance(i, kinds) and not isinstance(i, bool) and _is_finite(i) for i in items):
            raise SetupError(f"{self.where}: {name} must be a list of {what}, is {value!r:.100}")
        return items


def _is_finite(value: object) -> bool:
    """True for texts too. A whole number that no float holds is not finite."""
    return not isinstance(value, int | float) or abs(value) <= sys.float_info.max


def read_dtype(fields: Fields) -> DTypeName:
    name = str(fields.data.get("dtype") or fields.data.get("torch_dtype") or "float32").removeprefix("torch.")
    for known in DTYPE_BYTES:
        if name == known:
            return known
    supported = ", ".join(DTYPE_BYTES)
    raise SetupError(f"{fields.where}: dtype {name:.100} is not supported; supported are {supported}")


def read_eos_token_ids(fields: Fields, generation: Mapping[str, Any]) -> tuple[int, ...]:
    """generation_config.json has the last word on what ends a text."""
    value: object = generation.get("eos_token_id")
    if value is None:
        value = fields.data.get("eos_token_id")
    found: list[int] = []
    for token in cast(list[object], value) if isinstance(value, list) else [value]:
        if token is None:
            continue
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token <= TOKEN_ID_MAX:
            raise SetupError(f"{fields.where}: eos_token_id must be whole numbers, has {token!r:.100}")
        if token not in found:
            found.append(token)
        if len(found) > EOS_TOKENS_MAX:
            raise SetupError(f"{fields.where}: eos_token_id has more than {EOS_TOKENS_MAX} tokens")
    return tuple(found)
