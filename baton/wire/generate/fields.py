"""What becomes of one field of a struct: its lines in the .proto file, and the code of both directions."""

import typing
from dataclasses import dataclass
from typing import Any

from baton.core.wire_types import Columns, OneFor
from baton.wire.generate.kinds import (
    DeclarationError,
    WireKind,
    item_kind_of,
    item_of,
    kind_of,
    map_of,
    marks_of,
    without_none,
)


@dataclass(frozen=True, slots=True)
class ProtoField:
    label: str
    """optional, repeated or empty."""
    type: str
    name: str

    @property
    def text(self) -> str:
        return " ".join(part for part in (self.label, self.type, self.name) if part)


@dataclass(frozen=True, slots=True)
class FieldPlan:
    name: str
    protos: tuple[ProtoField, ...]
    encode: tuple[tuple[str, str], ...]
    """Names of protobuf fields, each with the expression of its value; the struct is called `x` there."""
    decode: str
    """The expression of the struct's value; the protobuf message is called `x` there."""
    one_for: str = ""
    """The field whose list must be as long as this one's; empty: none."""
    uses: tuple[Any, ...] = ()
    """Structs, enums and envelopes that the field is made of."""
    keys: tuple[Any, ...] = ()
    """An enum whose members are keys of a map: it is not in the .proto file for that."""
    list_of: WireKind | None = None
    """The field needs a message that holds a list of these, since None and an empty list differ."""


def plan(owner: str, name: str, hint: Any) -> FieldPlan:
    """Raises DeclarationError for a type that has no counterpart."""
    try:
        return _plan(owner, name, hint)
    except DeclarationError as error:
        raise DeclarationError(f"{owner}.{name}: {error}") from None


def _plan(owner: str, name: str, hint: Any) -> FieldPlan:
    hint, marks = marks_of(hint)
    one_for = next((mark.field for mark in marks if isinstance(mark, OneFor)), "")
    bare, is_optional = without_none(hint)
    item, entry = item_of(bare), map_of(bare)
    columns = [mark for mark in marks if isinstance(mark, Columns)]
    if is_optional and (one_for or columns or entry is not None):
        raise DeclarationError("an optional field may be no map, no pair of columns and no counted list")
    if columns:
        return _columns(owner, name, item, columns[0])
    if entry is not None:
        return _map(name, *entry)
    if item is None:
        return _single(name, kind_of(bare), is_optional)
    kind = item_kind_of(item)
    if is_optional:
        return _optional_list(name, kind)
    label, proto, encode, decode = _list(kind, f"x.{name}")
    proto_field = ProtoField(label, proto, name)
    return FieldPlan(name, (proto_field,), ((name, encode),), decode, one_for, _uses(kind))


def _uses(*kinds: WireKind) -> tuple[Any, ...]:
    return tuple(kind.declared for kind in kinds if kind.declared is not None)


def _single(name: str, kind: WireKind, is_optional: bool) -> FieldPlan:
    value = f"x.{name}"
    encode, decode, label = kind.encode.format(value), kind.decode.format(value), ""
    if is_optional:
        if encode != value:
            encode = f"None if {value} is None else {encode}"
        if kind.is_enum:
            decode = f"{decode} if {value} else None"  # 0, the unspecified value, stands for None
        else:
            decode = f'{decode} if x.HasField("{name}") else None'
            label = "" if kind.is_message else "optional"
    return FieldPlan(
        name, (ProtoField(label, kind.proto, name),), ((name, encode),), decode, uses=_uses(kind)
    )


def _list(kind: WireKind, value: str) -> tuple[str, str, str, str]:
    """Label and type in protobuf, and the code of both directions.

    A slice of protobuf's list is a Python list, and read several times as fast as by iteration.
    """
    if kind.is_hash:
        return "", "bytes", f'b"".join({value})', f"block_hashes({value})"
    if kind.encode == "{}":
        return "repeated", kind.proto, value, f"tuple({value}[:])"
    encode = f"[{kind.encode.format('v')} for v in {value}]"
    return "repeated", kind.proto, encode, f"tuple([{kind.decode.format('v')} for v in {value}[:]])"


def _optional_list(name: str, kind: WireKind) -> FieldPlan:
    _, _, encode, _ = _list(kind, f"x.{name}")
    _, _, _, decode = _list(kind, f"x.{name}.items")
    return FieldPlan(
        name,
        (ProtoField("", list_name(kind), name),),
        ((name, f'None if x.{name} is None else {{"items": {encode}}}'),),
        f'{decode} if x.HasField("{name}") else None',
        uses=_uses(kind),
        list_of=kind,
    )


def list_name(kind: WireKind) -> str:
    return f"{kind.proto[0].upper()}{kind.proto[1:]}List"


def list_field(kind: WireKind) -> ProtoField:
    label, proto, _, _ = _list(kind, "")
    return ProtoField(label, proto, "items")


def _columns(owner: str, name: str, item: Any, columns: Columns) -> FieldPlan:
    halves = typing.get_args(item)
    if typing.get_origin(item) is not tuple or len(halves) != 2:
        raise DeclarationError("columns are of a tuple of pairs")
    kinds = [kind_of(half) for half in halves]
    names = [f"{name}_{suffix}" if suffix else name for suffix in (columns.first, columns.second)]
    protos: list[ProtoField] = []
    encodes: list[tuple[str, str]] = []
    decodes: list[str] = []
    for kind, column, pattern in zip(kinds, names, ("v, _", "_, v"), strict=True):
        label, proto, _, decode = _list(kind, f"x.{column}")
        values = f"[{kind.encode.format('v')} for {pattern} in x.{name}]"
        protos.append(ProtoField(label, proto, column))
        encodes.append((column, f'b"".join({values})' if kind.is_hash else values))
        decodes.append(decode if kind.is_hash or kind.encode != "{}" else f"x.{column}[:]")
    decode = f'pairs("{owner}.{name}", {", ".join(decodes)})'
    return FieldPlan(name, tuple(protos), tuple(encodes), decode, uses=_uses(*kinds))


def _map(name: str, key_hint: Any, value_hint: Any) -> FieldPlan:
    """Protobuf's maps have no enums as keys: those travel as the text of their value."""
    key, value = kind_of(key_hint), kind_of(value_hint)
    key_type = "string" if key.is_enum else key.proto
    if key_type not in ("string", "uint32", "uint64"):
        raise DeclarationError("keys of a map are strings, enums or numbers that are not negative")
    if value.is_hash or value.is_enum:
        raise DeclarationError("values of a map are numbers, strings, bytes or messages")
    entries = f"for k, v in x.{name}.items()}}"
    if value.is_message:
        message = value.encode.format("v")
        encode = f"{{k: pb.{value.proto}(**{message}) {entries}"
    else:
        encode = f"x.{name}"
    if key.is_enum or value.is_message:
        decoded_key = f"enum_named({key.proto}, k)" if key.is_enum else "k"
        decode = f"{{{decoded_key}: {value.decode.format('v')} {entries}"
    else:
        decode = f"dict(x.{name})"
    proto = ProtoField("", f"map<{key_type}, {value.proto}>", name)
    uses = _uses(value) if key.is_enum else _uses(key, value)
    return FieldPlan(name, (proto,), ((name, encode),), decode, uses=uses, keys=_uses(key))
