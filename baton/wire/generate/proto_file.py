"""Writes baton.proto."""

import textwrap
from collections.abc import Iterable, Sequence
from enum import StrEnum

import msgspec

from baton.wire.generate.declared import (
    ListPlan,
    MessagePlan,
    Plan,
    ServicePlan,
    declared_of,
    docs_of,
)
from baton.wire.generate.fields import list_field, list_name
from baton.wire.generate.kinds import kind_of
from baton.wire.generate.names import enum_value, oneof_field
from baton.wire.generate.numbers import Block, Numbered, numbered, read_blocks
from baton.wire.services import Envelope, RpcService, Stream

COMMENT_WIDTH = 108

PACKAGE = "baton.v1"

HEAD = f"""\
// Messages between Baton's processes. `make proto` writes this file: a message is declared as a struct, and a
// call in baton/wire/services.py. Numbers of fields are kept from the file that is here; docs/contributing.md
// says how to add a field.
syntax = "proto3";

package {PACKAGE};
"""


def proto_file(found: Sequence[ServicePlan], committed: str) -> str:
    """The file's text. `committed` is the file as it was, whose numbers stay."""
    blocks = read_blocks(committed)
    parts = [HEAD]
    for section in found:
        parts.append(_service(section.service))
        parts += [_plan(each, blocks) for each in section.plans]
    return "\n".join(parts)


def _comment(text: str, indent: str = "") -> list[str]:
    lines = [wrapped for line in text.splitlines() for wrapped in textwrap.wrap(line, COMMENT_WIDTH) or [""]]
    return [f"{indent}// {line}".rstrip() for line in lines]


def _service(service: RpcService) -> str:
    lines = [*_comment(service.doc), f"service {service.name} {{"]
    for call in service.calls:
        lines += _comment(call.doc, "  ")
        request, reply = (_end(message, service) for message in (call.request, call.reply))
        lines.append(f"  rpc {call.name}({request}) returns ({reply});")
    return "\n".join([*lines, "}", ""])


def _end(message: type[msgspec.Struct] | Envelope | Stream, service: RpcService) -> str:
    declared = declared_of(message)
    name = declared.name if isinstance(declared, Envelope) else declared.__name__
    if name in [call.name for call in service.calls]:
        name = f".{PACKAGE}.{name}"  # within a service, a call hides the message of the same name
    return f"stream {name}" if isinstance(message, Stream) else name


def _plan(plan: Plan, blocks: dict[str, Block]) -> str:
    match plan:
        case MessagePlan():
            return _message(plan, blocks)
        case ListPlan(kind):
            name, field = list_name(kind), list_field(kind)
            known = numbered(name, [(_type_of(field.label, field.type), field.name)], blocks.get(name))
            lines = [f"  {field.text} = {known.numbers[field.name]};"]
            doc = "A list that may be absent: none at all and an empty one differ."
            return _block("message", name, doc, lines, known)
        case Envelope():
            return _envelope(plan, blocks)
        case _:
            return _enum(plan, blocks)


def _type_of(label: str, proto: str) -> str:
    return f"{label} {proto}".strip()


def _block(keyword: str, name: str, doc: str, lines: Iterable[str], known: Numbered) -> str:
    reserved = [f"  reserved {number};  // was {each}" for number, each in known.reserved.items()]
    body = [*reserved, *lines]
    head = _comment(doc)
    if not body:
        return "\n".join([*head, f"{keyword} {name} {{}}", ""])
    return "\n".join([*head, f"{keyword} {name} {{", *body, "}", ""])


def _message(plan: MessagePlan, blocks: dict[str, Block]) -> str:
    name = plan.struct.__name__
    protos = [proto for field in plan.fields for proto in field.protos]
    known = numbered(name, [(_type_of(p.label, p.type), p.name) for p in protos], blocks.get(name))
    lines: list[str] = []
    for field in plan.fields:
        lines += _comment(plan.docs.of_fields.get(field.name, ""), "  ")
        lines += [f"  {proto.text} = {known.numbers[proto.name]};" for proto in field.protos]
    return _block("message", name, plan.docs.of_class, lines, known)


def _envelope(envelope: Envelope, blocks: dict[str, Block]) -> str:
    kinds = [kind_of(variant) for variant in envelope.variants]
    fields = [(kind.proto, oneof_field(kind.proto)) for kind in kinds]
    known = numbered(envelope.name, fields, blocks.get(envelope.name))
    lines = [f"    {proto} {name} = {known.numbers[name]};" for proto, name in fields]
    return _block("message", envelope.name, envelope.doc, ["  oneof message {", *lines, "  }"], known)


def _enum(enum: type[StrEnum], blocks: dict[str, Block]) -> str:
    name, docs = enum.__name__, docs_of(enum)
    known = enum_numbers(enum, blocks.get(name))
    lines = [f"  {enum_value(name, 'UNSPECIFIED')} = 0;"]
    for member in enum:
        lines += _comment(docs.of_fields.get(member.name, ""), "  ")
        value = enum_value(name, member.name)
        lines.append(f"  {value} = {known.numbers[value]};")
    return _block("enum", name, docs.of_class, lines, known)


def enum_numbers(enum: type[StrEnum], known: Block | None) -> Numbered:
    return numbered(enum.__name__, [("", enum_value(enum.__name__, m.name)) for m in enum], known)
