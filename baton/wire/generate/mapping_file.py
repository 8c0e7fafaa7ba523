"""Writes mapping.py: straight code that turns each struct into protobuf and back."""

from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import Any

from baton.wire.generate.declared import MessagePlan, ServicePlan
from baton.wire.generate.kinds import kind_of
from baton.wire.generate.names import enum_value, function_prefix, members_name, numbers_name, oneof_field
from baton.wire.generate.numbers import read_blocks
from baton.wire.generate.proto_file import enum_numbers
from baton.wire.services import TRAVELS_AS, Envelope

HEAD = '''\
"""Values of our messages to protobuf and back. `make proto` writes this file, see `baton.wire.generate`.

Each message has three functions: `..._fields` returns the arguments of its protobuf message, `..._to_pb` that
message, and `..._from_pb` the value. The last raises WireError for what a correct peer never sends: an empty
oneof, an unspecified enum, a block hash of the wrong size, columns of different lengths.
"""

from typing import Any, assert_never

'''


def mapping_file(found: Sequence[ServicePlan], proto: str) -> str:
    """The module's text. `proto` is the new .proto file, from which it takes the numbers of enums."""
    blocks = read_blocks(proto)
    plans = [plan for section in found for plan in section.plans]
    parts = [HEAD, _imports(plans)]
    for plan in plans:
        if isinstance(plan, type):
            parts.append(_enum(plan, enum_numbers(plan, blocks.get(plan.__name__)).numbers))
    for plan in plans:
        match plan:
            case MessagePlan():
                parts.append(_message(plan))
            case Envelope():
                parts.append(_envelope(plan))
            case _:
                pass
    return "\n".join(parts)


def _imports(plans: Sequence[Any]) -> str:
    names: dict[str, set[str]] = {"baton.wire.proto": {"baton_pb2 as pb"}}
    for declared in _declared(plans):
        names.setdefault(declared.__module__, set()).add(declared.__name__)
    helpers = {"WireError", "block_hash", "block_hashes", "enum_member", "enum_named", "pairs"}
    names["baton.wire.decoding"] = helpers
    return (
        "\n".join(
            f"from {module} import {', '.join(sorted(of_module))}"
            for module, of_module in sorted(names.items())
        )
        + "\n"
    )


def _declared(plans: Sequence[Any]) -> Iterator[Any]:
    for plan in plans:
        match plan:
            case MessagePlan():
                yield plan.struct
                for field in plan.fields:
                    yield from field.keys
            case Envelope():
                yield from plan.variants
                for variant in plan.variants:
                    if variant in TRAVELS_AS:
                        yield TRAVELS_AS[variant].pack
                        yield TRAVELS_AS[variant].unpack
            case type():
                yield plan
            case _:
                pass


def _enum(enum: type[StrEnum], numbers: Any) -> str:
    name = enum.__name__
    lines = [f"    {name}.{m.name}: {numbers[enum_value(name, m.name)]}," for m in enum]
    return "\n".join(
        [
            f"{numbers_name(name)} = {{",
            *lines,
            "}",
            f"{members_name(name)} = {{number: member for member, number in {numbers_name(name)}.items()}}",
            "",
        ]
    )


def _message(plan: MessagePlan) -> str:
    name, prefix = plan.struct.__name__, function_prefix(plan.struct.__name__)
    encode = [f'        "{key}": {value},' for field in plan.fields for key, value in field.encode]
    decode = [f"        {field.name}={field.decode}," for field in plan.fields]
    return "\n".join(
        [
            "",
            f"def {prefix}_fields(x: {name}) -> dict[str, Any]:",
            *(["    return {", *encode, "    }"] if encode else ["    return {}"]),
            "",
            "",
            f"def {prefix}_to_pb(x: {name}) -> pb.{name}:",
            f"    return pb.{name}(**{prefix}_fields(x))",
            "",
            "",
            f"def {prefix}_from_pb(x: pb.{name}) -> {name}:",
            *_checks(plan),
            *([f"    return {name}(", *decode, "    )"] if decode else [f"    return {name}()"]),
            "",
        ]
    )


def _checks(plan: MessagePlan) -> list[str]:
    """Statements that run before the struct is made."""
    columns: dict[str, list[str]] = {}
    for field in plan.fields:
        if field.one_for:
            columns.setdefault(field.one_for, [field.one_for]).append(field.name)
    lines: list[str] = []
    for names in columns.values():
        error = f"{plan.struct.__name__}: {', '.join(names)} do not have the same length"
        lengths = " == ".join(f"len(x.{name})" for name in names)
        lines += [f"    if not {lengths}:", f'        raise WireError("{error}")']
    return lines


def _envelope(envelope: Envelope) -> str:
    name, prefix = envelope.name, function_prefix(envelope.name)
    encode: list[str] = []
    decode: list[str] = []
    for variant in envelope.variants:
        kind = kind_of(variant)
        field = oneof_field(kind.proto)
        encode += [
            f"        case {variant.__name__}():",
            f'            return {{"{field}": {kind.encode.format("x")}}}',
        ]
        if variant not in envelope.openings:
            decode += [f'        case "{field}":', f"            return {kind.decode.format(f'x.{field}')}"]
    sent = " | ".join(variant.__name__ for variant in envelope.variants)
    read = " | ".join(each.__name__ for each in envelope.variants if each not in envelope.openings)
    return "\n".join(
        [
            "",
            f"def {prefix}_fields(x: {sent}) -> dict[str, Any]:",
            "    match x:",
            *encode,
            "        case _:",
            "            assert_never(x)",
            "",
            "",
            f"def {prefix}_to_pb(x: {sent}) -> pb.{name}:",
            f"    return pb.{name}(**{prefix}_fields(x))",
            "",
            "",
            f"def {prefix}_from_pb(x: pb.{name}) -> {read}:",
            '    match x.WhichOneof("message"):',
            *decode,
            "        case other:",
            f'            raise WireError(f"{name}: message {{other!r}} is not allowed here")',
            "",
        ]
    )
