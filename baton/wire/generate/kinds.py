"""How a value of each Python type is written in protobuf, and the code that turns one into the other."""

import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import msgspec

from baton.core.ids import BlockHash
from baton.core.wire_types import Columns, OneFor, Scalar
from baton.wire.generate.names import function_prefix, members_name, numbers_name
from baton.wire.services import ENVELOPES, TRAVELS_AS

NONE = type(None)
PLAIN = {bool: "bool", int: "uint32", float: "double", str: "string", bytes: "bytes"}


class DeclarationError(Exception):
    """A message's declaration cannot be written in protobuf."""


@dataclass(frozen=True, slots=True)
class WireKind:
    """One value: its protobuf type and the code for each direction, in which `{}` stands for the value."""

    proto: str
    encode: str = "{}"
    decode: str = "{}"
    declared: Any = None
    """The struct, enum or envelope that the type names, if any."""
    is_message: bool = False
    is_enum: bool = False
    is_hash: bool = False
    is_optional: bool = False
    """None is allowed: only for enums in lists, whose number 0 stands for it."""


def without_none(hint: Any) -> tuple[Any, bool]:
    """The type without None, and whether None was in it."""
    if typing.get_origin(hint) not in (typing.Union, types.UnionType):
        return hint, False
    rest = [each for each in typing.get_args(hint) if each is not NONE]
    if len(rest) == len(typing.get_args(hint)):
        return hint, False
    return (rest[0] if len(rest) == 1 else typing.Union[tuple(rest)]), True  # noqa: UP007


def marks_of(hint: Any) -> tuple[Any, list[Any]]:
    """The type under the marks that concern a whole field, and those marks."""
    if typing.get_origin(hint) is not typing.Annotated:
        return hint, []
    base, *marks = typing.get_args(hint)
    return (base, marks) if any(isinstance(mark, Columns | OneFor) for mark in marks) else (hint, [])


def item_of(hint: Any) -> Any:
    """What a list holds; None if the type is no list of any length."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    is_list = origin is Sequence or (origin is tuple and len(args) == 2 and args[1] is ...)
    return args[0] if is_list else None


def map_of(hint: Any) -> tuple[Any, Any] | None:
    if typing.get_origin(hint) not in (dict, Mapping):
        return None
    key, value = typing.get_args(hint)
    return key, value


def kind_of(hint: Any) -> WireKind:
    if typing.get_origin(hint) is typing.Annotated:
        scalars = [mark for mark in typing.get_args(hint)[1:] if isinstance(mark, Scalar)]
        if len(scalars) == 1:
            return WireKind(scalars[0].name)
    if hint is BlockHash:
        return WireKind("bytes", decode="block_hash({})", is_hash=True)
    if isinstance(hint, typing.NewType):
        return kind_of(hint.__supertype__)
    if hint in PLAIN:
        return WireKind(PLAIN[hint])
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return _enum_kind(hint)
    if hint in TRAVELS_AS:
        via = TRAVELS_AS[hint]
        inner = kind_of(via.struct)
        encode = inner.encode.format(f"{via.pack.__name__}({{}})")
        return WireKind(
            inner.proto, encode, f"{via.unpack.__name__}({inner.decode})", inner.declared, is_message=True
        )
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return _message_kind(hint.__name__, hint)
    for envelope in ENVELOPES:
        if envelope.union == hint:
            return _message_kind(envelope.name, envelope)
    raise DeclarationError(f"{hint} has no counterpart in protobuf")


def _message_kind(name: str, declared: Any) -> WireKind:
    prefix = function_prefix(name)
    return WireKind(name, f"{prefix}_fields({{}})", f"{prefix}_from_pb({{}})", declared, is_message=True)


def _enum_kind(enum: type[StrEnum]) -> WireKind:
    name = enum.__name__
    return WireKind(
        name,
        f"{numbers_name(name)}[{{}}]",
        f"enum_member({members_name(name)}, {{}})",
        enum,
        is_enum=True,
    )


def item_kind_of(hint: Any) -> WireKind:
    """One element of a list. An enum may be None there, which travels as 0."""
    bare, is_optional = without_none(hint)
    kind = kind_of(bare)
    if not is_optional:
        return kind
    if not kind.is_enum:
        raise DeclarationError(f"None in a list of {kind.proto}: only enums may be None there")
    encode = f"(0 if {{0}} is None else {kind.encode.format('{0}')})"
    decode = f"({kind.decode.format('{0}')} if {{0}} else None)"
    return WireKind(kind.proto, encode, decode, kind.declared, is_enum=True, is_optional=True)
